//! Pages that a VM gave up. They must read as zero from then on, also after another pager has taken
//! over. So they are noted in a file beside the VM's socket, which is valid for one VMM process
//! only.

use crate::bitmap::Bitmap;
use crate::handshake::Layout;
use jiffy_sys::log_limit::LogLimit;
use jiffy_sys::{clock, durable};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::OnceLock;

const PAGE: u64 = 4 << 10;
const MAGIC: &[u8; 8] = b"JFYGONE\x01";
/// The offset of the bits, behind the magic and the owner.
const BITS_AT: u64 = 256;

/// Pages that were given up, by their offset in the image.
#[derive(Debug, Default)]
pub struct Removed {
    pages: u64,
    bits: OnceLock<Bitmap>,
    file: Option<File>,
}

impl Removed {
    /// None so far, and not backed by a file.
    pub fn new(layout: &Layout) -> Removed {
        Removed {
            pages: layout.end() / PAGE,
            bits: OnceLock::new(),
            file: None,
        }
    }

    /// Continues with the file at `path` if it was written for this process and these mappings;
    /// otherwise begins a new one.
    ///
    /// # Errors
    ///
    /// If the file can't be removed, created or written.
    pub fn open(layout: &Layout, path: &Path, owner: &Owner) -> io::Result<Removed> {
        let header = owner.header(layout);
        let mut removed = Removed::new(layout);
        if let Some(bits) = read(path, &header, removed.pages) {
            let bitmap = Bitmap::new(removed.pages);
            bitmap.merge(&bits);
            let _ = removed.bits.set(bitmap);
            removed.file = Some(OpenOptions::new().write(true).open(path)?);
            return Ok(removed);
        }
        durable::remove(path)?;
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)?;
        file.write_all_at(&header, 0)?;
        removed.file = Some(file);
        Ok(removed)
    }

    pub(super) fn add(&self, range: Range<u64>, log: &LogLimit) {
        let pages = range.start / PAGE..range.end.div_ceil(PAGE).min(self.pages);
        if pages.is_empty() {
            return;
        }
        let bits = self.bits.get_or_init(|| Bitmap::new(self.pages));
        bits.set_range(pages.clone());
        if let Some(file) = &self.file {
            let (at, bytes) = bits.bytes_of(pages);
            if let Err(error) = file.write_all_at(&bytes, BITS_AT + at)
                && log.admits()
            {
                tracing::warn!(%error, "pages that a VM released can't be saved for the next pager");
            }
        }
    }

    /// Whether the page at this offset was given up.
    pub(super) fn contains(&self, offset: u64) -> bool {
        self.bits.get().is_some_and(|bits| bits.get(offset / PAGE))
    }

    /// The end of the run of pages from `offset` that are all given up, or all not given up; at
    /// most `limit`.
    pub(super) fn run_end(&self, offset: u64, limit: u64) -> u64 {
        match self.bits.get() {
            None => limit,
            Some(bits) => (bits.run_end(offset / PAGE, limit.div_ceil(PAGE)) * PAGE).min(limit),
        }
    }
}

/// A VMM's process, identified so that a later process with the same id differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    pid: u32,
    started: u64,
    boot: String,
}

impl Owner {
    /// The process that has this id now; `None` if `/proc` does not tell.
    pub fn of(pid: u32) -> Option<Owner> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // Field 22 (starttime), counted from behind the name, which may contain anything.
        let started = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?;
        Some(Owner {
            pid,
            started: started.parse().ok()?,
            boot: clock::boot_id().ok()?,
        })
    }

    fn header(&self, layout: &Layout) -> Vec<u8> {
        let mut header = MAGIC.to_vec();
        header.extend(self.pid.to_le_bytes());
        header.extend(self.started.to_le_bytes());
        header.extend(layout.end().to_le_bytes());
        header.extend(layout.regions()[0].address.to_le_bytes());
        header.extend(self.boot.bytes().take(64));
        header.resize(BITS_AT as usize, 0);
        header
    }
}

/// The bits of a file with this header; `None` if the header differs.
fn read(path: &Path, header: &[u8], pages: u64) -> Option<Vec<u8>> {
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
        .open(path)
        .ok()?;
    let mut found = vec![0; header.len()];
    file.read_exact(&mut found).ok()?;
    if found != header {
        return None;
    }
    let mut bits = Vec::new();
    let most = pages.div_ceil(64) * 8;
    file.take(most).read_to_end(&mut bits).ok()?;
    bits.resize(bits.len().next_multiple_of(8), 0);
    Some(bits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_wire::pager::Mapping;

    fn layout(address: u64) -> Layout {
        let mapping = Mapping {
            base_host_virt_addr: address,
            size: 4 << 20,
            offset: 0,
            page_size: PAGE,
            page_size_kib: 0,
        };
        Layout::new(&[mapping], 4 << 20).unwrap()
    }

    #[test]
    fn removed_pages_are_known_to_a_successor_of_the_same_vm_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vm.removed");
        let owner = Owner::of(std::process::id()).unwrap();
        let layout_here = layout(1 << 30);
        let removed = Removed::open(&layout_here, &path, &owner).unwrap();
        removed.add(PAGE..3 * PAGE, &LogLimit::new());
        removed.add(1000 * PAGE..1001 * PAGE, &LogLimit::new());
        drop(removed);

        let again = Removed::open(&layout_here, &path, &owner).unwrap();
        assert!(!again.contains(0));
        assert!(again.contains(PAGE) && again.contains(2 * PAGE) && again.contains(1000 * PAGE));
        assert!(!again.contains(3 * PAGE));
        assert_eq!(again.run_end(0, 8 * PAGE), PAGE);
        assert_eq!(again.run_end(PAGE, 8 * PAGE), 3 * PAGE);
        again.add(5 * PAGE..6 * PAGE, &LogLimit::new());
        drop(again);
        assert!(
            Removed::open(&layout_here, &path, &owner)
                .unwrap()
                .contains(5 * PAGE)
        );

        let stranger = Owner {
            started: owner.started + 1,
            ..owner.clone()
        };
        assert!(
            !Removed::open(&layout_here, &path, &stranger)
                .unwrap()
                .contains(PAGE)
        );
        // The stranger has begun it anew.
        assert!(
            !Removed::open(&layout_here, &path, &owner)
                .unwrap()
                .contains(PAGE)
        );
        assert!(
            !Removed::open(&layout(1 << 31), &path, &owner)
                .unwrap()
                .contains(PAGE)
        );
    }

    #[test]
    fn a_damaged_or_foreign_removal_file_is_recreated() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vm.removed");
        fs::write(&path, b"something else").unwrap();
        let owner = Owner::of(std::process::id()).unwrap();
        let removed = Removed::open(&layout(1 << 30), &path, &owner).unwrap();
        assert!(!removed.contains(0));
        fs::remove_file(&path).unwrap();
        let elsewhere = folder.path().join("elsewhere");
        fs::write(&elsewhere, b"kept").unwrap();
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        Removed::open(&layout(1 << 30), &path, &owner).unwrap();
        assert_eq!(fs::read(&elsewhere).unwrap(), b"kept");
    }
}
