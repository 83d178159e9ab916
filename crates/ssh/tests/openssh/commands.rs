//! Commands: streams, statuses, many at once.

use crate::harness::wait_until;
use crate::node::{Node, bytes, stderr, stdout, wait};
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::thread;

#[test]
fn streams_and_exit_status_of_a_command_come_back() {
    let node = Node::start();
    let output = node.ssh(&["web", "echo out; echo err >&2; exit 7"]);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert_eq!(output.stdout, b"out\n");
    assert_eq!(output.stderr, b"err\n");
    // The words are one line for the shell, as ssh has it.
    let output = node.ssh(&["web", "echo", "a  b", "$HOME"]);
    let home = std::env::var("HOME").unwrap();
    assert_eq!(stdout(&output), format!("a b {home}\n"));
    let output = node.openssh("ssh").args(["web.jiffy", "pwd"]).output();
    assert_eq!(stdout(&output.unwrap()), format!("{home}\n"));
}

#[test]
fn a_command_that_a_signal_ends_is_255_to_ssh() {
    let node = Node::start();
    let output = node.ssh(&["web", "kill -KILL $$"]);
    assert_eq!(output.status.code(), Some(255), "{output:?}");
}

#[test]
fn bulk_data_passes_both_ways_with_and_without_rekeying() {
    let node = Node::start();
    let sent = bytes(12 << 20);
    for options in [&[][..], &["-oRekeyLimit=1M"]] {
        let mut command = node.openssh("ssh");
        command.args(options).args(["web.jiffy", "cat"]);
        let output = run_with_stdin(command, sent.clone());
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(output.stdout == sent, "{} bytes", output.stdout.len());
    }
}

#[test]
fn a_program_that_writes_before_reading_does_not_deadlock() {
    let node = Node::start();
    let mut command = node.openssh("ssh");
    command.args(["web.jiffy", "head -c 20000000 /dev/zero; wc -c"]);
    let output = run_with_stdin(command, bytes(10_000_000));
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(output.stdout.len(), 20_000_000 + "10000000\n".len());
    assert!(output.stdout.ends_with(b"\x0010000000\n"));
}

#[test]
fn a_program_that_reads_late_gets_all_its_input() {
    let node = Node::start();
    let mut command = node.openssh("ssh");
    command.args(["web.jiffy", "sleep 2; wc -c"]);
    // More than the proxy holds.
    let output = run_with_stdin(command, bytes(90 << 20));
    assert_eq!(stdout(&output), "94371840\n");
}

#[test]
fn a_program_that_reads_nothing_does_not_block_other_channels() {
    let node = Node::start();
    let mut master = node.openssh("ssh");
    let control = format!("-oControlPath={}", node.text("control"));
    let mut master = master
        .args(["-M", "-N", &control, "web.jiffy"])
        .spawn()
        .unwrap();
    wait_until("the master listens", || node.path("control").exists());
    let mut blocked = Command::new("ssh")
        .args([&control, "web.jiffy", "echo ready; sleep 1000"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = [0; 6];
    blocked
        .stdout
        .take()
        .unwrap()
        .read_exact(&mut ready)
        .unwrap();
    // More than a window and all buffers, less than the limit.
    let mut input = blocked.stdin.take().unwrap();
    input.write_all(&bytes(32 << 20)).unwrap();
    for _ in 0..3 {
        let other = Command::new("ssh")
            .args([&control, "web.jiffy", "head -c 5000000 /dev/zero"])
            .stdout(Stdio::piped())
            .spawn();
        assert_eq!(wait(other.unwrap()).stdout.len(), 5_000_000);
    }
    for child in [&mut blocked, &mut master] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

#[test]
fn environment_variables_of_the_client_are_set() {
    let node = Node::start();
    let output = node
        .openssh("ssh")
        .args(["-oSendEnv=LC_ODD", "-oSetEnv=GREETING=hello", "web.jiffy"])
        .arg("echo $GREETING $LC_ODD $SSH_CONNECTION")
        .env("LC_ODD", "very odd")
        .output()
        .unwrap();
    assert_eq!(
        stdout(&output),
        "hello very odd UNKNOWN 65535 UNKNOWN 65535\n"
    );
}

#[test]
fn a_killed_client_ends_its_program() {
    let node = Node::start();
    let mut client = node
        .openssh("ssh")
        .args(["web.jiffy", "echo ready; exec sleep 1000"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = [0; 6];
    let mut output = client.stdout.take().unwrap();
    output.read_exact(&mut ready).unwrap();
    // The process that copied the guest's program may end after it has answered.
    wait_until("only the program runs", || {
        node.guest_processes().len() == 1
    });
    client.kill().unwrap();
    client.wait().unwrap();
    wait_until("the program has ended", || {
        node.guest_processes().is_empty()
    });
}

#[test]
fn errors_are_reported_in_one_sentence() {
    let node = Node::start();
    let one = |output: &std::process::Output| {
        let text = stderr(output);
        assert_eq!(output.status.code(), Some(125), "{text}");
        assert!(text.starts_with("jiffy: "), "{text}");
        let sentences = text.lines().filter(|line| !line.starts_with("  hint: "));
        assert_eq!(sentences.count(), 1, "{text}");
        text
    };
    for words in [
        &["ssh", "nope"][..],
        &["ssh-config", "web", "nope"],
        &["ssh-proxy", "nope"],
    ] {
        let output = node.jiffy().args(words).output().unwrap();
        assert!(
            one(&output).contains("There is no VM \"nope\""),
            "{words:?}"
        );
        assert_eq!(output.stdout, b"");
    }
    let output = node.ssh(&["off"]);
    assert!(one(&output).contains("off does not run"));
    let output = node.ssh(&["--address", "web"]);
    assert!(one(&output).contains("web has no address"));
    let output = node.jiffy().env("PATH", "").args(["ssh", "web"]).output();
    assert!(one(&output.unwrap()).contains("no program ssh on PATH"));
}

#[test]
fn programs_run_as_the_given_user_and_unknown_users_are_named() {
    if !rustix::process::geteuid().is_root() {
        // The agent could not become any other user.
        return;
    }
    let node = Node::start();
    let output = node.ssh(&["no-such-user@web", "true"]);
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(stderr(&output).contains("no-such-user"), "{output:?}");
    let output = node.ssh(&["-l", "12345", "web", "id -u; pwd"]);
    assert_eq!(output.stdout, b"12345\n/\n", "{output:?}");
}

/// Runs a command with these bytes on stdin.
fn run_with_stdin(mut command: Command, input: Vec<u8>) -> std::process::Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writing = thread::spawn(move || stdin.write_all(&input).unwrap());
    let output = wait(child);
    writing.join().unwrap();
    output
}
