//! How much of a jail this host can give.

use crate::launch::{Jail, LaunchError};
use std::fmt;
use std::path::Path;

/// What a jail is made of, the strongest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// User and group id of its own, new mount, pid, network, IPC and UTS namespaces, an
    /// empty root. Needs root.
    OwnUser,
    /// The same namespaces and root, in a new user namespace: for everything outside it is
    /// the user who started it.
    UserNamespace,
    /// Limits, a clean environment, no new privileges, and only the descriptors it was
    /// handed.
    Bare,
}

impl Level {
    /// The strongest that works here, and why no stronger does. `folder` is what jailed
    /// programs will see; a process that does nothing tries each level.
    pub fn of_host(folder: &Path, user: u32) -> (Level, Vec<LaunchError>) {
        let is_root = rustix::process::geteuid().is_root();
        let mut levels = vec![Level::UserNamespace];
        if is_root {
            levels.insert(0, Level::OwnUser);
        }
        let mut refused = Vec::new();
        for level in levels {
            match Jail::try_level(level, folder, user) {
                Ok(()) => return (level, refused),
                Err(error) => refused.push(error),
            }
        }
        (Level::Bare, refused)
    }

    /// Does it keep the file system away?
    pub fn has_own_root(self) -> bool {
        self != Level::Bare
    }

    pub(crate) fn namespaces(self) -> libc::c_int {
        let usual = libc::CLONE_NEWNS
            | libc::CLONE_NEWPID
            | libc::CLONE_NEWNET
            | libc::CLONE_NEWIPC
            | libc::CLONE_NEWUTS;
        match self {
            Level::OwnUser => usual,
            Level::UserNamespace => usual | libc::CLONE_NEWUSER,
            Level::Bare => 0,
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Level::OwnUser => "a user id and namespaces of its own",
            Level::UserNamespace => "a user namespace of its own",
            Level::Bare => "no namespaces",
        })
    }
}
