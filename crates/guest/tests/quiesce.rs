//! Programs that are frozen for a capture, and the gate before they are thawed.
//!
//! Tests that freeze programs need a cgroup v2 of their own; where they can't create one, they run
//! only in the machine.

mod harness;

use harness::{Agent, Connection, Groups, Node, Received, shell, wait_until};
use jiffy_wire::agent::{
    Done, ExecInput, ExecOutput, ExitStatus, FromGuest, Request, ToGuest, VERSION,
};
use std::io::Read;
use std::time::{Duration, Instant};

const GENERATION: &str = "opt/jiffy/generation";
const CONFIG: &str = "opt/jiffy/config";
const FIRST_ID: &str = "11111111-1111-4111-8111-111111111111";
const SECOND_ID: &str = "22222222-2222-4222-8222-222222222222";

/// Counts in the file `count` as long as it runs.
const COUNTER: &str = "n=0; while :; do n=$((n+1)); echo $n >FOLDER/count; done";

fn generation(id: &str, start_main: bool) -> String {
    let seed = "5a".repeat(64);
    format!(
        "{{\"version\":1,\"id\":\"{id}\",\"seed\":\"{seed}\",\"realtime_ns\":1,\"start_main\":{start_main}}}"
    )
}

fn config(vm_id: &str, main: &str, more: &str) -> String {
    let main = main.replace('\\', "\\\\").replace('"', "\\\"");
    format!(
        "{{\"version\":1,\"vm_id\":\"{vm_id}\",\"main\":{{\"argv\":[\"sh\",\"-c\",\"{main}\"],\"stdin\":true}}{more}}}"
    )
}

const EMPTY: &str = "{\"version\":1,\"vm_id\":\"test\"}";

fn quiesce(agent: &Agent) -> (Connection, Option<Done>) {
    let mut connection = agent.connect();
    connection.send(&Request::Quiesce {
        version: VERSION,
        drop_caches: true,
    });
    let done = connection.next();
    (connection, done)
}

fn quiesced(agent: &Agent) -> Connection {
    let (connection, done) = quiesce(agent);
    assert_eq!(done, Some(Done::Ok));
    connection
}

fn groups() -> Option<Groups> {
    let groups = Groups::new();
    if groups.is_none() {
        eprintln!("skipped: no control group of version 2 can be created here");
    }
    groups
}

/// A program that runs on a connection and counts.
fn counter(agent: &Agent) -> Connection {
    let folder = agent.folder.path().to_str().unwrap();
    let mut connection = agent.exec(shell(&COUNTER.replace("FOLDER", folder)));
    connection.started();
    wait_until("it counts", || count(agent) > 10);
    connection
}

fn count(agent: &Agent) -> u64 {
    let text = std::fs::read_to_string(agent.path("count")).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

fn is_counting(agent: &Agent) -> bool {
    let before = std::fs::metadata(agent.path("count"))
        .unwrap()
        .modified()
        .unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let after = std::fs::metadata(agent.path("count"))
        .unwrap()
        .modified()
        .unwrap();
    before != after
}

fn welcome(connection: &mut Connection) {
    connection.send(&ToGuest::Welcome {
        version: VERSION,
        stdout_offset: 0,
        stderr_offset: 0,
    });
}

#[test]
fn a_guest_without_programs_can_be_quiesced() {
    let agent = Agent::start();
    let connection = quiesced(&agent);
    drop(connection);
    assert_eq!(agent.sh("echo on").text(), "on\n");
}

#[test]
fn a_quiesce_client_that_leaves_early_freezes_nothing() {
    let agent = Agent::start();
    for _ in 0..20 {
        let mut connection = agent.connect();
        connection.send(&Request::Quiesce {
            version: VERSION,
            drop_caches: false,
        });
        drop(connection);
        assert_eq!(agent.sh("echo on").text(), "on\n");
    }
}

#[test]
fn quiesce_is_refused_without_control_groups() {
    let agent = Agent::start();
    let _program = counter(&agent);
    let (mut connection, done) = quiesce(&agent);
    let Some(Done::Error(message)) = done else {
        panic!("{done:?}")
    };
    assert!(message.contains("no control groups"), "{message}");
    assert!(connection.is_closed());
    wait_until("it continues", || is_counting(&agent));
}

#[test]
fn a_program_is_frozen_until_the_connection_ends() {
    let Some(groups) = groups() else { return };
    let agent = Agent::in_groups(EMPTY, false, Some(&groups));
    let _program = counter(&agent);
    for _ in 0..3 {
        let connection = quiesced(&agent);
        assert!(!is_counting(&agent));
        drop(connection);
        wait_until("it continues", || is_counting(&agent));
    }
}

#[test]
fn every_cgroup_is_frozen_and_paused_ones_stay_frozen() {
    let Some(groups) = groups() else { return };
    let agent = Agent::in_groups(EMPTY, false, Some(&groups));
    let _program = counter(&agent);
    let mut programs = Vec::new();
    // As a container engine does: two cgroups, one of them paused.
    for name in ["running", "paused"] {
        std::fs::create_dir(groups.path.join(name)).unwrap();
        let script = format!(
            "echo $$ >{}/{name}/cgroup.procs; exec sleep 1000",
            groups.path.display()
        );
        let mut program = agent.exec(shell(&script));
        program.started();
        programs.push(program);
        wait_until("it joins", || {
            !groups.read(&format!("{name}/cgroup.procs")).is_empty()
        });
    }
    groups.write("paused/cgroup.freeze", "1");
    let connection = quiesced(&agent);
    assert!(groups.below().len() >= 3, "{:?}", groups.below());
    for group in groups.below() {
        let events = std::fs::read_to_string(group.join("cgroup.events")).unwrap();
        assert!(events.contains("frozen 1"), "{}: {events}", group.display());
    }
    let only = groups.read("cgroup.procs");
    assert_eq!(only.trim(), agent.process.id().to_string());
    drop(connection);
    wait_until("it continues", || {
        groups.read("running/cgroup.events").contains("frozen 0")
    });
    assert!(groups.read("paused/cgroup.events").contains("frozen 1"));
    groups.write("paused/cgroup.freeze", "0");
}

#[test]
fn processes_that_keep_forking_are_all_frozen() {
    let Some(groups) = groups() else { return };
    let agent = Agent::in_groups(EMPTY, false, Some(&groups));
    let script = "for n in 1 2 3 4; do (while :; do (/bin/true; exit) & /bin/true; wait; done) & done; echo up; wait";
    let mut program = agent.exec(shell(script));
    program.read_until("up");
    let mut others = Vec::new();
    for _ in 0..5 {
        let connection = quiesced(&agent);
        assert_eq!(
            groups.read("cgroup.procs").trim(),
            agent.process.id().to_string()
        );
        let before = groups.read("jiffy/cgroup.procs");
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(groups.read("jiffy/cgroup.procs"), before);
        drop(connection);
        // A new program in no cgroup.
        let mut program = agent.exec(shell("sleep 1000"));
        program.started();
        others.push(program);
    }
}

#[test]
fn other_requests_wait_while_programs_are_frozen() {
    let Some(groups) = groups() else { return };
    let agent = Agent::in_groups(EMPTY, false, Some(&groups));
    let _program = counter(&agent);
    let connection = quiesced(&agent);
    let mut other = agent.exec(shell("echo now"));
    other
        .stream
        .set_read_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    let mut byte = [0];
    assert!(other.stream.read(&mut byte).is_err(), "it was served");
    other
        .stream
        .set_read_timeout(Some(harness::TIMEOUT))
        .unwrap();
    drop(connection);
    assert_eq!(other.finish().text(), "now\n");
}

#[test]
fn output_is_delivered_before_the_quiesce_answer() {
    let Some(groups) = groups() else { return };
    let main = "i=0; while :; do i=$((i+1)); echo line $i; done";
    let agent = Agent::in_groups(&config("test", main, ""), true, Some(&groups));
    let node = Node::listen(&agent.path("node"));
    let mut channel = node.welcome(0, 0);
    let mut received = Received::default();
    while received.pid.is_none() {
        received.take(channel.next().expect("the channel lives"));
    }
    loop {
        let begun = Instant::now();
        let mut asking = agent.connect();
        asking.send(&Request::Quiesce {
            version: VERSION,
            drop_caches: false,
        });
        asking.stream.set_nonblocking(true).unwrap();
        // Confirms output as a node does, until the guest reports that it is frozen.
        loop {
            let mut byte = [0];
            channel.stream.set_nonblocking(true).unwrap();
            let more = rustix::net::recv(&channel.stream, &mut byte, rustix::net::RecvFlags::PEEK);
            channel.stream.set_nonblocking(false).unwrap();
            if more.is_ok() {
                received.take(channel.next().expect("the channel lives"));
            } else {
                std::thread::sleep(Duration::from_millis(20));
                let mut length = [0; 4];
                if asking.stream.read(&mut length).is_ok() {
                    break;
                }
            }
            let stdout_offset = received.stdout.len() as u64;
            channel.send(&ToGuest::MainOutputStored {
                stdout_offset,
                stderr_offset: 0,
            });
        }
        let took = begun.elapsed();
        // All output of the frozen program was sent.
        let pid = received.pid.unwrap();
        let pipe = std::fs::read_link(format!("/proc/{pid}/fd/1")).unwrap();
        let ours = std::fs::read_dir(format!("/proc/{}/fd", agent.process.id())).unwrap();
        let end = ours
            .flatten()
            .find(|entry| std::fs::read_link(entry.path()).is_ok_and(|link| link == pipe))
            .expect("init reads its output");
        let file = std::fs::File::open(end.path()).unwrap();
        let left = rustix::io::ioctl_fionread(&file).unwrap();
        if left == 0 {
            break;
        }
        // The guest waits half a second for this node. If that was too slow, the test is repeated.
        assert!(took >= Duration::from_millis(500), "{left} bytes are left");
    }
}

#[test]
fn a_known_generation_changes_nothing() {
    let Some(groups) = groups() else { return };
    let agent = Agent::in_groups(&config("test", "cat", ""), true, Some(&groups));
    agent.set_host_file(GENERATION, &generation(FIRST_ID, true));
    agent.set_host_file(CONFIG, &config("other", "exit 7", ""));
    let node = Node::listen(&agent.path("node"));
    let mut channel = node.welcome(0, 0);
    let mut received = Received::default();
    received.listen_until(&mut channel, |received| received.pid.is_some());
    drop(quiesced(&agent));
    channel.send(&ToGuest::MainInput(ExecInput::Stdin(b"same\n".to_vec())));
    received.listen_until(&mut channel, |received| received.stdout == b"same\n");
}

#[test]
fn a_new_generation_starts_its_command_and_reconnects() {
    let agent = Agent::in_groups(EMPTY, true, None);
    let node = Node::listen(&agent.path("node"));
    let (mut old, attempt) = node.accept();
    assert_eq!(attempt, 0);
    welcome(&mut old);
    while !matches!(old.next::<FromGuest>(), Some(FromGuest::Ready)) {}
    let connection = quiesced(&agent);
    let service = ",\"services\":[{\"name\":\"s\",\"command\":{\"argv\":[\"echo\",\"served\"]}}],\"power_off_after_main\":true";
    agent.set_host_file(CONFIG, &config("child", "echo hello; exit 5", service));
    agent.set_host_file(GENERATION, &generation(FIRST_ID, true));
    drop(connection);
    let (mut channel, vm_id, attempt) = node.accept_any();
    assert_eq!((vm_id.as_str(), attempt), ("child", 0));
    assert!(old.is_closed());
    welcome(&mut channel);
    let mut received = Received::default();
    received.listen_until(&mut channel, |received| {
        received.end.is_some() && received.log.iter().any(|line| line == "s: served")
    });
    assert!(received.ready && received.pid.is_some());
    assert_eq!(
        (received.stdout.as_slice(), received.end),
        (&b"hello\n"[..], Some(ExitStatus::Code(5)))
    );
    channel.send(&ToGuest::MainEndStored);
    let mut agent = agent;
    assert!(agent.wait_for_end().success());
}

#[test]
fn a_clones_command_continues_with_offsets_from_zero() {
    let Some(groups) = groups() else { return };
    let agent = Agent::in_groups(&config("test", "cat", ""), true, Some(&groups));
    let node = Node::listen(&agent.path("node"));
    let mut old = node.welcome(0, 0);
    let mut received = Received::default();
    old.send(&ToGuest::MainInput(ExecInput::Stdin(
        b"parent's\n".to_vec(),
    )));
    // Output without confirmation still belongs to the parent.
    received.listen_until(&mut old, |received| received.stdout == b"parent's\n");
    let connection = quiesced(&agent);
    agent.set_host_file(CONFIG, &config("child", "cat", ""));
    agent.set_host_file(GENERATION, &generation(FIRST_ID, false));
    drop(connection);
    let (mut channel, vm_id, _) = node.accept_any();
    assert_eq!(vm_id, "child");
    welcome(&mut channel);
    channel.send(&ToGuest::MainInput(ExecInput::Stdin(b"child's\n".to_vec())));
    let mut again = Received::default();
    again.listen_until(&mut channel, |received| received.stdout == b"child's\n");
    assert_eq!(again.pid, received.pid);
    // Once more, from the clone.
    let connection = quiesced(&agent);
    agent.set_host_file(GENERATION, &generation(SECOND_ID, false));
    drop(connection);
    let (mut channel, ..) = node.accept_any();
    welcome(&mut channel);
    channel.send(&ToGuest::MainInput(ExecInput::StdinClosed));
    let mut last = Received::default();
    last.listen_until(&mut channel, |received| received.end.is_some());
    assert_eq!(
        (last.pid, last.end),
        (received.pid, Some(ExitStatus::Code(0)))
    );
    assert!(last.stdout.is_empty());
}

#[test]
fn the_captured_command_continues_beside_the_new_one() {
    let Some(groups) = groups() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    // It writes more than a pipe holds, so its output must be read.
    let main = format!("while :; do seq 1 50000; date +%s%N >{path}/alive; done");
    let agent = Agent::in_groups(&config("test", &main, ""), true, Some(&groups));
    let node = Node::listen(&agent.path("node"));
    let old = node.welcome(0, 0);
    wait_until("it runs", || {
        groups.read("cgroup.procs").lines().count() > 1
    });
    // A node without confirmations delays the capture, but only for a limited time.
    let connection = quiesced(&agent);
    agent.set_host_file(CONFIG, &config("child", "echo new; exit 3", ""));
    agent.set_host_file(GENERATION, &generation(FIRST_ID, true));
    drop((connection, old));
    let (mut channel, ..) = node.accept_any();
    welcome(&mut channel);
    let mut received = Received::default();
    received.listen_until(&mut channel, |received| received.end.is_some());
    assert_eq!(
        (received.stdout.as_slice(), received.end),
        (&b"new\n"[..], Some(ExitStatus::Code(3)))
    );
    let alive = folder.path().join("alive");
    wait_until("the loop has run", || alive.exists());
    let before = std::fs::read_to_string(&alive).unwrap();
    wait_until("the loop runs again", || {
        std::fs::read_to_string(&alive).unwrap() != before
    });
}

#[test]
fn connections_of_the_captured_guest_are_hung_up() {
    let Some(groups) = groups() else { return };
    let agent = Agent::in_groups(EMPTY, false, Some(&groups));
    let script = "trap 'echo hung up >FOLDER/end; exit' HUP; echo up; while :; do sleep 0.01; done";
    let script = script.replace("FOLDER", agent.folder.path().to_str().unwrap());
    let mut program = agent.exec(shell(&script));
    program.read_until("up");
    let connection = quiesced(&agent);
    agent.set_host_file(GENERATION, &generation(FIRST_ID, false));
    drop(connection);
    wait_until("it gets SIGHUP", || agent.path("end").exists());
    assert_eq!(program.next::<ExecOutput>(), None);
    assert_eq!(agent.sh("echo served").text(), "served\n");
}

#[test]
fn an_unreadable_generation_ends_the_vm_without_thawing() {
    let broken = generation(FIRST_ID, true).replace("5a5a", "5a5");
    let no_config = generation(FIRST_ID, true);
    for (generation, config) in [
        (broken.as_str(), None),
        ("{}", None),
        (no_config.as_str(), Some("{\"version\":1")),
    ] {
        let Some(groups) = groups() else { return };
        let mut agent = Agent::in_groups(EMPTY, false, Some(&groups));
        let _program = counter(&agent);
        let connection = quiesced(&agent);
        if let Some(config) = config {
            agent.set_host_file(CONFIG, config);
        }
        agent.set_host_file(GENERATION, generation);
        drop(connection);
        agent.wait_for_end();
        assert!(!is_counting(&agent), "it runs");
        let console = agent.console();
        assert!(console.contains("cannot continue"), "{console}");
    }
}

#[test]
fn quiesce_is_refused_when_the_generation_is_already_invalid() {
    let agent = Agent::start();
    agent.set_host_file(GENERATION, "nonsense");
    let (_, done) = quiesce(&agent);
    assert!(matches!(done, Some(Done::Error(message)) if message.contains("not a generation")));
}

#[test]
fn data_from_the_quiesce_client_thaws_the_guest() {
    let Some(groups) = groups() else { return };
    let agent = Agent::in_groups(EMPTY, false, Some(&groups));
    let _program = counter(&agent);
    let mut connection = quiesced(&agent);
    connection.send(&ExecInput::StdinClosed);
    assert!(connection.is_closed());
    wait_until("it continues", || is_counting(&agent));
}
