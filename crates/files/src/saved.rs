//! The format of a captured session: which files the guest's kernel knows and has open, by their
//! paths below the folder.
//!
//! All numbers are little endian:
//!
//! | field | type |
//! |---|---|
//! | version, 1 | u32 |
//! | number of entries, number of lost handles | 2 × u32 |
//! | the next node's number, the last handle's number | 2 × u64 |
//! | numbers of handles whose file has no path | u64 each |
//! | entries | – |
//!
//! An entry is: 0 for a node or 1 for a handle, how many bytes of its path are those of the path
//! before it, how many follow, the kind of its file (`S_IFMT`), nanoseconds of its birth (5 × u32),
//! its inode number, seconds of its birth, the node's or handle's number, and the lookups of a node
//! or the flags of a handle (4 × u64), then the rest of the path. Entries are sorted by path, so that
//! files of one folder share its path.
//!
//! The bytes come out of a snapshot, which someone may have forged: [`Table::of`] checks all of them.

use crate::contents::{FOLDER, flags_again};
use crate::nodes::ROOT;
use crate::protocol::{Arguments, Outcome};
use crate::server::DESCRIPTORS_MAX;
use jiffy_wire::files::SESSION_MAX;
use rustix::fs::{FileType, OFlags, Statx, StatxFlags};
use rustix::io::Errno;
use std::collections::HashSet;
use std::ffi::{CStr, CString};
use thiserror::Error;

const VERSION: u32 = 1;
const NODE: u32 = 0;
const HANDLE: u32 = 1;
/// Longest path, bytes: the kernel opens none that is longer.
const PATH_LONGEST: usize = 4095;
const NAME_LONGEST: usize = 255;
/// Most entries and lost handles: of those that the server holds descriptors of, and as many that
/// were lost in earlier captures.
const FILES_MAX: u64 = 2 * DESCRIPTORS_MAX;
/// No guest counts so far, so numbers that are given later do not overflow.
const NUMBER_MAX: u64 = 1 << 62;

/// Why a saved session is refused.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// A later release has saved it.
    #[error("it has version {0}, this jiffy-files reads version {VERSION}")]
    Version(u32),
    /// It is no session.
    #[error("it is damaged: {0}")]
    Damaged(&'static str),
}

/// Identifies a file after a capture: its path may lead to another one by then. Device numbers are
/// not compared, because some file systems have others after each mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileId {
    kind: FileType,
    inode: u64,
    /// When it was made: seconds and nanoseconds; 0 if the file system does not know. An inode
    /// number alone may be used again.
    born: (u64, u32),
}

impl FileId {
    /// The facts that [`FileId::of`] needs besides the basic ones.
    pub const FACTS: StatxFlags = StatxFlags::BTIME;

    /// The identity of a file with these facts.
    pub fn of(facts: &Statx) -> FileId {
        let is_known = facts.stx_mask & StatxFlags::BTIME.bits() != 0;
        let born = facts.stx_btime;
        FileId {
            kind: crate::nodes::kind_of(facts),
            inode: facts.stx_ino,
            born: match is_known {
                true => (born.tv_sec.cast_unsigned(), born.tv_nsec),
                false => (0, 0),
            },
        }
    }
}

/// What the guest has of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Known {
    /// Its kernel knows it.
    Node {
        /// Its number.
        number: u64,
        /// How many answers named it since it was last forgotten.
        lookups: u64,
    },
    /// It is open.
    Handle {
        /// Its number.
        number: u64,
        /// Flags by which it can be opened again.
        flags: OFlags,
    },
}

/// A file of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its path below the folder; empty for the folder itself.
    pub path: CString,
    /// Which file had that path.
    pub file: FileId,
    /// What the guest has of it.
    pub known: Known,
}

/// A session to be saved.
#[derive(Debug, Default)]
pub struct Session {
    /// The next node's number.
    pub next_node: u64,
    /// The last handle's number.
    pub last_handle: u64,
    /// Handles whose file has no path.
    pub lost: Vec<u64>,
    /// All others, and the nodes that have a path.
    pub entries: Vec<Entry>,
}

impl Session {
    /// Its bytes.
    ///
    /// # Errors
    ///
    /// `EFBIG` if it has more files than a guest can have, or too many bytes.
    pub fn encode(mut self) -> Outcome<Vec<u8>> {
        if (self.entries.len() + self.lost.len()) as u64 > FILES_MAX {
            return Err(Errno::FBIG);
        }
        let order = |entry: &Entry| match entry.known {
            Known::Node { number, .. } => (NODE, number),
            Known::Handle { number, .. } => (HANDLE, number),
        };
        self.entries.sort_by(|one, other| {
            let by_path = one.path.cmp(&other.path);
            by_path.then_with(|| order(one).cmp(&order(other)))
        });
        self.lost.sort_unstable();
        let mut bytes = Vec::new();
        let put32 = |bytes: &mut Vec<u8>, number: u32| bytes.extend(number.to_le_bytes());
        let put64 = |bytes: &mut Vec<u8>, number: u64| bytes.extend(number.to_le_bytes());
        put32(&mut bytes, VERSION);
        put32(&mut bytes, self.entries.len() as u32);
        put32(&mut bytes, self.lost.len() as u32);
        put64(&mut bytes, self.next_node);
        put64(&mut bytes, self.last_handle);
        for number in &self.lost {
            put64(&mut bytes, *number);
        }
        let mut before: &[u8] = &[];
        for entry in &self.entries {
            let path = entry.path.as_bytes();
            let both = path.iter().zip(before);
            let shared = both.take_while(|(one, other)| one == other).count();
            let (kind, number, more) = match entry.known {
                Known::Node { number, lookups } => (NODE, number, lookups),
                Known::Handle { number, flags } => (HANDLE, number, flags.bits().into()),
            };
            let file = &entry.file;
            let words = [
                kind,
                shared as u32,
                (path.len() - shared) as u32,
                file.kind.as_raw_mode(),
                file.born.1,
            ];
            for word in words {
                put32(&mut bytes, word);
            }
            for word in [file.inode, file.born.0, number, more] {
                put64(&mut bytes, word);
            }
            bytes.extend(&path[shared..]);
            if bytes.len() > SESSION_MAX {
                return Err(Errno::FBIG);
            }
            before = path;
        }
        Ok(bytes)
    }
}

/// A saved session that was checked.
#[derive(Debug)]
pub struct Table<'a> {
    /// The next node's number.
    pub next_node: u64,
    /// The last handle's number.
    pub last_handle: u64,
    /// Handles whose file has no path.
    pub lost: Vec<u64>,
    count: u32,
    entries: Arguments<'a>,
}

impl<'a> Table<'a> {
    /// Checks a saved session.
    ///
    /// # Errors
    ///
    /// If it has another version, is cut short, or no server can have saved it so.
    pub fn of(bytes: &'a [u8]) -> Result<Table<'a>, Refused> {
        let cut = |_| Refused::Damaged("it is cut short");
        let mut fields = Arguments(bytes);
        let version = fields.u32().map_err(cut)?;
        if version != VERSION {
            return Err(Refused::Version(version));
        }
        let (count, lost) = (fields.u32().map_err(cut)?, fields.u32().map_err(cut)?);
        if u64::from(count) + u64::from(lost) > FILES_MAX {
            return Err(Refused::Damaged("it has more files than a guest can have"));
        }
        let next_node = fields.u64().map_err(cut)?;
        let last_handle = fields.u64().map_err(cut)?;
        if !(ROOT + 1..=NUMBER_MAX).contains(&next_node) || last_handle > NUMBER_MAX {
            return Err(Refused::Damaged("its numbers are not plausible"));
        }
        let lost = (0..lost).map(|_| fields.u64().map_err(cut));
        let table = Table {
            next_node,
            last_handle,
            lost: lost.collect::<Result<_, _>>()?,
            count,
            entries: fields,
        };
        table.check()?;
        Ok(table)
    }

    fn check(&self) -> Result<(), Refused> {
        let (mut nodes, mut handles) = (HashSet::new(), HashSet::new());
        let mut known = |known: Known| match known {
            Known::Node { number, .. } => {
                (ROOT + 1..self.next_node).contains(&number) && nodes.insert(number)
            }
            Known::Handle { number, .. } => {
                (1..=self.last_handle).contains(&number) && handles.insert(number)
            }
        };
        let lost = |number: &u64| Known::Handle {
            number: *number,
            flags: OFlags::empty(),
        };
        let mut is_plausible = self.lost.iter().map(lost).all(&mut known);
        self.walk(|entry| is_plausible &= known(entry.known))?;
        match is_plausible {
            true => Ok(()),
            false => Err(Refused::Damaged(
                "a number in it is not plausible, or there twice",
            )),
        }
    }

    /// Calls the function for each entry.
    pub fn each(&self, each: impl FnMut(&Entry)) {
        // It was checked.
        let _ = self.walk(each);
    }

    fn walk(&self, mut each: impl FnMut(&Entry)) -> Result<(), Refused> {
        let mut fields = self.entries;
        let mut path = Vec::new();
        for _ in 0..self.count {
            let entry = entry(&mut fields, &mut path);
            each(&entry.map_err(|_| Refused::Damaged("an entry is not valid"))?);
        }
        match fields.end() {
            Ok(()) => Ok(()),
            Err(_) => Err(Refused::Damaged("bytes are left over")),
        }
    }
}

/// The next entry; `path` is that of the entry before.
fn entry(fields: &mut Arguments<'_>, path: &mut Vec<u8>) -> Outcome<Entry> {
    let (what, shared, more) = (fields.u32()?, fields.u32()?, fields.u32()?);
    let kind = FileType::from_raw_mode(fields.u32()?);
    let nanoseconds = fields.u32()?;
    let inode = fields.u64()?;
    let born = (fields.u64()?, nanoseconds);
    let (number, extra) = (fields.u64()?, fields.u64()?);
    let (shared, rest) = (shared as usize, fields.bytes(more as usize)?);
    if shared > path.len() {
        return Err(Errno::INVAL);
    }
    path.truncate(shared);
    path.extend_from_slice(rest);
    check_path(path)?;
    let known = match what {
        NODE if path.is_empty() => return Err(Errno::INVAL),
        NODE => Known::Node {
            number,
            lookups: extra,
        },
        HANDLE => Known::Handle {
            number,
            flags: handle_flags(kind, u32::try_from(extra).map_err(|_| Errno::INVAL)?)?,
        },
        _ => return Err(Errno::INVAL),
    };
    Ok(Entry {
        path: CString::new(path.clone()).map_err(|_| Errno::INVAL)?,
        file: FileId { kind, inode, born },
        known,
    })
}

fn handle_flags(kind: FileType, raw: u32) -> Outcome<OFlags> {
    match kind {
        FileType::RegularFile => flags_again(raw),
        FileType::Directory if raw == FOLDER.bits() => Ok(FOLDER),
        _ => Err(Errno::INVAL),
    }
}

/// Refuses a path that does not consist of names.
fn check_path(path: &[u8]) -> Outcome<()> {
    let is_name =
        |name: &[u8]| (1..=NAME_LONGEST).contains(&name.len()) && name != b"." && name != b"..";
    let good = path.len() <= PATH_LONGEST
        && (path.is_empty() || path.split(|byte| *byte == b'/').all(is_name));
    match good {
        true => Ok(()),
        false => Err(Errno::INVAL),
    }
}

/// The path, if a saved session can have it.
pub fn path(bytes: Vec<u8>) -> Option<CString> {
    check_path(&bytes).ok()?;
    CString::new(bytes).ok()
}

/// The path of an entry, for messages.
pub fn shown(path: &CStr) -> std::borrow::Cow<'_, str> {
    path.to_string_lossy()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &CStr, kind: FileType, known: Known) -> Entry {
        let file = FileId {
            kind,
            inode: 0x0102,
            born: (3, 4),
        };
        Entry {
            path: path.to_owned(),
            file,
            known,
        }
    }

    fn session() -> Session {
        let node = |number| Known::Node { number, lookups: 7 };
        let handle = |number, flags| Known::Handle { number, flags };
        Session {
            next_node: 9,
            last_handle: 5,
            lost: vec![5, 2],
            entries: vec![
                entry(
                    c"a/c",
                    FileType::RegularFile,
                    handle(3, OFlags::RDWR | OFlags::APPEND),
                ),
                entry(c"a/c", FileType::RegularFile, node(8)),
                entry(c"", FileType::Directory, handle(1, FOLDER)),
                entry(c"a", FileType::Directory, node(2)),
            ],
        }
    }

    /// If this fails, sessions that were captured before can't be restored: a change needs a new
    /// version.
    #[test]
    fn the_format_does_not_drift() {
        let words = |words: &[u32]| words.iter().flat_map(|it| it.to_le_bytes()).collect();
        let expected: Vec<Vec<u8>> = vec![
            words(&[1, 4, 2, 9, 0, 5, 0]),
            words(&[2, 0, 5, 0]),
            words(&[1, 0, 0, 0o040_000, 4, 0x102, 0, 3, 0, 1, 0, 0o200_000, 0]),
            words(&[0, 0, 1, 0o040_000, 4, 0x102, 0, 3, 0, 2, 0, 7, 0]),
            b"a".to_vec(),
            words(&[0, 1, 2, 0o100_000, 4, 0x102, 0, 3, 0, 8, 0, 7, 0]),
            b"/c".to_vec(),
            words(&[1, 3, 0, 0o100_000, 4, 0x102, 0, 3, 0, 3, 0, 0o2002, 0]),
        ];
        assert_eq!(session().encode().unwrap(), expected.concat());
    }

    #[test]
    fn what_was_encoded_is_read() {
        let bytes = session().encode().unwrap();
        let table = Table::of(&bytes).unwrap();
        assert_eq!((table.next_node, table.last_handle), (9, 5));
        assert_eq!(table.lost, [2, 5]);
        let mut entries = Vec::new();
        table.each(|entry| entries.push(entry.clone()));
        let mut expected = session().entries;
        expected.rotate_right(2);
        expected.swap(2, 3);
        assert_eq!(entries, expected);
    }

    #[test]
    fn what_no_guest_can_have_is_refused() {
        let refused = |change: fn(&mut Session)| {
            let mut forged = session();
            change(&mut forged);
            Table::of(&forged.encode().unwrap()).unwrap_err()
        };
        refused(|it| it.lost.push(1));
        refused(|it| it.lost.push(6));
        refused(|it| it.entries.push(it.entries[1].clone()));
        refused(|it| it.next_node = u64::MAX);
        refused(|it| it.last_handle = u64::MAX);
        refused(|it| it.next_node = 8);
        refused(|it| {
            let flags = OFlags::RDWR | OFlags::CREATE;
            it.entries[0].known = Known::Handle { number: 3, flags };
        });
        refused(|it| it.entries[0].file.kind = FileType::Fifo);
        refused(|it| it.entries[2].known = it.entries[0].known);
        refused(|it| it.entries[0].path = CString::new("x".repeat(256)).unwrap());
        refused(|it| it.entries[0].path = CString::new("x/".repeat(2047) + "xxx").unwrap());
        // A number of entries that would not fit into memory.
        let mut many = session().encode().unwrap();
        many[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        let why = Table::of(&many).unwrap_err();
        assert!(why.to_string().contains("more files"), "{why}");
    }
}
