//! Tests the agent over a real socket with the host's client.

use super::serve;
use crate::client::{AgentAddress, Session};
use jiffy_wire::agent::{Command, ExecInput, ExecOutput, ExitStatus, StartFailure, WindowSize};
use std::net::TcpListener;
use std::time::{Duration, Instant};

/// A test that takes longer hangs.
const TIMEOUT: Duration = Duration::from_secs(120);

fn agent() -> AgentAddress {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || serve::serve(&listener, "secret"));
    AgentAddress {
        address,
        token: "secret".into(),
    }
}

fn shell(script: &str) -> Command {
    Command {
        argv: ["/bin/sh", "-c", script].map(String::from).into(),
        ..Command::default()
    }
}

/// All output of a program, and its exit status.
fn finish(mut session: Session) -> (String, ExitStatus) {
    session.set_time_limit(Some(TIMEOUT)).unwrap();
    let mut output = Vec::new();
    loop {
        match session.receive().unwrap().expect("an end is announced") {
            ExecOutput::Output { data, .. } => output.extend(data),
            ExecOutput::Exited(status) => return (String::from_utf8(output).unwrap(), status),
            ExecOutput::Started { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_program_gets_its_input_and_gives_its_output_and_status() {
    let command = Command {
        stdin: true,
        env: vec!["WORD=hello".into()],
        ..shell("cat; echo $WORD; exit 7")
    };
    let session = agent().exec(command, false).unwrap();
    let mut sender = session.sender().unwrap();
    sender.send(&ExecInput::Stdin(b"typed\n".to_vec())).unwrap();
    sender.send(&ExecInput::StdinClosed).unwrap();
    assert_eq!(
        finish(session),
        ("typed\nhello\n".into(), ExitStatus::Code(7))
    );
}

#[test]
fn kept_output_is_delivered_whole_at_the_end() {
    let session = agent().exec(shell("seq 1 3"), true).unwrap();
    assert_eq!(finish(session), ("1\n2\n3\n".into(), ExitStatus::Code(0)));
}

/// A child that keeps the output open, or writes forever, does not delay the report of the
/// program's end.
#[test]
fn background_children_do_not_delay_the_end() {
    for child in ["sleep 1000", "yes"] {
        let mut session = agent()
            .exec(shell(&format!("{child} & echo $!")), false)
            .unwrap();
        session.set_time_limit(Some(TIMEOUT)).unwrap();
        let mut output = Vec::new();
        loop {
            match session.receive().unwrap().expect("an end is announced") {
                ExecOutput::Output { data, .. } => output.extend(data),
                ExecOutput::Exited(status) => break assert_eq!(status, ExitStatus::Code(0)),
                _ => {}
            }
        }
        let text = String::from_utf8(output).unwrap();
        let mut numbers = text.lines().filter_map(|line| line.parse().ok());
        let child = rustix::process::Pid::from_raw(numbers.next().unwrap()).unwrap();
        let _ = rustix::process::kill_process(child, rustix::process::Signal::KILL);
    }
}

#[test]
fn a_terminal_has_the_requested_size() {
    let command = Command {
        tty: Some(WindowSize {
            rows: 30,
            columns: 100,
        }),
        stdin: true,
        ..shell("test -t 0 && test -t 2 && stty size; exit 4")
    };
    let session = agent().exec(command, false).unwrap();
    let (output, status) = finish(session);
    assert_eq!(output.trim_end(), "30 100");
    assert_eq!(status, ExitStatus::Code(4));
}

#[test]
fn signals_reach_the_whole_group() {
    let mut session = agent()
        .exec(shell("sleep 1000 & echo ready; wait"), false)
        .unwrap();
    session.set_time_limit(Some(TIMEOUT)).unwrap();
    while !matches!(session.receive().unwrap(), Some(ExecOutput::Output { .. })) {}
    session
        .sender()
        .unwrap()
        .send(&ExecInput::Signal(9))
        .unwrap();
    assert_eq!(finish(session).1, ExitStatus::Signal(9));
}

/// Otherwise it would run until somebody reads its input, which nobody does.
#[test]
fn a_program_that_does_not_read_gets_sighup_when_its_host_disconnects() {
    let command = Command {
        stdin: true,
        ..shell("exec sleep 1000")
    };
    let mut session = agent().exec(command, false).unwrap();
    session.set_time_limit(Some(TIMEOUT)).unwrap();
    let Some(ExecOutput::Started { pid }) = session.receive().unwrap() else {
        panic!("it did not start");
    };
    // More than a pipe holds.
    let mut sender = session.sender().unwrap();
    for _ in 0..8 {
        sender.send(&ExecInput::Stdin(vec![0; 16 << 10])).unwrap();
    }
    drop((session, sender));
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while rustix::process::test_kill_process(pid).is_ok() {
        if Instant::now() > until {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            panic!("it runs on");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn missing_and_non_executable_programs_are_told_apart() {
    let agent = agent();
    for (program, kind) in [
        ("/no/such/program", StartFailure::NotFound),
        ("/etc/passwd", StartFailure::NotExecutable),
    ] {
        let command = Command {
            argv: vec![program.into()],
            ..Command::default()
        };
        let mut session = agent.exec(command, false).unwrap();
        match session.receive().unwrap() {
            Some(ExecOutput::Failed(error)) => assert_eq!(error.kind, kind),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_wrong_token_is_refused() {
    let mut agent = agent();
    agent.token = "guess".into();
    let mut session = agent.exec(shell("echo never"), false).unwrap();
    assert!(!matches!(session.receive(), Ok(Some(_))));
}
