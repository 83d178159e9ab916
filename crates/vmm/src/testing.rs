//! Entry points for fuzzing: what the pager answers, and what a client of the control socket sends.

use crate::control::{Answer, Client};
use crate::devices::disk_chunks::next_answer;
use crate::pager::ask_for_working_set;
use jiffy_sys::fds::send_with_fds;
use jiffy_wire::disk::{ChunkAnswer, LINE_MAX};
use jiffy_wire::lines::Lines;
use jiffy_wire::vmm::{ControlRequest, ControlResponse, Extent};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Bytes that a socket takes in any case while its other end reads as much.
const PIECE: usize = 4096;
/// Longer than an answer that was sent already needs.
const ANSWER_TIME: Duration = Duration::from_secs(10);

/// The pager's answers in what it sends, in pieces of this many bytes, each with the chunk's bytes.
///
/// # Errors
///
/// If the pager violates the protocol.
pub fn disk_answers(bytes: &[u8], piece: usize) -> io::Result<Vec<(ChunkAnswer, Vec<u8>)>> {
    let (mut received, mut partial) = (Lines::new(LINE_MAX), None);
    let mut answers = Vec::new();
    for piece in bytes.chunks(piece) {
        received.push(piece);
        while let Some(answer) = next_answer(&mut received, &mut partial)? {
            answers.push(answer);
        }
    }
    Ok(answers)
}

/// The ranges of the working set that the pager offers with this file, and those of them that are
/// written first; `None` without a file.
///
/// # Errors
///
/// If the pager violates the protocol.
#[allow(clippy::type_complexity)] // The pager's answer, for one caller.
pub fn working_set(
    answer: &[u8],
    file: Option<&File>,
) -> io::Result<Option<(Vec<Extent>, Option<Vec<Extent>>)>> {
    let (ours, theirs) = UnixStream::pair()?;
    let answer = &answer[..answer.len().min(64 << 10)];
    if !answer.is_empty() {
        let files: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
        send_with_fds(&theirs, answer, &files)?;
    }
    theirs.shutdown(Shutdown::Write)?;
    let offered = ask_for_working_set(&ours, ANSWER_TIME)?;
    Ok(offered.map(|(_, ranges, written)| (ranges, written)))
}

/// The requests in what a client of the control socket sends in pieces of this many bytes.
pub fn control_requests(bytes: &[u8], piece: usize) -> Vec<ControlRequest> {
    let (ours, theirs) = UnixStream::pair().expect("two sockets");
    for end in [&ours, &theirs] {
        end.set_nonblocking(true).expect("a socket's flag");
    }
    let mut client = Client::new(ours);
    let mut requests = Vec::new();
    let mut answers = [0; 64 << 10];
    for piece in bytes.chunks(piece.clamp(1, PIECE)) {
        let goes_on = (&theirs).write_all(piece).is_ok()
            && client.serve(&mut |request| {
                requests.push(request);
                Answer::from(ControlResponse::Ok)
            });
        if !goes_on {
            break;
        }
        while (&theirs).read(&mut answers).is_ok_and(|count| count > 0) {}
    }
    requests
}
