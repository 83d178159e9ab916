//! The SSH server: authentication, and the requests that it accepts.

use super::backlog::Backlog;
use super::guest::Guest;
use super::login::Login;
use super::{forward, session};
use jiffy_cli::failure::Failure;
use russh::keys::{Algorithm, PrivateKey, PublicKey};
use russh::server::{
    Auth, ChannelOpenHandle, Config, Handler, Msg, PublicKeyOffer, Session, VerifiedPublicKey,
    run_stream,
};
use russh::{Channel, ChannelId, MethodKind, MethodSet, Preferred, Pty};
use std::borrow::Cow;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};

/// Serves a connection until the client disconnects.
///
/// # Errors
///
/// If the connection ends for another reason than that the client disconnects.
pub async fn run(
    transport: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    host_key: PrivateKey,
    user_key: PublicKey,
    guest: Guest,
    backlog: Arc<Backlog>,
) -> Result<(), Failure> {
    let config = Config {
        methods: MethodSet::from(&[MethodKind::PublicKey][..]),
        // There is no password to guess.
        auth_rejection_time: Duration::ZERO,
        keys: vec![host_key],
        preferred: Preferred {
            key: Cow::Borrowed(&[Algorithm::Ed25519]),
            ..Preferred::DEFAULT
        },
        inactivity_timeout: None,
        ..Config::default()
    };
    let connection = Connection {
        user_key,
        login: Login {
            guest: Arc::new(guest),
            user: Arc::from(""),
            backlog,
        },
    };
    let ended = match run_stream(Arc::new(config), transport, connection).await {
        Ok(running) => running.await,
        Err(error) => Err(error),
    };
    match ended {
        Err(error) if !client_disconnected(&error) => {
            Err(Failure::new(format!("the SSH connection ended: {error}")))
        }
        _ => Ok(()),
    }
}

/// Whether the client closed its end or was killed.
fn client_disconnected(error: &russh::Error) -> bool {
    match error {
        russh::Error::IO(error) => matches!(
            error.kind(),
            ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset
        ),
        russh::Error::HUP | russh::Error::Disconnect => true,
        _ => false,
    }
}

/// A connection of a client.
struct Connection {
    user_key: PublicKey,
    login: Login,
}

impl Connection {
    fn check_key(&self, offered: &PublicKey) -> Auth {
        match offered.key_data() == self.user_key.key_data() {
            true => Auth::Accept,
            false => Auth::reject(),
        }
    }

    fn forward(&self, channel: Channel<Msg>, reply: ChannelOpenHandle, arguments: Vec<String>) {
        let login = self.login.clone();
        tokio::spawn(forward::serve(channel, reply, login, arguments));
    }
}

/// Requests are answered here, at once; [`session`] acts on them.
impl Handler for Connection {
    type Error = russh::Error;

    async fn auth_publickey_offered(
        &mut self,
        _user: &str,
        offer: PublicKeyOffer<'_>,
    ) -> Result<Auth, russh::Error> {
        Ok(self.check_key(offer.public_key))
    }

    async fn auth_publickey(
        &mut self,
        user: &str,
        key: VerifiedPublicKey<'_>,
    ) -> Result<Auth, russh::Error> {
        self.login.user = Arc::from(user);
        Ok(self.check_key(key.public_key))
    }

    async fn channel_open_session(
        &mut self,
        channel: Channel<Msg>,
        reply: ChannelOpenHandle,
        session: &mut Session,
    ) -> Result<(), russh::Error> {
        reply.accept().await;
        let serve = session::serve(channel, session.handle(), self.login.clone());
        tokio::spawn(serve);
        Ok(())
    }

    async fn channel_open_direct_tcpip(
        &mut self,
        channel: Channel<Msg>,
        host: &str,
        port: u32,
        _originator: &str,
        _originator_port: u32,
        reply: ChannelOpenHandle,
        _session: &mut Session,
    ) -> Result<(), russh::Error> {
        let arguments = vec!["connect".into(), host.to_owned(), port.to_string()];
        self.forward(channel, reply, arguments);
        Ok(())
    }

    async fn channel_open_direct_streamlocal(
        &mut self,
        channel: Channel<Msg>,
        path: &str,
        reply: ChannelOpenHandle,
        _session: &mut Session,
    ) -> Result<(), russh::Error> {
        let arguments = vec!["connect-unix".into(), path.to_owned()];
        self.forward(channel, reply, arguments);
        Ok(())
    }

    async fn pty_request(
        &mut self,
        channel: ChannelId,
        _term: &str,
        _columns: u32,
        _rows: u32,
        _width: u32,
        _height: u32,
        _modes: &[(Pty, u32)],
        session: &mut Session,
    ) -> Result<(), russh::Error> {
        session.channel_success(channel)
    }

    async fn env_request(
        &mut self,
        channel: ChannelId,
        name: &str,
        value: &str,
        session: &mut Session,
    ) -> Result<(), russh::Error> {
        match session::variable(name, value) {
            Some(_) => session.channel_success(channel),
            None => session.channel_failure(channel),
        }
    }

    async fn shell_request(
        &mut self,
        channel: ChannelId,
        session: &mut Session,
    ) -> Result<(), russh::Error> {
        session.channel_success(channel)
    }

    async fn exec_request(
        &mut self,
        channel: ChannelId,
        _command: &[u8],
        session: &mut Session,
    ) -> Result<(), russh::Error> {
        session.channel_success(channel)
    }

    async fn subsystem_request(
        &mut self,
        channel: ChannelId,
        name: &str,
        session: &mut Session,
    ) -> Result<(), russh::Error> {
        match name {
            session::SFTP => session.channel_success(channel),
            _ => session.channel_failure(channel),
        }
    }

    async fn x11_request(
        &mut self,
        channel: ChannelId,
        _single: bool,
        _protocol: &str,
        _cookie: &str,
        _screen: u32,
        session: &mut Session,
    ) -> Result<(), russh::Error> {
        session.channel_failure(channel)
    }
}
