//! Passes messages between a client and a guest's agent.
//!
//! Only complete messages of the expected type pass. If the guest dies or misbehaves in the
//! middle of a message, the client's stream still consists of whole frames, and the proxy can end
//! it with a message of its own.

use crate::attach::close;
use crate::frames::{self, FrameReader, ReadError};
use jiffy_wire::agent::{CopyDone, CopyFrame, ExecInput, ExecOutput};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Serialize, de::DeserializeOwned};
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// How long an agent may accept no input before the proxy checks whether the client is still
/// connected.
const STUCK: Duration = Duration::from_secs(1);

/// Messages to a client.
pub trait ToClient: Serialize + DeserializeOwned + Send + Sync + 'static {
    /// Messages from the client.
    type FromClient: Serialize + DeserializeOwned + Send + Sync;

    /// Is this the last message?
    fn is_last(&self) -> bool;

    /// May a guest send this message?
    fn is_for_guests(&self) -> bool {
        true
    }

    /// The message that ends an interrupted stream.
    fn cut_short(why: String) -> Self;
}

impl ToClient for ExecOutput {
    type FromClient = ExecInput;

    fn is_last(&self) -> bool {
        matches!(
            self,
            ExecOutput::Exited(_) | ExecOutput::Failed(_) | ExecOutput::Lost { .. }
        )
    }

    fn is_for_guests(&self) -> bool {
        !matches!(self, ExecOutput::Lost { .. })
    }

    fn cut_short(message: String) -> ExecOutput {
        ExecOutput::Lost {
            message,
            hint: None,
        }
    }
}

/// Copying out: the client sends nothing.
impl ToClient for CopyFrame {
    type FromClient = CopyFrame;

    fn is_last(&self) -> bool {
        matches!(self, CopyFrame::End | CopyFrame::Failed { .. })
    }

    fn cut_short(message: String) -> CopyFrame {
        CopyFrame::Failed { message }
    }
}

/// Copying in.
impl ToClient for CopyDone {
    type FromClient = CopyFrame;

    fn is_last(&self) -> bool {
        true
    }

    fn cut_short(why: String) -> CopyDone {
        CopyDone {
            entries: 0,
            error: Some(why),
        }
    }
}

/// The other end of a client's connection.
#[derive(Debug)]
pub struct Peer(OwnedFd);

impl Peer {
    /// The peer of this connection.
    ///
    /// # Errors
    ///
    /// If the descriptor can't be duplicated.
    pub fn of(connection: &impl AsFd) -> io::Result<Peer> {
        connection.as_fd().try_clone_to_owned().map(Peer)
    }

    /// Has the peer closed its end, so that only data in flight can follow? This is seen without
    /// reading that data.
    fn has_closed(&self) -> bool {
        let left = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let mut look = [PollFd::new(&self.0, PollFlags::RDHUP)];
        let now = Timespec::default();
        poll(&mut look, Some(&now)).is_ok() && look[0].revents().intersects(left)
    }
}

/// Passes messages until the last one, or until either side disconnects. If the client leaves, even
/// with input that the program has not read, the agent's connection is closed, which ends the
/// program. If the guest's stream is cut off, `why` is called for a reason.
pub async fn run<T: ToClient>(
    client: impl AsyncRead + AsyncWrite,
    peer: Peer,
    agent: UnixStream,
    why: impl Future<Output = Option<String>>,
) {
    let (from_client, mut to_client) = tokio::io::split(client);
    let (from_agent, mut to_agent) = agent.into_split();
    let mut from_client = FrameReader::new(from_client);
    let mut from_agent = FrameReader::new(from_agent);
    let down = async {
        loop {
            let cut = match from_agent.next::<T>().await {
                Ok(Some(message)) if message.is_for_guests() => {
                    frames::write(&mut to_client, &message).await.ok()?;
                    if message.is_last() {
                        return Some(());
                    }
                    continue;
                }
                Ok(None) | Err(ReadError::Io(_)) => None,
                Ok(Some(_)) | Err(ReadError::Frame(_)) => {
                    Some("The guest's agent does not follow the protocol.".to_owned())
                }
            };
            let message = match cut {
                Some(cut) => cut,
                None => why.await.unwrap_or_else(|| {
                    "The guest's agent closed the connection before the end.".to_owned()
                }),
            };
            frames::write(&mut to_client, &T::cut_short(message))
                .await
                .ok()?;
            return Some(());
        }
    };
    let up = async {
        while let Ok(Some(message)) = from_client.next::<T::FromClient>().await {
            let passed = frames::write(&mut to_agent, &message);
            tokio::pin!(passed);
            let passed = loop {
                match timeout(STUCK, &mut passed).await {
                    Ok(passed) => break passed,
                    Err(_) if peer.has_closed() => return,
                    Err(_) => {}
                }
            };
            if passed.is_err() {
                // The agent may have sent a reason, which `down` reads.
                std::future::pending::<()>().await;
            }
        }
    };
    let whole = tokio::select! {
        whole = down => whole.is_some(),
        () = up => false,
    };
    if whole {
        close(from_client.into_inner(), to_client).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_wire::agent::{ExitStatus, Stream};
    use jiffy_wire::frame::{self, Decoder};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// What a client receives when the agent sends these bytes and closes.
    async fn client_sees(bytes: &[u8]) -> Vec<ExecOutput> {
        let (mut client, ours) = UnixStream::pair().unwrap();
        let (mut guest, agent) = UnixStream::pair().unwrap();
        guest.write_all(bytes).await.unwrap();
        drop(guest);
        let why = async { Some("The VM is gone.".to_owned()) };
        let peer = Peer::of(&ours).unwrap();
        let proxy = tokio::spawn(run::<ExecOutput>(ours, peer, agent, why));
        let mut decoder = Decoder::new();
        let mut seen = Vec::new();
        let mut buffer = [0; 1000];
        loop {
            let got = client.read(&mut buffer).await.unwrap();
            if got == 0 {
                break;
            }
            decoder.push(&buffer[..got]);
            while let Some(message) = decoder.next().unwrap() {
                seen.push(message);
            }
        }
        assert_eq!(decoder.pending(), 0, "frames stay whole");
        drop(client);
        proxy.await.unwrap();
        seen
    }

    fn output(data: &[u8]) -> ExecOutput {
        ExecOutput::Output {
            stream: Stream::Stdout,
            data: data.to_vec(),
        }
    }

    fn lost(message: &str) -> ExecOutput {
        ExecOutput::cut_short(message.into())
    }

    #[tokio::test]
    async fn a_guest_that_dies_in_mid_message_ends_the_stream_cleanly() {
        let mut bytes = frame::to_vec(&output(b"one")).unwrap();
        let second = frame::to_vec(&output(&[7; 500])).unwrap();
        bytes.extend_from_slice(&second[..second.len() - 1]);
        assert_eq!(
            client_sees(&bytes).await,
            [output(b"one"), lost("The VM is gone.")]
        );
    }

    #[tokio::test]
    async fn invalid_and_forged_messages_end_the_stream_cleanly() {
        let refused = [lost("The guest's agent does not follow the protocol.")];
        assert_eq!(client_sees(&[0xff; 100]).await, refused);
        assert_eq!(client_sees(&[1, 0, 0, 0, 99]).await, refused);
        let forged = frame::to_vec(&lost("I am the node")).unwrap();
        assert_eq!(client_sees(&forged).await, refused);
    }

    #[tokio::test]
    async fn data_after_the_last_message_is_dropped() {
        let end = ExecOutput::Exited(ExitStatus::Code(3));
        let mut bytes = frame::to_vec(&end).unwrap();
        frame::encode(&output(b"more"), &mut bytes).unwrap();
        assert_eq!(client_sees(&bytes).await, [end]);
    }

    #[tokio::test]
    async fn a_client_that_leaves_closes_the_agents_connection() {
        let (client, ours) = UnixStream::pair().unwrap();
        let (mut guest, agent) = UnixStream::pair().unwrap();
        let peer = Peer::of(&ours).unwrap();
        let proxy = tokio::spawn(run::<ExecOutput>(ours, peer, agent, async { None }));
        drop(client);
        assert_eq!(guest.read(&mut [0]).await.unwrap(), 0);
        proxy.await.unwrap();
    }

    #[tokio::test]
    async fn a_client_that_leaves_with_unread_input_ends_the_proxy() {
        let (mut client, ours) = UnixStream::pair().unwrap();
        let (guest, agent) = UnixStream::pair().unwrap();
        let peer = Peer::of(&ours).unwrap();
        let proxy = tokio::spawn(run::<ExecOutput>(ours, peer, agent, async { None }));
        let input = frame::to_vec(&ExecInput::Stdin(vec![7; 10_000])).unwrap();
        // More than the sockets' buffers hold.
        let until = Duration::from_millis(200);
        while timeout(until, client.write_all(&input)).await.is_ok() {}
        assert!(!proxy.is_finished());
        drop(client);
        timeout(10 * STUCK, proxy).await.unwrap().unwrap();
        drop(guest);
    }
}
