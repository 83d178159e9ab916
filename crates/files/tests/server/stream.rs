//! Requests on a stream, in which each message begins with its length.

use crate::client::{Bytes, Client, Place, ROOT, serve, serve_on, serve_stream, usual};
use jiffy_files::protocol::opcode::{GETATTR, LOOKUP, READ};
use jiffy_wire::files::{DATA_MAX, MESSAGE_MAX};
use rustix::net::{RecvFlags, SendFlags, SocketType, recv, send};
use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Sends all bytes; a stream may take fewer at a time.
fn put(client: &Client, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let sent = send(&client.socket, bytes, SendFlags::NOSIGNAL).unwrap();
        bytes = &bytes[sent..];
    }
}

/// The next answer of a stream: its number, its errno and its payload.
fn take(client: &Client) -> (u64, i32, Vec<u8>) {
    let mut header = [0; 16];
    let (read, _) = recv(&client.socket, &mut header[..], RecvFlags::WAITALL).unwrap();
    assert_eq!(read, 16);
    let length = u32::from_ne_bytes(header[..4].try_into().unwrap()) as usize;
    let error = i32::from_ne_bytes(header[4..8].try_into().unwrap());
    let unique = u64::from_ne_bytes(header[8..].try_into().unwrap());
    let mut payload = vec![0; length - 16];
    let mut filled = 0;
    while filled < payload.len() {
        let rest = &mut payload[filled..];
        let (read, _) = recv(&client.socket, rest, RecvFlags::WAITALL).unwrap();
        assert_ne!(read, 0, "the server ended");
        filled += read;
    }
    (unique, -error, payload)
}

fn numbered(client: &mut Client, opcode: u32, node: u64, arguments: &[u8]) -> Vec<u8> {
    client.unique += 1;
    client.message(opcode, node, arguments)
}

#[test]
fn messages_may_come_in_pieces_and_together() {
    let place = Place::new();
    fs::write(place.path("file"), "data").unwrap();
    let (_server, mut client) = serve_stream(&place.shared(), usual());
    let whole = numbered(&mut client, GETATTR, ROOT, &[0; 16]);
    for piece in [&whole[..1], &whole[1..4], &whole[4..41], &whole[41..]] {
        put(&client, piece);
        std::thread::sleep(Duration::from_millis(20));
    }
    let (unique, error, payload) = take(&client);
    assert_eq!((unique, error), (client.unique, 0));
    assert!(!payload.is_empty());
    // Two messages and a half in one write.
    let found = numbered(&mut client, LOOKUP, ROOT, b"file\0");
    let missing = numbered(&mut client, LOOKUP, ROOT, b"none\0");
    let last = numbered(&mut client, GETATTR, ROOT, &[0; 16]);
    put(&client, &[&found, &missing, &last[..20]].concat());
    let mut errors = [take(&client), take(&client)].map(|(unique, error, _)| (unique, error));
    errors.sort_unstable();
    let first = client.unique - 2;
    assert_eq!(errors, [(first, 0), (first + 1, libc::ENOENT)]);
    put(&client, &last[20..]);
    assert_eq!(take(&client).1, 0);
}

#[test]
fn many_long_answers_are_never_mixed() {
    let place = Place::new();
    fs::write(place.path("file"), vec![7; DATA_MAX]).unwrap();
    let (_server, mut client) = serve_stream(&place.shared(), usual());
    let look_up = numbered(&mut client, LOOKUP, ROOT, b"file\0");
    put(&client, &look_up);
    let node = u64::from_ne_bytes(take(&client).2[..8].try_into().unwrap());
    let open = numbered(
        &mut client,
        jiffy_files::protocol::opcode::OPEN,
        node,
        &[0; 8],
    );
    put(&client, &open);
    let handle = u64::from_ne_bytes(take(&client).2[..8].try_into().unwrap());
    let first = client.unique + 1;
    let arguments = Bytes::new()
        .u64(handle)
        .u64(0)
        .u32(DATA_MAX as u32)
        .zeros(20);
    let requests: Vec<u8> = (0..200)
        .flat_map(|_| numbered(&mut client, READ, node, &arguments.0))
        .collect();
    let client = std::sync::Arc::new(client);
    let sender = client.clone();
    let thread = std::thread::spawn(move || put(&sender, &requests));
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..200 {
        let (unique, error, payload) = take(&client);
        assert_eq!(error, 0);
        assert!(payload == [7; DATA_MAX]);
        assert!(seen.insert(unique));
    }
    thread.join().unwrap();
    assert_eq!(
        (seen.first(), seen.last()),
        (Some(&first), Some(&(first + 199)))
    );
}

#[test]
fn an_impossible_length_ends_the_connection_and_harms_nobody_else() {
    let place = Place::new();
    let (_other, mut other) = serve(&place.shared(), usual());
    for length in [0, 3, 39, MESSAGE_MAX as u32 + 1, u32::MAX] {
        let (mut server, client) = serve_stream(&place.shared(), usual());
        put(&client, &length.to_ne_bytes());
        let closed = recv(&client.socket, &mut [0; 1][..], RecvFlags::empty());
        assert_eq!(closed.map(|(read, _)| read), Ok(0), "{length}");
        assert!(server.wait().success());
    }
    // The longest is served.
    let (_server, mut client) = serve_stream(&place.shared(), usual());
    let longest = numbered(&mut client, GETATTR, ROOT, &vec![0; MESSAGE_MAX - 40]);
    put(&client, &longest);
    assert_eq!(take(&client).1, 0);
    other.getattr(ROOT).unwrap();
}

#[test]
fn a_stream_that_ends_within_a_message_ends_the_server() {
    let place = Place::new();
    for length in [0, 2, 4, 50] {
        let (mut server, mut client) = serve_stream(&place.shared(), usual());
        let message = numbered(&mut client, GETATTR, ROOT, &[0; 16]);
        put(&client, &message[..length]);
        drop(client);
        assert!(server.wait().success());
    }
}

#[test]
fn sockets_of_other_types_are_refused() {
    let place = Place::new();
    let mut command = Command::new(env!("CARGO_BIN_EXE_jiffy-files"));
    command.stderr(Stdio::piped());
    let (mut server, _client) = serve_on(SocketType::DGRAM, command, &place.shared(), usual());
    assert_eq!(server.wait().code(), Some(1));
    let said = std::io::read_to_string(server.process.stderr.take().unwrap()).unwrap();
    assert!(said.contains("SOCK_SEQPACKET or SOCK_STREAM"), "{said}");
}
