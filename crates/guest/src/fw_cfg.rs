//! The host's files for this guest: QEMU's fw_cfg device, read through its ports (QEMU,
//! docs/specs/fw_cfg.rst).
//!
//! The kernel's driver is used only if ioperm(2) is missing. It shows names and sizes from the time
//! it was loaded, which are wrong in a restored guest.

use crate::files;
use crate::program::prepare::reason;
use crate::syscalls::ports::Ports;
use alloc::{format, string::String, vec, vec::Vec};
use core::ffi::CStr;
use rustix::io::Errno;

const SYSFS: &str = "/sys/firmware/qemu_fw_cfg/by_name";

const SELECTOR_PORT: u16 = 0x510;
const SELECTOR: u16 = 0;
const DATA: u16 = 1;
const KEY_SIGNATURE: u16 = 0x0000;
const KEY_DIRECTORY: u16 = 0x0019;
/// A directory entry: size (u32), key (u16), reserved (u16), all big endian,
/// and a name of 56 bytes, NUL-terminated.
const ENTRY: usize = 64;
const MOST_ENTRIES: usize = 4096;
/// Entries per read; each read is one VM exit, regardless of its length.
const ENTRIES_AT_ONCE: usize = 8;

/// Access to the files.
#[derive(Debug, Clone)]
pub struct FwCfg(Source);

#[derive(Debug, Clone)]
enum Source {
    Ports(Ports),
    /// The kernel's driver, for kernels without `ioperm`.
    Driver,
    /// Files below a folder, for an agent that is an ordinary process.
    Folder(String),
}

impl FwCfg {
    /// Opens the device through its ports or the kernel's driver.
    pub fn open() -> FwCfg {
        FwCfg(match Ports::open(SELECTOR_PORT, 2) {
            Some(ports) if is_there(&ports) => Source::Ports(ports),
            _ => Source::Driver,
        })
    }

    /// Files below a folder.
    pub fn folder(folder: &str) -> FwCfg {
        FwCfg(Source::Folder(folder.into()))
    }

    /// Whether it shows the host's current files instead of those at boot.
    pub fn is_current(&self) -> bool {
        !matches!(self.0, Source::Driver)
    }

    /// Reads a file of at most `limit` bytes; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// If the device can't be read, or the file is larger than `limit`.
    pub fn read(&self, name: &str, limit: usize) -> Result<Option<Vec<u8>>, String> {
        let [content] = self.read_each([(name, limit)])?;
        Ok(content)
    }

    /// Reads several files, each of at most so many bytes, with one read of the directory.
    ///
    /// # Errors
    ///
    /// If the device can't be read, or a file is larger than its limit.
    pub fn read_each<const N: usize>(
        &self,
        files: [(&str, usize); N],
    ) -> Result<[Option<Vec<u8>>; N], String> {
        let path = |folder: &str, name: &str| match self.0 {
            Source::Driver => format!("{folder}/{name}/raw"),
            _ => format!("{folder}/{name}"),
        };
        match &self.0 {
            Source::Ports(ports) => read_by_ports(ports, files),
            Source::Driver => read_below(SYSFS, files, path),
            Source::Folder(folder) => read_below(folder, files, path),
        }
    }
}

fn too_large(name: &str, limit: usize) -> String {
    format!("fw_cfg file {name} is over {limit} bytes")
}

fn read_below<const N: usize>(
    folder: &str,
    wanted: [(&str, usize); N],
    path: impl Fn(&str, &str) -> String,
) -> Result<[Option<Vec<u8>>; N], String> {
    let mut found = [const { None }; N];
    for (slot, (name, limit)) in found.iter_mut().zip(wanted) {
        *slot = match files::read(path(folder, name), limit) {
            Ok(bytes) => Some(bytes),
            Err(Errno::NOENT | Errno::NOTDIR) => None,
            Err(Errno::FBIG) => return Err(too_large(name, limit)),
            Err(error) => {
                return Err(format!(
                    "fw_cfg file {name} cannot be read: {}",
                    reason(error)
                ));
            }
        };
    }
    Ok(found)
}

fn is_there(ports: &Ports) -> bool {
    let mut signature = [0; 4];
    ports.write_word(SELECTOR, KEY_SIGNATURE);
    ports.read_bytes(DATA, &mut signature);
    signature == *b"QEMU"
}

fn read_by_ports<const N: usize>(
    ports: &Ports,
    wanted: [(&str, usize); N],
) -> Result<[Option<Vec<u8>>; N], String> {
    let places = find(wanted.map(|(name, _)| name), |first, bytes| {
        if first {
            ports.write_word(SELECTOR, KEY_DIRECTORY);
        }
        ports.read_bytes(DATA, bytes);
    });
    let mut found = [const { None }; N];
    for ((slot, place), (name, limit)) in found.iter_mut().zip(places).zip(wanted) {
        let Some(Place { size, key }) = place else {
            continue;
        };
        if size > limit {
            return Err(too_large(name, limit));
        }
        let mut bytes = vec![0; size];
        ports.write_word(SELECTOR, key);
        ports.read_bytes(DATA, &mut bytes);
        *slot = Some(bytes);
    }
    Ok(found)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    size: usize,
    key: u16,
}

/// Finds names in the directory. `read` fills a buffer with the next bytes, or with the first ones
/// if its first argument is true; past the end the device returns zeros.
fn find<const N: usize>(
    names: [&str; N],
    mut read: impl FnMut(bool, &mut [u8]),
) -> [Option<Place>; N] {
    let mut places = [None; N];
    let mut bytes = [0; 4 + ENTRIES_AT_ONCE * ENTRY];
    read(true, &mut bytes);
    let [c0, c1, c2, c3, ..] = bytes;
    let count = (u32::from_be_bytes([c0, c1, c2, c3]) as usize).min(MOST_ENTRIES);
    let mut entries = &mut bytes[4..];
    let mut seen = 0;
    loop {
        let now = (count - seen).min(ENTRIES_AT_ONCE);
        for entry in entries.as_chunks::<ENTRY>().0.iter().take(now) {
            for (place, name) in places.iter_mut().zip(names) {
                if place.is_none() {
                    *place = matching(entry, name);
                }
            }
        }
        seen += now;
        if seen == count || places.iter().all(Option::is_some) {
            return places;
        }
        entries = &mut bytes[4..];
        read(false, entries);
    }
}

/// The file of an entry, if it has this name.
fn matching(entry: &[u8; ENTRY], wanted: &str) -> Option<Place> {
    let (header, name) = entry.split_first_chunk::<8>()?;
    let wanted = wanted.as_bytes();
    // Compare the name first: most entries are other files.
    if name.get(..wanted.len())? != wanted {
        return None;
    }
    let name = CStr::from_bytes_until_nul(name).ok()?;
    let [s0, s1, s2, s3, k0, k1, ..] = *header;
    (name.to_bytes() == wanted).then(|| Place {
        size: u32::from_be_bytes([s0, s1, s2, s3]) as usize,
        key: u16::from_be_bytes([k0, k1]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn directory(names: &[&str]) -> Vec<u8> {
        let mut bytes = (names.len() as u32).to_be_bytes().to_vec();
        for (index, name) in names.iter().enumerate() {
            let mut entry = [0; ENTRY];
            entry[..4].copy_from_slice(&(100 + index as u32).to_be_bytes());
            entry[4..6].copy_from_slice(&(0x20 + index as u16).to_be_bytes());
            entry[8..8 + name.len()].copy_from_slice(name.as_bytes());
            bytes.extend(entry);
        }
        bytes
    }

    /// Reads like the device.
    fn reader(content: &[u8]) -> impl FnMut(bool, &mut [u8]) {
        let mut at = 0;
        move |first, bytes| {
            if first {
                at = 0;
            }
            for byte in bytes {
                *byte = content.get(at).copied().unwrap_or(0);
                at += 1;
            }
        }
    }

    #[test]
    fn fw_cfg_files_are_found_at_any_position() {
        let others: Vec<String> = (0..20).map(|n| format!("etc/other-{n}")).collect();
        for position in 0..=others.len() {
            let mut names: Vec<&str> = others.iter().map(String::as_str).collect();
            names.insert(position, "opt/a");
            names.insert(0, "opt/b");
            let [a, b, c] = find(["opt/a", "opt/b", "opt/c"], reader(&directory(&names)));
            assert_eq!(
                b,
                Some(Place {
                    size: 100,
                    key: 0x20
                })
            );
            let at = names.iter().position(|name| *name == "opt/a").unwrap();
            let place = Place {
                size: 100 + at,
                key: 0x20 + at as u16,
            };
            assert_eq!((a, c), (Some(place), None));
        }
    }

    #[test]
    fn an_entry_is_matched_by_its_whole_name() {
        let names = ["opt/jiffy/configuration", "opt/jiffy/conf"];
        assert_eq!(
            find(["opt/jiffy/config"], reader(&directory(&names))),
            [None]
        );
    }

    #[test]
    fn an_absurd_directory_count_is_bounded() {
        let mut read = 0;
        let places = find(["x"], |_, bytes| {
            bytes.fill(0xff);
            read += bytes.len();
        });
        assert_eq!(places, [None]);
        assert!(read < (MOST_ENTRIES + 2 * ENTRIES_AT_ONCE) * ENTRY);
    }

    #[test]
    fn a_folder_can_replace_the_fw_cfg_device() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a"), "12345").unwrap();
        let source = FwCfg::folder(folder.path().to_str().unwrap());
        let [a, b] = source.read_each([("a", 5), ("b", 5)]).unwrap();
        assert_eq!((a.as_deref(), b), (Some(&b"12345"[..]), None));
        assert!(source.read("a", 4).unwrap_err().contains("over 4 bytes"));
    }

    proptest! {
        #[test]
        fn any_fw_cfg_directory_is_searched_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let _ = find(["opt/jiffy/config", ""], reader(&bytes));
        }
    }
}
