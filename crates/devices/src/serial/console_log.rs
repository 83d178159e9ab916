//! Keeps a console's output in a file of limited size.

use jiffy_sys::handed;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Most bytes of a file, not counting the inserted line.
const BYTES_MAX: u64 = 4 << 20;
/// The first bytes, which are always kept: they show how the guest booted.
const FIRST_BYTES: u64 = 256 << 10;
/// The last bytes that are kept when the file is full, from the beginning of a line.
const LAST_BYTES: u64 = 2 << 20;

/// The output of a serial port in a file, for reading later.
///
/// A guest can write without end, and must not fill the disk. So when the file reaches 4 MiB, its
/// middle is removed: it keeps its first 256 KiB, which show how the guest booted, a line that says
/// how much was removed, and its last 2 MiB. A program that follows the file sees it shrink.
///
/// A path that is not a regular file (a terminal, a pipe) gets all output.
///
/// Besides `write`, the writing thread needs the system calls `pread64`, `ftruncate` and `lseek`.
#[derive(Debug)]
pub struct ConsoleLog {
    file: File,
    regular: bool,
    limits: Limits,
    /// Offset of the next byte.
    end: u64,
    /// End of the part that is never removed; the inserted line, if any, follows it.
    first_end: u64,
    /// Start of the part that may be removed.
    rest_start: u64,
    left_out: u64,
}

/// Limits, which tests make smaller.
#[derive(Debug, Clone, Copy)]
struct Limits {
    most: u64,
    first: u64,
    last: u64,
}

impl ConsoleLog {
    /// Opens or creates the file, and continues at its end.
    ///
    /// # Errors
    ///
    /// If the file can't be opened or created, or fstat(2) fails.
    pub fn open(path: &Path) -> io::Result<ConsoleLog> {
        ConsoleLog::with(
            path,
            Limits {
                most: BYTES_MAX,
                first: FIRST_BYTES,
                last: LAST_BYTES,
            },
        )
    }

    fn with(path: &Path, limits: Limits) -> io::Result<ConsoleLog> {
        let file = match handed::take(path) {
            Some(file) => file.into(),
            None => OpenOptions::new()
                .read(true)
                .append(true)
                .create(true)
                // Opening a pipe without a reader must not block.
                .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
                .open(path)?,
        };
        let metadata = file.metadata()?;
        let end = metadata.len();
        let first_end = end.min(limits.first);
        Ok(ConsoleLog {
            file,
            regular: metadata.is_file(),
            limits,
            end,
            first_end,
            rest_start: first_end,
            left_out: 0,
        })
    }

    /// Another process has shortened the file: its current contents are kept.
    fn reread_size(&mut self) -> io::Result<()> {
        self.end = self.file.seek(SeekFrom::End(0))?;
        self.first_end = self.end.min(self.limits.first);
        self.rest_start = self.first_end;
        self.left_out = 0;
        Ok(())
    }

    /// Removes the middle of the file.
    fn cut_middle(&mut self) -> io::Result<()> {
        let last = self.line_start(self.end.saturating_sub(self.limits.last))?;
        let left_out = self.left_out + (last - self.rest_start);
        let mut rest =
            format!("\njiffy: {left_out} bytes of output are left out here\n").into_bytes();
        let start = self.first_end + rest.len() as u64;
        let line = rest.len();
        rest.resize(line + (self.end - last) as usize, 0);
        self.file.read_exact_at(&mut rest[line..], last)?;
        self.file.set_len(self.first_end)?;
        self.end = self.first_end;
        self.file.write_all(&rest)?;
        self.end += rest.len() as u64;
        self.rest_start = start;
        self.left_out = left_out;
        Ok(())
    }

    /// Start of the first line at or after `at`, if there is one nearby.
    fn line_start(&self, at: u64) -> io::Result<u64> {
        let at = at.max(self.rest_start);
        let mut near = [0; 1024];
        let count = near.len().min((self.end - at) as usize);
        self.file.read_exact_at(&mut near[..count], at)?;
        let newline = near[..count].iter().position(|byte| *byte == b'\n');
        Ok(newline.map_or(at, |place| at + place as u64 + 1))
    }
}

impl Write for ConsoleLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.regular {
            return self.file.write(bytes);
        }
        while self.end >= self.limits.most {
            match self.cut_middle() {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => self.reread_size()?,
                result => result?,
            }
        }
        let room = usize::try_from(self.limits.most - self.end).unwrap_or(usize::MAX);
        let written = self
            .file
            .write_at(&bytes[..bytes.len().min(room)], self.end)?;
        self.end += written as u64;
        if self.left_out == 0 {
            self.first_end = self.end.min(self.limits.first);
            self.rest_start = self.first_end;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tempfile::TempDir;

    const SMALL: Limits = Limits {
        most: 4000,
        first: 200,
        last: 2000,
    };

    fn small() -> (TempDir, std::path::PathBuf, ConsoleLog) {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("console.log");
        let log = ConsoleLog::with(&path, SMALL).unwrap();
        (folder, path, log)
    }

    #[test]
    fn a_short_log_is_kept_whole() {
        let (_folder, path, mut log) = small();
        for number in 0..400 {
            writeln!(log, "line {number:04}").unwrap();
        }
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.len(), 4000);
        assert_eq!(text.lines().count(), 400);
    }

    #[test]
    fn the_beginning_and_the_end_of_a_long_log_are_kept() {
        let (_folder, path, mut log) = small();
        let mut text = String::new();
        for number in 0..10_000 {
            // Byte by byte, as a UART writes.
            for byte in format!("line {number:04}\n").bytes() {
                assert_eq!(log.write(&[byte]).unwrap(), 1);
            }
            if number % 7 == 0 || number == 9999 {
                text = fs::read_to_string(&path).unwrap();
                assert!(text.len() <= 4100, "{}", text.len());
                let last = format!("line {number:04}\n");
                assert!(text.ends_with(&last), "{number}");
            }
        }
        let lines: Vec<&str> = text.lines().collect();
        for (number, line) in lines[..20].iter().enumerate() {
            assert_eq!(*line, format!("line {number:04}"));
        }
        assert_eq!(lines[20], "");
        let left_out: usize = lines[21]
            .strip_prefix("jiffy: ")
            .and_then(|rest| rest.strip_suffix(" bytes of output are left out here"))
            .unwrap()
            .parse()
            .unwrap();
        // Only as many lines are missing as the file says.
        let kept = &lines[22..];
        assert!(kept.len() >= 199, "{}", kept.len());
        let first = 10_000 - kept.len();
        assert_eq!(left_out, (first - 20) * 10);
        for (number, line) in (first..).zip(kept) {
            assert_eq!(*line, format!("line {number:04}"));
        }
    }

    #[test]
    fn large_writes_without_line_breaks_are_bounded() {
        let (_folder, path, mut log) = small();
        for byte in 0..50u8 {
            log.write_all(&[b'0' + byte; 1500]).unwrap();
        }
        let bytes = fs::read(&path).unwrap();
        assert!((2000..4100).contains(&bytes.len()), "{}", bytes.len());
        assert_eq!(bytes[..200], [b'0'; 200]);
        assert!(bytes.ends_with(&[b'0' + 49; 1500]));
    }

    #[test]
    fn an_existing_log_is_appended_to() {
        let (_folder, path, mut log) = small();
        log.write_all(&[b'a'; 3990]).unwrap();
        drop(log);
        let mut log = ConsoleLog::with(&path, SMALL).unwrap();
        log.write_all(b"\nthe end\n").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 3999);
        log.write_all(b"and more\n").unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.len() < 2500);
        assert!(text.ends_with("a\nthe end\nand more\n"));
        // The file is larger than the limit: another process has written to it.
        fs::write(&path, vec![b'b'; 100_000]).unwrap();
        let mut log = ConsoleLog::with(&path, SMALL).unwrap();
        log.write_all(b"x").unwrap();
        assert!(fs::metadata(&path).unwrap().len() < 2500);
    }

    #[test]
    fn logging_continues_after_the_file_is_truncated() {
        let (_folder, path, _) = small();
        for (length, cut_to) in [(3500, 0), (3500, 100), (3500, 1000), (100_000, 50_000)] {
            fs::write(&path, vec![b'a'; length]).unwrap();
            let mut log = ConsoleLog::with(&path, SMALL).unwrap();
            let file = OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len(cut_to).unwrap();
            for number in 0..1000 {
                writeln!(log, "line {number:04}").unwrap();
            }
            let text = fs::read_to_string(&path).unwrap();
            assert!(text.len() <= 4100 && text.ends_with("line 0998\nline 0999\n"));
        }
    }

    #[test]
    fn a_device_file_gets_all_output() {
        let mut log = ConsoleLog::with(Path::new("/dev/null"), SMALL).unwrap();
        for _ in 0..100 {
            assert_eq!(log.write(&[0; 1000]).unwrap(), 1000);
        }
    }
}
