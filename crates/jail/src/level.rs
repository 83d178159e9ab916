//! How strong a jail is.

use std::fmt;

/// The parts of a jail, the strongest level first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// User and group id of its own, new mount, pid, network, IPC and UTS namespaces, an
    /// empty root. Needs root.
    OwnUser,
    /// The same namespaces and root, in a new user namespace: outside of it the program has the
    /// user id that started it.
    UserNamespace,
    /// Limits, a clean environment, no new privileges, and only the descriptors it was
    /// handed.
    Bare,
}

impl Level {
    /// Whether the program is kept from the host's file system.
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
