//! Standard streams, terminals, signals.

use crate::support::jiffy;

#[test]
fn stdout_and_stderr_stay_separate() {
    let jiffy = jiffy();
    let output = jiffy.run(&["run", "--rm", "--", "sh", "-c", "echo out; echo err >&2"]);
    assert_eq!(output.text(), "out");
    assert_eq!(output.error_text(), "err");
}

#[test]
fn stdin_arrives_whole_and_ends() {
    let jiffy = jiffy();
    let bytes: Vec<u8> = (0..1_000_000u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let output = jiffy
        .command(&["run", "--rm", "-i", "--", "cat"])
        .stdin(bytes.clone())
        .output()
        .expect("it runs");
    assert_eq!(output.code(), 0, "{}", output.error_text());
    assert_eq!(output.stdout.len(), bytes.len());
    assert!(output.stdout == bytes, "every byte as it was sent");
}

#[test]
fn a_megabyte_of_output_arrives_whole() {
    let jiffy = jiffy();
    let output = jiffy.run(&["run", "--rm", "--", "sh", "-c", "seq 1 150000"]);
    let expected: String = (1..=150_000).map(|n| format!("{n}\n")).collect();
    assert_eq!(output.stdout.len(), expected.len());
    assert!(output.stdout == expected.as_bytes());
}

#[test]
fn a_terminal_has_its_size_and_follows_changes() {
    let jiffy = jiffy();
    let mut session = jiffy
        .command(&["run", "--rm", "-it", "--", "sh"])
        .tty(24, 80)
        .start()
        .expect("it starts");
    session
        .write("tty; stty size; echo 'ready''!'\n")
        .expect("typed");
    let screen = session.read_until("ready!").expect("it answers");
    assert!(screen.contains("24 80"), "{screen}");
    session.resize(50, 132).expect("resized");
    session
        .write("while [ \"$(stty size)\" != '50 132' ]; do sleep 0.1; done; echo 'lar''ger'\n")
        .expect("typed");
    session.read_until("larger").expect("the size arrives");
    session.write("exit 3\n").expect("typed");
    assert_eq!(session.wait().expect("it ends").code(), 3);
}

#[test]
fn control_c_on_a_terminal_interrupts_the_command_not_the_vm() {
    let jiffy = jiffy();
    let mut session = jiffy
        .command(&["run", "--rm", "--name", "keys", "-it", "--", "sh"])
        .tty(24, 80)
        .start()
        .expect("it starts");
    session
        .write("echo 'wait''ing'; sleep 1000\n")
        .expect("typed");
    session.read_until("waiting").expect("it runs");
    // Until `sleep` runs, the terminal's foreground group is the shell, which would get the signal.
    jiffy.eventually("it sleeps", || {
        jiffy.run(&["exec", "keys", "pidof", "sleep"]).code() == 0
    });
    session.write([3]).expect("Ctrl-C");
    session.write("echo 'still ''here'\n").expect("typed");
    // Only after the prompt: a terminal in canonical mode turns Ctrl-D into an end of file that is
    // lost when the shell switches to its own line editing.
    session
        .read_until("still here\r\n/ # ")
        .expect("the shell continues");
    session.write([4]).expect("Ctrl-D");
    session.wait().expect("it ends");
}

#[test]
fn signals_are_forwarded() {
    let jiffy = jiffy();
    let mut running = jiffy
        .command(&[
            "run",
            "--rm",
            "--",
            "sh",
            "-c",
            "trap 'echo got TERM; exit 42' TERM; echo ready; while :; do sleep 0.1; done",
        ])
        .start()
        .expect("it starts");
    running.read_until("ready").expect("it runs");
    running.signal(15).expect("sent");
    let output = running.wait().expect("it ends");
    assert_eq!(output.code(), 42, "{}", output.error_text());
    assert!(output.text().ends_with("got TERM"), "{}", output.text());
}

#[test]
fn a_command_killed_by_a_signal_says_so_by_its_status() {
    let jiffy = jiffy();
    let mut running = jiffy
        .command(&[
            "run",
            "--rm",
            "--",
            "sh",
            "-c",
            "echo ready; exec sleep 1000",
        ])
        .start()
        .expect("it starts");
    running.read_until("ready").expect("it runs");
    running.signal(15).expect("sent");
    assert_eq!(running.wait().expect("it ends").code(), 128 + 15);
}

#[test]
fn exec_has_its_own_streams_and_status() {
    let jiffy = jiffy();
    jiffy.ok(&["run", "-d", "--name", "host"]);
    let output = jiffy
        .command(&[
            "exec",
            "-i",
            "host",
            "sh",
            "-c",
            "cat; echo err >&2; exit 5",
        ])
        .stdin("hello")
        .output()
        .expect("it runs");
    assert_eq!(
        (
            output.code(),
            output.text().as_str(),
            output.error_text().as_str()
        ),
        (5, "hello", "err")
    );
    assert_eq!(jiffy.run(&["exec", "host", "no-such-program"]).code(), 127);
    assert_eq!(jiffy.run(&["exec", "host", "/etc/passwd"]).code(), 126);
}
