//! The threads that serve a channel.

use crate::channel::Channel;
use crate::confinement::{self, ConfinementError};
use crate::folder::{Folder, Sharing};
use crate::identity::Identity;
use crate::options::Options;
use crate::protocol::Answer;
use jiffy_sys::{arenas, descriptors, handed};
use jiffy_wire::files::MESSAGE_MAX;
use rustix::fs::{FileType, Mode};
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::{Arc, mpsc};
use thiserror::Error;

/// Most descriptors that a guest may make the server hold: one for each file that its kernel
/// remembers, and one for each that is open.
pub const DESCRIPTORS_MAX: u64 = 256 * 1024;
/// Descriptors for the server itself, and for requests in progress.
const RESERVE: u64 = 64;
/// Requests that are served at the same time: a slow one does not delay the others.
const THREADS: usize = 4;

/// Why the server did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// A descriptor was not inherited.
    #[error(
        "the descriptor {1} of --{0} is not open, or is a standard stream: start jiffy-files with it inherited"
    )]
    NotInherited(&'static str, RawFd),
    /// Both are the same.
    #[error("--socket-fd and --folder-fd are the same descriptor {0}: give two")]
    Same(RawFd),
    /// The socket is something else.
    #[error(
        "the descriptor of --socket-fd is not a socket of AF_UNIX and SOCK_SEQPACKET or SOCK_STREAM"
    )]
    NotASocket,
    /// The folder is something else.
    #[error("the descriptor of --folder-fd is not a folder")]
    NotAFolder,
    /// It has no right to act as others.
    #[error("without --squash, jiffy-files acts as the guest's users and must run as root")]
    NotRoot,
    /// The limit of open files is too low.
    #[error("the limit of open files is {0}; at least {min} are needed: raise it (ulimit -n)", min = 2 * RESERVE)]
    FewDescriptors(u64),
    /// The sandbox can't be entered.
    #[error(transparent)]
    Confinement(#[from] ConfinementError),
    /// A thread can't be started.
    #[error("a thread can't be started")]
    Thread(#[source] io::Error),
}

/// Serves the folder until the other side closes its socket.
///
/// # Errors
///
/// If a descriptor is not inherited or is of another kind, this is not root but would act as
/// others, too few descriptors may be open, the process can't be confined, or a thread can't be
/// started.
pub fn serve(options: &Options) -> Result<(), ServeError> {
    let (channel, folder) = inherited(options)?;
    let limit = descriptors::raise_limit(DESCRIPTORS_MAX + RESERVE);
    let for_guest = limit
        .checked_sub(RESERVE)
        .filter(|left| *left >= RESERVE)
        .ok_or(ServeError::FewDescriptors(limit))?;
    arenas::share_one();
    // The guest's kernel applies the masks of its processes.
    rustix::process::umask(Mode::empty());
    let identity = match options.squash {
        true => Identity::own(),
        false => Identity::Same,
    };
    let rooted = confinement::enter(folder.as_fd(), options.read_only, !options.squash)?;
    drop(folder);
    if let Some(error) = &rooted.no_own_root {
        tracing::warn!(%error, "this host allows no mounts: the server could change attributes elsewhere");
    }
    if !rooted.has_landlock {
        tracing::warn!(
            "this kernel has no Landlock: only the mount keeps the server in the folder"
        );
    }
    let sharing = Sharing {
        read_only: options.read_only,
        identity,
        descriptors: for_guest.min(DESCRIPTORS_MAX) as usize,
    };
    run(
        Arc::new(Folder::new(rooted.folder, rooted.descriptors, sharing)),
        Arc::new(channel),
    )
}

fn inherited(options: &Options) -> Result<(Channel, OwnedFd), ServeError> {
    let (socket, folder) = (options.socket_fd, options.folder_fd);
    if socket == folder {
        return Err(ServeError::Same(socket));
    }
    let take = |name: &'static str, number| {
        let path = Path::new(name);
        handed::add_inherited(path.into(), number)
            .ok()
            .and_then(|()| handed::take(path))
            .ok_or(ServeError::NotInherited(name, number))
    };
    let socket = take("socket-fd", socket)?;
    let folder = take("folder-fd", folder)?;
    let channel = Channel::of(socket).ok_or(ServeError::NotASocket)?;
    let kind = rustix::fs::fstat(&folder).map(|facts| FileType::from_raw_mode(facts.st_mode));
    if kind != Ok(FileType::Directory) {
        return Err(ServeError::NotAFolder);
    }
    if !options.squash && !rustix::process::geteuid().is_root() {
        return Err(ServeError::NotRoot);
    }
    Ok((channel, folder))
}

/// Starts the threads, and waits until one of them finds the channel closed. The others may be in a
/// system call; the end of the process ends it.
fn run(folder: Arc<Folder>, channel: Arc<Channel>) -> Result<(), ServeError> {
    let (ended, end) = mpsc::channel();
    for number in 0..THREADS {
        let (folder, channel, ended) = (folder.clone(), channel.clone(), ended.clone());
        std::thread::Builder::new()
            .name(format!("files-{number}"))
            .spawn(move || {
                answer_all(&folder, &channel);
                let _ = ended.send(());
            })
            .map_err(ServeError::Thread)?;
    }
    drop(ended);
    // An error means that all threads have ended.
    let _ = end.recv();
    Ok(())
}

/// Answers requests until the other side closes its socket.
fn answer_all(folder: &Folder, channel: &Channel) {
    let mut message = Box::new([0; MESSAGE_MAX]);
    let mut answer = Answer::default();
    while let Some((received, length)) = channel.receive(&mut message) {
        let answer = folder.serve(&message[..received], length, &mut answer);
        if let Some(answer) = answer
            && !channel.send(answer)
        {
            return;
        }
    }
}
