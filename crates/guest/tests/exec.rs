//! Programs over an agent connection: streams, ends, terminals, failures.

mod harness;

use harness::{Agent, program, shell, wait_until};
use jiffy_wire::agent::{
    Command, Done, ExecInput, ExecOutput, ExitStatus, Request, StartFailure, Stat, Stream, VERSION,
    WindowSize,
};
use jiffy_wire::frame::{MAX_DATA, MAX_FRAME};
use std::io::{Read, Write};
use std::time::{Duration, Instant};

fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

fn failure(agent: &Agent, command: Command) -> (StartFailure, String) {
    let mut connection = agent.exec(command);
    match connection.next() {
        Some(ExecOutput::Failed(error)) => {
            assert!(connection.is_closed());
            (error.kind, error.message)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn output_and_exit_status_are_returned() {
    let agent = Agent::start();
    let outcome = agent.sh("echo out; echo err >&2; exit 7");
    assert_eq!(outcome.stdout, b"out\n");
    assert_eq!(outcome.stderr, b"err\n");
    assert_eq!(outcome.end, Some(ExitStatus::Code(7)));
}

#[test]
fn a_signal_is_reported_as_such() {
    let agent = Agent::start();
    assert_eq!(agent.sh("kill -SEGV $$").end, Some(ExitStatus::Signal(11)));
}

#[test]
fn stdin_is_passed_on_to_its_end() {
    let agent = Agent::start();
    let mut connection = agent.exec(Command {
        stdin: true,
        ..program(&["cat"])
    });
    connection.input(b"hello ");
    connection.input(b"world");
    connection.send(&ExecInput::StdinClosed);
    let outcome = connection.finish();
    assert_eq!(outcome.stdout, b"hello world");
    assert_eq!(outcome.end, Some(ExitStatus::Code(0)));
}

#[test]
fn without_stdin_a_program_reads_nothing() {
    let agent = Agent::start();
    let outcome = agent.sh("cat; readlink /proc/self/fd/0");
    assert_eq!(outcome.text(), "/dev/null\n");
}

#[test]
fn ten_megabytes_of_output_arrive_before_the_exit_status() {
    let agent = Agent::start();
    let outcome = agent.sh("seq 1 1500000");
    let expected: String = (1..=1_500_000).map(|n| format!("{n}\n")).collect();
    assert!(
        outcome.stdout == expected.as_bytes(),
        "{} bytes",
        outcome.stdout.len()
    );
}

#[test]
fn megabytes_go_through_a_program_both_ways_at_once() {
    let agent = Agent::start();
    let mut connection = agent.exec(Command {
        stdin: true,
        ..program(&["cat"])
    });
    let writer = connection.stream.try_clone().unwrap();
    let sent: Vec<u8> = (0..4_000_000u32).map(|n| (n * 7 / 3) as u8).collect();
    let copy = sent.clone();
    let thread = std::thread::spawn(move || {
        let mut writer = harness::Connection::new(writer);
        copy.chunks(MAX_DATA).for_each(|piece| writer.input(piece));
        writer.send(&ExecInput::StdinClosed);
    });
    connection.started();
    let outcome = connection.finish();
    thread.join().unwrap();
    assert!(outcome.stdout == sent);
}

#[test]
fn input_for_a_program_that_closed_stdin_is_dropped() {
    let agent = Agent::start();
    let mut connection = agent.exec(Command {
        stdin: true,
        ..shell("exec 0<&-; echo done")
    });
    connection.started();
    let input = jiffy_wire::frame::to_vec(&ExecInput::Stdin(vec![b'x'; 20_000])).unwrap();
    for _ in 0..8 {
        // The program may have ended, and closed the connection.
        let _ = connection.stream.write_all(&input);
    }
    assert_eq!(connection.finish().stdout, b"done\n");
}

#[test]
fn environment_and_folder_are_the_command_s() {
    let agent = Agent::start();
    let mut command = shell("pwd; echo $A; echo $HOME; echo $PATH; echo ${TERM:-none}");
    command.env = vec!["A=b c".into()];
    command.cwd = Some("/usr".into());
    let outcome = agent.exec(command).finish();
    assert_eq!(
        outcome.text(),
        "/usr\nb c\n/root\n/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\nnone\n"
    );
}

#[test]
fn a_program_inherits_no_descriptors_or_signal_state() {
    let agent = Agent::start();
    // Only descriptors 0 to 2 (and ls's own), no blocked signal, and none of the ordinary signals
    // ignored, whatever the agent's parent ignored.
    let outcome = agent.sh("echo $(ls /proc/self/fd); grep SigBlk /proc/self/status");
    assert_eq!(outcome.text(), "0 1 2 3\nSigBlk:\t0000000000000000\n");
    let ignored = agent.sh("sed -n 's/^SigIgn:.//p' /proc/self/status");
    let ignored = u64::from_str_radix(ignored.text().trim(), 16).unwrap();
    const ORDINARY: u64 = 0x7fff_ffff;
    assert_eq!(ignored & ORDINARY, 0, "{ignored:#x}");
}

#[test]
fn users_are_looked_up_in_the_image() {
    if !rustix::process::getuid().is_root() {
        return eprintln!("skipped: only root can change its user");
    }
    let agent = Agent::start();
    let run = |user: &str| {
        let command = Command {
            user: Some(user.into()),
            ..shell("id -u; id -g; id -G; echo $HOME")
        };
        agent.exec(command).finish().text().to_owned()
    };
    assert_eq!(run("daemon"), "1\n1\n1\n/usr/sbin\n");
    assert_eq!(run("daemon:adm"), "1\n4\n4\n/usr/sbin\n");
    assert_eq!(run("12345:54321"), "12345\n54321\n54321\n/\n");
    // Streams belong to the program's user, who can reopen them by their names in /dev.
    let mut connection = agent.exec(Command {
        stdin: true,
        user: Some("daemon".into()),
        ..shell("cat /dev/stdin >/dev/stdout; echo err >/dev/stderr")
    });
    connection.input(b"in\n");
    connection.send(&ExecInput::StdinClosed);
    let outcome = connection.finish();
    assert_eq!(
        (&outcome.stdout[..], &outcome.stderr[..]),
        (&b"in\n"[..], &b"err\n"[..])
    );
    let command = Command {
        user: Some("daemon".into()),
        ..shell("stat -c %U /dev/null")
    };
    assert_eq!(agent.exec(command).finish().text(), "root\n");
    // A terminal as well.
    let tty = Some(WindowSize {
        rows: 5,
        columns: 5,
    });
    let user = Some("daemon".into());
    let command = shell("stat -c %U $(tty); echo x > $(tty)");
    let outcome = agent
        .exec(Command {
            tty,
            user,
            ..command
        })
        .finish();
    assert_eq!(outcome.text(), "daemon\r\nx\r\n");
    let command = Command {
        user: Some("nobody-here".into()),
        ..shell("true")
    };
    let (kind, message) = failure(&agent, command);
    assert_eq!(kind, StartFailure::NoSuchUser);
    assert!(message.contains("nobody-here"), "{message}");
}

#[test]
fn a_failed_start_is_reported_with_its_kind() {
    let agent = Agent::start();
    let file = agent.path("plain");
    std::fs::write(&file, "text").unwrap();
    let plain = file.to_str().unwrap();
    let script = agent.path("script");
    // A separate process writes the script: a test in another thread may fork while this one has
    // the file open for writing, and exec would fail with ETXTBSY.
    let write = "echo '#!/no/such/interpreter' > \"$0\" && chmod 755 \"$0\"";
    let mut writer = std::process::Command::new("sh");
    assert!(
        writer
            .args(["-c", write])
            .arg(&script)
            .status()
            .unwrap()
            .success()
    );

    let cases = [
        (
            program(&["no-such-program"]),
            StartFailure::NotFound,
            127,
            "PATH",
        ),
        (
            program(&["/no/such/program"]),
            StartFailure::NotFound,
            127,
            "does not exist",
        ),
        (
            program(&[script.to_str().unwrap()]),
            StartFailure::NotFound,
            127,
            "interpreter",
        ),
        (
            program(&[plain]),
            StartFailure::NotExecutable,
            126,
            "not executable",
        ),
        (program(&["/etc"]), StartFailure::NotExecutable, 126, "/etc"),
        (program(&[]), StartFailure::Invalid, 125, "empty"),
        (program(&["a\0b"]), StartFailure::Invalid, 125, "NUL"),
        (
            Command {
                cwd: Some("/no/such/folder".into()),
                ..shell("true")
            },
            StartFailure::NoSuchDirectory,
            125,
            "/no/such/folder",
        ),
    ];
    for (command, kind, code, words) in cases {
        let (found, message) = failure(&agent, command);
        assert_eq!(found, kind, "{message}");
        assert_eq!(found.exit_code(), code);
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn a_program_with_a_tty_gets_a_sized_pty() {
    let agent = Agent::start();
    let tty = Some(WindowSize {
        rows: 33,
        columns: 111,
    });
    let script = "tty | grep -c /dev/pts; stty size; echo $TERM; echo err >&2; ps -o tty= -p $$ | grep -c pts";
    let outcome = agent
        .exec(Command {
            tty,
            ..shell(script)
        })
        .finish();
    assert_eq!(outcome.text(), "1\r\n33 111\r\nxterm\r\nerr\r\n1\r\n");
    assert_eq!(outcome.stderr, b"");
    assert_eq!(outcome.end, Some(ExitStatus::Code(0)));
}

#[test]
fn a_terminal_can_be_resized() {
    let agent = Agent::start();
    let tty = Some(WindowSize {
        rows: 10,
        columns: 20,
    });
    let script = "trap 'stty size; exit 3' WINCH; echo ready; while :; do sleep 0.05; done";
    let mut connection = agent.exec(Command {
        tty,
        ..shell(script)
    });
    connection.read_until("ready");
    connection.send(&ExecInput::Resize(WindowSize {
        rows: 40,
        columns: 99,
    }));
    let outcome = connection.finish();
    assert!(outcome.text().contains("40 99"), "{outcome:?}");
    assert_eq!(outcome.end, Some(ExitStatus::Code(3)));
}

#[test]
fn control_keys_work_on_a_terminal() {
    let agent = Agent::start();
    let tty = Some(WindowSize {
        rows: 10,
        columns: 80,
    });
    // Not a shell: dash may lose a signal while it starts a program.
    let command = Command {
        tty,
        stdin: true,
        ..program(&["cat"])
    };
    let mut connection = agent.exec(command);
    connection.input(b"typed\n");
    connection.read_until("typed\r\ntyped\r\n");
    connection.input(b"\x03");
    assert_eq!(connection.finish().end, Some(ExitStatus::Signal(2)));

    let mut connection = agent.exec(Command {
        tty,
        stdin: true,
        ..program(&["cat"])
    });
    connection.started();
    connection.input(b"line\n");
    connection.send(&ExecInput::StdinClosed);
    let outcome = connection.finish();
    assert!(outcome.text().contains("line\r\n"), "{outcome:?}");
    assert_eq!(outcome.end, Some(ExitStatus::Code(0)));
}

#[test]
fn a_program_may_close_its_terminal_and_continue() {
    let agent = Agent::start();
    let tty = Some(WindowSize {
        rows: 10,
        columns: 80,
    });
    // Closes its descriptors, then opens the terminal again.
    let script = "exec <&- >&- 2>&-; sleep 0.3; exec >/dev/tty; echo back; exit 8";
    let outcome = agent
        .exec(Command {
            tty,
            ..shell(script)
        })
        .finish();
    assert_eq!(outcome.text(), "back\r\n");
    assert_eq!(outcome.end, Some(ExitStatus::Code(8)));
}

#[test]
fn signals_reach_the_whole_process_group() {
    let agent = Agent::start();
    let mut connection = agent.exec(shell("sleep 100 & echo $!; wait"));
    connection.started();
    let text = connection.read_until("\n");
    let child: u32 = text.trim().parse().unwrap();
    assert!(is_alive(child));
    connection.send(&ExecInput::Signal(15));
    assert_eq!(connection.finish().end, Some(ExitStatus::Signal(15)));
    wait_until("the child is gone", || !is_alive(child));
}

#[test]
fn invalid_signal_numbers_are_ignored() {
    let agent = Agent::start();
    let mut connection = agent.exec(shell("echo ready; sleep 0.2; exit 4"));
    connection.read_until("ready");
    for signal in [0, -1, 65, i32::MIN, i32::MAX] {
        connection.send(&ExecInput::Signal(signal));
    }
    assert_eq!(connection.finish().end, Some(ExitStatus::Code(4)));
}

#[test]
fn a_lost_connection_hangs_up_on_the_program() {
    let agent = Agent::start();
    let script = "trap 'echo gone > '$0'; exit' HUP; echo ready; while :; do sleep 0.05; done";
    let mark = agent.path("mark");
    let mut command = shell(script);
    command.argv.push(mark.to_str().unwrap().into());
    let mut connection = agent.exec(command);
    connection.read_until("ready");
    drop(connection);
    wait_until("the program took SIGHUP", || mark.exists());
    wait_until("it is reaped", || agent.children().is_empty());
}

#[test]
fn a_half_closed_connection_counts_as_lost() {
    let agent = Agent::start();
    let mut connection = agent.exec(shell("echo ready; sleep 100"));
    let pid = connection.started();
    connection.read_until("ready");
    connection.half_close();
    wait_until("the program is gone", || !is_alive(pid));
    assert!(connection.is_closed());
}

#[test]
fn a_program_that_ignores_the_hang_up_is_killed() {
    let agent = Agent::start();
    let mut connection = agent.exec(shell("trap '' HUP; echo ready; while :; do sleep 1; done"));
    let pid = connection.started();
    connection.read_until("ready");
    let start = Instant::now();
    drop(connection);
    wait_until("the program is gone", || !is_alive(pid));
    let waited = start.elapsed();
    assert!(waited > Duration::from_secs(4), "{waited:?}");
}

#[test]
fn a_background_process_does_not_delay_the_exit_report() {
    let agent = Agent::start();
    let outcome = agent.sh("sleep 1000 & echo started; exit 5");
    assert_eq!(
        (outcome.text(), outcome.end),
        ("started\n", Some(ExitStatus::Code(5)))
    );
}

#[test]
fn fifty_programs_run_at_once() {
    let agent = Agent::start();
    let mut connections: Vec<_> = (0..50)
        .map(|n| {
            let command = shell(&format!("read line; echo {n} $line; exit {n}"));
            let mut connection = agent.exec(Command {
                stdin: true,
                ..command
            });
            connection.started();
            connection
        })
        .collect();
    assert_eq!(agent.children().len(), 50);
    connections
        .iter_mut()
        .for_each(|connection| connection.input(b"go\n"));
    for (n, connection) in connections.into_iter().enumerate() {
        let outcome = connection.finish();
        assert_eq!(outcome.text(), format!("{n} go\n"));
        assert_eq!(outcome.end, Some(ExitStatus::Code(n as i32)));
    }
    assert!(agent.children().is_empty());
}

#[test]
fn a_slow_reader_stops_its_own_program_only() {
    let agent = Agent::start();
    let mut slow = agent.exec(shell("yes"));
    slow.started();
    // This output is not read. Others are served meanwhile, and memory use is bounded.
    std::thread::sleep(Duration::from_millis(300));
    for _ in 0..20 {
        assert_eq!(agent.sh("echo x").stdout, b"x\n");
    }
    assert!(agent.memory() < 16 << 20, "{} bytes", agent.memory());
    // The output was only paused: the rest is complete and in order.
    let mut bytes = Vec::new();
    while bytes.len() < 2_000_000 {
        match slow.next() {
            Some(ExecOutput::Output {
                stream: Stream::Stdout,
                data,
            }) => bytes.extend(data),
            other => panic!("{other:?}"),
        }
    }
    assert!(
        bytes
            .chunks(2)
            .all(|pair| pair[0] == b'y' && pair.get(1).is_none_or(|b| *b == b'\n'))
    );
}

#[test]
fn garbage_closes_that_connection_and_nothing_else() {
    let agent = Agent::start();
    let mut witness = agent.exec(Command {
        stdin: true,
        ..program(&["cat"])
    });
    witness.started();
    let too_large = (MAX_FRAME as u32 + 1).to_le_bytes();
    let pieces: [&[u8]; 5] = [
        b"GET / HTTP/1.1\r\n\r\n",
        &too_large,
        &[1, 0, 0, 0, 0xff],
        &[3, 0, 0, 0, 0, 1, 0],
        &[0, 0, 0, 0],
    ];
    for piece in pieces {
        let mut connection = agent.connect();
        connection.stream.write_all(piece).unwrap();
        let mut rest = Vec::new();
        // Closed, with or without a reset for unread data.
        let _ = connection.stream.read_to_end(&mut rest);
        assert_eq!(rest, b"", "{piece:?}");
    }
    // Invalid bytes after a valid request end that program.
    let mut connection = agent.exec(Command {
        stdin: true,
        ..program(&["cat"])
    });
    let pid = connection.started();
    connection.stream.write_all(&[1, 0, 0, 0, 0xff]).unwrap();
    assert!(connection.is_closed());
    wait_until("its program is gone", || !is_alive(pid));

    witness.input(b"still here");
    witness.send(&ExecInput::StdinClosed);
    assert_eq!(witness.finish().stdout, b"still here");
}

#[test]
fn no_input_crashes_the_agent() {
    use proptest::prelude::*;
    let agent = Agent::start();
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(300));
    // Half of them begin like a request, so that they get past the first field.
    let bytes = (
        proptest::option::of((0u8..6, Just(1u8))),
        proptest::collection::vec(any::<u8>(), 0..60),
        proptest::collection::vec(any::<u8>(), 0..60),
    );
    let result = runner.run(&bytes, |(start, body, after)| {
        let mut frame: Vec<u8> = start
            .iter()
            .flat_map(|(kind, version)| [*kind, *version])
            .collect();
        frame.extend(body);
        // Leaves out the one request that may end the agent.
        let mut decoder = jiffy_wire::frame::Decoder::new();
        let mut whole = (frame.len() as u32).to_le_bytes().to_vec();
        whole.extend(frame);
        decoder.push(&whole);
        prop_assume!(!matches!(
            decoder.next(),
            Ok(Some(Request::Shutdown { .. }))
        ));
        whole.extend(after);
        let mut connection = agent.connect();
        let _ = connection.stream.write_all(&whole);
        Ok(())
    });
    result.unwrap();
    assert_eq!(agent.sh("echo alive").stdout, b"alive\n");
    wait_until("its children are gone", || agent.children().is_empty());
}

#[test]
fn a_request_may_come_byte_by_byte() {
    let agent = Agent::start();
    let mut connection = agent.connect();
    let request = Request::Exec {
        version: VERSION,
        command: shell("echo patient"),
    };
    for byte in jiffy_wire::frame::to_vec(&request).unwrap() {
        connection.stream.write_all(&[byte]).unwrap();
    }
    assert_eq!(connection.finish().stdout, b"patient\n");
}

#[test]
fn an_unknown_protocol_version_is_refused_with_a_message() {
    let agent = Agent::start();
    let mut connection = agent.connect();
    connection.send(&Request::Exec {
        version: 99,
        command: shell("true"),
    });
    match connection.next() {
        Some(ExecOutput::Failed(error)) => {
            assert!(error.message.contains("version 99"), "{error:?}")
        }
        other => panic!("{other:?}"),
    }
    let mut connection = agent.connect();
    connection.send(&Request::Shutdown {
        version: 99,
        grace_ms: 0,
    });
    match connection.next() {
        Some(Done::Error(message)) => assert!(message.contains("version 99"), "{message}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn stat_reports_memory_and_cpu_time() {
    let agent = Agent::start();
    let mut connection = agent.connect();
    connection.send(&Request::Stat { version: VERSION });
    let stat: Stat = connection.next().unwrap();
    assert!(stat.memory_total > stat.memory_free && stat.uptime_ns > 0 && stat.processes > 1);
    assert!(stat.cpu_idle_ns > 0);
    assert!(connection.is_closed());
}

#[test]
fn shutdown_ends_programs_in_order() {
    let mut agent = Agent::start();
    let mut polite = agent.exec(shell(
        "trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.05; done",
    ));
    polite.read_until("ready");
    let mut stubborn = agent.exec(shell(
        "trap '' TERM; echo ready; while :; do sleep 0.05; done",
    ));
    stubborn.read_until("ready");
    let shut_down = |grace_ms| {
        let mut connection = agent.connect();
        connection.send(&Request::Shutdown {
            version: VERSION,
            grace_ms,
        });
        assert_eq!(connection.next(), Some(Done::Ok));
    };
    // However long this host stops: the polite one has its time.
    shut_down(300_000);
    let outcome = polite.finish();
    assert_eq!(
        (outcome.text(), outcome.end),
        ("bye\n", Some(ExitStatus::Code(0)))
    );
    shut_down(300);
    assert_eq!(stubborn.finish().end, Some(ExitStatus::Signal(9)));
    assert!(agent.wait_for_end().success());
}
