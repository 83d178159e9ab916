//! The protocol between the host and the agent in the machine.
//!
//! The agent listens on a TCP port that QEMU forwards from the host's loopback. A connection begins
//! with a [`Hello`] and one [`Request`]. After `Exec` the host sends [`ExecInput`] and the agent
//! sends [`ExecOutput`], as in Jiffy's other protocols; after `PowerOff` the agent closes the
//! connection.
//!
//! Readiness is reported in the other direction: the agent writes [`Ready`], one JSON object per
//! line, to the virtio-serial port [`READY_PORT`].
//!
//! [`ExecInput`]: jiffy_wire::agent::ExecInput
//! [`ExecOutput`]: jiffy_wire::agent::ExecOutput

use jiffy_wire::agent::Command;
use jiffy_wire::frame::{self, Decoder};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::io::{self, Read, Write};

/// The newest version of the messages. A machine may outlive the release that started it, so a
/// [`Hello`] has the version that introduced its request, and the agent serves all versions from
/// [`OLDEST`] on.
pub const VERSION: u32 = 1;
/// The oldest version that is served.
pub const OLDEST: u32 = 1;
/// `jiffyd`'s port in the machine.
pub const API_PORT: u16 = 7070;
/// The agent's port in the machine.
pub const AGENT_PORT: u16 = 7071;
/// fw_cfg file with the token.
pub const TOKEN_FW_CFG_NAME: &str = "opt/jiffy/token";
/// Path of that file in the machine.
pub const TOKEN_PATH: &str = "/sys/firmware/qemu_fw_cfg/by_name/opt/jiffy/token/raw";
/// fw_cfg file with the certificate authorities that the host trusts.
pub const AUTHORITIES_FW_CFG_NAME: &str = "opt/jiffy/authorities";
/// Path of that file in the machine.
pub const AUTHORITIES_PATH: &str = "/sys/firmware/qemu_fw_cfg/by_name/opt/jiffy/authorities/raw";
/// The machine's address in QEMU's user network, to which the host's ports are forwarded. The
/// machine listens on no other address, in particular not on those that VMs reach.
pub const GUEST: &str = "10.0.2.15";
/// The host's loopback as seen from the machine (QEMU's user network).
pub const HOST: &str = "10.0.2.2";
/// QEMU's name server.
pub const NAME_SERVER: &str = "10.0.2.3";
/// Name of the virtio-serial port for readiness.
pub const READY_PORT: &str = "jiffy.ready";
/// Mount point of the data disk.
pub const DATA_MOUNT: &str = "/var/lib/jiffy";

/// First message of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The version that introduced the request ([`Request::version`]).
    pub version: u32,
    /// The machine's token.
    pub token: String,
}

/// A request of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Run a program.
    Exec {
        /// The program.
        command: Command,
        /// Keep its output until it has ended, so that network traffic does not disturb a
        /// measurement.
        keep_output: bool,
    },
    /// End all programs, sync, power off.
    PowerOff {
        /// How long programs have after SIGTERM, milliseconds.
        grace_ms: u32,
    },
}

impl Request {
    /// The version that introduced the request: agents of that version and later serve it.
    pub fn version(&self) -> u32 {
        match self {
            Request::Exec { .. } | Request::PowerOff { .. } => 1,
        }
    }
}

/// Readiness of the machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "stage")]
pub enum Ready {
    /// The agent takes requests.
    Agent {
        /// Whether there is a `/dev/kvm`.
        kvm: bool,
        /// Time since the kernel's start, milliseconds.
        uptime_ms: u64,
    },
    /// The services accept connections too: the machine is ready.
    Services {
        /// Time since the kernel's start, milliseconds.
        uptime_ms: u64,
    },
    /// A service did not start.
    Failed {
        /// One sentence.
        message: String,
    },
}

/// Sends one message.
///
/// # Errors
///
/// If it can't be encoded in a frame, or the stream fails.
pub fn send<T: Serialize>(out: &mut impl Write, message: &T) -> io::Result<()> {
    let bytes = frame::to_vec(message).map_err(io::Error::other)?;
    out.write_all(&bytes)
}

/// Splits a blocking stream into messages.
#[derive(Debug)]
pub struct Receiver<R> {
    stream: R,
    decoder: Decoder,
}

impl<R: Read> Receiver<R> {
    /// Reads from `stream`.
    pub fn new(stream: R) -> Receiver<R> {
        Receiver {
            stream,
            decoder: Decoder::new(),
        }
    }

    /// The underlying stream.
    pub fn stream(&self) -> &R {
        &self.stream
    }

    /// Reads the next message; `None` if the stream ends between two messages.
    ///
    /// # Errors
    ///
    /// If the stream fails or ends in a message (`UnexpectedEof`), or a message is malformed
    /// (`InvalidData`).
    pub fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        loop {
            match self.decoder.next() {
                Ok(Some(message)) => return Ok(Some(message)),
                Ok(None) => {}
                Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidData, error)),
            }
            let mut buffer = [0; 32 * 1024];
            match self.stream.read(&mut buffer) {
                Ok(0) if self.decoder.pending() == 0 => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(length) => self.decoder.push(&buffer[..length]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Release 0.1's machines read this format. A change needs a new version.
    #[test]
    fn version_1_encoding_is_unchanged() {
        let power_off = Request::PowerOff { grace_ms: 5000 };
        let hello = Hello {
            version: power_off.version(),
            token: "token".into(),
        };
        let mut bytes = Vec::new();
        send(&mut bytes, &hello).unwrap();
        send(&mut bytes, &power_off).unwrap();
        assert_eq!(bytes, b"\x07\0\0\0\x01\x05token\x03\0\0\0\x01\x88\x27");
    }
}
