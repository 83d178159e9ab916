//! The resource limits of a jailed program.

use rustix::process::{Resource, Rlimit};

/// Resource limits (setrlimit(2)); soft and hard limits are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Descriptors.
    pub files: u64,
    /// Threads and processes of its user id.
    pub processes: u64,
    /// Bytes of the largest file it may write; a write beyond them fails with `EFBIG`.
    pub file_size: Option<u64>,
}

impl Limits {
    /// Resources and their bounds.
    pub(crate) fn all(&self) -> [(Resource, Rlimit); 7] {
        let bound = |most: Option<u64>| Rlimit {
            current: most,
            maximum: most,
        };
        [
            (Resource::Nofile, bound(Some(self.files))),
            (Resource::Nproc, bound(Some(self.processes))),
            (Resource::Fsize, bound(self.file_size)),
            // No core dumps: they would write a guest's memory to the disk.
            (Resource::Core, bound(Some(0))),
            (Resource::Msgqueue, bound(Some(0))),
            (Resource::Memlock, bound(Some(0))),
            (Resource::Sigpending, bound(Some(256))),
        ]
    }
}
