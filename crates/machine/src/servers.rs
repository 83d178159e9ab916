//! Starts a `jiffy-files` for each folder that the machine shares. QEMU holds the other ends of their
//! sockets, so they end when QEMU ends.

use crate::error::MachineError;
use crate::shares::Share;
use jiffy_sys::spawn::{Detached, Environment, spawn_detached};
use jiffy_wire::files;
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, WaitOptions, geteuid, waitpid};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// Servers of folders that run, until QEMU has their sockets.
#[derive(Debug, Default)]
pub struct Servers {
    sockets: Vec<OwnedFd>,
    started: Vec<Pid>,
}

impl Servers {
    /// Starts `program` for each folder. They write errors to `log`.
    ///
    /// # Errors
    ///
    /// If a folder can't be opened, or the program can't be started; then none runs.
    pub fn start(
        program: &Path,
        shares: &[Share],
        log: BorrowedFd<'_>,
    ) -> Result<Servers, MachineError> {
        let mut servers = Servers::default();
        for share in shares {
            servers.add(program, share, log)?;
        }
        Ok(servers)
    }

    /// QEMU's ends of their sockets, one for each share.
    pub fn sockets(&self) -> &[OwnedFd] {
        &self.sockets
    }

    /// Keeps them running: QEMU has inherited the sockets.
    pub fn release(mut self) {
        self.started.clear();
    }

    fn add(
        &mut self,
        program: &Path,
        share: &Share,
        log: BorrowedFd<'_>,
    ) -> Result<(), MachineError> {
        let unusable = |error: io::Error| MachineError::Share {
            path: share.path.clone(),
            source: error,
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = openat(CWD, share.path.as_str(), flags, Mode::empty())
            .map_err(|error| unusable(error.into()))?;
        let flags = SocketFlags::CLOEXEC;
        let (qemus, servers) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(|error| unusable(error.into()))?;
        let arguments = files::arguments(share.read_only, !geteuid().is_root());
        let arguments: Vec<&OsStr> = arguments.map(OsStr::new).collect();
        let pid = spawn_detached(&Detached {
            program,
            arguments: &arguments,
            directory: Path::new("/"),
            output: log,
            descriptors: &[servers.as_fd(), folder.as_fd()],
            environment: Environment::Empty,
        })
        .map_err(|error| MachineError::file(program, error))?;
        self.sockets.push(qemus);
        self.started.extend(Pid::from_raw(pid as i32));
        Ok(())
    }
}

impl Drop for Servers {
    /// Closes the sockets, which ends the servers that QEMU does not have, and waits for them.
    fn drop(&mut self) {
        self.sockets.clear();
        for pid in &self.started {
            let _ = rustix::io::retry_on_intr(|| waitpid(Some(*pid), WaitOptions::empty()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    /// A program that writes its arguments to its socket and then copies what it reads, to the end.
    const SERVER: &str = "#!/bin/sh\necho $@ >&3; exec cat <&3 >&3\n";

    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Place {
            let place = Place(tempfile::tempdir().unwrap());
            jiffy_sys::testing::write_program(&place.program(), SERVER);
            place
        }

        fn program(&self) -> std::path::PathBuf {
            self.0.path().join("jiffy-files")
        }

        fn share(&self, read_only: bool) -> Share {
            Share::of(self.0.path(), read_only).unwrap()
        }
    }

    #[test]
    fn each_folder_has_a_server_until_its_socket_is_closed() {
        let place = Place::new();
        let log = File::open("/dev/null").unwrap();
        let shares = [place.share(false), place.share(true)];
        let servers = Servers::start(&place.program(), &shares, log.as_fd()).unwrap();
        let squash = if geteuid().is_root() { "" } else { " --squash" };
        for (socket, read_only) in servers.sockets().iter().zip(["", " --read-only"]) {
            let mut socket = UnixStream::from(socket.try_clone().unwrap());
            socket
                .set_read_timeout(Some(Duration::from_secs(60)))
                .unwrap();
            let wanted = format!("--socket-fd 3 --folder-fd 4{read_only}{squash}\nhello");
            socket.write_all(b"hello").unwrap();
            let mut said = vec![0; wanted.len()];
            socket.read_exact(&mut said).unwrap();
            assert_eq!(String::from_utf8(said).unwrap(), wanted);
        }
        let started = servers.started.clone();
        drop(servers);
        for pid in started {
            assert!(rustix::process::test_kill_process(pid).is_err());
        }
    }

    #[test]
    fn nothing_is_left_if_one_can_not_be_started() {
        let place = Place::new();
        let log = File::open("/dev/null").unwrap();
        let gone = Share {
            path: "/nonexistent/folder".into(),
            read_only: false,
        };
        let shares = [place.share(false), gone];
        // Returns only when the first server has ended.
        let error = Servers::start(&place.program(), &shares, log.as_fd()).unwrap_err();
        assert!(matches!(error, MachineError::Share { .. }), "{error}");
        assert!(error.to_string().contains("/nonexistent/folder"), "{error}");
        let missing = place.0.path().join("missing");
        let error = Servers::start(&missing, &shares, log.as_fd()).unwrap_err();
        assert!(error.to_string().contains("missing"), "{error}");
    }
}
