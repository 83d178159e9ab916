//! Feeds bytes to the readers of the sockets, in pieces.

use super::client::Client;
use super::disk_peer::{DiskPeer, Line};
use super::served::{Handshake, Received, read_written};
use jiffy_wire::disk::ChunkRequest;
use jiffy_wire::lines::Lines;
use jiffy_wire::pager::{Mapping, PagerRequest, WORKING_SET_LINE};
use jiffy_wire::vmm::Extent;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Bytes that a socket takes in any case while its other end reads as much.
const PIECE: usize = 4096;

/// What a VMM sent when it connected.
#[derive(Debug, PartialEq, Eq)]
pub enum Opening {
    /// No whole message.
    Part,
    /// The question for the working set.
    Question,
    /// The mappings of its memory.
    Mappings(Vec<Mapping>),
    /// It was refused.
    Refused,
}

/// The requests in what a client of the control socket sends in pieces of this many bytes.
pub fn control_requests(bytes: &[u8], piece: usize) -> Vec<PagerRequest> {
    let (ours, theirs) = pair();
    let mut client = Client::new(ours);
    let mut requests = Vec::new();
    send(&theirs, bytes, piece, || {
        let mut goes_on = client.exchange();
        while let Some(request) = client.next_request() {
            requests.push(request);
        }
        goes_on &= client.flush();
        goes_on
    });
    requests
}

/// The requests in what a VMM with a disk sends, and the process for which its connection was made.
pub fn disk_requests(bytes: &[u8], piece: usize) -> (Vec<ChunkRequest>, Option<u32>) {
    let (ours, theirs) = pair();
    let mut peer = DiskPeer::new(ours, None, Arc::default());
    let mut requests = Vec::new();
    send(&theirs, bytes, piece, || {
        if !peer.exchange(false) {
            return false;
        }
        loop {
            match peer.next_line() {
                Ok(Some(Line::Request(request))) => requests.push(request),
                Ok(Some(Line::OnBehalfOf(_))) => {}
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
    });
    (requests, peer.pid)
}

/// What a VMM that connects sends, and the process for which its connection was made.
pub fn handshake(bytes: &[u8], piece: usize) -> (Opening, Option<u32>) {
    let (ours, theirs) = pair();
    let mut handshake = Handshake::new(ours, None);
    let mut opening = Opening::Part;
    send(&theirs, bytes, piece, || {
        opening = match handshake.receive() {
            Ok(Received::Part) => return true,
            Ok(Received::Question) => Opening::Question,
            Ok(Received::Mappings(mappings)) => Opening::Mappings(mappings),
            Err(_) => Opening::Refused,
        };
        false
    });
    (opening, handshake.pid)
}

/// The ranges in what a VMM sends about the pages that its guest has written.
pub fn written(bytes: &[u8], piece: usize) -> Option<Vec<Extent>> {
    let mut owed = Some(Lines::new(WORKING_SET_LINE));
    let mut pieces = bytes.chunks(piece);
    pieces.find_map(|piece| read_written(&mut owed, piece))
}

fn pair() -> (UnixStream, UnixStream) {
    let (ours, theirs) = UnixStream::pair().expect("two sockets");
    for end in [&ours, &theirs] {
        end.set_nonblocking(true).expect("a socket's flag");
    }
    (ours, theirs)
}

/// Sends the bytes and discards the answers, until `receive` returns false.
fn send(mut theirs: &UnixStream, bytes: &[u8], piece: usize, mut receive: impl FnMut() -> bool) {
    let mut answers = [0; 64 << 10];
    for piece in bytes.chunks(piece.clamp(1, PIECE)) {
        if theirs.write_all(piece).is_err() || !receive() {
            return;
        }
        while theirs.read(&mut answers).is_ok_and(|count| count > 0) {}
    }
}
