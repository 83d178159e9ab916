//! Between a client and a guest's agent: whole, checked messages both ways.
//!
//! Only whole messages of the expected type pass, so that a guest that dies
//! or misbehaves in mid-message leaves the client with a stream that still
//! has its frames, and the proxy can end it with a message of its own.

use crate::frames::{self, FrameReader, ReadError};
use crate::vm::attach::close;
use jiffy_wire::agent::{CopyDone, CopyFrame, ExecInput, ExecOutput};
use serde::{Serialize, de::DeserializeOwned};
use std::future::Future;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;

/// What flows to a client.
pub trait ToClient: Serialize + DeserializeOwned + Send + Sync + 'static {
    /// What the client sends.
    type FromClient: Serialize + DeserializeOwned + Send + Sync;

    /// Does nothing follow this message?
    fn is_last(&self) -> bool;

    /// May a guest send it?
    fn is_for_guests(&self) -> bool {
        true
    }

    /// The message that ends a stream cut short.
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

/// Copying out: nothing is expected from the client.
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

/// Passes messages until the last one, or until either side is gone. A client
/// that goes takes the agent's connection with it, which ends the program.
/// `why` is asked for a sentence when the guest is cut off.
pub async fn run<T: ToClient>(
    client: impl AsyncRead + AsyncWrite,
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
            if frames::write(&mut to_agent, &message).await.is_err() {
                // The agent may have said why; `down` finds out.
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

    /// What a client sees when the agent sends these bytes and goes.
    async fn client_sees(bytes: &[u8]) -> Vec<ExecOutput> {
        let (mut client, ours) = UnixStream::pair().unwrap();
        let (mut guest, agent) = UnixStream::pair().unwrap();
        guest.write_all(bytes).await.unwrap();
        drop(guest);
        let why = async { Some("The VM is gone.".to_owned()) };
        let proxy = tokio::spawn(run::<ExecOutput>(ours, agent, why));
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
    async fn a_guest_that_dies_in_mid_message_ends_the_stream_in_order() {
        let mut bytes = frame::to_vec(&output(b"one")).unwrap();
        let second = frame::to_vec(&output(&[7; 500])).unwrap();
        bytes.extend_from_slice(&second[..second.len() - 1]);
        assert_eq!(
            client_sees(&bytes).await,
            [output(b"one"), lost("The VM is gone.")]
        );
    }

    #[tokio::test]
    async fn hostile_bytes_and_forged_messages_end_the_stream_in_order() {
        let refused = [lost("The guest's agent does not follow the protocol.")];
        assert_eq!(client_sees(&[0xff; 100]).await, refused);
        assert_eq!(client_sees(&[1, 0, 0, 0, 99]).await, refused);
        let forged = frame::to_vec(&lost("I am the node")).unwrap();
        assert_eq!(client_sees(&forged).await, refused);
    }

    #[tokio::test]
    async fn nothing_passes_after_the_last_message() {
        let end = ExecOutput::Exited(ExitStatus::Code(3));
        let mut bytes = frame::to_vec(&end).unwrap();
        frame::encode(&output(b"more"), &mut bytes).unwrap();
        assert_eq!(client_sees(&bytes).await, [end]);
    }

    #[tokio::test]
    async fn a_client_that_goes_takes_the_agents_connection_along() {
        let (client, ours) = UnixStream::pair().unwrap();
        let (mut guest, agent) = UnixStream::pair().unwrap();
        let proxy = tokio::spawn(run::<ExecOutput>(ours, agent, async { None }));
        drop(client);
        assert_eq!(guest.read(&mut [0]).await.unwrap(), 0);
        proxy.await.unwrap();
    }
}
