//! What the server of a shared folder knows of the guest's files: saved with the VM, and given to
//! the server of the restored one.

use jiffy_devices::virtio::fs::{ExchangeError, Fs};
use jiffy_wire::files::{DATA_MAX, RESTORE, SAVE, SESSION_MAX};
use rustix::io::Errno;
use thiserror::Error;

/// Why what a server knows of a guest's files can't be saved or restored.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The server does not answer as it should.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// It waits for the host's file system.
    #[error("a request of the guest, which was sent before, takes too long")]
    Busy,
    /// There is a limit.
    #[error("the guest knows more files than can be saved ({} MiB)", SESSION_MAX >> 20)]
    TooLarge,
    /// The saved session has a later version.
    #[error("a later release has saved it")]
    Later,
    /// The saved session is no session.
    #[error("what was saved is damaged")]
    Damaged,
}

/// Sends the server a message, and gives its refusals a meaning.
fn ask(device: &mut Fs, opcode: u32, arguments: &[&[u8]]) -> Result<Vec<u8>, SessionError> {
    device.exchange(opcode, arguments).map_err(|error| {
        let refused = match &error {
            ExchangeError::Refused(number) => Errno::from_raw_os_error(*number),
            _ => return error.into(),
        };
        match refused {
            Errno::BUSY => SessionError::Busy,
            Errno::FBIG => SessionError::TooLarge,
            Errno::PROTONOSUPPORT => SessionError::Later,
            Errno::INVAL => SessionError::Damaged,
            _ => error.into(),
        }
    })
}

/// What the server knows of the guest's files. A server that has ended has lost it, so that the guest
/// can't be captured.
pub(super) fn save(device: &mut Fs) -> Result<Vec<u8>, SessionError> {
    let sent = device.sent().ok_or(ExchangeError::Running)?;
    let mut session = Vec::new();
    loop {
        let offset = session.len() as u64;
        let answer = ask(device, SAVE, &[&offset.to_le_bytes(), &sent.to_le_bytes()])?;
        let (length, part) = answer.split_first_chunk().ok_or(ExchangeError::Malformed)?;
        let length = u64::from_le_bytes(*length);
        let has = offset + part.len() as u64;
        if part.is_empty() || has > length || length > SESSION_MAX as u64 {
            return Err(ExchangeError::Malformed.into());
        }
        session.extend_from_slice(part);
        if has == length {
            return Ok(session);
        }
    }
}

/// Tells a new server what the one before knew.
pub(super) fn restore(device: &mut Fs, session: &[u8]) -> Result<(), SessionError> {
    if session.is_empty() {
        return Err(SessionError::Damaged);
    }
    let length = (session.len() as u64).to_le_bytes();
    for (number, part) in session.chunks(DATA_MAX).enumerate() {
        let offset = (number * DATA_MAX) as u64;
        ask(device, RESTORE, &[&length, &offset.to_le_bytes(), part])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_devices::virtio::fs::FsArgs;
    use jiffy_wire::files::MESSAGE_MAX;
    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
    use rustix::net::{recv, send, socketpair};
    use std::os::fd::OwnedFd;
    use std::thread::{self, JoinHandle};

    /// A server that answers each message by this function: an error number and results.
    fn served(
        mut by: impl FnMut(u32, &[u8]) -> (i32, Vec<u8>) + Send + 'static,
    ) -> (Fs, JoinHandle<()>) {
        let flags = SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (ours, theirs): (OwnedFd, OwnedFd) = pair.unwrap();
        let server = thread::spawn(move || {
            let mut message = vec![0; MESSAGE_MAX];
            while let Ok((length @ 1.., _)) = recv(&theirs, &mut message[..], RecvFlags::empty()) {
                let word = |at: usize| u32::from_le_bytes(message[at..at + 4].try_into().unwrap());
                assert_eq!(word(0) as usize, length);
                let (error, results) = by(word(4), &message[40..length]);
                let mut answer = (16 + results.len() as u32).to_le_bytes().to_vec();
                answer.extend((-error).to_le_bytes());
                answer.extend(&message[8..16]);
                answer.extend(results);
                send(&theirs, &answer, SendFlags::empty()).unwrap();
            }
        });
        let device = Fs::new(FsArgs {
            tag: "folder0".into(),
            server: Some(ours),
            message_max: MESSAGE_MAX,
        });
        (device.unwrap(), server)
    }

    fn number(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
    }

    #[test]
    fn a_session_of_several_parts_is_saved_and_restored() {
        let saved: Vec<u8> = (0..2 * DATA_MAX + 5).map(|at| at as u8).collect();
        let whole = saved.clone();
        let (mut device, server) = served(move |opcode, arguments| {
            assert_eq!(opcode, SAVE);
            let rest = &whole[number(arguments, 0) as usize..];
            // Nothing was sent before the first one.
            assert_eq!(number(arguments, 8), 0);
            let part = &rest[..rest.len().min(DATA_MAX)];
            let length = (whole.len() as u64).to_le_bytes();
            (0, [&length[..], part].concat())
        });
        let state = save(&mut device).unwrap();
        assert_eq!(state, saved);
        assert_eq!(device.sent(), Some(3));
        drop(device);
        server.join().unwrap();

        let mut received = Vec::new();
        let (mut device, server) = served(move |opcode, arguments| {
            assert_eq!(opcode, RESTORE);
            assert_eq!(number(arguments, 0) as usize, saved.len());
            assert_eq!(number(arguments, 8) as usize, received.len());
            received.extend_from_slice(&arguments[16..]);
            assert!(saved.starts_with(&received));
            (0, Vec::new())
        });
        restore(&mut device, &state).unwrap();
        assert_eq!(device.sent(), Some(3));
        drop(device);
        server.join().unwrap();
    }

    #[test]
    fn a_server_that_can_t_save_or_restore_is_an_error_with_the_reason() {
        let reasons = [
            (libc::EBUSY, "takes too long"),
            (libc::EFBIG, "more files than can be saved (32 MiB)"),
            (libc::EPROTONOSUPPORT, "a later release"),
            (libc::EINVAL, "damaged"),
            (libc::EIO, "error 5"),
        ];
        for (error, reason) in reasons {
            let (mut device, _server) = served(move |_, _| (error, Vec::new()));
            let refused = save(&mut device).unwrap_err();
            let said = refused.to_string();
            assert!(said.contains(reason), "{said}");
            let refused = restore(&mut device, b"x").unwrap_err().to_string();
            assert!(refused.contains(reason), "{refused}");
        }
        // Answers that no server gives.
        let long = (SESSION_MAX as u64 + 1).to_le_bytes();
        let none = 4_u64.to_le_bytes();
        for wrong in [
            &[][..],
            &none,
            &[&long[..], b"x"].concat(),
            &[&none[..], b"12345"].concat(),
        ] {
            let wrong = wrong.to_vec();
            let (mut device, _server) = served(move |_, _| (0, wrong.clone()));
            assert!(save(&mut device).is_err());
        }
        let (mut device, _server) = served(|_, _| (0, Vec::new()));
        assert!(restore(&mut device, b"").is_err());
    }
}
