//! The channel to the node: the first command, services, and lost connections.

mod harness;

use harness::{Agent, Node, Received, wait_until};
use jiffy_wire::agent::{
    Done, ExecInput, ExitStatus, FromGuest, MAIN_OUTPUT_WINDOW, Request, StartFailure, ToGuest,
    VERSION,
};
use jiffy_wire::frame::MAX_DATA;
use std::io::Write;
use std::time::{Duration, Instant};

/// An agent with this first command, and its node, which has not answered yet.
fn with_main(script: &str, more: &str) -> (Agent, Node) {
    let script = script.replace('\\', "\\\\").replace('"', "\\\"");
    with_config(&format!(
        "{{\"version\":1,\"vm_id\":\"test\",\"main\":{{\"argv\":[\"sh\",\"-c\",\"{script}\"],\"stdin\":true}}{more}}}"
    ))
}

fn with_config(config: &str) -> (Agent, Node) {
    let agent = Agent::with(config, true);
    let node = Node::listen(&agent.path("node"));
    (agent, node)
}

const POWER_OFF: &str = ",\"power_off_after_main\":true";

#[test]
fn the_first_command_does_not_wait_for_a_node() {
    let config = "{\"version\":1,\"vm_id\":\"test\",\"main\":{\"argv\":[\"sh\",\"-c\",\"touch started\"],\"cwd\":\"FOLDER\"}}";
    let folder = tempfile::tempdir().unwrap();
    let config = config.replace("FOLDER", folder.path().to_str().unwrap());
    let _agent = Agent::with(&config, true);
    wait_until("it ran", || folder.path().join("started").exists());
}

#[test]
fn the_vm_ends_after_all_output_is_reported() {
    let (mut agent, node) = with_main("echo out; echo err >&2; exit 9", POWER_OFF);
    let mut channel = node.welcome(0, 0);
    let mut received = Received::default();
    received.listen_until(&mut channel, |received| received.end.is_some());
    assert!(received.ready && received.pid.is_some());
    assert_eq!(
        (received.stdout.as_slice(), received.stderr.as_slice()),
        (&b"out\n"[..], &b"err\n"[..])
    );
    assert_eq!(received.end, Some(ExitStatus::Code(9)));
    // It ends only after the node has stored everything.
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(agent.process.try_wait().unwrap(), None);
    channel.send(&ToGuest::MainEndStored);
    assert_eq!(channel.next(), Some(FromGuest::PoweringOff));
    assert!(agent.wait_for_end().success());
}

#[test]
fn nothing_is_sent_before_the_welcome() {
    let (_agent, node) = with_main("echo x", "");
    let (mut channel, attempt) = node.accept();
    assert_eq!(attempt, 0);
    channel
        .stream
        .set_read_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    let mut byte = [0];
    let early = std::io::Read::read(&mut channel.stream, &mut byte);
    assert!(early.is_err(), "{early:?}");
}

#[test]
fn a_command_that_cannot_start_is_reported_until_stored() {
    let config = "{\"version\":1,\"vm_id\":\"test\",\"main\":{\"argv\":[\"/no/such\"]},\"power_off_after_main\":true}";
    let (mut agent, node) = with_config(config);
    for attempt in 0..2 {
        let (mut channel, number) = node.accept();
        assert_eq!(number, attempt);
        channel.send(&ToGuest::Welcome {
            version: VERSION,
            stdout_offset: 0,
            stderr_offset: 0,
        });
        loop {
            match channel.next().unwrap() {
                FromGuest::MainFailed(error) => {
                    assert_eq!(error.kind, StartFailure::NotFound);
                    break;
                }
                FromGuest::MainStarted { .. } | FromGuest::MainExited(_) => {
                    panic!("the command did not start")
                }
                _ => {}
            }
        }
        if attempt == 1 {
            channel.send(&ToGuest::MainEndStored);
            assert!(agent.wait_for_end().success());
        }
    }
}

#[test]
fn a_node_that_reconnects_misses_no_output() {
    let (_agent, node) = with_main("seq 1 100000; exit 2", "");
    let mut received = Received::default();
    let mut connections = 0;
    // Each connection is cut after some time, when only a part of the output was stored.
    while received.end.is_none() {
        let mut channel = node.welcome(received.stdout.len() as u64, 0);
        connections += 1;
        for _ in 0..4 {
            match channel.next() {
                Some(message) => received.take(message),
                None => break,
            }
            if received.end.is_some() {
                break;
            }
            let stdout_offset = received.stdout.len() as u64;
            channel.send(&ToGuest::MainOutputStored {
                stdout_offset,
                stderr_offset: 0,
            });
        }
    }
    let expected: String = (1..=100_000).map(|n| format!("{n}\n")).collect();
    assert!(received.stdout == expected.as_bytes());
    assert_eq!(received.end, Some(ExitStatus::Code(2)));
    assert!(connections > 1);
}

#[test]
fn the_exit_status_is_resent_until_it_is_stored() {
    let (mut agent, node) = with_main("exit 3", POWER_OFF);
    for _ in 0..3 {
        let mut channel = node.welcome(0, 0);
        let mut received = Received::default();
        received.listen_until(&mut channel, |received| received.end.is_some());
        assert!(received.pid.is_some() && received.ready);
    }
    let mut channel = node.welcome(0, 0);
    Received::default().listen_until(&mut channel, |received| received.end.is_some());
    channel.send(&ToGuest::MainEndStored);
    assert!(agent.wait_for_end().success());
}

#[test]
fn a_silent_node_applies_backpressure_to_the_command() {
    let (agent, node) = with_main("yes; echo never", "");
    let (mut channel, _) = node.accept();
    // Accepted without a welcome: the agent must not send anything.
    std::thread::sleep(Duration::from_millis(500));
    assert!(agent.memory() < 16 << 20, "{} bytes", agent.memory());
    channel.send(&ToGuest::Welcome {
        version: VERSION,
        stdout_offset: 0,
        stderr_offset: 0,
    });
    // Welcomed without confirmations: it sends up to a limit and then stops.
    let mut received = Received::default();
    received.listen_until(&mut channel, |received| {
        received.stdout.len() >= MAIN_OUTPUT_WINDOW
    });
    channel
        .stream
        .set_read_timeout(Some(Duration::from_millis(500)))
        .unwrap();
    let mut more = vec![0; 64 * 1024];
    let mut total = 0;
    while let Ok(count @ 1..) = std::io::Read::read(&mut channel.stream, &mut more) {
        total += count;
        assert!(total < 4 << 20, "unconfirmed output has no limit");
    }
    assert!(agent.memory() < 24 << 20, "{} bytes", agent.memory());
}

#[test]
fn input_and_output_of_any_size_do_not_block_each_other() {
    let (_agent, node) = with_main("cat; exit 4", "");
    let mut channel = node.welcome(0, 0);
    let mut writer = channel.stream.try_clone().unwrap();
    let sent: Vec<u8> = (0..6_000_000u32).map(|n| (n / 3) as u8).collect();
    let copy = sent.clone();
    let (confirm, confirmations) = std::sync::mpsc::channel::<u64>();
    // One writer as in a node: input and confirmations share the stream.
    let thread = std::thread::spawn(move || {
        let mut send = |message: &ToGuest| {
            writer
                .write_all(&jiffy_wire::frame::to_vec(message).unwrap())
                .unwrap();
        };
        let stored = |stdout_offset| ToGuest::MainOutputStored {
            stdout_offset,
            stderr_offset: 0,
        };
        for piece in copy.chunks(MAX_DATA) {
            send(&ToGuest::MainInput(ExecInput::Stdin(piece.to_vec())));
            confirmations
                .try_iter()
                .for_each(|offset| send(&stored(offset)));
        }
        send(&ToGuest::MainInput(ExecInput::StdinClosed));
        confirmations
            .iter()
            .for_each(|offset| send(&stored(offset)));
    });
    let mut received = Received::default();
    while received.end.is_none() {
        received.take(channel.next().expect("the channel lives"));
        confirm.send(received.stdout.len() as u64).unwrap();
    }
    drop(confirm);
    thread.join().unwrap();
    assert!(received.stdout == sent);
    assert_eq!(received.end, Some(ExitStatus::Code(4)));
}

#[test]
fn unread_input_stays_with_the_node() {
    let (agent, node) = with_main("echo ready; sleep 100", "");
    let mut channel = node.welcome(0, 0);
    let mut received = Received::default();
    received.listen_until(&mut channel, |received| received.stdout == b"ready\n");
    channel
        .stream
        .set_write_timeout(Some(Duration::from_millis(500)))
        .unwrap();
    let input = ToGuest::MainInput(ExecInput::Stdin(vec![b'x'; MAX_DATA]));
    let input = jiffy_wire::frame::to_vec(&input).unwrap();
    let taken = (0..1000).take_while(|_| channel.stream.write_all(&input).is_ok());
    assert!(taken.count() < 40, "input has no limit");
    assert!(agent.memory() < 16 << 20, "{} bytes", agent.memory());
}

#[test]
fn room_for_input_is_announced_as_the_command_reads() {
    let (_agent, node) = with_main("read line; sleep 0.3; wc -c", "");
    let mut channel = node.welcome(0, 0);
    let mut received = Received::default();
    received.listen_until(&mut channel, |received| received.pid.is_some());
    let first = received.input_room;
    assert!(first >= MAX_DATA as u64);
    let total = 4 << 20;
    let mut sent = 0;
    while sent < total {
        // Room is announced only for input that was read.
        assert!(received.input_room <= first + sent, "{received:?}");
        received.listen_until(&mut channel, |received| received.input_room > sent);
        let piece = (received.input_room - sent)
            .min(total - sent)
            .min(MAX_DATA as u64);
        let bytes = vec![b'\n'; piece as usize];
        channel.send(&ToGuest::MainInput(ExecInput::Stdin(bytes)));
        sent += piece;
    }
    channel.send(&ToGuest::MainInput(ExecInput::StdinClosed));
    received.listen_until(&mut channel, |received| received.end.is_some());
    let rest: u64 = std::str::from_utf8(&received.stdout)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    assert_eq!(rest, total - 1);
    // A new connection begins with all the room again.
    drop(channel);
    let mut channel = node.welcome(0, 0);
    let mut again = Received::default();
    again.listen_until(&mut channel, |received| received.end.is_some());
    assert_eq!(again.input_room, first);
}

#[test]
fn signals_reach_the_first_command_by_channel_and_by_request() {
    let (agent, node) = with_main(
        "trap 'echo usr1' USR1; trap 'exit 6' TERM; echo ready; while :; do sleep 0.05; done",
        "",
    );
    let mut channel = node.welcome(0, 0);
    let mut received = Received::default();
    received.listen_until(&mut channel, |received| received.stdout == b"ready\n");
    channel.send(&ToGuest::MainInput(ExecInput::Signal(10)));
    received.listen_until(&mut channel, |received| received.stdout == b"ready\nusr1\n");
    let ask = |signal| {
        let mut connection = agent.connect();
        connection.send(&Request::SignalMain {
            version: VERSION,
            signal,
        });
        connection.next::<Done>().unwrap()
    };
    assert_eq!(ask(15), Done::Ok);
    received.listen_until(&mut channel, |received| received.end.is_some());
    assert_eq!(received.end, Some(ExitStatus::Code(6)));
    assert!(matches!(ask(15), Done::Error(message) if message.contains("does not run")));
}

#[test]
fn the_guest_reconnects_after_invalid_messages() {
    let (_agent, node) = with_main("echo kept; sleep 100", "");
    for nonsense in [
        vec![0xff; 8],
        jiffy_wire::frame::to_vec(&ToGuest::MainEndStored).unwrap(),
        jiffy_wire::frame::to_vec(&ToGuest::Welcome {
            version: 77,
            stdout_offset: 0,
            stderr_offset: 0,
        })
        .unwrap(),
    ] {
        let (mut channel, _) = node.accept();
        channel.stream.write_all(&nonsense).unwrap();
        assert_eq!(channel.next::<FromGuest>(), None);
    }
    let mut channel = node.welcome(u64::MAX, u64::MAX);
    let mut received = Received::default();
    received.listen_until(&mut channel, |received| received.stdout == b"kept\n");
}

#[test]
fn services_run_restart_and_are_logged() {
    let config = r#"{"version":1,"vm_id":"test","services":[
        {"name":"once","command":{"argv":["sh","-c","echo a; echo b >&2; printf c"]}},
        {"name":"flaky","command":{"argv":["sh","-c","echo try; exit 1"]},"restart":"on_failure"},
        {"name":"fine","command":{"argv":["true"]},"restart":"on_failure"},
        {"name":"missing","command":{"argv":["/no/such"]}}]}"#;
    let start = Instant::now();
    let (_agent, node) = with_config(config);
    let mut channel = node.welcome(0, 0);
    let mut received = Received::default();
    let count = |received: &Received, line: &str| {
        received.log.iter().filter(|l| l.as_str() == line).count()
    };
    let ended = "once: [jiffy-init] ended with status 0";
    received.listen_until(&mut channel, |received| {
        count(received, "flaky: try") >= 3 && count(received, ended) == 1
    });
    // Delays of 100 ms and 200 ms.
    assert!(
        start.elapsed() >= Duration::from_millis(250),
        "{:?}",
        start.elapsed()
    );
    for line in ["once: a", "once: b", "once: c"] {
        assert_eq!(count(&received, line), 1, "{line} in {:?}", received.log);
    }
    assert_eq!(
        count(&received, "flaky: [jiffy-init] starts again in 100 ms"),
        1
    );
    assert_eq!(
        count(&received, "flaky: [jiffy-init] starts again in 200 ms"),
        1
    );
    assert_eq!(
        received
            .log
            .iter()
            .filter(|l| l.starts_with("fine: [jiffy-init] started"))
            .count(),
        1
    );
    assert!(
        received
            .log
            .iter()
            .any(|l| l.starts_with("missing: ") && l.contains("does not exist"))
    );
}

#[test]
fn without_a_node_all_output_goes_to_the_console() {
    let folder = tempfile::tempdir().unwrap();
    // The VM ends with the first command, which therefore waits for the service.
    let config = r#"{"version":1,"vm_id":"test","power_off_after_main":true,
        "services":[{"name":"noise","command":{"argv":["sh","-c",
            "echo hello; touch FOLDER/said"]}}],
        "main":{"argv":["sh","-c",
            "until [ -e FOLDER/said ]; do sleep 0.1; done; sleep 0.5; echo from main"]}}"#;
    let config = config.replace("FOLDER", folder.path().to_str().unwrap());
    let mut agent = Agent::with(&config, false);
    assert!(agent.wait_for_end().success());
    let console = agent.console();
    assert!(
        console.contains("noise: hello\n") && console.contains("from main\n"),
        "{console}"
    );
}

#[test]
fn shutdown_reports_the_end_of_the_first_command() {
    let (mut agent, node) = with_main(
        "trap 'echo bye; exit 1' TERM; echo ready; while :; do sleep 0.05; done",
        "",
    );
    let mut channel = node.welcome(0, 0);
    let mut received = Received::default();
    received.listen_until(&mut channel, |received| received.stdout == b"ready\n");
    let mut connection = agent.connect();
    connection.send(&Request::Shutdown {
        version: VERSION,
        grace_ms: 300_000,
    });
    assert_eq!(connection.next(), Some(Done::Ok));
    received.listen_until(&mut channel, |received| received.end.is_some());
    assert_eq!(received.stdout, b"ready\nbye\n");
    assert_eq!(received.end, Some(ExitStatus::Code(1)));
    assert_eq!(channel.next(), Some(FromGuest::PoweringOff));
    assert!(agent.wait_for_end().success());
}
