//! Memory with a descriptor, in small or huge pages.

use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::{self, File};
use std::io;

/// Size of the pages behind a memfd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    /// 4 KiB.
    Small,
    /// 2 MiB, from the host's pool of huge pages.
    Huge2M,
    /// 1 GiB, from the host's pool of huge pages.
    Huge1G,
}

impl Pages {
    /// Size of a page, bytes.
    pub fn bytes(self) -> u64 {
        match self {
            Pages::Small => 4 << 10,
            Pages::Huge2M => 2 << 20,
            Pages::Huge1G => 1 << 30,
        }
    }

    /// Number of huge pages of this size that are neither used nor reserved; `None` if the
    /// processor or the kernel has no pages of this size.
    pub fn free_in_pool(self) -> Option<u64> {
        let pool = format!(
            "/sys/kernel/mm/hugepages/hugepages-{}kB",
            self.bytes() >> 10
        );
        let count = |name: &str| -> Option<u64> {
            fs::read_to_string(format!("{pool}/{name}"))
                .ok()?
                .trim()
                .parse()
                .ok()
        };
        Some(count("free_hugepages")?.saturating_sub(count("resv_hugepages")?))
    }
}

/// Creates a memfd of `size` zero bytes, closed on exec. No page is allocated yet; huge pages are
/// reserved when it is mapped.
///
/// # Errors
///
/// If memfd_create(2) fails, such as for a size of pages that this host lacks, or if ftruncate(2)
/// fails: `InvalidInput` if `size` is not a multiple of the size of huge pages.
pub fn create(name: &str, size: u64, pages: Pages) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC
        | match pages {
            Pages::Small => MemfdFlags::ALLOW_SEALING,
            Pages::Huge2M => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
            Pages::Huge1G => MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
        };
    let file = File::from(memfd_create(name, flags)?);
    file.set_len(size)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_memfd_has_its_size_and_is_zero() {
        let file = create("test", 3 << 20, Pages::Small).unwrap();
        let meta = file.metadata().unwrap();
        assert_eq!(meta.len(), 3 << 20);
        assert_eq!(std::os::unix::fs::MetadataExt::blocks(&meta), 0);
    }
}
