//! Whose files they are: users and groups of the guest, and of the host.

use crate::protocol::Outcome;
use rustix::fs::{Gid, Uid};
use rustix::io::Errno;
use rustix::thread::{set_thread_res_gid, set_thread_res_uid};

/// The id of users and groups that are not mapped.
const NOBODY: u32 = 65534;
/// Not an id: system calls take it as "no change".
const NONE: u32 = u32::MAX;

/// How ids of the guest become those of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Identity {
    /// They are the same. Needs root.
    Same,
    /// The guest's root is this user and group of the host; other ids are not mapped.
    Squashed {
        /// The server's user.
        user: u32,
        /// The server's group.
        group: u32,
    },
}

impl Identity {
    /// Squashed to the user of this process.
    pub fn own() -> Identity {
        Identity::Squashed {
            user: rustix::process::geteuid().as_raw(),
            group: rustix::process::getegid().as_raw(),
        }
    }

    /// Makes something in a folder, so that it belongs to this user and group of the guest.
    ///
    /// # Errors
    ///
    /// `EINVAL` if they are no ids; otherwise that of `make`, or of `setresuid` and `setresgid`.
    pub fn create<T>(self, user: u32, group: u32, make: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
        if user == NONE || group == NONE {
            return Err(Errno::INVAL);
        }
        if self != Identity::Same || (user, group) == (0, 0) {
            return make();
        }
        become_user(Uid::from_raw(user), Gid::from_raw(group))?;
        let made = make();
        if become_user(Uid::ROOT, Gid::ROOT).is_err() {
            // The thread would serve others as this user. It has the capability, so this is not
            // expected to happen.
            std::process::abort();
        }
        made
    }

    /// The host's user and group, for a file of the guest's.
    ///
    /// # Errors
    ///
    /// `EPERM` if the host has none for them, `EINVAL` if they are no ids.
    pub fn owner(
        self,
        user: Option<u32>,
        group: Option<u32>,
    ) -> Outcome<(Option<Uid>, Option<Gid>)> {
        if user == Some(NONE) || group == Some(NONE) {
            return Err(Errno::INVAL);
        }
        let (user, group) = match self {
            Identity::Same => (user, group),
            Identity::Squashed { .. } if user.or(Some(0)) != Some(0) => return Err(Errno::PERM),
            Identity::Squashed { .. } if group.or(Some(0)) != Some(0) => return Err(Errno::PERM),
            Identity::Squashed {
                user: us,
                group: our,
            } => (user.and(Some(us)), group.and(Some(our))),
        };
        Ok((user.map(Uid::from_raw), group.map(Gid::from_raw)))
    }

    /// The guest's user and group of a file of the host's. In the server's user namespace, others have
    /// no numbers.
    pub fn shown(self, user: u32, group: u32) -> (u32, u32) {
        let shown = |id: u32, own: u32| if id == own { 0 } else { NOBODY };
        match self {
            Identity::Same => (user, group),
            Identity::Squashed {
                user: us,
                group: our,
            } => (shown(user, us), shown(group, our)),
        }
    }
}

/// Changes the effective ids of this thread only. Its capabilities stay
/// (`SECBIT_NO_SETUID_FIXUP`): the guest's kernel has checked what the user may do.
fn become_user(user: Uid, group: Gid) -> Outcome<()> {
    set_thread_res_gid(None, group, None)?;
    set_thread_res_uid(None, user, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guests_root_is_the_servers_user_when_squashed() {
        let squashed = Identity::Squashed {
            user: 1000,
            group: 100,
        };
        assert_eq!(squashed.shown(1000, 100), (0, 0));
        assert_eq!(squashed.shown(0, 0), (NOBODY, NOBODY));
        assert_eq!(squashed.shown(7, 8), (NOBODY, NOBODY));
        let ours = (Some(Uid::from_raw(1000)), Some(Gid::from_raw(100)));
        assert_eq!(squashed.owner(Some(0), Some(0)), Ok(ours));
        assert_eq!(squashed.owner(None, None), Ok((None, None)));
        assert_eq!(squashed.owner(Some(1000), None), Err(Errno::PERM));
        assert_eq!(squashed.owner(None, Some(5)), Err(Errno::PERM));
    }

    #[test]
    fn no_id_is_never_taken_for_no_change() {
        for identity in [Identity::Same, Identity::own()] {
            for (user, group) in [(NONE, 0), (0, NONE), (NONE, NONE)] {
                let made = identity.create(user, group, || Ok(()));
                assert_eq!(made, Err(Errno::INVAL));
                let owner = identity.owner(Some(user), Some(group));
                assert_eq!(owner, Err(Errno::INVAL));
            }
        }
    }
}
