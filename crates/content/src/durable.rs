//! The node's own files: JSON in an envelope with a format's name, a version
//! and a checksum, replaced whole or not at all.
//!
//! ```json
//! {"format":"jiffy-vm","version":1,"crc32c":"1c291ca3","content":{…}}
//! ```
//!
//! The checksum is CRC-32C over the exact bytes of `content`.

use jiffy_sys::durable::{is_full, remove_any};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::value::RawValue;
use std::fs;
use std::io;
use std::path::Path;
use tempfile::TempDir;
use thiserror::Error;

/// Largest file of this kind that is read, bytes.
const MOST: u64 = 64 << 20;

/// Why a file was not read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file can't be read.
    #[error("the file can't be read")]
    Io(#[source] io::Error),
    /// The file has no bytes: the host stopped before a file that was not synced reached the
    /// disk.
    #[error("the file is empty")]
    Empty,
    /// No envelope.
    #[error("the file is damaged")]
    Malformed(#[source] serde_json::Error),
    /// An envelope of something else.
    #[error("the file is a {found:?}, not a {expected:?}")]
    OtherFormat {
        /// What was found.
        found: String,
        /// What was looked for.
        expected: &'static str,
    },
    /// The file was written by another release of Jiffy.
    #[error("the file has version {found}; this jiffyd reads version {expected}")]
    OtherVersion {
        /// What was found.
        found: u32,
        /// The version that is read, the newest if there are several.
        expected: u32,
    },
    /// The content isn't what was written.
    #[error("the file's checksum is wrong")]
    Checksum,
}

impl LoadError {
    /// Whether a newer release wrote the file: it is then not damaged, and must be kept for that
    /// release.
    pub fn is_newer(&self) -> bool {
        matches!(self, LoadError::OtherVersion { found, expected } if found > expected)
    }
}

/// Checks that a file exists and is not empty, without reading it.
///
/// # Errors
///
/// If the file is missing, empty, not a regular one, or can't be looked at: a sentence without its
/// full stop.
pub fn check_not_empty(path: &Path) -> Result<(), String> {
    let shown = path.display();
    match jiffy_sys::regular::look(path) {
        Ok(data) if data.len() == 0 => Err(format!("{shown} is empty")),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(format!("{shown} is missing")),
        Err(error) => Err(format!("{shown} can't be read: {error}")),
    }
}

/// What was moved away to be removed: it is when this is dropped.
#[derive(Debug)]
pub struct Aside(Option<TempDir>);

impl Aside {
    /// Removes it now.
    ///
    /// # Errors
    ///
    /// If its contents can't be removed.
    pub fn close(self) -> io::Result<()> {
        self.0.map_or(Ok(()), TempDir::close)
    }
}

/// Moves `path` into a new temporary folder beside it: `path` is free at once, and its contents
/// are removed with the folder. A starting daemon removes such folders. If the disk has no room for the
/// folder, `path` is removed where it is: what is removed to free space must not need some.
///
/// # Errors
///
/// If the folder can't be made, or `path` can't be renamed or removed.
pub fn set_aside(path: &Path) -> io::Result<Aside> {
    match moved_aside(path) {
        Ok(gone) => Ok(Aside(Some(gone))),
        Err(error) if is_full(&error) => remove_any(path).map(|()| Aside(None)),
        Err(error) => Err(error),
    }
}

fn moved_aside(path: &Path) -> io::Result<TempDir> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    let gone = tempfile::Builder::new()
        .prefix(".gone-")
        .tempdir_in(parent)?;
    fs::rename(path, gone.path().join("it"))?;
    Ok(gone)
}

/// Whether anything has this path, even a dangling symbolic link.
pub fn is_taken(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

#[derive(Serialize, Deserialize)]
struct Envelope<'a> {
    format: &'a str,
    version: u32,
    crc32c: &'a str,
    #[serde(borrow)]
    content: &'a RawValue,
}

/// Writes `content` to `path`. Without `sync` a crash of the host may leave
/// an empty file, but a crash of the daemon never does.
///
/// # Errors
///
/// If `content` can't be written as JSON, or the file can't be written, synced or renamed.
pub fn save<T: Serialize>(
    path: &Path,
    format: &'static str,
    version: u32,
    content: &T,
    sync: bool,
) -> io::Result<()> {
    let content = serde_json::value::to_raw_value(content)?;
    let crc32c = format!("{:08x}", crc_fast::crc32_iscsi(content.get().as_bytes()));
    let bytes = serde_json::to_vec(&Envelope {
        format,
        version,
        crc32c: &crc32c,
        content: &content,
    })?;
    if sync {
        return jiffy_sys::durable::replace(path, &bytes);
    }
    let temporary = path.with_extension("tmp");
    fs::write(&temporary, &bytes)
        .and_then(|()| fs::rename(&temporary, path))
        .inspect_err(|_| {
            let _ = fs::remove_file(&temporary);
        })
}

/// Reads what [`save`] wrote.
///
/// # Errors
///
/// If the file can't be read, is empty or damaged, or is of another format or version.
pub fn load<T: DeserializeOwned>(
    path: &Path,
    format: &'static str,
    version: u32,
) -> Result<T, LoadError> {
    load_with(path, format, version, |found, content| {
        (found == version).then(|| serde_json::from_str(content))
    })
}

/// As [`load`], for versions up to `newest`: `parse` gets the version and the content, and
/// returns `None` for a version that it does not know.
///
/// # Errors
///
/// As for [`load`], or if `parse` fails.
pub fn load_with<T>(
    path: &Path,
    format: &'static str,
    newest: u32,
    parse: impl Fn(u32, &str) -> Option<serde_json::Result<T>>,
) -> Result<T, LoadError> {
    let bytes = jiffy_sys::regular::read(path, MOST).map_err(LoadError::Io)?;
    if bytes.is_empty() {
        return Err(LoadError::Empty);
    }
    if let Some((version, content)) = as_saved(&bytes, format)
        && let Some(parsed) = parse(version, content)
    {
        return parsed.map_err(LoadError::Malformed);
    }
    let envelope: Envelope<'_> = serde_json::from_slice(&bytes).map_err(LoadError::Malformed)?;
    if envelope.format != format {
        return Err(LoadError::OtherFormat {
            found: envelope.format.chars().take(32).collect(),
            expected: format,
        });
    }
    let content = envelope.content.get();
    let sum = u32::from_str_radix(envelope.crc32c, 16);
    let whole = sum == Ok(crc_fast::crc32_iscsi(content.as_bytes()));
    let known = match whole {
        true => parse(envelope.version, content),
        // A file of another version is reported as such even if its checksum is wrong.
        false if envelope.version > newest => None,
        false => return Err(LoadError::Checksum),
    };
    match known {
        Some(parsed) => parsed.map_err(LoadError::Malformed),
        None => Err(LoadError::OtherVersion {
            found: envelope.version,
            expected: newest,
        }),
    }
}

/// The version and the content of a whole file of this format that is laid out as [`save`] does: found
/// without parsing the content, which would take as long as reading it.
fn as_saved<'a>(bytes: &'a [u8], format: &str) -> Option<(u32, &'a str)> {
    let rest = bytes.strip_prefix(b"{\"format\":\"")?;
    let rest = rest.strip_prefix(format.as_bytes())?;
    let rest = rest.strip_prefix(b"\",\"version\":")?;
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (version, rest) = rest.split_at_checked(digits)?;
    let rest = rest.strip_prefix(b",\"crc32c\":\"")?;
    let (sum, rest) = rest.split_at_checked(8)?;
    let content = rest.strip_prefix(b"\",\"content\":")?.strip_suffix(b"}")?;
    let text = |bytes| std::str::from_utf8(bytes).ok();
    let sum = u32::from_str_radix(text(sum)?, 16).ok()?;
    if sum != crc_fast::crc32_iscsi(content) {
        return None;
    }
    Some((text(version)?.parse().ok()?, text(content)?))
}

/// A few fields of a file's content, whatever its version, if they are there.
pub fn peek<T: DeserializeOwned>(path: &Path, format: &'static str) -> Option<T> {
    let bytes = jiffy_sys::regular::read(path, MOST).ok()?;
    let envelope: Envelope<'_> = serde_json::from_slice(&bytes).ok()?;
    (envelope.format == format).then_some(())?;
    serde_json::from_str(envelope.content.get()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_content_is_loaded_and_each_kind_of_damage_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("thing.json");
        for sync in [false, true] {
            save(&path, "thing", 1, &vec![1, 2, 3], sync).unwrap();
            let read: Vec<i32> = load(&path, "thing", 1).unwrap();
            assert_eq!(read, [1, 2, 3]);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let laid_out_otherwise = fs::read_to_string(&path).unwrap().replace(":", ": ");
        assert!(as_saved(&fs::read(&path).unwrap(), "thing").is_some());
        assert!(as_saved(laid_out_otherwise.as_bytes(), "thing").is_none());
        fs::write(&path, laid_out_otherwise).unwrap();
        assert_eq!(load::<Vec<i32>>(&path, "thing", 1).unwrap(), [1, 2, 3]);
        save(&path, "thing", 1, &vec![1, 2, 3], true).unwrap();
        let read = |format, version| load::<Vec<i32>>(&path, format, version).unwrap_err();
        assert!(matches!(read("other", 1), LoadError::OtherFormat { .. }));
        assert!(!read("thing", 2).is_newer());
        assert!(read("thing", 0).is_newer());
        let good = fs::read_to_string(&path).unwrap();
        fs::write(&path, good.replace("[1,2,3]", "[1,2,4]")).unwrap();
        assert!(matches!(read("thing", 1), LoadError::Checksum));
        fs::write(&path, &good[..good.len() - 3]).unwrap();
        assert!(matches!(read("thing", 1), LoadError::Malformed(_)));
        fs::write(&path, "").unwrap();
        assert!(matches!(read("thing", 1), LoadError::Empty));
        fs::remove_file(&path).unwrap();
        assert!(matches!(read("thing", 1), LoadError::Io(_)));
    }
}
