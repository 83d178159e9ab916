//! Connections to the agent in a guest, through the VMM's vsock socket.

use crate::dial::dial;
use crate::frames::{self, FrameReader, ReadError};
use jiffy_sys::causes;
use jiffy_wire::agent::{AGENT_PORT, Done, Request};
use jiffy_wire::frame::FrameError;
use serde::de::DeserializeOwned;
use std::io;
use std::path::Path;
use std::time::Duration;
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// How long the VMM and the guest's kernel have to set up the connection.
const CONNECT_TIME: Duration = Duration::from_secs(20);
/// Longest `OK <port>\n`.
const MAX_ANSWER: usize = 32;

/// Why a request to the agent failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AgentError {
    /// Connecting to the VMM's socket, or I/O on it, failed.
    #[error("the connection to the guest's agent failed")]
    Io(#[from] io::Error),
    /// Nothing in the guest listens on the agent's port.
    #[error("the guest's agent accepts no connections")]
    Refused,
    /// Its answer is not a valid message.
    #[error("the guest's agent does not follow the protocol")]
    Protocol(#[from] FrameError),
    /// It did not answer in time.
    #[error("the guest's agent did not answer in time")]
    TimedOut,
}

/// Connects to the agent and sends one request.
///
/// # Errors
///
/// If the VMM does not listen, nothing in the guest listens on the agent's port, or the guest does
/// not accept within the limit.
pub async fn ask(vsock: &Path, request: &Request) -> Result<UnixStream, AgentError> {
    match timeout(CONNECT_TIME, connect(vsock)).await {
        Ok(Ok(mut stream)) => {
            frames::write(&mut stream, request).await?;
            Ok(stream)
        }
        Ok(Err(error)) => Err(error),
        Err(_) => Err(AgentError::TimedOut),
    }
}

async fn connect(vsock: &Path) -> Result<UnixStream, AgentError> {
    let mut stream = dial(vsock).await?;
    stream
        .write_all(format!("CONNECT {AGENT_PORT}\n").as_bytes())
        .await?;
    // Read byte by byte, because the bytes after the line belong to the protocol.
    let mut answer = Vec::with_capacity(MAX_ANSWER);
    loop {
        let mut byte = [0];
        if stream.read(&mut byte).await? == 0 || answer.len() == MAX_ANSWER {
            return Err(AgentError::Refused);
        }
        if byte[0] == b'\n' {
            break;
        }
        answer.push(byte[0]);
    }
    if answer.starts_with(b"OK ") {
        Ok(stream)
    } else {
        Err(AgentError::Refused)
    }
}

/// Sends a request that has one answer, and waits for it at most `within`.
///
/// # Errors
///
/// If [`ask`] fails, the answer is not complete or not valid, or it does not come `within` that
/// time.
pub async fn ask_once<T: DeserializeOwned>(
    vsock: &Path,
    request: &Request,
    within: Duration,
) -> Result<T, AgentError> {
    let exchange = async {
        let mut answers = FrameReader::new(ask(vsock, request).await?);
        match answers.next().await {
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Err(ReadError::Io(error)) => Err(error.into()),
            Err(ReadError::Frame(error)) => Err(error.into()),
        }
    };
    timeout(within, exchange)
        .await
        .unwrap_or(Err(AgentError::TimedOut))
}

/// Sends a request whose answer is [`Done`], and waits for it at most `within`.
///
/// # Errors
///
/// If [`ask_once`] fails or the agent refuses: a sentence.
pub async fn tell(vsock: &Path, request: &Request, within: Duration) -> Result<(), String> {
    match ask_once::<Done>(vsock, request, within).await {
        Ok(Done::Ok) => Ok(()),
        Ok(Done::Error(message)) => Err(crate::text::short(&message)),
        Err(error) => Err(causes::sentence(&error)),
    }
}
