//! Guests that send what no kernel sends.

use crate::client::{Bytes, Client, Fields, Place, ROOT, serve, serve_by, usual};
use jiffy_files::protocol::opcode::*;
use jiffy_wire::files::{DATA_MAX, MESSAGE_MAX};
use std::fs;
use std::process::{Command, Stdio};

/// The server still answers.
fn assert_alive(client: &mut Client) {
    client.getattr(ROOT).expect("the server is alive");
}

#[test]
fn malformed_messages_are_answered_and_harm_nothing() {
    let place = Place::new();
    fs::write(place.path("file"), "data").unwrap();
    let (mut server, mut client) = serve(&place.shared(), usual());
    // No complete header: no answer. An empty message is not the end.
    for length in [0, 1, 16, 39] {
        client.send(&vec![0xff; length]);
    }
    assert_alive(&mut client);
    // The length is a lie.
    for length in [0, 39, 41, u32::MAX] {
        client.unique += 1;
        let mut message = client.message(GETATTR, ROOT, &[0; 16]);
        message[..4].copy_from_slice(&length.to_ne_bytes());
        client.send(&message);
        assert_eq!(client.receive(), (client.unique, Err(libc::EINVAL)));
    }
    // A message beyond the limit, and the longest.
    client.unique += 1;
    let most = MESSAGE_MAX - 40;
    client.send(&client.message(GETATTR, ROOT, &vec![0; most + 1]));
    assert_eq!(client.receive(), (client.unique, Err(libc::EINVAL)));
    client.ask(GETATTR, ROOT, &vec![0; most]).unwrap();
    for opcode in [0, 7, 9999, u32::MAX] {
        assert_eq!(client.ask(opcode, ROOT, &[0; 64]), Err(libc::ENOSYS));
    }
    // No answer, whatever they contain.
    for opcode in [FORGET, BATCH_FORGET, INTERRUPT] {
        for arguments in [&[][..], &[0xff; 7], &[0xff; 64]] {
            client.send(&client.message(opcode, u64::MAX, arguments));
        }
    }
    assert_alive(&mut client);
    assert!(server.process.try_wait().unwrap().is_none());
}

/// Requests that need arguments.
const WITH_ARGUMENTS: &[u32] = &[
    LOOKUP,
    SETATTR,
    SYMLINK,
    MKNOD,
    MKDIR,
    UNLINK,
    RMDIR,
    RENAME,
    LINK,
    OPEN,
    READ,
    WRITE,
    RELEASE,
    FSYNC,
    SETXATTR,
    GETXATTR,
    LISTXATTR,
    REMOVEXATTR,
    FLUSH,
    INIT,
    READDIR,
    RELEASEDIR,
    FSYNCDIR,
    ACCESS,
    CREATE,
    FALLOCATE,
    READDIRPLUS,
    RENAME2,
    LSEEK,
    TMPFILE,
];

#[test]
fn truncated_and_random_arguments_are_refused() {
    let place = Place::new();
    let (_server, mut client) = serve(&place.shared(), usual());
    let (node, _, handle) = client.create(ROOT, "file", libc::O_RDWR).unwrap();
    for opcode in WITH_ARGUMENTS {
        assert_eq!(
            client.ask(*opcode, ROOT, &[]),
            Err(libc::EINVAL),
            "{opcode}"
        );
        for length in 1..100 {
            for byte in [0, 1, 0x41, 0xff] {
                // An error, or what a harmless request gives: what matters is that one comes.
                let arguments = Bytes::new().u64(handle).bytes(&vec![byte; length]).0;
                let _ = client.ask(*opcode, node, &arguments);
                let _ = client.ask(*opcode, u64::MAX, &vec![byte; length]);
            }
        }
    }
    assert_alive(&mut client);
}

#[test]
fn sizes_at_the_limits_are_served_and_beyond_refused() {
    let place = Place::new();
    let (server, mut client) = serve(&place.shared(), usual());
    let (node, _, handle) = client.create(ROOT, "file", libc::O_RDWR).unwrap();
    let data = vec![7; DATA_MAX];
    assert_eq!(client.write(node, handle, 0, &data), Ok(DATA_MAX as u32));
    assert_eq!(
        client.read(node, handle, 0, DATA_MAX as u32),
        Ok(data.clone())
    );
    for size in [DATA_MAX as u32 + 1, 1 << 30, u32::MAX] {
        assert_eq!(client.read(node, handle, 0, size), Err(libc::EINVAL));
    }
    let longer = [&data[..], &[7]].concat();
    assert_eq!(client.write(node, handle, 0, &longer), Err(libc::EINVAL));
    // More or less data than the size says.
    for size in [0, 2, u32::MAX] {
        let arguments = Bytes::new()
            .u64(handle)
            .u64(0)
            .u32(size)
            .zeros(20)
            .bytes(b"x");
        assert_eq!(client.ask(WRITE, node, &arguments.0), Err(libc::EINVAL));
    }
    for offset in [i64::MAX as u64, 1 << 63, u64::MAX] {
        client.read(node, handle, offset, 4096).unwrap_err();
        client.write(node, handle, offset, b"x").unwrap_err();
    }
    let folder = Fields(&client.ask(OPENDIR, ROOT, &[0; 8]).unwrap()).u64();
    let listing = |handle: u64, offset: u64, size: u32| {
        Bytes::new().u64(handle).u64(offset).u32(size).zeros(20).0
    };
    for size in [DATA_MAX as u32 + 1, u32::MAX] {
        let refused = client.ask(READDIR, ROOT, &listing(folder, 0, size));
        assert_eq!(refused, Err(libc::EINVAL));
    }
    assert_eq!(
        client.ask(READDIR, ROOT, &listing(folder, 0, 0)),
        Ok(vec![])
    );
    assert_eq!(
        client.ask(READDIR, ROOT, &listing(folder, 0, 31)),
        Ok(vec![])
    );
    let beyond = client.ask(READDIR, ROOT, &listing(folder, u64::MAX, 4096));
    assert_eq!(beyond, Err(libc::EINVAL));
    // Handles of the other kind.
    assert_eq!(client.read(node, folder, 0, 1), Err(libc::EBADF));
    let other = client.ask(READDIR, ROOT, &listing(handle, 0, 4096));
    assert_eq!(other, Err(libc::EBADF));
    let statm = fs::read_to_string(format!("/proc/{}/statm", server.process.id())).unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    assert!(pages < 64 << 8, "{pages} pages are more than 64 MiB");
}

#[test]
fn a_guest_that_holds_too_much_gets_an_error_and_others_are_served() {
    let place = Place::new();
    for at in 0..400 {
        fs::write(place.path(&format!("file-{at:03}")), "").unwrap();
    }
    let limited = |most: u32| {
        let mut command = Command::new("prlimit");
        command.arg(format!("--nofile={most}:{most}"));
        command.arg(env!("CARGO_BIN_EXE_jiffy-files"));
        command
    };
    // Root may raise the limit again, so it must not have the capability.
    let mut command = limited(256);
    if crate::client::is_root() {
        command = Command::new("setpriv");
        command.args([
            "--bounding-set=-sys_resource",
            "prlimit",
            "--nofile=256:256",
        ]);
        command.arg(env!("CARGO_BIN_EXE_jiffy-files"));
    }
    let (_server, mut client) = serve_by(command, &place.shared(), usual());
    let (_other, mut other) = serve(&place.shared(), usual());
    let name = |at| format!("file-{at:03}");
    let mut nodes = Vec::new();
    let refused = loop {
        match client.look_up(ROOT, &name(nodes.len())) {
            Ok((node, _)) => nodes.push(node),
            Err(error) => break error,
        }
    };
    assert_eq!(refused, libc::ENFILE);
    assert_eq!(nodes.len(), 256 - 64);
    assert_eq!(client.open(nodes[0], libc::O_RDONLY), Err(libc::ENFILE));
    let create = client.create(ROOT, "new", libc::O_RDWR).map(drop);
    assert_eq!(create, Err(libc::ENFILE));
    assert!(!place.path("new").exists());
    // What it holds still works, and it may let go.
    client.getattr(nodes[0]).unwrap();
    other.look_up(ROOT, &name(399)).unwrap();
    for node in &nodes[1..] {
        client.send(&client.message(FORGET, *node, &1_u64.to_ne_bytes()));
    }
    client.settle();
    assert_eq!(client.getattr(nodes[5]).map(drop), Err(libc::ESTALE));
    let handle = client.open(nodes[0], libc::O_RDONLY).unwrap();
    client.release(nodes[0], handle).unwrap();
    // A listing holds nothing in advance when little is left.
    assert_eq!(client.names(ROOT).len(), 400);
    let listed = |client: &mut Client| {
        let folder = Fields(&client.ask(OPENDIR, ROOT, &[0; 8]).unwrap()).u64();
        let arguments = Bytes::new()
            .u64(folder)
            .u64(0)
            .u32(DATA_MAX as u32)
            .zeros(20);
        client.ask(READDIRPLUS, ROOT, &arguments.0).unwrap();
        let arguments = Bytes::new().u64(folder).zeros(16);
        client.ask(RELEASEDIR, ROOT, &arguments.0).unwrap();
    };
    listed(&mut client);
    client.look_up(ROOT, "file-399").expect("something is left");
    // A new guest begins with nothing.
    client.init();
    assert_eq!(client.getattr(nodes[0]).map(drop), Err(libc::ESTALE));
    client.look_up(ROOT, &name(0)).unwrap();
}

#[test]
fn forgetting_more_than_was_looked_up_harms_nothing() {
    let place = Place::new();
    fs::write(place.path("file"), "data").unwrap();
    let (_server, mut client) = serve(&place.shared(), usual());
    let (node, _) = client.look_up(ROOT, "file").unwrap();
    assert_eq!(client.look_up(ROOT, "file").unwrap().0, node);
    let handle = client.open(node, libc::O_RDONLY).unwrap();
    client.send(&client.message(FORGET, node, &1_u64.to_ne_bytes()));
    client.settle();
    client.getattr(node).expect("it was looked up twice");
    for forgotten in [node, ROOT, u64::MAX] {
        client.send(&client.message(FORGET, forgotten, &u64::MAX.to_ne_bytes()));
    }
    client.settle();
    assert_eq!(client.getattr(node), Err(libc::ESTALE));
    assert_eq!(
        client.read(node, handle, 0, 9),
        Ok(b"data".to_vec()),
        "still open"
    );
    let (again, _) = client.look_up(ROOT, "file").unwrap();
    assert_ne!(again, node, "numbers are not used again");
    let many = Bytes::new().u32(u32::MAX).u32(0).u64(again).u64(1);
    client.send(&client.message(BATCH_FORGET, 0, &many.0));
    client.settle();
    assert_eq!(client.getattr(again), Err(libc::ESTALE));
}

#[test]
fn many_requests_are_answered_in_any_order() {
    let place = Place::new();
    let (_server, mut client) = serve(&place.shared(), usual());
    let (node, _, handle) = client.create(ROOT, "file", libc::O_RDWR).unwrap();
    client.write(node, handle, 0, &vec![1; DATA_MAX]).unwrap();
    let first = client.unique + 1;
    let client = std::sync::Arc::new(client);
    let sender = client.clone();
    let thread = std::thread::spawn(move || {
        for unique in first..first + 500 {
            let arguments = Bytes::new()
                .u64(handle)
                .u64(0)
                .u32(DATA_MAX as u32)
                .zeros(20);
            let mut message = sender.message(READ, node, &arguments.0);
            message[8..16].copy_from_slice(&unique.to_ne_bytes());
            sender.send(&message);
        }
    });
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..500 {
        let (unique, answer) = client.receive();
        assert_eq!(answer.unwrap().len(), DATA_MAX);
        assert!(seen.insert(unique));
    }
    thread.join().unwrap();
    assert_eq!(
        (seen.first(), seen.last()),
        (Some(&first), Some(&(first + 499)))
    );
}

#[test]
fn the_server_ends_with_success_when_the_peer_closes() {
    let place = Place::new();
    let (mut idle, client) = serve(&place.shared(), usual());
    drop(client);
    assert!(idle.wait().success());
    // With requests in progress, and answers that nobody receives.
    let (mut busy, mut client) = serve(&place.shared(), usual());
    let (node, _, handle) = client.create(ROOT, "file", libc::O_RDWR).unwrap();
    client.write(node, handle, 0, &vec![1; DATA_MAX]).unwrap();
    for _ in 0..5 {
        let arguments = Bytes::new()
            .u64(handle)
            .u64(0)
            .u32(DATA_MAX as u32)
            .zeros(20);
        client.send(&client.message(READ, node, &arguments.0));
    }
    drop(client);
    assert!(busy.wait().success());
}

#[test]
fn wrong_arguments_give_one_sentence() {
    let place = Place::new();
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_jiffy-files"))
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(said.lines().count(), 1, "{said}");
        said
    };
    let said = run(&["--socket-fd", "900", "--folder-fd", "901"]);
    assert!(
        said.contains("descriptor 900 of --socket-fd is not open"),
        "{said}"
    );
    let said = run(&["--socket-fd", "0", "--folder-fd", "901"]);
    assert!(said.contains("standard stream"), "{said}");
    let said = run(&["--socket-fd", "5", "--folder-fd", "5"]);
    assert!(said.contains("the same descriptor 5"), "{said}");
    let mut file = Command::new(env!("CARGO_BIN_EXE_jiffy-files"));
    file.stderr(Stdio::piped());
    fs::write(place.path("file"), "").unwrap();
    let (mut server, _client) = serve_by(file, &place.path("file"), usual());
    assert_eq!(server.wait().code(), Some(1));
    let said = std::io::read_to_string(server.process.stderr.take().unwrap()).unwrap();
    assert!(said.contains("--folder-fd is not a folder"), "{said}");
}
