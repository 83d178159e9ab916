//! QEMU's control socket (QEMU, docs/interop/qmp-spec.txt).

use crate::error::MachineError;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long QEMU may take to accept a client, and to answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// An open control socket.
#[derive(Debug)]
pub struct Control {
    reader: BufReader<UnixStream>,
}

impl Control {
    /// Connects and negotiates capabilities.
    ///
    /// # Errors
    ///
    /// If QEMU does not answer within 60 s, or it refuses.
    pub fn connect(path: &Path) -> Result<Control, MachineError> {
        let stream = connect_within(path, PATIENCE).map_err(failed)?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
        let mut control = Control {
            reader: BufReader::new(stream),
        };
        control.line()?; // The greeting.
        control.execute("qmp_capabilities", Value::Null)?;
        Ok(control)
    }

    /// Runs one command and returns its result.
    ///
    /// # Errors
    ///
    /// If QEMU does not answer within 60 s, closes the socket, or answers with an error.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, MachineError> {
        let mut request = json!({ "execute": command });
        if !arguments.is_null() {
            request["arguments"] = arguments;
        }
        let mut bytes = request.to_string().into_bytes();
        bytes.push(b'\n');
        self.reader.get_mut().write_all(&bytes).map_err(failed)?;
        loop {
            let mut answer = self.line()?;
            if let Some(error) = answer.get("error") {
                return Err(MachineError::Control(error["desc"].to_string()));
            }
            if answer.get("return").is_some() {
                return Ok(answer["return"].take());
            }
            // Other messages are events.
        }
    }

    /// QEMU's name of the machine's state: `running`, `io-error`, …
    ///
    /// # Errors
    ///
    /// If [`execute`](Control::execute) fails.
    pub fn status(&mut self) -> Result<String, MachineError> {
        let answer = self.execute("query-status", Value::Null)?;
        Ok(answer["status"].as_str().unwrap_or("unknown").into())
    }

    /// The host's port that is forwarded to `guest_port` of the machine.
    ///
    /// # Errors
    ///
    /// If the port is not forwarded, or [`execute`](Control::execute) fails.
    pub fn forwarded_port(&mut self, guest_port: u16) -> Result<u16, MachineError> {
        let answer = self.execute(
            "human-monitor-command",
            json!({ "command-line": "info usernet" }),
        )?;
        let table = answer.as_str().unwrap_or_default();
        parse_forwarded_port(table, guest_port)
            .ok_or_else(|| MachineError::Control(format!("port {guest_port} is not forwarded")))
    }

    fn line(&mut self) -> Result<Value, MachineError> {
        let mut line = String::new();
        let length = self.reader.read_line(&mut line).map_err(failed)?;
        if length == 0 {
            return Err(MachineError::Control("QEMU has closed it".into()));
        }
        serde_json::from_str(&line).map_err(|error| MachineError::Control(error.to_string()))
    }
}

/// Connects to a socket. QEMU takes one client at a time and lets one more wait; connect(2) waits for
/// room without a limit unless the socket has one.
fn connect_within(path: &Path, time: Duration) -> io::Result<UnixStream> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(time))?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

fn failed(error: io::Error) -> MachineError {
    MachineError::Control(match error.kind() {
        io::ErrorKind::WouldBlock => {
            format!("QEMU does not answer within {} s", PATIENCE.as_secs())
        }
        _ => error.to_string(),
    })
}

/// Parses `info usernet`: protocol, descriptor, source address and port, destination address and
/// port.
fn parse_forwarded_port(table: &str, guest_port: u16) -> Option<u16> {
    table.lines().find_map(|line| {
        let columns: Vec<_> = line.split_whitespace().collect();
        let [protocol, _, _, host, _, guest, ..] = columns[..] else {
            return None;
        };
        (protocol == "TCP[HOST_FORWARD]" && guest == guest_port.to_string())
            .then(|| host.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_qemu_that_accepts_nobody_is_not_waited_for_without_a_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp.sock");
        let server = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        );
        let server = server.unwrap();
        rustix::net::bind(&server, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&server, 1).unwrap();
        let begun = Instant::now();
        let limit = Duration::from_millis(100);
        let waiting: Vec<_> = (0..4).map(|_| connect_within(&path, limit)).collect();
        assert!(waiting[0].is_ok(), "{waiting:?}");
        let kind = waiting[3].as_ref().unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::WouldBlock);
        assert!(begun.elapsed() >= limit);
    }

    #[test]
    fn the_forwarded_port_is_found_in_the_table() {
        let table = "Hub -1 (net):\r\n  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ\r\n  TCP[HOST_FORWARD]  13       127.0.0.1 35113       10.0.2.15  7071     0     0\r\n  TCP[HOST_FORWARD]  12       127.0.0.1 41209       10.0.2.15  7070     0     0\r\n";
        assert_eq!(parse_forwarded_port(table, 7070), Some(41209));
        assert_eq!(parse_forwarded_port(table, 7071), Some(35113));
        assert_eq!(parse_forwarded_port(table, 22), None);
    }
}
