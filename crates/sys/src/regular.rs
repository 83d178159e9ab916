//! Opens regular files only; refuses other types without blocking.

use std::fs::{self, File, FileType, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Opens a file for reading. Does not block at a FIFO (fifo(7)).
///
/// # Errors
///
/// If open(2) fails. `InvalidData`, with a text that names the type, for a FIFO, a folder, a socket
/// or a device.
pub fn open(path: &Path) -> io::Result<File> {
    open_with(OpenOptions::new().read(true), path)
}

/// Like [`open`], with other options.
///
/// # Errors
///
/// As for [`open`].
pub fn open_with(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    // O_NONBLOCK has no effect on regular files (open(2)).
    let file = match options.custom_flags(libc::O_NONBLOCK).open(path) {
        Ok(file) => file,
        // open(2)'s error for a socket is less clear than its type.
        Err(error) => return Err(look(path).err().unwrap_or(error)),
    };
    check(file.metadata()?.file_type())?;
    Ok(file)
}

/// Opens a file for writing with these options, which must create it if it is missing. Removes
/// anything else at the path first.
///
/// # Errors
///
/// If a file that is there can't be opened, or anything else that is there can't be removed, or the
/// file can't be created.
pub fn make_with(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    match open_with(options, path) {
        Err(_) if look(path).is_err() => {
            crate::durable::remove_any(path)?;
            options.open(path)
        }
        opened => opened,
    }
}

/// The metadata of a regular file, without opening it.
///
/// # Errors
///
/// If stat(2) fails, or the type is another one, as of [`open`].
pub fn look(path: &Path) -> io::Result<Metadata> {
    let data = fs::metadata(path)?;
    check(data.file_type())?;
    Ok(data)
}

/// Reads a file of at most `most` bytes.
///
/// # Errors
///
/// As for [`open`] and [`contents::of`](crate::contents::of).
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    crate::contents::of(&open(path)?, most)
}

fn check(kind: FileType) -> io::Result<()> {
    let found = match kind {
        kind if kind.is_file() => return Ok(()),
        kind if kind.is_dir() => "a folder",
        kind if kind.is_fifo() => "a FIFO",
        kind if kind.is_socket() => "a socket",
        _ => "a device",
    };
    let problem = format!("it is {found}, not a file");
    Err(io::Error::new(io::ErrorKind::InvalidData, problem))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    #[test]
    fn only_regular_files_are_opened_and_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("file"), "contents").unwrap();
        symlink("file", path("link")).unwrap();
        for good in ["file", "link"] {
            assert_eq!(read(&path(good), 8).unwrap(), b"contents");
            assert_eq!(look(&path(good)).unwrap().len(), 8);
        }
        assert!(read(&path("file"), 7).is_err());
        let fifo = std::process::Command::new("mkfifo")
            .arg(path("fifo"))
            .status();
        assert!(fifo.unwrap().success());
        let _listener = UnixListener::bind(path("socket")).unwrap();
        fs::create_dir(path("folder")).unwrap();
        symlink("loop", path("loop")).unwrap();
        assert!(open(&path("loop")).is_err());
        for (name, what) in [
            ("fifo", "a FIFO"),
            ("socket", "a socket"),
            ("folder", "a folder"),
        ] {
            for refused in [
                open(&path(name)).map(drop),
                look(&path(name)).map(drop),
                open_with(OpenOptions::new().read(true).write(true), &path(name)).map(drop),
            ] {
                let error = refused.unwrap_err().to_string();
                assert_eq!(error, format!("it is {what}, not a file"));
            }
        }
        let mut making = OpenOptions::new();
        making.create(true).append(true);
        for name in ["fifo", "socket", "folder", "loop", "file", "new"] {
            make_with(&mut making, &path(name)).unwrap();
            look(&path(name)).unwrap();
        }
        assert_eq!(fs::read(path("file")).unwrap(), b"contents");
        assert!(
            open(Path::new("/dev/null"))
                .unwrap_err()
                .to_string()
                .contains("a device")
        );
    }
}
