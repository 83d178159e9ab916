//! Passes data between a channel and a program in the VM.

use super::backlog::{Backlog, Share};
use jiffy_cli::client::{FrameReader, FrameWriter, Frames};
use jiffy_wire::agent::{ExecInput, ExecOutput, ExitStatus, Stream, WindowSize};
use jiffy_wire::signal;
use russh::server::Msg;
use russh::{ChannelMsg, ChannelReadHalf, ChannelWriteHalf, Sig};
use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// SSH_EXTENDED_DATA_STDERR (RFC 4254 §5.2).
const STDERR: u32 = 1;

/// How a program ended.
pub enum End {
    /// It exited, or a signal ended it.
    Exited(ExitStatus),
    /// It could not be started or was lost: a sentence, and the exit status for the client.
    Failed(String, u32),
    /// The client has closed the channel; the program gets SIGHUP.
    ClientClosed,
}

/// Input for the program, and its share of the backlog.
type Queued = (ExecInput, Share);

/// Passes data both ways until the program ends or the client closes the channel.
pub async fn pump(
    from_client: ChannelReadHalf,
    to_client: &ChannelWriteHalf<Msg>,
    frames: Frames,
    backlog: &Arc<Backlog>,
) -> End {
    let (queue, queued) = unbounded_channel();
    tokio::select! {
        end = send_output(frames.reader, to_client) => end,
        () = queue_input(from_client, queue, backlog) => End::ClientClosed,
        never = send_input(frames.writer, queued) => match never {},
    }
}

/// Queues input of the client. Never waits for the program: russh would stop the connection.
async fn queue_input(
    mut from_client: ChannelReadHalf,
    queue: UnboundedSender<Queued>,
    backlog: &Arc<Backlog>,
) {
    while let Some(message) = from_client.wait().await {
        let input = match message {
            ChannelMsg::Data { data } => ExecInput::Stdin(data.into()),
            ChannelMsg::Eof => ExecInput::StdinClosed,
            ChannelMsg::WindowChange {
                col_width,
                row_height,
                ..
            } => ExecInput::Resize(size(col_width, row_height)),
            ChannelMsg::Signal { signal } => match number(&signal) {
                Some(number) => ExecInput::Signal(number),
                None => continue,
            },
            ChannelMsg::Close => return,
            _ => continue,
        };
        let bytes = match &input {
            ExecInput::Stdin(data) => data.len(),
            _ => 0,
        };
        // A program whose input is closed reads nothing more.
        let _ = queue.send((input, backlog.add(bytes)));
    }
}

/// Sends queued input to the program, which may be slow to read it.
async fn send_input(mut writer: FrameWriter, mut queued: UnboundedReceiver<Queued>) -> Infallible {
    while let Some((input, _share)) = queued.recv().await {
        if writer.send(&input).await.is_err() {
            // The reason comes as the last output.
            break;
        }
    }
    drop(queued);
    pending().await
}

/// Sends the program's output to the client, as far as the channel's window allows.
async fn send_output(mut reader: FrameReader, to_client: &ChannelWriteHalf<Msg>) -> End {
    loop {
        let sent = match reader.next::<ExecOutput>().await {
            Ok(Some(ExecOutput::Started { .. })) => Ok(()),
            Ok(Some(ExecOutput::Output { stream, data })) => match stream {
                Stream::Stdout => to_client.data_bytes(data).await,
                Stream::Stderr => to_client.extended_data_bytes(STDERR, data).await,
            },
            Ok(Some(ExecOutput::Exited(status))) => return End::Exited(status),
            Ok(Some(ExecOutput::Failed(error))) => {
                return End::Failed(error.message, error.kind.exit_code() as u32);
            }
            Ok(Some(ExecOutput::Lost { message, .. })) => return End::Failed(message, 255),
            Ok(None) => return End::Failed("the connection to jiffyd was lost".into(), 255),
            Err(failure) => return End::Failed(failure.message, 255),
        };
        if sent.is_err() {
            return End::ClientClosed;
        }
    }
}

/// A terminal's size; the protocol allows larger ones.
pub fn size(columns: u32, rows: u32) -> WindowSize {
    let characters = |count: u32| u16::try_from(count).unwrap_or(u16::MAX);
    WindowSize {
        rows: characters(rows),
        columns: characters(columns),
    }
}

/// The number of a signal; `None` if Linux has no such signal.
fn number(sig: &Sig) -> Option<i32> {
    let name = match sig {
        Sig::Custom(name) => name.clone(),
        known => format!("{known:?}"),
    };
    signal::number(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_sizes_are_clamped_to_16_bits() {
        let largest = size(u32::MAX, 24);
        assert_eq!((largest.columns, largest.rows), (u16::MAX, 24));
    }
}
