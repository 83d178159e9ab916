//! Writes archives in cpio's "newc" format, from which the kernel unpacks an initramfs
//! (Documentation/driver-api/early-userspace/buffer-format.rst).
//!
//! Archives are reproducible: they have no times, owners or inode numbers of the host. Archives may
//! be concatenated; later entries replace earlier ones.

use std::io::{self, Write};

/// Writes one archive.
#[derive(Debug)]
pub struct Archive<W: Write> {
    out: W,
    written: u64,
    inode: u32,
}

const FOLDER: u32 = 0o040000;
const REGULAR: u32 = 0o100000;
const SYMLINK: u32 = 0o120000;
const CHARACTER: u32 = 0o020000;

impl<W: Write> Archive<W> {
    /// An empty archive, written to `out`.
    pub fn new(out: W) -> Archive<W> {
        Archive {
            out,
            written: 0,
            inode: 0,
        }
    }

    /// Adds a folder; `mode` is its permission bits, here and below. Its parent must be added
    /// before.
    ///
    /// # Errors
    ///
    /// If the path is empty or contains a zero byte, or the writer fails.
    pub fn folder(&mut self, path: &str, mode: u32) -> io::Result<()> {
        self.entry(path, FOLDER | mode, 2, (0, 0), &[])
    }

    /// Adds a file with these contents.
    ///
    /// # Errors
    ///
    /// If the path is empty or contains a zero byte, the contents have 4 GiB or more, or the writer
    /// fails.
    pub fn file(&mut self, path: &str, mode: u32, contents: &[u8]) -> io::Result<()> {
        self.entry(path, REGULAR | mode, 1, (0, 0), contents)
    }

    /// Adds a symbolic link.
    ///
    /// # Errors
    ///
    /// If the path is empty or contains a zero byte, or the writer fails.
    pub fn symlink(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.entry(path, SYMLINK | 0o777, 1, (0, 0), target.as_bytes())
    }

    /// Adds a character device.
    ///
    /// # Errors
    ///
    /// If the path is empty or contains a zero byte, or the writer fails.
    pub fn character_device(
        &mut self,
        path: &str,
        mode: u32,
        major: u32,
        minor: u32,
    ) -> io::Result<()> {
        self.entry(path, CHARACTER | mode, 1, (major, minor), &[])
    }

    /// Writes the trailer, pads to 512 bytes and returns the writer.
    ///
    /// # Errors
    ///
    /// If the writer fails.
    pub fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.header("TRAILER!!!", 0, 1, (0, 0), 0)?;
        self.pad(512)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn entry(
        &mut self,
        path: &str,
        mode: u32,
        links: u32,
        device: (u32, u32),
        contents: &[u8],
    ) -> io::Result<()> {
        let path = path.trim_start_matches('/');
        if path.is_empty() || path.contains('\0') {
            return Err(io::Error::other(format!(
                "not a path in an archive: {path:?}"
            )));
        }
        let size = u32::try_from(contents.len())
            .map_err(|_| io::Error::other(format!("{path} is over 4 GiB")))?;
        self.inode += 1;
        self.header(path, mode, links, device, size)?;
        self.write(contents)?;
        self.pad(4)
    }

    fn header(
        &mut self,
        path: &str,
        mode: u32,
        links: u32,
        (major, minor): (u32, u32),
        size: u32,
    ) -> io::Result<()> {
        let name_size = path.len() as u32 + 1;
        let fields = [
            self.inode, mode, 0, 0, links, 0, size, 0, 0, major, minor, name_size, 0,
        ];
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08X}"));
        }
        self.write(header.as_bytes())?;
        self.write(path.as_bytes())?;
        self.write(&[0])?;
        self.pad(4)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    fn pad(&mut self, to: u64) -> io::Result<()> {
        let missing = (to - self.written % to) % to;
        self.write(&[0; 512][..missing as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> Vec<u8> {
        let mut archive = Archive::new(Vec::new());
        archive.folder("bin", 0o755).unwrap();
        archive.file("/bin/hello", 0o755, b"hello\n").unwrap();
        archive.symlink("bin/hi", "hello").unwrap();
        archive.character_device("console", 0o600, 5, 1).unwrap();
        archive.finish().unwrap()
    }

    #[test]
    fn the_same_entries_give_the_same_bytes() {
        assert_eq!(small(), small());
        assert_eq!(small().len() % 512, 0);
    }

    #[test]
    fn cpio_headers_follow_the_newc_format() {
        let bytes = small();
        assert_eq!(&bytes[..6], b"070701");
        // The mode is the second field: a folder, 0755.
        assert_eq!(&bytes[14..22], b"000041ED");
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.contains("bin/hello\0"), "no leading slash in names");
        assert!(text.contains("TRAILER!!!"));
    }

    #[test]
    fn an_empty_path_is_refused() {
        assert!(Archive::new(Vec::new()).folder("/", 0o755).is_err());
    }
}
