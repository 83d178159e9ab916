//! Tests of the device that play the guest and the host programs.

mod asked;
mod connect;
mod data;
mod flow;
mod packets;
mod pause;
mod restore;
mod shutdown;
mod socket_file;

use super::device::{Vsock, VsockArgs};
use super::testing::{EVENT_IDX, GUEST_CID, Guest};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use tempfile::TempDir;

/// The host's side: a folder with the sockets of the device and of programs.
struct Host {
    folder: TempDir,
}

impl Host {
    fn new() -> Host {
        Host {
            folder: TempDir::new().unwrap(),
        }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("v")
    }

    fn args(&self) -> VsockArgs {
        VsockArgs {
            cid: GUEST_CID,
            path: self.path(),
        }
    }

    fn guest(&self) -> Guest {
        Guest::new(Vsock::new(self.args()).unwrap(), EVENT_IDX)
    }

    /// The same, without any buffers for the device.
    fn guest_without_buffers(&self) -> Guest {
        Guest::without_buffers(Vsock::new(self.args()).unwrap(), EVENT_IDX)
    }

    /// A host program that waits for the guest at `port`.
    fn listen(&self, port: u32) -> UnixListener {
        UnixListener::bind(self.folder.path().join(format!("v_{port}"))).unwrap()
    }

    /// A host program that connects to `port` of the guest.
    fn call(&self, port: u32) -> UnixStream {
        let mut stream = UnixStream::connect(self.path()).unwrap();
        stream
            .write_all(format!("CONNECT {port}\n").as_bytes())
            .unwrap();
        stream
    }

    /// An open connection from the guest to a program.
    fn guest_to_host(&self, guest: &mut Guest, ports: (u32, u32)) -> UnixStream {
        let listener = self.listen(ports.0);
        guest.connect(ports);
        listener.accept().unwrap().0
    }
}

/// Reads the `OK` line; returns its port.
fn read_ok(stream: &mut UnixStream) -> u32 {
    let mut line = Vec::new();
    while !line.ends_with(b"\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        line.push(byte[0]);
    }
    let line = String::from_utf8(line).unwrap();
    line.strip_prefix("OK ")
        .unwrap()
        .trim_end()
        .parse()
        .unwrap()
}

/// Bytes that do not repeat, so that a lost, duplicated or swapped piece is noticed.
fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}
