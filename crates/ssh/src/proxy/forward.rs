//! A connection in the VM to a port or a socket (direct-tcpip, direct-streamlocal@openssh.com).

use super::login::Login;
use super::pump::pump;
use jiffy_cli::client::Frames;
use jiffy_ssh_guest::connect::CONNECTED;
use jiffy_wire::agent::{ExecOutput, Stream};
use russh::server::{ChannelOpenHandle, Msg};
use russh::{Channel, ChannelOpenFailure};

/// Connects, then passes data until one end closes.
pub async fn serve(
    channel: Channel<Msg>,
    reply: ChannelOpenHandle,
    login: Login,
    arguments: Vec<String>,
) {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let command = login.guest.command(&login.user, &arguments);
    let Ok(upgraded) = login.guest.exec(&command).await else {
        return reply.reject(ChannelOpenFailure::ConnectFailed).await;
    };
    let mut frames = upgraded.frames;
    let Some(data) = connected(&mut frames).await else {
        return reply.reject(ChannelOpenFailure::ConnectFailed).await;
    };
    reply.accept().await;
    let (from_client, to_client) = channel.split();
    // A failure means that the client has disconnected.
    if to_client.data_bytes(data).await.is_ok() {
        pump(from_client, &to_client, frames, &login.backlog).await;
    }
    let _ = to_client.eof().await;
    let _ = to_client.close().await;
}

/// Waits until the guest has connected. Returns data received with its report; `None` on failure.
async fn connected(frames: &mut Frames) -> Option<Vec<u8>> {
    loop {
        match frames.reader.next::<ExecOutput>().await.ok()?? {
            ExecOutput::Started { .. } => {}
            ExecOutput::Output {
                stream: Stream::Stdout,
                mut data,
            } => {
                return (data.first() == Some(&CONNECTED)).then(|| data.split_off(1));
            }
            _ => return None,
        }
    }
}
