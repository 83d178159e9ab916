//! Client of the machine's agent: runs programs in the machine.

use crate::error::MachineError;
use crate::protocol::{Hello, Receiver, Request, send};
use jiffy_wire::agent::{Command, ExecInput, ExecOutput};
use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

/// Time limit for connecting; a busy machine may be slow.
const CONNECT_TIME: Duration = Duration::from_secs(60);

/// The agent's address and token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentAddress {
    /// Address on the host's loopback.
    pub address: SocketAddr,
    /// The machine's token.
    pub token: String,
}

impl AgentAddress {
    /// Starts a program; see [`Request::Exec`].
    ///
    /// # Errors
    ///
    /// If the agent does not accept a connection within 60 s, or it is lost. [`Session::receive`]
    /// shows that the agent can't start the program, or refuses the token.
    pub fn exec(&self, command: Command, keep_output: bool) -> Result<Session, MachineError> {
        let stream = self.request(&Request::Exec {
            command,
            keep_output,
        })?;
        let receiver = Receiver::new(stream.try_clone().map_err(MachineError::Agent)?);
        Ok(Session { stream, receiver })
    }

    /// Asks the machine to shut down. Programs have `grace` after SIGTERM. Does not wait for the
    /// end.
    ///
    /// # Errors
    ///
    /// If the agent does not accept a connection within 60 s, or it is lost.
    pub fn power_off(&self, grace: Duration) -> Result<(), MachineError> {
        let grace_ms = u32::try_from(grace.as_millis()).unwrap_or(u32::MAX);
        self.request(&Request::PowerOff { grace_ms })
            .map(close_later)
    }

    fn request(&self, request: &Request) -> Result<TcpStream, MachineError> {
        let connect = || -> io::Result<TcpStream> {
            let mut stream = TcpStream::connect_timeout(&self.address, CONNECT_TIME)?;
            stream.set_nodelay(true)?;
            let hello = Hello {
                version: request.version(),
                token: self.token.clone(),
            };
            send(&mut stream, &hello)?;
            send(&mut stream, request)?;
            Ok(stream)
        };
        connect().map_err(MachineError::Agent)
    }
}

/// Keeps a connection open after the call: if this side closed it too early, the request might be
/// lost.
fn close_later(stream: TcpStream) {
    std::thread::spawn(move || {
        let _ = stream.set_read_timeout(Some(Duration::from_secs(30)));
        let mut receiver = Receiver::new(stream);
        let _ = receiver.receive::<ExecOutput>();
    });
}

/// A program that runs in the machine. It gets SIGHUP when this is dropped.
#[derive(Debug)]
pub struct Session {
    stream: TcpStream,
    receiver: Receiver<TcpStream>,
}

impl Session {
    /// A second handle, for sending from another thread.
    ///
    /// # Errors
    ///
    /// If `dup` fails.
    pub fn sender(&self) -> Result<Sender, MachineError> {
        self.stream
            .try_clone()
            .map(Sender)
            .map_err(MachineError::Agent)
    }

    /// Waits for the next message of the program; `None` once the connection is closed.
    ///
    /// # Errors
    ///
    /// If the connection is lost, the time of [`set_time_limit`](Session::set_time_limit) passes,
    /// or a message is malformed.
    pub fn receive(&mut self) -> Result<Option<ExecOutput>, MachineError> {
        self.receiver.receive().map_err(MachineError::Agent)
    }

    /// Sets a timeout for [`receive`](Session::receive).
    ///
    /// # Errors
    ///
    /// If `limit` is zero.
    pub fn set_time_limit(&self, limit: Option<Duration>) -> Result<(), MachineError> {
        self.stream
            .set_read_timeout(limit)
            .map_err(MachineError::Agent)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Sends input to a program in the machine.
#[derive(Debug)]
pub struct Sender(TcpStream);

impl Sender {
    /// Sends one message.
    ///
    /// # Errors
    ///
    /// If the message is too large, or the connection is lost.
    pub fn send(&mut self, input: &ExecInput) -> Result<(), MachineError> {
        send(&mut self.0, input).map_err(MachineError::Agent)
    }
}
