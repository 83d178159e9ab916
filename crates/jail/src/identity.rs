//! Unused user ids, one for each jailed program.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The first id of the first node's range: above the ids that systemd, shadow and container
/// runtimes use. systemd's UIDS-GIDS lists 1879048192 to 2147352575 as unused.
pub const FIRST: u32 = 1_880_000_000;
/// Number of ids in a node's range.
pub const COUNT: u32 = 65_536;
/// Number of ranges.
const RANGES: u32 = (2_147_352_575 - FIRST) / COUNT;

/// The offset of an id in its node's range; `None` if it is in no range.
fn place_of(id: u32) -> Option<u32> {
    let at = id.checked_sub(FIRST)?;
    (at < RANGES * COUNT).then_some(at % COUNT)
}

/// Is this the id of a program of any node, and not a shared group?
pub fn is_one(id: u32) -> bool {
    place_of(id).is_some_and(|place| place > 0)
}

/// The first id of the node with this run folder: the folder's group, if an earlier daemon has set
/// it. Otherwise a range chosen by the folder's inode, so that two nodes of a host rarely have the
/// same.
pub fn first_of(run: &Path) -> u32 {
    let Ok(facts) = fs::metadata(run) else {
        return FIRST;
    };
    let group = facts.gid();
    match place_of(group) {
        Some(0) => group,
        _ => FIRST + (facts.ino() % u64::from(RANGES)) as u32 * COUNT,
    }
}

/// Ids for programs that run at the same time.
#[derive(Debug)]
pub struct Identities {
    first: u32,
    count: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u32,
    used: HashSet<u32>,
}

/// A user and group id that no other program has until this is dropped.
#[derive(Debug)]
pub struct Identity {
    id: u32,
    of: Arc<Identities>,
}

impl Identities {
    /// The ids from `first` on. The first of them is the group that all programs share
    /// ([`Identities::shared_group`]).
    pub fn new(first: u32, count: u32) -> Arc<Identities> {
        Arc::new(Identities {
            first,
            count,
            state: Mutex::default(),
        })
    }

    /// The group of all jailed programs, which may traverse the run folder.
    pub fn shared_group(&self) -> u32 {
        self.first
    }

    /// A free id, the one unused for longest, so that a process whose end was not noticed does not
    /// share its id with a new one.
    pub fn take(self: &Arc<Identities>) -> Option<Identity> {
        let mut state = self.lock();
        for _ in 1..self.count {
            state.next = state.next % (self.count - 1) + 1;
            let id = self.first + state.next;
            if state.used.insert(id) {
                return Some(self.identity(id));
            }
        }
        None
    }

    /// The id of a running program; `None` if it is not in this range, or taken.
    pub fn adopt(self: &Arc<Identities>, id: u32) -> Option<Identity> {
        let is_ours = id > self.first && id - self.first < self.count;
        (is_ours && self.lock().used.insert(id)).then(|| self.identity(id))
    }

    fn identity(self: &Arc<Identities>, id: u32) -> Identity {
        Identity {
            id,
            of: Arc::clone(self),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Identity {
    /// The user id, and the group id.
    pub fn id(&self) -> u32 {
        self.id
    }
}

impl Drop for Identity {
    fn drop(&mut self) {
        self.of.lock().used.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique_and_freed_ids_are_reused_last() {
        let all = Identities::new(1000, 4);
        let one = all.take().unwrap();
        let two = all.take().unwrap();
        assert_eq!((one.id(), two.id()), (1001, 1002));
        drop(one);
        let three = all.take().unwrap();
        assert_eq!(three.id(), 1003);
        assert_eq!(all.take().unwrap().id(), 1001, "it was dropped at once");
        let _again = all.take().unwrap();
        assert!(all.take().is_none(), "the shared group is not handed out");
    }

    #[test]
    fn the_id_range_is_taken_from_the_run_folders_group() {
        let run = tempfile::tempdir().unwrap();
        let first = first_of(run.path());
        assert_eq!(first_of(run.path()), first);
        assert!(first >= FIRST && !is_one(first) && is_one(first + 1));
        assert!(is_one(first + COUNT - 1));
        assert_eq!(first_of(&run.path().join("missing")), FIRST);
        assert!(!is_one(0) && !is_one(FIRST) && !is_one(u32::MAX));
        if rustix::process::geteuid().is_root() {
            let other = FIRST + (RANGES - 1) * COUNT;
            std::os::unix::fs::chown(run.path(), None, Some(other)).unwrap();
            assert_eq!(first_of(run.path()), other);
        }
    }

    #[test]
    fn an_adopted_id_is_not_handed_out() {
        let all = Identities::new(1000, 3);
        let adopted = all.adopt(1001).unwrap();
        assert!(all.adopt(1001).is_none());
        assert!(all.adopt(1000).is_none());
        assert!(all.adopt(1003).is_none());
        assert!(all.adopt(5).is_none());
        let other = all.take().unwrap();
        assert_eq!(other.id(), 1002);
        assert!(all.take().is_none());
        drop(adopted);
        assert_eq!(all.take().unwrap().id(), 1001);
    }
}
