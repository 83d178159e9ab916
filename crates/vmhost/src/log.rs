//! `command.log`: what the first command wrote, and the node's notes.
//!
//! The log is the only path from the guest to attached clients: the guest's
//! output is stored, and each client reads the file at its own pace. A slow
//! client costs no memory, and nothing stored waits for a client.
//!
//! Two segments of at most [`SEGMENT`] bytes are kept, `command.log` and the
//! one before it, `command.log.1`. A segment, little endian:
//!
//! | bytes | header |
//! |---|---|
//! | 8 | magic `JIFFYLOG` |
//! | 4 | version, 1 |
//! | 4 | zero |
//! | 8 | position of the first record in the whole log |
//! | 8 | bytes of stdout since the VM's start, before this segment |
//! | 8 | the same for stderr |
//! | 4 | zero |
//! | 4 | CRC-32C of the 44 bytes above |
//!
//! | bytes | record, repeated |
//! |---|---|
//! | 4 | length of the data, at most 65536 |
//! | 1 | kind: 0 the VM was started, 1 stdout, 2 stderr, 3 a note |
//! | 3 | zero |
//! | 4 | CRC-32C of the 8 bytes above and the data |
//! | n | data |
//!
//! A *position* counts the bytes of records since the log began, without the headers of segments;
//! it only grows.

use jiffy_content::durable::is_taken;
use jiffy_sys::durable::remove_any;
use jiffy_sys::regular;
use jiffy_wire::agent::Stream;
use jiffy_wire::frame::MAX_DATA;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Most bytes of a segment.
pub const SEGMENT: u64 = 32 << 20;

/// Extension of an unreadable log that was set aside.
const SET_ASIDE: &str = "unreadable";

const MAGIC: &[u8; 8] = b"JIFFYLOG";
const VERSION: u32 = 1;
const SEGMENT_HEADER: u64 = 48;
const RECORD_HEADER: usize = 12;

/// What a record holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The VM was started: offsets of the streams begin at 0 again.
    Start,
    /// Output of the first command.
    Output(Stream),
    /// A warning of init, a line of a service, or a note of the node.
    Note,
}

impl Kind {
    fn code(self) -> u8 {
        match self {
            Kind::Start => 0,
            Kind::Output(Stream::Stdout) => 1,
            Kind::Output(Stream::Stderr) => 2,
            Kind::Note => 3,
        }
    }

    fn from_code(code: u8) -> Option<Kind> {
        Some(match code {
            0 => Kind::Start,
            1 => Kind::Output(Stream::Stdout),
            2 => Kind::Output(Stream::Stderr),
            3 => Kind::Note,
            _ => return None,
        })
    }
}

/// One record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Its kind.
    pub kind: Kind,
    /// Its bytes.
    pub data: Vec<u8>,
    /// Its position.
    pub position: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct SegmentStart {
    position: u64,
    stdout: u64,
    stderr: u64,
}

/// CRC-32C of a record: its header before the checksum, and its data.
fn record_checksum(header: &[u8], data: &[u8]) -> u32 {
    let mut sum = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    sum.update(header);
    sum.update(data);
    sum.finalize() as u32
}

impl SegmentStart {
    fn encode(&self) -> [u8; SEGMENT_HEADER as usize] {
        let mut header = [0; SEGMENT_HEADER as usize];
        header[..8].copy_from_slice(MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[16..24].copy_from_slice(&self.position.to_le_bytes());
        header[24..32].copy_from_slice(&self.stdout.to_le_bytes());
        header[32..40].copy_from_slice(&self.stderr.to_le_bytes());
        let sum = crc_fast::crc32_iscsi(&header[..44]);
        header[44..].copy_from_slice(&sum.to_le_bytes());
        header
    }

    fn read(file: &File) -> io::Result<SegmentStart> {
        let mut header = [0; SEGMENT_HEADER as usize];
        file.read_exact_at(&mut header, 0)?;
        let word = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap_or([0; 8]));
        let half = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap_or([0; 4]));
        if &header[..8] != MAGIC {
            return Err(damaged("it doesn't begin with the magic of a Jiffy log"));
        }
        if half(8) != VERSION {
            return Err(damaged("the version of its format is not known"));
        }
        if half(44) != crc_fast::crc32_iscsi(&header[..44]) {
            return Err(damaged("its header's checksum is wrong"));
        }
        let start = SegmentStart {
            position: word(16),
            stdout: word(24),
            stderr: word(32),
        };
        // Bounded, so that later sums do not overflow.
        let most = i64::MAX as u64;
        if start.position.max(start.stdout).max(start.stderr) > most {
            return Err(damaged("its header counts more bytes than a log can have"));
        }
        Ok(start)
    }
}

fn damaged(why: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("the log is damaged: {why}"),
    )
}

/// Does the error mean that a log is damaged? After any other error its bytes may be right.
fn is_damage(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof
    )
}

fn current(folder: &Path) -> PathBuf {
    folder.join("command.log")
}

/// The next segment, until it takes the current one's place.
fn fresh(folder: &Path) -> PathBuf {
    folder.join("command.log.new")
}

fn previous(folder: &Path) -> PathBuf {
    folder.join("command.log.1")
}

/// Appends to a VM's log.
#[derive(Debug)]
pub struct Writer {
    folder: PathBuf,
    /// `None` while it can't be opened.
    file: Option<File>,
    start: SegmentStart,
    /// Bytes of the current segment's file.
    length: u64,
    stdout: u64,
    stderr: u64,
    segment: u64,
    buffer: Vec<u8>,
}

impl Writer {
    /// A log that can't be opened yet; see [`Writer::reopen`].
    pub fn unopened(folder: &Path) -> Writer {
        Writer {
            folder: folder.to_owned(),
            file: None,
            start: SegmentStart::default(),
            length: SEGMENT_HEADER,
            stdout: 0,
            stderr: 0,
            segment: SEGMENT,
            buffer: Vec::new(),
        }
    }

    /// Opens a log that could not be opened before.
    ///
    /// # Errors
    ///
    /// As in [`Writer::open`].
    pub fn reopen(&mut self) -> io::Result<()> {
        if self.file.is_none() {
            *self = Writer::open(&self.folder)?;
        }
        Ok(())
    }

    /// A new, empty log.
    ///
    /// # Errors
    ///
    /// If the file can't be created or written.
    pub fn create(folder: &Path) -> io::Result<Writer> {
        let start = SegmentStart::default();
        let file = new_segment(&current(folder), &start)?;
        Ok(Writer {
            folder: folder.to_owned(),
            file: Some(file),
            start,
            length: SEGMENT_HEADER,
            stdout: 0,
            stderr: 0,
            segment: SEGMENT,
            buffer: Vec::new(),
        })
    }

    /// Opens an existing log, reads its whole current segment and truncates it after the last whole
    /// record. A log that is damaged at its beginning is renamed to `command.unreadable`, and a new
    /// one is begun.
    ///
    /// # Errors
    ///
    /// If the log is no regular file, or can't be read, renamed or truncated. It stays as it is
    /// then.
    pub fn open(folder: &Path) -> io::Result<Writer> {
        let mut options = OpenOptions::new();
        let opened = regular::open_with(options.read(true).write(true), &current(folder));
        let file = match opened {
            Ok(file) => file,
            // A rotation that was cut short between its two renames is finished.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return match fs::rename(fresh(folder), current(folder)) {
                    Ok(()) => Writer::open(folder),
                    Err(_) => Writer::create(folder),
                };
            }
            Err(error) => return Err(error),
        };
        let start = match SegmentStart::read(&file) {
            Ok(start) => start,
            Err(error) if is_damage(&error) => {
                set_aside(folder, &error)?;
                return Writer::create(folder);
            }
            Err(error) => return Err(error),
        };
        let mut reader = Reader::new(folder, start.position);
        let (mut stdout, mut stderr) = (start.stdout, start.stderr);
        let mut end = start.position;
        loop {
            let batch = match reader.batch(u64::MAX) {
                Err(error) if !is_damage(&error) => return Err(error),
                batch => batch.unwrap_or_default(),
            };
            let Some(last) = batch.last() else { break };
            end = last.position + (RECORD_HEADER + last.data.len()) as u64;
            for record in &batch {
                match record.kind {
                    Kind::Start => (stdout, stderr) = (0, 0),
                    Kind::Output(Stream::Stdout) => stdout += record.data.len() as u64,
                    Kind::Output(Stream::Stderr) => stderr += record.data.len() as u64,
                    Kind::Note => {}
                }
            }
        }
        let length = SEGMENT_HEADER + (end - start.position);
        file.set_len(length)?;
        Ok(Writer {
            folder: folder.to_owned(),
            file: Some(file),
            start,
            length,
            stdout,
            stderr,
            segment: SEGMENT,
            buffer: Vec::new(),
        })
    }

    /// As [`Writer::open`], for a VM that starts: what is not a regular file is replaced, too.
    ///
    /// # Errors
    ///
    /// As in [`Writer::open`], or if what is in its place can't be renamed.
    pub fn open_anew(folder: &Path) -> io::Result<Writer> {
        match regular::look(&current(folder)) {
            Err(error) if is_taken(&current(folder)) => set_aside(folder, &error)?,
            _ => {}
        }
        Writer::open(folder)
    }

    /// Appends a start record; the streams' offsets begin at 0. Returns the position after it.
    ///
    /// # Errors
    ///
    /// As in [`Writer::append`].
    pub fn begin(&mut self) -> io::Result<u64> {
        let position = self.append(Kind::Start, &[])?;
        (self.stdout, self.stderr) = (0, 0);
        Ok(position)
    }

    /// Position of the next record.
    pub fn end(&self) -> u64 {
        self.start.position + (self.length - SEGMENT_HEADER)
    }

    /// How much of a stream is stored since the VM's start.
    pub fn offset(&self, stream: Stream) -> u64 {
        match stream {
            Stream::Stdout => self.stdout,
            Stream::Stderr => self.stderr,
        }
    }

    /// Sets the offset of a stream's next byte; the bytes before it are lost.
    pub fn skip_to(&mut self, stream: Stream, offset: u64) {
        match stream {
            Stream::Stdout => self.stdout = offset,
            Stream::Stderr => self.stderr = offset,
        }
    }

    /// Appends one record, or nothing; `data` is at most [`MAX_DATA`] bytes. Returns the new end.
    ///
    /// # Errors
    ///
    /// `NotConnected` if the log could not be opened; otherwise that of the write, or of a new
    /// segment. The record is not stored then.
    pub fn append(&mut self, kind: Kind, data: &[u8]) -> io::Result<u64> {
        debug_assert!(data.len() <= MAX_DATA);
        let size = (RECORD_HEADER + data.len()) as u64;
        if self.length + size > self.segment && self.length > SEGMENT_HEADER {
            self.rotate()?;
        }
        self.buffer.clear();
        self.buffer
            .extend_from_slice(&(data.len() as u32).to_le_bytes());
        self.buffer.extend_from_slice(&[kind.code(), 0, 0, 0]);
        let sum = record_checksum(&self.buffer, data);
        self.buffer.extend_from_slice(&sum.to_le_bytes());
        self.buffer.extend_from_slice(data);
        let file = self.file.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        if let Err(error) = file.write_all_at(&self.buffer, self.length) {
            let _ = file.set_len(self.length);
            return Err(error);
        }
        self.length += size;
        match kind {
            Kind::Output(Stream::Stdout) => self.stdout += data.len() as u64,
            Kind::Output(Stream::Stderr) => self.stderr += data.len() as u64,
            Kind::Start | Kind::Note => {}
        }
        Ok(self.end())
    }

    fn rotate(&mut self) -> io::Result<()> {
        let start = SegmentStart {
            position: self.end(),
            stdout: self.stdout,
            stderr: self.stderr,
        };
        let fresh = fresh(&self.folder);
        let file = new_segment(&fresh, &start)?;
        match fs::rename(current(&self.folder), previous(&self.folder)) {
            // An earlier attempt failed after this step.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other?,
        }
        fs::rename(&fresh, current(&self.folder))?;
        self.file = Some(file);
        self.start = start;
        self.length = SEGMENT_HEADER;
        Ok(())
    }

    #[cfg(test)]
    fn with_segment(mut self, bytes: u64) -> Writer {
        self.segment = bytes;
        self
    }
}

/// Sets aside a log that can't be read, so that a new one can be begun.
fn set_aside(folder: &Path, why: &io::Error) -> io::Result<()> {
    let aside = current(folder).with_extension(SET_ASIDE);
    tracing::warn!(kept = %aside.display(), error = %why, "a command's log can't be read: it was set aside, and a new one is begun");
    remove_any(&aside)?;
    fs::rename(current(folder), &aside)?;
    let _ = remove_any(&previous(folder));
    Ok(())
}

fn new_segment(path: &Path, start: &SegmentStart) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    file.write_all_at(&start.encode(), 0).inspect_err(|_| {
        let _ = fs::remove_file(path);
    })?;
    Ok(file)
}

/// End position of the log of a VM that doesn't run; 0 without a log.
///
/// # Errors
///
/// If the log can't be read, or its first bytes are not a segment's.
pub fn end_of(folder: &Path) -> io::Result<u64> {
    match regular::open(&current(folder)) {
        Ok(file) => {
            let start = SegmentStart::read(&file)?;
            let length = file.metadata()?.len();
            Ok(start.position + length.saturating_sub(SEGMENT_HEADER))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

/// Reads a VM's log from a position on, also while it grows.
#[derive(Debug)]
pub struct Reader {
    folder: PathBuf,
    position: u64,
    segment: Option<(File, SegmentStart)>,
    buffer: Vec<u8>,
    /// Bytes that were deleted before they were read.
    dropped: u64,
}

impl Reader {
    /// A reader at this position; nothing is opened yet.
    pub fn new(folder: &Path, position: u64) -> Reader {
        Reader {
            folder: folder.to_owned(),
            position,
            segment: None,
            buffer: Vec::new(),
            dropped: 0,
        }
    }

    /// The next position it reads.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Bytes it had to skip since the last call, because the log keeps only two segments.
    pub fn take_dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped)
    }

    /// The next records that begin before `end`; empty if there are none.
    ///
    /// # Errors
    ///
    /// If a segment can't be read; `InvalidData` if the first of the records is damaged.
    pub fn batch(&mut self, end: u64) -> io::Result<Vec<Record>> {
        let mut reopened = false;
        while self.position < end {
            if self.segment.is_none() {
                self.segment = self.find_segment()?;
            }
            let Some((file, start)) = &self.segment else {
                return Ok(Vec::new());
            };
            self.buffer.resize(RECORD_HEADER + MAX_DATA, 0);
            let at = SEGMENT_HEADER + (self.position - start.position);
            let got = read_up_to(file, &mut self.buffer, at)?;
            if got == 0 && !reopened {
                // This segment was read to its end; the next records are in a newer one.
                reopened = true;
                self.segment = None;
                continue;
            }
            return self.parse(got, end);
        }
        Ok(Vec::new())
    }

    /// Parses the first `got` bytes of the buffer into whole records. A damaged record is an error
    /// only if it is the first: the next call finds it, and the records before it are not lost.
    fn parse(&mut self, got: usize, end: u64) -> io::Result<Vec<Record>> {
        let mut records = Vec::new();
        let mut wrong = None;
        let mut rest = &self.buffer[..got];
        while self.position < end
            && let Some((header, after)) = rest.split_at_checked(RECORD_HEADER)
        {
            let word =
                |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap_or([0; 4]));
            let length = word(0) as usize;
            let Some(kind) = Kind::from_code(header[4]).filter(|_| length <= MAX_DATA) else {
                wrong = Some("it contains a record of an unknown kind");
                break;
            };
            let Some((data, after)) = after.split_at_checked(length) else {
                break;
            };
            if word(8) != record_checksum(&header[..8], data) {
                wrong = Some("a record's checksum is wrong");
                break;
            }
            records.push(Record {
                kind,
                data: data.to_vec(),
                position: self.position,
            });
            self.position += (RECORD_HEADER + length) as u64;
            rest = after;
        }
        match wrong {
            Some(why) if records.is_empty() => Err(damaged(why)),
            _ => Ok(records),
        }
    }

    /// Opens the segment that contains the position, or else the oldest.
    fn find_segment(&mut self) -> io::Result<Option<(File, SegmentStart)>> {
        // If the log is rotated between the two opens, this is tried again.
        for _ in 0..4 {
            let newest = match open_segment(&current(&self.folder))? {
                Some((file, start)) if self.position >= start.position => {
                    return Ok(Some((file, start)));
                }
                Some(newest) => newest,
                None => continue,
            };
            let (file, start) = match open_segment(&previous(&self.folder))? {
                Some((_, start)) if start.position == newest.1.position => continue,
                Some(older) => older,
                None => newest,
            };
            if self.position < start.position {
                self.dropped += start.position - self.position;
                self.position = start.position;
            }
            return Ok(Some((file, start)));
        }
        Ok(None)
    }
}

fn open_segment(path: &Path) -> io::Result<Option<(File, SegmentStart)>> {
    match regular::open(path) {
        Ok(file) => {
            let start = SegmentStart::read(&file)?;
            Ok(Some((file, start)))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn read_up_to(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match file.read_at(&mut buffer[got..], at + got as u64) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

#[cfg(test)]
mod tests;
