//! Feeds bytes to the readers of `jiffy-origins`' answers and of requests for credential helpers.

use super::client::ask;
use super::helpers::pair;
use super::request::{HelperRequest, MAX_LINE};
use jiffy_store::{Bytes, OriginError, Stop};
use jiffy_sys::fds::send_with_fds;
use jiffy_sys::mutex::lock;
use std::fs::File;
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

/// The outcome of a request for `length` bytes that is answered with `sent` and this memory.
///
/// # Errors
///
/// If the sockets can't be made or written to; the inner result is the reader's.
pub fn answer(
    sent: &[u8],
    memory: Option<&File>,
    length: u64,
) -> io::Result<Result<Bytes, OriginError>> {
    let (ours, theirs) = UnixStream::pair()?;
    // One byte more than a line may have; the socket takes that.
    let sent = &sent[..sent.len().min(MAX_LINE as usize + 1)];
    if !sent.is_empty() {
        let attached: Vec<_> = memory.iter().map(|memory| memory.as_fd()).collect();
        send_with_fds(&theirs, sent, &attached)?;
    }
    theirs.shutdown(Shutdown::Write)?;
    ask(&ours, b"?\n", length, &Stop::never())
}

/// The request for a credential helper in a message that comes with or without a socket.
pub fn helper_request(message: &[u8], with_socket: bool) -> Option<HelperRequest> {
    let (helpers, broker) = pair().expect("two sockets");
    let (mut answer, theirs) = UnixStream::pair().expect("two sockets");
    let attached: Vec<_> = with_socket.then(|| theirs.as_fd()).into_iter().collect();
    send_with_fds(lock(&helpers.0).as_fd(), message, &attached).ok()?;
    let request = broker.request().ok()??.0;
    drop(theirs);
    // The broker closes its end, or the process that asked would wait for ever.
    assert_eq!(answer.read(&mut [0]).ok(), Some(0));
    Some(request)
}
