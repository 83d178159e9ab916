//! Starts a passt.
//!
//! passt confines itself: it keeps no privileges, has an empty root folder and namespaces of its
//! own except for the network, and a filter for its system calls. It forks when it is ready.

use super::host::{self, Resolving};
use jiffy_net::identity::GATEWAY_MAC;
use jiffy_net::policy::publish::Publish;
use jiffy_net::policy::target::Protocol;
use jiffy_sys::spawn::{Detached, Environment, FIRST_DESCRIPTOR, spawn_detached};
use jiffy_wire::mac::Mac;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// The address of each VM: no other VM sees it.
pub const GUEST: Ipv4Addr = Ipv4Addr::new(10, 118, 0, 2);
/// Its gateway, which only passt has.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 118, 0, 1);

/// The program.
pub const PROGRAM: &str = "passt";
/// How long passt may take until it is ready.
const READY_S: i64 = 10;
/// Most bytes of its messages that are read.
const MESSAGES: u64 = 16 << 10;

/// A passt that is not ready yet. It is ended if this is dropped before that.
#[derive(Debug)]
pub struct Starting {
    pid: Option<Pid>,
    messages: File,
}

/// Starts a passt with these ports for a guest with this address; returns the other end of its
/// socket. It ends when that is closed.
///
/// # Errors
///
/// If it can't be started: why, without a full stop.
pub fn start(
    program: &Path,
    published: &[Publish],
    resolving: &Resolving,
    guest: Mac,
) -> Result<(OwnedFd, Starting), String> {
    let failed = |error: io::Error| format!("{} can't be started: {error}", program.display());
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|error| failed(error.into()))?;
    let ours = UnixStream::from(ours);
    (&ours).write_all(&announcement(guest)).map_err(failed)?;
    let messages = memfd_create("passt", MemfdFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
    let arguments = arguments(published, resolving);
    let arguments: Vec<&OsStr> = arguments.iter().map(OsStr::new).collect();
    let pid = spawn_detached(&Detached {
        program,
        arguments: &arguments,
        directory: Path::new("/"),
        output: messages.as_fd(),
        descriptors: &[theirs.as_fd()],
        environment: Environment::Empty,
    });
    let starting = Starting {
        pid: Pid::from_raw(pid.map_err(failed)? as i32),
        messages: messages.into(),
    };
    Ok((ours.into(), starting))
}

/// A frame of the guest, after its length: a request for its own address, which nobody answers
/// (RFC 5227). Until passt has seen the guest's MAC address it sends frames to all, and Linux accepts
/// no TCP in such frames.
fn announcement(guest: Mac) -> Vec<u8> {
    const ARP: [u8; 10] = [0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1];
    let address = GUEST.octets();
    let frame = [
        &[0xff; 6][..],
        &guest.0,
        &ARP,
        &guest.0,
        &address,
        &[0; 6],
        &address,
    ]
    .concat();
    [&(frame.len() as u32).to_be_bytes()[..], &frame].concat()
}

fn arguments(published: &[Publish], resolving: &Resolving) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    let mut add = |texts: &[&str]| all.extend(texts.iter().map(|&text| text.to_owned()));
    add(&["--fd", &FIRST_DESCRIPTOR.to_string(), "--quiet"]);
    // The guest is configured by its init, for IPv4.
    add(&["--ipv4-only", "--no-dhcp", "--address", &GUEST.to_string()]);
    add(&["--netmask", "24", "--gateway", &GATEWAY.to_string()]);
    add(&["--mac-addr", &GATEWAY_MAC.to_string()]);
    if published.iter().all(|it| it.protocol == Protocol::Tcp) {
        // By its gateway's address a guest would reach the host's loopback. The guard refuses that,
        // too, but lets pass what answers a datagram of loopback, which needs the way.
        add(&["--no-map-gw"]);
    }
    if !host::has_default_route() {
        // Without an interface to imitate, passt does not start.
        add(&["--interface", "lo"]);
    }
    if resolving.is_forwarded() {
        add(&["--dns", "127.0.0.1", "--dns-forward", &GATEWAY.to_string()]);
    }
    for publish in published {
        let option = match publish.protocol {
            Protocol::Tcp => "--tcp-ports",
            Protocol::Udp => "--udp-ports",
        };
        add(&[option, &forwarded(publish)]);
    }
    all
}

/// `ADDRESS/HOST-HOST:GUEST-GUEST`.
fn forwarded(publish: &Publish) -> String {
    let range = |first: u16| match publish.count {
        1 => first.to_string(),
        count => format!("{first}-{}", first + (count - 1)),
    };
    let (host, guest) = (range(publish.host), range(publish.guest));
    format!("{}/{host}:{guest}", publish.address)
}

impl Starting {
    /// Waits until it is ready.
    ///
    /// # Errors
    ///
    /// If it has ended with an error, whose last line is named, or is not ready in time: a sentence
    /// without a full stop.
    pub fn settle(mut self) -> Result<(), String> {
        match self.wait() {
            Ok(Some(0)) => Ok(()),
            Ok(Some(_)) => Err(format!("passt says \"{}\"", self.last_line())),
            Ok(None) => Err(format!("passt was not ready after {READY_S} s")),
            Err(error) => Err(format!("passt can't be watched: {error}")),
        }
    }

    /// Its exit status; `None` if it is not ready in time.
    fn wait(&mut self) -> io::Result<Option<i32>> {
        let Some(pid) = self.pid else { return Ok(None) };
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let timeout = Timespec {
            tv_sec: READY_S,
            tv_nsec: 0,
        };
        let mut polled = [PollFd::new(&process, PollFlags::IN)];
        let ready = rustix::io::retry_on_intr(|| poll(&mut polled, Some(&timeout)))?;
        if ready == 0 {
            return Ok(None);
        }
        self.pid = None;
        let ended = waitpid(Some(pid), WaitOptions::empty())?;
        Ok(ended.map(|(_, status)| status.exit_status().unwrap_or(-1)))
    }

    /// The last of its messages. It also complains that there is no system log.
    fn last_line(&mut self) -> String {
        let mut text = Vec::new();
        let _ = self.messages.rewind();
        let _ = (&self.messages).take(MESSAGES).read_to_end(&mut text);
        let text = String::from_utf8_lossy(&text);
        let says = |line: &&str| !line.trim().is_empty() && !line.contains("syslog");
        let last = text.lines().rev().find(says).unwrap_or("nothing");
        last.trim().trim_end_matches(", exiting").to_owned()
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        if let Some(pid) = self.pid.take() {
            let _ = kill_process(pid, Signal::KILL);
            let _ = waitpid(Some(pid), WaitOptions::empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_passed_in_passts_form() {
        let form = |text: &str| forwarded(&text.parse().unwrap());
        assert_eq!(form("8080:80"), "127.0.0.1/8080:80");
        assert_eq!(form("0.0.0.0:80-82:90-92/udp"), "0.0.0.0/80-82:90-92");
    }

    #[test]
    fn a_failed_start_is_an_error_with_its_reason() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("passt");
        let error = start(&program, &[], &Resolving::default(), GATEWAY_MAC).unwrap_err();
        assert!(
            error.contains("passt can't be started: No such file"),
            "{error}"
        );
        let says = |script: &str| {
            jiffy_sys::testing::write_program(&program, &format!("#!/bin/sh\n{script}\n"));
            let (_socket, starting) =
                start(&program, &[], &Resolving::default(), GATEWAY_MAC).unwrap();
            starting.settle()
        };
        says("echo fine >&2").unwrap();
        let error = says("echo a >&2; echo 'b is wrong, exiting' >&2; echo syslog >&2; exit 1");
        assert_eq!(error.unwrap_err(), "passt says \"b is wrong\"");
        assert!(says("kill -9 $$").is_err());
    }
}
