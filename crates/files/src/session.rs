//! `INIT`: the version and what both sides may use.

use crate::folder::Folder;
use crate::protocol::{Answer, Arguments, Outcome};
use jiffy_wire::files::DATA_MAX;
use rustix::io::Errno;

/// The version of the protocol that the server speaks.
const MAJOR: u32 = 7;
const MINOR: u32 = 41;
/// The first version with virtio-fs.
const OLDEST_MINOR: u32 = 31;

// What the server can do. `FUSE_MAX_PAGES` is not among it, so that a request has at most
// `DATA_MAX` bytes of data; neither are the host's locks, nor its access control lists.
const ASYNC_READ: u32 = 1 << 0;
const ATOMIC_TRUNCATE: u32 = 1 << 3;
const BIG_WRITES: u32 = 1 << 5;
/// The guest drops cached data if the file's time or size has changed.
const INVALIDATE_DATA: u32 = 1 << 12;
const READDIRPLUS: u32 = 1 << 13;
const READDIRPLUS_AUTO: u32 = 1 << 14;
const ASYNC_DIRECT: u32 = 1 << 15;
const PARALLEL_LOOKUPS: u32 = 1 << 18;
const OFFERED: u32 = ASYNC_READ
    | ATOMIC_TRUNCATE
    | BIG_WRITES
    | INVALIDATE_DATA
    | READDIRPLUS
    | READDIRPLUS_AUTO
    | ASYNC_DIRECT
    | PARALLEL_LOOKUPS;

/// Most requests that the guest sends in advance, and the number at which it slows down.
const BACKGROUND: u16 = 64;
const CONGESTED: u16 = 48;

impl Folder {
    /// `INIT`: a new session. Nodes and handles of an earlier one are dropped.
    ///
    /// # Errors
    ///
    /// `EPROTO` if the guest's protocol is too old, `EINVAL` if the message is malformed.
    pub fn answer_init(&self, mut arguments: Arguments<'_>, answer: &mut Answer) -> Outcome<()> {
        let (major, minor) = (arguments.u32()?, arguments.u32()?);
        let (readahead, flags) = (arguments.u32()?, arguments.u32()?);
        if major < MAJOR || (major == MAJOR && minor < OLDEST_MINOR) {
            return Err(Errno::PROTO);
        }
        self.clear();
        answer.put_u32(MAJOR)?;
        answer.put_u32(MINOR)?;
        if major > MAJOR {
            // The guest begins again with this version.
            return answer.put(&[0; 56]);
        }
        answer.put_u32(readahead.min(DATA_MAX as u32))?;
        answer.put_u32(flags & OFFERED)?;
        answer.put(&BACKGROUND.to_ne_bytes())?;
        answer.put(&CONGESTED.to_ne_bytes())?;
        answer.put_u32(DATA_MAX as u32)?;
        // Granularity of times, nanoseconds.
        answer.put_u32(1)?;
        // Fields of later versions.
        answer.put(&[0; 36])
    }
}
