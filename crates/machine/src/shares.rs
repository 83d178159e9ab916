//! Folders of the host that the machine shares, so that VMs in it can share them or folders below
//! them.

use crate::error::MachineError;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Most folders that a machine shares.
pub const MOST: usize = 8;
/// The folder of the shares in the machine: the folder `/a` of the host is `/host/a`.
pub const ROOT: &str = "/host";
/// Prefix of the names of virtio-serial ports; a share's number follows.
const PORT: &str = "org.jiffy.share.";

/// A shared folder of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Share {
    /// Its absolute path, without symbolic links.
    pub path: String,
    /// Whether the machine may only read it.
    #[serde(default)]
    pub read_only: bool,
}

impl Share {
    /// The folder at this path, which may be relative and contain links.
    ///
    /// # Errors
    ///
    /// If it does not exist, is no folder, or its path is not UTF-8.
    pub fn of(path: &Path, read_only: bool) -> Result<Share, MachineError> {
        let refused =
            |why: &str| MachineError::Options(format!("{} can't be shared: {why}", path.display()));
        let found = path
            .canonicalize()
            .map_err(|error| refused(&reason(&error)))?;
        if !found.is_dir() {
            return Err(refused("it is not a folder"));
        }
        let path = found.into_os_string().into_string();
        Ok(Share {
            path: path.map_err(|_| refused("its path is not UTF-8"))?,
            read_only,
        })
    }

    /// Its path in the machine.
    pub fn mount_point(&self) -> PathBuf {
        in_machine(Path::new(&self.path))
    }
}

fn reason(error: &std::io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::NOENT) => "it does not exist".into(),
        Some(Errno::NOTDIR) => "a part of its path is not a folder".into(),
        Some(Errno::ACCESS) => "you may not read a folder above it".into(),
        _ => error.to_string(),
    }
}

/// The path in the machine of a path of the host, if it is shared.
pub fn in_machine(path: &Path) -> PathBuf {
    Path::new(ROOT).join(path.strip_prefix("/").unwrap_or(path))
}

/// The innermost share that contains this path of the host, which must be absolute and without links.
pub fn holder<'a>(shares: &'a [Share], path: &Path) -> Option<&'a Share> {
    shares
        .iter()
        .filter(|share| path.starts_with(&share.path))
        .max_by_key(|share| share.path.len())
}

/// Checks a list of shares.
///
/// # Errors
///
/// If there are more than [`MOST`], a folder is shared twice, or a path is not absolute.
pub fn check(shares: &[Share]) -> Result<(), MachineError> {
    if shares.len() > MOST {
        return Err(MachineError::Options(format!(
            "the machine can share at most {MOST} folders, not {}",
            shares.len()
        )));
    }
    for (at, share) in shares.iter().enumerate() {
        if shares[..at].iter().any(|other| other.path == share.path) {
            return Err(MachineError::Options(format!(
                "{} can't be shared twice",
                share.path
            )));
        }
        if !share.path.starts_with('/') {
            return Err(MachineError::Options(format!(
                "'{}' can't be shared: it is not an absolute path",
                share.path
            )));
        }
    }
    Ok(())
}

/// Name of the virtio-serial port of the share of this number.
pub fn port(number: usize) -> String {
    format!("{PORT}{number}")
}

/// As the agent's argument: `rw:/a` or `ro:/a`.
impl fmt::Display for Share {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let access = if self.read_only { "ro" } else { "rw" };
        write!(out, "{access}:{}", self.path)
    }
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Share, String> {
        let read_only = match text.split_once(':') {
            Some(("rw", _)) => false,
            Some(("ro", _)) => true,
            _ => return Err(format!("'{text}' does not begin with rw: or ro:")),
        };
        Ok(Share {
            path: text[3..].to_owned(),
            read_only,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(path: &str, read_only: bool) -> Share {
        Share {
            path: path.into(),
            read_only,
        }
    }

    #[test]
    fn a_path_below_a_share_is_found_in_the_innermost() {
        let shares = [
            share("/a", false),
            share("/a/b", true),
            share("/other", false),
        ];
        let holder = |path: &str| holder(&shares, Path::new(path)).map(|one| one.path.as_str());
        assert_eq!(holder("/a"), Some("/a"));
        assert_eq!(holder("/a/x"), Some("/a"));
        assert_eq!(holder("/a/b/c"), Some("/a/b"));
        assert_eq!(holder("/ab"), None);
        assert_eq!(holder("/"), None);
        assert_eq!(in_machine(Path::new("/a/x")), Path::new("/host/a/x"));
        let all = [share("/", true)];
        assert!(super::holder(&all, Path::new("/x")).is_some());
        assert_eq!(all[0].mount_point(), Path::new("/host"));
    }

    #[test]
    fn a_folder_gets_its_real_path_and_others_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let real = folder.path().canonicalize().unwrap();
        let at = |name: &str| real.join(name);
        std::fs::create_dir(at("a")).unwrap();
        std::fs::write(at("file"), "").unwrap();
        std::os::unix::fs::symlink("a", at("link")).unwrap();
        let found = Share::of(&at("link/../link"), true).unwrap();
        assert_eq!(found, share(at("a").to_str().unwrap(), true));
        for (name, why) in [
            ("none", "does not exist"),
            ("file", "not a folder"),
            ("file/x", "not a folder"),
        ] {
            let error = Share::of(&at(name), false).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(why), "{error}");
        }
    }

    #[test]
    fn too_many_and_equal_folders_are_refused() {
        let many: Vec<_> = (0..9).map(|at| share(&format!("/{at}"), false)).collect();
        check(&many[..MOST]).unwrap();
        for (refused, why) in [
            (&many[..], "at most 8"),
            (
                &[share("/a", true), share("/a", false)],
                "/a can't be shared twice",
            ),
            (&[share("a", true)], "not an absolute path"),
        ] {
            let error = check(refused).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn the_agents_argument_is_read_back() {
        for one in [share("/a:b c", true), share("/", false)] {
            assert_eq!(one.to_string().parse(), Ok(one));
        }
        assert!("x:/a".parse::<Share>().is_err());
        assert!("".parse::<Share>().is_err());
    }
}
