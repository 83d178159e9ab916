//! Files that the user asks for: a recording, a picture.

use crate::failure::{Failure, Result};
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// How a file of this name is written.
enum Target {
    /// The file at this path, which need not exist, is replaced: it is the old one or the new one.
    Replaced(PathBuf),
    /// A device, a pipe, a terminal, or a link whose file is missing, is opened and written.
    InPlace,
}

/// What the name leads to. A link stays, and the file that it points to is replaced.
fn target(file: &Path) -> io::Result<Target> {
    match fs::metadata(file) {
        Ok(data) if data.is_file() => fs::canonicalize(file).map(Target::Replaced),
        Err(error) if error.kind() == ErrorKind::NotFound && !file.is_symlink() => {
            Ok(Target::Replaced(file.to_owned()))
        }
        Ok(data) if data.is_dir() => Err(Errno::ISDIR.into()),
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(Target::InPlace),
    }
}

/// Writes a file, in place of one with its name; `what` names the contents in an error.
///
/// # Errors
///
/// If it is a folder, or can't be written.
pub fn write(what: &str, file: &Path, bytes: &[u8]) -> Result<()> {
    let written = target(file).and_then(|target| match target {
        Target::Replaced(path) => jiffy_sys::durable::replace(&path, bytes),
        Target::InPlace => OpenOptions::new()
            .write(true)
            .create(file.is_symlink())
            .open(file)
            .and_then(|mut file| file.write_all(bytes)),
    });
    written.map_err(|error| unwritable(what, file, error))
}

/// Checks, before a command does what takes long, whether [`write()`] can succeed.
///
/// # Errors
///
/// If the file is a folder, or this process may not write to it.
pub fn check(what: &str, file: &Path) -> Result<()> {
    let checked = target(file).and_then(|target| match target {
        Target::Replaced(path) => {
            let folder = match path.parent() {
                Some(folder) if !folder.as_os_str().is_empty() => folder,
                _ => Path::new("."),
            };
            access(folder, Access::WRITE_OK | Access::EXEC_OK)
        }
        // A missing file is known only when it is made.
        Target::InPlace if !file.exists() => Ok(()),
        Target::InPlace => access(file, Access::WRITE_OK),
    });
    checked.map_err(|error| unwritable(what, file, error))
}

fn access(path: &Path, wanted: Access) -> io::Result<()> {
    Ok(accessat(CWD, path, wanted, AtFlags::EACCESS)?)
}

fn unwritable(what: &str, file: &Path, error: io::Error) -> Failure {
    let file = file.display();
    Failure::io(format_args!("{what} can't be written to {file}"), error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{FileType, Mode, mknodat};
    use std::io::Read;
    use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, symlink};

    /// Checks and writes `text`.
    fn write_text(file: &Path, text: &str) -> Result<()> {
        check("the text", file)?;
        write("the text", file, text.as_bytes())
    }

    #[test]
    fn a_file_that_is_no_regular_one_is_written_and_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = folder.path().join("pipe");
        let link = folder.path().join("link");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::from(0o600), 0).expect("a pipe");
        symlink("pipe", &link).expect("a link");
        let mut reader = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32)
            .open(&pipe)
            .expect("both ends");
        for name in [&pipe, &link] {
            write_text(name, "text").expect("written");
            let mut read = [0; 8];
            assert_eq!(reader.read(&mut read).expect("it came through the pipe"), 4);
        }
        let kind = |path| fs::symlink_metadata(path).expect("it exists").file_type();
        assert!(kind(&pipe).is_fifo() && kind(&link).is_symlink());
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 2);
    }

    #[test]
    fn a_link_stays_and_its_file_is_replaced_or_made() {
        let folder = tempfile::tempdir().expect("a folder");
        let below = folder.path().join("below");
        fs::create_dir(&below).expect("a folder");
        fs::write(below.join("old"), "old").expect("a file");
        for name in ["old", "missing"] {
            let link = folder.path().join(name);
            symlink(Path::new("below").join(name), &link).expect("a link");
            write_text(&link, "new").expect("written");
            assert!(link.is_symlink());
            assert_eq!(fs::read(below.join(name)).expect("a file"), b"new");
        }
        assert_eq!(fs::read_dir(&below).expect("a folder").count(), 2);
    }

    #[test]
    fn what_can_not_be_written_is_refused_before() {
        let folder = tempfile::tempdir().expect("a folder");
        let nowhere = folder.path().join("nowhere/text");
        for path in [folder.path(), &nowhere] {
            let failure = check("the text", path).expect_err("it can't be written");
            let expected = format!("the text can't be written to {}: ", path.display());
            assert!(failure.message.starts_with(&expected), "{failure}");
            assert_eq!(
                write("the text", path, b"text")
                    .expect_err("neither")
                    .message,
                failure.message
            );
        }
    }
}
