//! Sends the changes of the root file system as a tar: the overlay's upper layer, with whiteouts
//! and opaque folders as in overlayfs.
//!
//! Runs in its own process while programs are frozen. The format is POSIX.1-2001 pax; extended
//! attributes are `SCHILY.xattr.NAME` records.

use super::copy_out::Pipe;
use crate::program::prepare::reason;
use alloc::collections::BTreeMap;
use alloc::{format, string::String, vec, vec::Vec};
use jiffy_wire::agent::CopyFrame;
use jiffy_wire::frame::MAX_DATA;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

/// Deepest tree that is sent; each level has one open descriptor.
const DEEPEST: usize = 256;
const BLOCK: usize = 512;
/// Longest list of attributes and longest value, bytes (linux/limits.h).
const XATTRS: usize = 64 * 1024;
/// Prefix of overlayfs's own attributes.
const OVERLAY: &[u8] = b"trusted.overlay.";
/// Marks an opaque folder: the lower layers' entries are hidden.
const OPAQUE: &[u8] = b"trusted.overlay.opaque";
/// Marks what overlayfs finds elsewhere, if the kernel's defaults let it: the contents of a folder
/// that was moved, and those of a file of which only attributes were changed.
const ELSEWHERE: [&[u8]; 2] = [b"trusted.overlay.redirect", b"trusted.overlay.metacopy"];
/// Largest number that fits in seven octal digits.
const MOST_ID: u32 = 0o7_777_777;
/// Largest number that fits in eleven octal digits.
const MOST_SIZE: u64 = 0o77_777_777_777;

/// Why it stopped: a sentence, or `None` if the peer is gone.
type Stop = Option<String>;

/// Sends the upper layer in this folder. Returns whether it was complete.
pub fn serve(pipe: &mut Pipe, upper: &OwnedFd) -> bool {
    let mut tar = Tar {
        pipe,
        kept: Vec::new(),
        links: BTreeMap::new(),
    };
    let result = tar.tree(upper).and_then(|()| tar.end());
    if let Err(Some(message)) = &result {
        let message = message.clone();
        let _ = pipe.send(&CopyFrame::Failed { message });
    }
    result.is_ok()
}

struct Tar<'a> {
    pipe: &'a mut Pipe,
    kept: Vec<u8>,
    /// The path under which a file with several names was sent, by device and inode.
    links: BTreeMap<(u64, u64), Vec<u8>>,
}

impl Tar<'_> {
    fn tree(&mut self, upper: &OwnedFd) -> Result<(), Stop> {
        let status = fs::fstat(upper).map_err(|error| failed(b"/", error))?;
        let mut entry = Entry::new(b"./", &status, b'5');
        entry.xattrs = xattrs(upper.as_fd(), b"/")?;
        self.header(&entry)?;
        self.children(upper, b"", 0)
    }

    fn children(&mut self, folder: &OwnedFd, path: &[u8], depth: usize) -> Result<(), Stop> {
        if depth >= DEEPEST {
            let shown = String::from_utf8_lossy(path);
            return Err(Some(format!(
                "/{shown} is more than {DEEPEST} folders deep"
            )));
        }
        for child in Dir::read_from(folder).map_err(|error| failed(path, error))? {
            let child = child.map_err(|error| failed(path, error))?;
            let name = child.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let mut below = path.to_vec();
            if !below.is_empty() {
                below.push(b'/');
            }
            below.extend_from_slice(name.to_bytes());
            self.entry(folder.as_fd(), name, &below, depth)?;
        }
        Ok(())
    }

    fn entry(
        &mut self,
        at: BorrowedFd<'_>,
        name: &core::ffi::CStr,
        path: &[u8],
        depth: usize,
    ) -> Result<(), Stop> {
        let status = fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW);
        let status = status.map_err(|error| failed(path, error))?;
        let kind = FileType::from_raw_mode(status.st_mode);
        if may_be_hard_link(&status) {
            let key = (status.st_dev, status.st_ino);
            if let Some(first) = self.links.get(&key).cloned() {
                let mut entry = Entry::new(path, &status, b'1');
                entry.link = first;
                return self.header(&entry);
            }
            self.links.insert(key, path.to_vec());
        }
        match kind {
            FileType::Directory => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let folder = fs::openat(at, name, flags, Mode::empty());
                let folder = folder.map_err(|error| failed(path, error))?;
                let mut entry = Entry::new(path, &status, b'5');
                entry.path.push(b'/');
                entry.xattrs = xattrs(folder.as_fd(), path)?;
                self.header(&entry)?;
                self.children(&folder, path, depth + 1)
            }
            FileType::RegularFile => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let file = fs::openat(at, name, flags, Mode::empty());
                let file = file.map_err(|error| failed(path, error))?;
                let mut entry = Entry::new(path, &status, b'0');
                entry.size = status.st_size as u64;
                entry.xattrs = xattrs(file.as_fd(), path)?;
                self.header(&entry)?;
                self.contents(&file, entry.size, path)
            }
            FileType::Symlink => {
                let target = fs::readlinkat(at, name, Vec::new());
                let mut entry = Entry::new(path, &status, b'2');
                entry.link = target
                    .map_err(|error| failed(path, error))?
                    .to_bytes()
                    .to_vec();
                self.header(&entry)
            }
            // A whiteout is a character device 0/0.
            FileType::CharacterDevice => self.header(&Entry::new(path, &status, b'3')),
            FileType::BlockDevice => self.header(&Entry::new(path, &status, b'4')),
            FileType::Fifo => self.header(&Entry::new(path, &status, b'6')),
            // Sockets are left out, because they are useless without their listener.
            _ => Ok(()),
        }
    }

    fn contents(&mut self, file: &OwnedFd, size: u64, path: &[u8]) -> Result<(), Stop> {
        let mut left = size;
        let mut piece = vec![0; MAX_DATA];
        while left > 0 {
            let limit = left.min(MAX_DATA as u64) as usize;
            match rustix::io::read(file, &mut piece[..limit]) {
                Ok(0) => {
                    let shown = String::from_utf8_lossy(path);
                    return Err(Some(format!("/{shown} became shorter while it was read")));
                }
                Ok(count) => {
                    left -= count as u64;
                    self.write(&piece[..count])?;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(failed(path, error)),
            }
        }
        self.pad(size)
    }

    /// Writes an entry's header, after a pax header with the values that do not fit into it.
    fn header(&mut self, entry: &Entry) -> Result<(), Stop> {
        let records = entry.records();
        if !records.is_empty() {
            let mut extended = Entry::plain(b"pax", b'x');
            extended.size = records.len() as u64;
            self.write(&extended.block())?;
            self.write(&records)?;
            self.pad(records.len() as u64)?;
        }
        self.write(&entry.block())
    }

    fn pad(&mut self, size: u64) -> Result<(), Stop> {
        let over = (size % BLOCK as u64) as usize;
        match over {
            0 => Ok(()),
            over => self.write(&[0; BLOCK][over..]),
        }
    }

    fn write(&mut self, mut bytes: &[u8]) -> Result<(), Stop> {
        while !bytes.is_empty() {
            let room = MAX_DATA - self.kept.len();
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.kept.extend_from_slice(now);
            bytes = later;
            if self.kept.len() == MAX_DATA {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Stop> {
        let data = core::mem::take(&mut self.kept);
        self.pipe.send(&CopyFrame::Data(data)).map_err(|_| None)
    }

    fn end(&mut self) -> Result<(), Stop> {
        self.write(&[0; 2 * BLOCK])?;
        if !self.kept.is_empty() {
            self.flush()?;
        }
        self.pipe.send(&CopyFrame::End).map_err(|_| None)
    }
}

/// Extended attributes: names and values.
type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// Values of a header.
struct Entry {
    path: Vec<u8>,
    link: Vec<u8>,
    kind: u8,
    mode: u32,
    uid: u32,
    gid: u32,
    size: u64,
    mtime: i64,
    device: (u32, u32),
    xattrs: Xattrs,
}

impl Entry {
    fn plain(path: &[u8], kind: u8) -> Entry {
        Entry {
            path: path.to_vec(),
            link: Vec::new(),
            kind,
            mode: 0o644,
            uid: 0,
            gid: 0,
            size: 0,
            mtime: 0,
            device: (0, 0),
            xattrs: Vec::new(),
        }
    }

    fn new(path: &[u8], status: &Stat, kind: u8) -> Entry {
        Entry {
            mode: status.st_mode & 0o7777,
            uid: status.st_uid,
            gid: status.st_gid,
            mtime: status.st_mtime,
            device: (fs::major(status.st_rdev), fs::minor(status.st_rdev)),
            ..Entry::plain(path, kind)
        }
    }

    /// pax records of the values that do not fit into the header.
    fn records(&self) -> Vec<u8> {
        let mut records = Vec::new();
        let mut add = |key: &[u8], value: &[u8]| {
            // "LENGTH KEY=VALUE\n"; LENGTH counts the whole record.
            let rest = key.len() + value.len() + 3;
            let mut length = rest + 1;
            while format!("{length}").len() + rest != length {
                length = format!("{length}").len() + rest;
            }
            records.extend_from_slice(format!("{length} ").as_bytes());
            records.extend_from_slice(key);
            records.push(b'=');
            records.extend_from_slice(value);
            records.push(b'\n');
        };
        if self.path.len() > 100 {
            add(b"path", &self.path);
        }
        if self.link.len() > 100 {
            add(b"linkpath", &self.link);
        }
        if self.size > MOST_SIZE {
            add(b"size", format!("{}", self.size).as_bytes());
        }
        if self.uid > MOST_ID {
            add(b"uid", format!("{}", self.uid).as_bytes());
        }
        if self.gid > MOST_ID {
            add(b"gid", format!("{}", self.gid).as_bytes());
        }
        if self.mtime < 0 || self.mtime as u64 > MOST_SIZE {
            add(b"mtime", format!("{}", self.mtime).as_bytes());
        }
        for (name, value) in &self.xattrs {
            let mut key = b"SCHILY.xattr.".to_vec();
            key.extend_from_slice(name);
            add(&key, value);
        }
        records
    }

    /// The ustar header (POSIX.1-1988).
    fn block(&self) -> [u8; BLOCK] {
        let mut block = [0; BLOCK];
        let text = |block: &mut [u8; BLOCK], at: usize, bytes: &[u8]| {
            let count = bytes.len().min(100);
            block[at..at + count].copy_from_slice(&bytes[..count]);
        };
        text(&mut block, 0, &self.path);
        octal(&mut block[100..108], self.mode.into());
        octal(&mut block[108..116], self.uid.min(MOST_ID).into());
        octal(&mut block[116..124], self.gid.min(MOST_ID).into());
        octal(&mut block[124..136], self.size.min(MOST_SIZE));
        octal(
            &mut block[136..148],
            self.mtime.clamp(0, MOST_SIZE as i64) as u64,
        );
        block[148..156].fill(b' ');
        block[156] = self.kind;
        text(&mut block, 157, &self.link);
        block[257..265].copy_from_slice(b"ustar\x0000");
        octal(&mut block[329..337], self.device.0.into());
        octal(&mut block[337..345], self.device.1.into());
        let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
        octal(&mut block[148..155], sum);
        block
    }
}

/// Writes a number as octal digits with a final zero.
fn octal(field: &mut [u8], mut number: u64) {
    let Some((last, digits)) = field.split_last_mut() else {
        return;
    };
    *last = 0;
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (number & 7) as u8;
        number >>= 3;
    }
}

/// Whether an entry may be a hard link. Each whiteout hides its own name, but overlayfs makes them
/// links to one inode. Sockets are left out, so that nothing can link to them.
fn may_be_hard_link(status: &Stat) -> bool {
    let kind = FileType::from_raw_mode(status.st_mode);
    let is_whiteout = kind == FileType::CharacterDevice && status.st_rdev == 0;
    let can_be_linked = !is_whiteout && !matches!(kind, FileType::Directory | FileType::Socket);
    can_be_linked && status.st_nlink > 1
}

/// The extended attributes of a file or folder, without those internal to overlayfs.
fn xattrs(file: BorrowedFd<'_>, path: &[u8]) -> Result<Xattrs, Stop> {
    let mut names = vec![0; XATTRS];
    let count = match fs::flistxattr(file, &mut names[..]) {
        Ok(count) => count,
        Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
        Err(error) => return Err(failed(path, error)),
    };
    let mut found = Vec::new();
    let mut value = Vec::new();
    for name in names[..count].split(|byte| *byte == 0) {
        if ELSEWHERE.contains(&name) {
            let shown = String::from_utf8_lossy(path);
            return Err(Some(format!(
                "/{shown} has its contents in another layer: the guest's kernel must have \
                 redirect_dir and metacopy of overlayfs off by default"
            )));
        }
        if name.is_empty() || (name.starts_with(OVERLAY) && name != OPAQUE) {
            continue;
        }
        value.resize(XATTRS, 0);
        match fs::fgetxattr(file, name, &mut value[..]) {
            Ok(length) => found.push((name.to_vec(), value[..length].to_vec())),
            Err(Errno::NODATA) => {}
            Err(error) => return Err(failed(path, error)),
        }
    }
    Ok(found)
}

fn failed(path: &[u8], error: Errno) -> Stop {
    let shown = String::from_utf8_lossy(path);
    Some(format!("/{shown}: {}", reason(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_readable_by_the_tar_crate() {
        let mut entry = Entry::plain(b"etc/name", b'0');
        entry.size = 5;
        entry.uid = 1000;
        let mut archive = entry.block().to_vec();
        archive.extend_from_slice(b"hello");
        archive.resize(2 * BLOCK, 0);
        archive.resize(4 * BLOCK, 0);
        let mut read = tar::Archive::new(&archive[..]);
        let read = read.entries().unwrap().next().unwrap().unwrap();
        assert_eq!(read.path().unwrap().to_str(), Some("etc/name"));
        assert_eq!((read.size(), read.header().uid().unwrap()), (5, 1000));
    }

    #[test]
    fn whiteouts_that_share_an_inode_are_no_hard_links() {
        let mut device = fs::stat("/dev/null").unwrap();
        device.st_nlink = 2;
        assert!(may_be_hard_link(&device));
        let mut whiteout = device;
        whiteout.st_rdev = 0;
        assert!(!may_be_hard_link(&whiteout));
        device.st_nlink = 1;
        assert!(!may_be_hard_link(&device));
        let mut folder = fs::stat("/").unwrap();
        folder.st_nlink = 2;
        assert!(!may_be_hard_link(&folder));
    }

    #[test]
    fn long_paths_and_xattrs_become_pax_records() {
        let mut entry = Entry::plain(&[b'a'; 101], b'0');
        entry.xattrs = vec![(b"user.x".to_vec(), b"1\n2".to_vec())];
        let records = entry.records();
        let text = String::from_utf8(records).unwrap();
        assert_eq!(
            text,
            format!(
                "111 path={}\n27 SCHILY.xattr.user.x=1\n2\n",
                "a".repeat(101)
            )
        );
        assert!(Entry::plain(b"short", b'0').records().is_empty());
    }
}
