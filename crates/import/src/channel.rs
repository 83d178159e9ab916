//! The channel to the daemon.

use jiffy_wire::import::{
    Answer, Failure, FailureKind, MAX_SENTENCE, MessageError, Request, decode_request, encode,
    length,
};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use thiserror::Error;

/// Why there is no request.
#[derive(Debug, Error)]
pub enum RequestError {
    /// The daemon has closed the channel, or it can't be read.
    #[error("no request was received")]
    Read(#[from] io::Error),
    /// It is not valid.
    #[error(
        "the request is not valid; after an upgrade, restart jiffyd, which is of another release than its programs"
    )]
    Message(#[from] MessageError),
}

/// The channel.
#[derive(Debug, Clone)]
pub struct Channel(Arc<Mutex<File>>);

impl Channel {
    /// The channel with this descriptor, a stream socket.
    pub fn new(socket: OwnedFd) -> Channel {
        // A file reads and writes by the plain calls, which the filter allows.
        Channel(Arc::new(Mutex::new(File::from(socket))))
    }

    /// Receives the request.
    ///
    /// # Errors
    ///
    /// If the daemon has closed the channel, it can't be read, or the message is not a valid
    /// request of this version.
    pub fn request(&self) -> Result<Request, RequestError> {
        let mut socket = jiffy_sys::mutex::lock(&self.0);
        let mut head = [0; 4];
        socket.read_exact(&mut head)?;
        let mut bytes = vec![0; length(head)?];
        socket.read_exact(&mut bytes)?;
        Ok(decode_request(&bytes)?)
    }

    /// Sends an answer; false if the daemon is gone.
    pub fn send(&self, answer: &Answer) -> bool {
        match encode(answer) {
            Ok(bytes) => jiffy_sys::mutex::lock(&self.0).write_all(&bytes).is_ok(),
            Err(error) => self.fail(
                FailureKind::Source,
                format!("its configuration is too large: {error}"),
            ),
        }
    }

    /// Sends a failure, shortened if it is too long.
    pub fn fail(&self, kind: FailureKind, mut sentence: String) -> bool {
        while sentence.len() > MAX_SENTENCE {
            sentence.pop();
        }
        self.send(&Answer::Failed(Failure { kind, sentence }))
    }
}
