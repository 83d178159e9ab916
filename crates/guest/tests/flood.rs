//! Clients that stall, send slowly, flood or never disconnect take a bounded amount of memory,
//! processes and time, and delay no other client.

mod harness;

use harness::*;
use jiffy_wire::agent::{
    Command, CopyDone, CopyFrame, ExecInput, ExecOutput, Request, Stat, VERSION,
};
use jiffy_wire::frame;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, Signal, kill_process};
use std::io::Write;
use std::os::unix::net::UnixStream;

/// Most connections of an agent.
const CONNECTIONS: usize = 256;
/// Most programs of connections.
const PROGRAMS: usize = 240;
/// Most processes that copy.
const COPIES: usize = 64;

/// Checks that a well-behaved client is served.
fn assert_served(agent: &Agent) {
    assert_eq!(agent.sh("echo x").stdout, b"x\n");
    stat(agent);
}

fn stat(agent: &Agent) {
    let mut connection = agent.connect();
    connection.send(&Request::Stat { version: VERSION });
    assert!(connection.next::<Stat>().is_some());
}

/// Starts programs and reads none of their output.
fn sessions(agent: &Agent, count: usize, script: &str) -> Vec<Connection> {
    let command = Command {
        stdin: true,
        ..shell(script)
    };
    let begin = |_| {
        let mut connection = agent.exec(command.clone());
        connection.started();
        connection
    };
    (0..count).map(begin).collect()
}

/// Writes until the peer accepts no more; returns the bytes written.
fn write_until_full(mut stream: &UnixStream, bytes: &[u8]) -> usize {
    stream.set_nonblocking(true).unwrap();
    let mut taken = 0;
    let mut idle = 0;
    // A second without progress counts as the end.
    while idle < 100 {
        match stream.write(&bytes[taken % bytes.len()..]) {
            Ok(count) => (taken, idle) = (taken + count, 0),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                idle += 1;
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            Err(_) => break,
        }
        assert!(taken < 64 << 20, "the peer accepts unlimited input");
    }
    stream.set_nonblocking(false).unwrap();
    taken
}

#[test]
fn a_burst_of_clients_waits_for_a_busy_agent() {
    let agent = Agent::start();
    let pid = Pid::from_child(&agent.process);
    kill_process(pid, Signal::STOP).unwrap();
    let address = SocketAddrUnix::new(agent.path("agent")).unwrap();
    let connect = |_| {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        // Fails at once if the backlog is full.
        net::connect(&socket, &address).unwrap();
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(false).unwrap();
        let mut connection = Connection::new(stream);
        connection.send(&Request::Stat { version: VERSION });
        connection
    };
    let clients: Vec<_> = (0..CONNECTIONS - 8).map(connect).collect();
    kill_process(pid, Signal::CONT).unwrap();
    for mut client in clients {
        assert!(client.next::<Stat>().is_some());
    }
}

#[test]
fn a_connection_over_the_limit_replaces_the_longest_silent_one() {
    let agent = Agent::start();
    let mut connections: Vec<_> = (0..CONNECTIONS).map(|_| agent.connect()).collect();
    // Half a frame is not a request either.
    connections[1].stream.write_all(&[9, 0, 0]).unwrap();
    assert_served(&agent);
    assert!(connections[0].is_closed());
    let last = connections.last_mut().unwrap();
    last.send(&Request::Stat { version: VERSION });
    assert!(last.next::<Stat>().is_some());
}

#[test]
fn programs_over_the_limit_are_refused_and_the_node_is_served() {
    let agent = Agent::start();
    let mut connections = sessions(&agent, PROGRAMS, "exec cat");
    let mut refused = agent.exec(shell("true"));
    match refused.next() {
        Some(ExecOutput::Failed(error)) => {
            assert!(error.message.contains("one has to end first"), "{error:?}");
        }
        other => panic!("{other:?}"),
    }
    assert!(refused.is_closed());
    stat(&agent);
    assert_eq!(agent.children().len(), PROGRAMS);
    // A program whose connection was closed counts until it has ended.
    let dropped = connections.pop().unwrap();
    dropped.half_close();
    drop(dropped);
    wait_until("there is room", || {
        let mut connection = agent.exec(shell("true"));
        matches!(connection.next(), Some(ExecOutput::Started { .. }))
    });
    for connection in &mut connections {
        connection.input(b"all");
        connection.send(&ExecInput::StdinClosed);
    }
    for connection in connections {
        assert_eq!(connection.finish().stdout, b"all");
    }
    wait_until("all have ended", || agent.children().is_empty());
}

#[test]
fn programs_that_ignore_sighup_count_until_they_are_killed() {
    let agent = Agent::start();
    let script = "trap '' HUP; echo up; exec sleep 1000";
    let mut connections = sessions(&agent, PROGRAMS, script);
    for connection in &mut connections {
        connection.read_until("up");
    }
    drop(connections);
    // They have a few seconds; until then no client can start more.
    let mut most = 0;
    wait_until("they are killed", || {
        most = most.max(agent.children().len());
        let mut connection = agent.exec(shell("true"));
        matches!(connection.next(), Some(ExecOutput::Started { .. }))
    });
    assert!(most <= PROGRAMS, "{most} programs");
    assert_served(&agent);
}

#[test]
fn unread_output_of_many_programs_takes_bounded_memory() {
    let agent = Agent::start();
    let before = agent.memory();
    let connections = sessions(&agent, 100, "exec yes 2>&1");
    // Each has filled its buffers.
    wait_until("they wait for their readers", || {
        let waits = |pid: &u32| {
            let channel = std::fs::read_to_string(format!("/proc/{pid}/wchan"));
            channel.is_ok_and(|channel| channel.contains("pipe"))
        };
        agent.children().iter().all(waits)
    });
    assert_served(&agent);
    let each = (agent.memory() - before) / 100;
    // 128 KiB, and one more piece of 64 KiB; the allocator may keep the same again.
    assert!(each < 384 << 10, "{each} bytes each");
    drop(connections);
    wait_until("they are gone", || agent.children().is_empty());
    assert_served(&agent);
}

#[test]
fn unread_input_of_many_programs_takes_bounded_memory() {
    let agent = Agent::start();
    let before = agent.memory();
    let frame = frame::to_vec(&ExecInput::Stdin(vec![b'x'; frame::MAX_DATA])).unwrap();
    let connections = sessions(&agent, 10, "exec sleep 1000");
    for connection in &connections {
        write_until_full(&connection.stream, &frame);
    }
    assert_served(&agent);
    let each = (agent.memory() - before) / 10;
    assert!(each < 1 << 20, "{each} bytes each");
    // An endless stream of frames without effect is processed piece by piece.
    let signals = frame::to_vec(&ExecInput::Signal(99)).unwrap().repeat(1000);
    let busy = sessions(&agent, 1, "exec sleep 1000");
    let stream = busy[0].stream.try_clone().unwrap();
    let flood = std::thread::spawn(move || {
        let mut stream = stream;
        while stream.write_all(&signals).is_ok() {}
    });
    for _ in 0..20 {
        assert_served(&agent);
    }
    busy[0].stream.shutdown(std::net::Shutdown::Both).unwrap();
    flood.join().unwrap();
    assert_served(&agent);
}

#[test]
fn stalled_copies_are_limited_in_number() {
    let agent = Agent::start();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("large"), vec![1; 8 << 20]).unwrap();
    let path = folder.path().to_str().unwrap().to_owned();
    let begin = |number: usize| {
        let mut connection = agent.connect();
        let (version, path) = (VERSION, path.clone());
        connection.send(&match number % 2 {
            0 => Request::CopyIn { version, path },
            _ => Request::CopyOut { version, path },
        });
        connection
    };
    let connections: Vec<_> = (0..COPIES).map(begin).collect();
    wait_until("all have begun", || agent.children().len() == COPIES);
    match begin(0).next::<CopyDone>() {
        Some(CopyDone {
            error: Some(error), ..
        }) => {
            assert!(error.contains("one has to end first"), "{error}");
        }
        other => panic!("{other:?}"),
    }
    match begin(1).next::<CopyFrame>() {
        Some(CopyFrame::Failed { message }) => {
            assert!(message.contains("one has to end first"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    assert_served(&agent);
    drop(connections);
    wait_until("they are gone", || agent.children().is_empty());
    drop(begin(0));
    assert_served(&agent);
}
