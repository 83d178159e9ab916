//! The limit of open files of this process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// Raises the limit of open files (RLIMIT_NOFILE, getrlimit(2)) to `wanted` if this process is
/// privileged, else to its hard limit. Returns the new limit. Programs started later inherit it.
pub fn raise_limit(wanted: u64) -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let enough = |limit: Option<u64>| limit.is_none_or(|limit| limit >= wanted);
    let targets = [
        limit.maximum.map(|maximum| maximum.max(wanted)),
        limit.maximum,
    ];
    for maximum in targets {
        if enough(limit.current) {
            break;
        }
        let raised = Rlimit {
            current: maximum,
            maximum,
        };
        if setrlimit(Resource::Nofile, raised).is_ok() {
            break;
        }
    }
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// The limit, if fewer than `reserve` descriptors are left below it. Judges by the number of the
/// newest descriptor, which was the lowest free one.
pub fn are_short(newest: BorrowedFd<'_>, reserve: u64) -> Option<u64> {
    let limit = getrlimit(Resource::Nofile).current?;
    let open = u64::try_from(newest.as_raw_fd()).unwrap_or(0);
    (open.saturating_add(reserve) >= limit).then_some(limit)
}

/// Duplicates a descriptor: the number is the first free one from `number` on, or from the last one
/// that the limit allows.
///
/// # Errors
///
/// If fcntl(2) fails: `EMFILE` if no such number is free.
pub fn with_number(descriptor: impl AsFd, number: RawFd) -> io::Result<OwnedFd> {
    let limit = getrlimit(Resource::Nofile).current;
    let last = limit.and_then(|limit| RawFd::try_from(limit.saturating_sub(1)).ok());
    let number = last.map_or(number, |last| number.min(last));
    Ok(rustix::io::fcntl_dupfd_cloexec(descriptor, number)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutex::lock;
    use std::sync::Mutex;

    /// Held by tests while the limit must stay as it is, and while they raise it.
    static LIMIT: Mutex<()> = Mutex::new(());

    #[test]
    fn the_newest_descriptor_gives_the_number_left() {
        let _same = lock(&LIMIT);
        let newest = std::fs::File::open("/").unwrap();
        let limit = getrlimit(Resource::Nofile).current.unwrap();
        assert_eq!(are_short(newest.as_fd(), 0), None);
        assert_eq!(are_short(newest.as_fd(), limit), Some(limit));
    }

    #[test]
    fn a_descriptor_gets_a_number_that_the_limit_allows() {
        let file = std::fs::File::open("/").unwrap();
        assert!(with_number(&file, 400).unwrap().as_raw_fd() >= 400);
        let last = with_number(&file, RawFd::MAX).unwrap().as_raw_fd();
        let limit = getrlimit(Resource::Nofile).current.unwrap();
        assert!((400..limit).contains(&(last as u64)), "{last} of {limit}");
    }

    #[test]
    fn the_descriptor_limit_is_raised_and_never_lowered() {
        let _only = lock(&LIMIT);
        let before = getrlimit(Resource::Nofile);
        let now = raise_limit(before.current.unwrap_or(1) + 1);
        assert!(before.current.is_none_or(|before| now >= before));
        assert_eq!(raise_limit(1), now, "less is no reason to lower it");
        if before.maximum != before.current {
            assert!(before.current.is_none_or(|before| now > before));
        }
    }
}
