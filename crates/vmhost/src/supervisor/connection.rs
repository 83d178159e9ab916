//! One connection of a guest's init: its hello, then messages in both directions.

use super::{Complaints, FromLink, Link, QUEUE, Stored};
use crate::frames::{self, FrameReader};
use jiffy_sys::causes;
use jiffy_wire::agent::{self, FromGuest, ToGuest};
use jiffy_wire::frame;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tracing::{debug, warn};

/// How long a new connection has to send its hello.
pub(super) const HELLO_TIME: Duration = Duration::from_secs(10);

/// A valid hello.
struct Hello {
    /// The newest version that both ends speak.
    version: u16,
    pid1_ns: u64,
    attempt: u32,
}

/// Serves a connection until either end closes it.
pub(super) async fn serve(
    stream: UnixStream,
    serial: u64,
    vm_id: &str,
    messages: mpsc::Sender<FromLink>,
    complaints: &Complaints,
) {
    let (input, mut output) = stream.into_split();
    let mut input = FrameReader::new(input);
    let Some(hello) = hello(&mut input, vm_id, complaints).await else {
        return;
    };
    let (send, to_guest) = mpsc::channel(QUEUE);
    let (stored, stored_seen) = watch::channel(Stored::default());
    let link = Link {
        serial,
        version: hello.version,
        send,
        stored,
        heard_end: false,
        room: None,
    };
    let hello = FromLink::Hello {
        link,
        pid1_ns: hello.pid1_ns,
        attempt: hello.attempt,
    };
    if messages.send(hello).await.is_err() {
        return;
    }
    // Reads and writes concurrently: a guest that blocks one direction must not block the other.
    tokio::select! {
        () = read(&mut input, serial, vm_id, &messages, complaints) => {}
        () = write(&mut output, to_guest, stored_seen) => {}
    }
    let _ = messages.send(FromLink::Gone(serial)).await;
}

/// The hello of the guest with this id; `None` if something else came, or nothing in time.
async fn hello(
    input: &mut FrameReader<OwnedReadHalf>,
    vm_id: &str,
    complaints: &Complaints,
) -> Option<Hello> {
    match timeout(HELLO_TIME, input.next()).await {
        Ok(Ok(Some(FromGuest::Hello {
            version,
            vm_id: said,
            pid1_ns,
            attempt,
        }))) if said == vm_id
            && let Some(version) = agent::negotiated_version(version) =>
        {
            Some(Hello {
                version,
                pid1_ns,
                attempt,
            })
        }
        Ok(Ok(Some(FromGuest::Hello { version, .. }))) => {
            if complaints.may_be_logged() {
                warn!(
                    vm = vm_id,
                    version,
                    "refused a guest's hello: its VM id is wrong or its version is not supported"
                );
            }
            None
        }
        other => {
            debug!(
                vm = vm_id,
                ?other,
                "a connection without a hello was closed"
            );
            None
        }
    }
}

/// Passes messages on until the guest closes the connection, or violates the protocol.
async fn read(
    input: &mut FrameReader<OwnedReadHalf>,
    serial: u64,
    vm_id: &str,
    messages: &mpsc::Sender<FromLink>,
    complaints: &Complaints,
) {
    loop {
        match input.next().await {
            Ok(Some(message)) => {
                let message = FromLink::Message(serial, message);
                if messages.send(message).await.is_err() {
                    return;
                }
            }
            Ok(None) => return,
            Err(error) => {
                if complaints.may_be_logged() {
                    let error = causes::sentence(&error);
                    warn!(vm = vm_id, error, "closed a guest's supervisor connection");
                }
                return;
            }
        }
    }
}

/// Writes messages and acknowledgements until the link is dropped.
async fn write(
    output: &mut (impl AsyncWriteExt + Unpin),
    mut to_guest: mpsc::Receiver<ToGuest>,
    mut stored: watch::Receiver<Stored>,
) {
    let mut told = Stored::default();
    // The welcome must be the first message.
    match to_guest.recv().await {
        Some(welcome) if frames::write(output, &welcome).await.is_ok() => {}
        _ => return,
    }
    loop {
        let mut bytes = Vec::new();
        let message = tokio::select! {
            biased;
            changed = stored.changed() => {
                if changed.is_err() {
                    return;
                }
                None
            }
            message = to_guest.recv() => match message {
                Some(message) => Some(message),
                None => return,
            },
        };
        if let Some(message) = message {
            if frame::encode(&message, &mut bytes).is_err() {
                continue;
            }
        } else {
            let now = *stored.borrow_and_update();
            let acknowledge = ToGuest::MainOutputStored {
                stdout_offset: now.stdout,
                stderr_offset: now.stderr,
            };
            if (now.stdout, now.stderr) != (told.stdout, told.stderr) {
                let _ = frame::encode(&acknowledge, &mut bytes);
            }
            if now.end && !told.end {
                let _ = frame::encode(&ToGuest::MainEndStored, &mut bytes);
            }
            told = now;
        }
        if output.write_all(&bytes).await.is_err() {
            return;
        }
    }
}
