//! Reads the tar in a blob: unpacks it, checks its digests and limits its size.

use super::blob::{Blob, BlobStream, Compression};
use crate::archive::Skip;
use crate::scratch::Scratch;
use jiffy_oci::{Digest, Hasher};
use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use thiserror::Error;

/// Bytes per piece from the unpacking thread, and the number of pieces in its channel.
const STRIDE: usize = 256 * 1024;
const CHANNEL_PIECES: usize = 8;
/// The ratio limit applies to layers larger than this, unpacked bytes.
const RATIO_EXEMPT_BYTES: u64 = 1 << 30;
/// Largest zstd window (log2 of its bytes): that of `zstd --ultra`.
const ZSTD_WINDOW_LOG: u32 = 27;
/// Memory limit of the xz decoder, bytes: enough for `xz -9`.
const XZ_MEMORY: u64 = 128 << 20;

/// Digests and size that a blob must have.
#[derive(Debug, Clone, Default)]
pub struct Expected {
    /// Digest of the blob.
    pub digest: Option<Digest>,
    /// Digest of the unpacked tar.
    pub diff_id: Option<Digest>,
    /// Bytes of the blob.
    pub size: Option<u64>,
}

/// Limits on the unpacked size.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Unpacked bytes.
    pub bytes: u64,
    /// Unpacked bytes per compressed byte, for layers larger than 1 GiB.
    pub ratio: u64,
}

/// Why a layer's bytes are refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LayerError {
    /// The blob has the wrong size.
    #[error("it has {actual} bytes, expected {expected}")]
    Size {
        /// Its size, bytes.
        actual: u64,
        /// The size in the manifest, bytes.
        expected: u64,
    },
    /// The blob has the wrong digest.
    #[error("its digest is {actual}, expected {expected}: it is damaged or was changed")]
    Digest {
        /// Digest of its bytes.
        actual: Digest,
        /// Digest in the manifest.
        expected: Digest,
    },
    /// The tar has the wrong digest.
    #[error(
        "its digest after unpacking is {actual}, expected {expected}: it is damaged or was changed"
    )]
    DiffId {
        /// Digest of its bytes.
        actual: Digest,
        /// Digest in the configuration.
        expected: Digest,
    },
    /// It is larger than this limit, unpacked bytes.
    #[error("it unpacks to more than the limit of {0} bytes")]
    TooLarge(u64),
    /// It unpacks to more than this many times its compressed size.
    #[error("it unpacks to more than {0} times its size, the limit for large layers")]
    Ratio(u64),
    /// Its compression is not supported.
    #[error("it is compressed with {0}, which is not supported; compress it with gzip, zstd or xz")]
    Unsupported(&'static str),
    /// The compressed bytes are malformed or can't be read.
    #[error("it can't be unpacked")]
    Unpack(#[source] io::Error),
    /// The watcher cancelled it.
    #[error("the import was cancelled")]
    Cancelled,
    /// The spool file can't be written.
    #[error("a temporary file can't be written")]
    Spool(#[source] io::Error),
}

/// An unnamed file to which unpacked tars are appended.
#[derive(Debug, Clone)]
pub struct Spool {
    file: Arc<File>,
    end: u64,
}

impl Spool {
    /// An empty spool file.
    ///
    /// # Errors
    ///
    /// If there is no temporary file, or it can't be created.
    pub fn new(scratch: &Scratch) -> io::Result<Spool> {
        Ok(Spool {
            file: Arc::new(scratch.file()?),
            end: 0,
        })
    }
}

/// A tar that was read to its end and checked.
#[derive(Debug, Clone)]
pub struct Unpacked {
    /// The tar's bytes: the blob itself if it is not compressed.
    pub tar: Blob,
    /// The blob's digest, if one was expected.
    pub digest: Option<Digest>,
}

/// Copies a stream into a temporary file, unpacked.
///
/// # Errors
///
/// If the stream can't be read or unpacked, is compressed with bzip2, exceeds `bounds`, or the
/// temporary file can't be written.
pub fn unpack_to_file(
    reader: impl Read,
    scratch: &Scratch,
    bounds: Bounds,
) -> Result<Blob, LayerError> {
    let mut file = scratch.file().map_err(LayerError::Spool)?;
    let mut reader = io::BufReader::with_capacity(STRIDE, reader);
    let mut head = Vec::new();
    let mut first = (&mut reader).take(6);
    first.read_to_end(&mut head).map_err(LayerError::Unpack)?;
    let compression = Compression::of(&head);
    if compression == Compression::Bzip2 {
        return Err(LayerError::Unsupported("bzip2"));
    }
    let read = AtomicU64::new(0);
    let counted = Counted(io::Cursor::new(head).chain(reader), &read);
    let mut unpacked = decoder(compression, counted).map_err(LayerError::Unpack)?;
    let mut piece = vec![0; STRIDE];
    let mut out = 0;
    loop {
        let got = read_full(&mut unpacked, &mut piece).map_err(LayerError::Unpack)?;
        if got == 0 {
            break;
        }
        out += got as u64;
        bounds.check(out, read.load(Ordering::Relaxed))?;
        file.write_all(&piece[..got]).map_err(LayerError::Spool)?;
    }
    Blob::whole(file).map_err(LayerError::Spool)
}

impl Bounds {
    /// Checks that `out` unpacked bytes are allowed for `read` compressed bytes.
    fn check(&self, out: u64, read: u64) -> Result<(), LayerError> {
        if out > self.bytes {
            return Err(LayerError::TooLarge(self.bytes));
        }
        if out > RATIO_EXEMPT_BYTES && out / self.ratio.max(1) > read {
            return Err(LayerError::Ratio(self.ratio));
        }
        Ok(())
    }
}

/// Reads until the buffer is full or the stream ends; returns the bytes read.
fn read_full(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match reader.read(&mut buffer[got..]) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

/// Counts the bytes that are read.
struct Counted<'a, R>(R, &'a AtomicU64);

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.0.read(buffer)?;
        self.1.fetch_add(got as u64, Ordering::Relaxed);
        Ok(got)
    }
}

/// Called regularly while a layer is read; `Break` cancels it.
pub type Tick<'a> = &'a mut dyn FnMut() -> ControlFlow<()>;

/// Passes the tar in `blob` to `read`, then checks the rest of it. `seen` counts the blob's bytes
/// as they are read.
///
/// `read` may stop early: the remaining bytes are hashed and checked too. What `read` found must
/// not be used before this function returns.
///
/// # Errors
///
/// If the size or a digest is not the expected one, the blob can't be read or unpacked, exceeds
/// `bounds`, the spool file can't be written, `tick` cancels it, or `read` fails.
pub fn unpack<T, E: From<LayerError>>(
    blob: &Blob,
    expected: &Expected,
    bounds: Bounds,
    spool: &mut Spool,
    seen: &AtomicU64,
    tick: Tick<'_>,
    read: impl FnOnce(&mut LayerStream<'_>) -> Result<T, E>,
) -> Result<(T, Unpacked), E> {
    if let Some(wanted) = expected.size.filter(|size| *size != blob.len) {
        let actual = blob.len;
        return Err(LayerError::Size {
            actual,
            expected: wanted,
        }
        .into());
    }
    let compression = blob.compression().map_err(LayerError::Unpack)?;
    if compression == Compression::Bzip2 {
        return Err(LayerError::Unsupported("bzip2").into());
    }
    if compression == Compression::Plain {
        return plain(blob, expected, bounds, seen, tick, read);
    }
    let start = spool.end;
    let (value, digest) = std::thread::scope(|scope| {
        let (sender, receiver) = sync_channel(CHANNEL_PIECES);
        let thread =
            scope.spawn(move || unpacking(blob, compression, expected, bounds, seen, &sender));
        let mut stream = LayerStream {
            origin: Origin::Thread(receiver),
            piece: Vec::new(),
            used: 0,
            hasher: expected.diff_id.map(|_| Hasher::new()),
            file: Arc::clone(&spool.file),
            base: start,
            spool: Some(&mut *spool),
            failure: None,
            seen: None,
            tick,
        };
        let value = read(&mut stream);
        if value.is_ok() {
            stream.drain();
        }
        let failure = stream.failure.take();
        let hasher = stream.hasher.take();
        drop(stream);
        let digest = thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // The stream's failure caused the reader's error, so it is reported first.
        let digest = match (digest, failure) {
            (_, Some(failure)) => return Err(failure.into()),
            (Err(Some(failure)), None) => return Err(failure.into()),
            (Err(None), None) => None,
            (Ok(digest), None) => digest,
        };
        let value = value?;
        check_diff_id(hasher, expected)?;
        Ok::<_, E>((value, digest))
    })?;
    let tar = Blob {
        file: Arc::clone(&spool.file),
        offset: start,
        len: spool.end - start,
    };
    Ok((value, Unpacked { tar, digest }))
}

fn plain<T, E: From<LayerError>>(
    blob: &Blob,
    expected: &Expected,
    bounds: Bounds,
    seen: &AtomicU64,
    tick: Tick<'_>,
    read: impl FnOnce(&mut LayerStream<'_>) -> Result<T, E>,
) -> Result<(T, Unpacked), E> {
    if blob.len > bounds.bytes {
        return Err(LayerError::TooLarge(bounds.bytes).into());
    }
    // A plain tar's digest is its diff_id as well: one hash serves for both.
    let hashed = expected.digest.is_some() || expected.diff_id.is_some();
    let mut stream = LayerStream {
        origin: Origin::Plain(blob.stream()),
        piece: Vec::new(),
        used: 0,
        hasher: hashed.then(Hasher::new),
        file: Arc::clone(&blob.file),
        base: blob.offset,
        spool: None,
        failure: None,
        seen: Some(seen),
        tick,
    };
    let value = read(&mut stream);
    if value.is_ok() {
        stream.drain();
    }
    if let Some(failure) = stream.failure.take() {
        return Err(failure.into());
    }
    let value = value?;
    let hasher = stream.hasher.take();
    let digest = hasher.clone().map(Hasher::finish);
    if let (Some(actual), Some(wanted)) = (digest, expected.digest)
        && actual != wanted
    {
        return Err(LayerError::Digest {
            actual,
            expected: wanted,
        }
        .into());
    }
    check_diff_id(hasher, expected)?;
    let tar = blob.clone();
    Ok((value, Unpacked { tar, digest }))
}

fn check_diff_id(hasher: Option<Hasher>, expected: &Expected) -> Result<(), LayerError> {
    let Some((hasher, wanted)) = hasher.zip(expected.diff_id) else {
        return Ok(());
    };
    let actual = hasher.finish();
    if actual == wanted {
        Ok(())
    } else {
        Err(LayerError::DiffId {
            actual,
            expected: wanted,
        })
    }
}

/// Body of the unpacking thread. `Err(None)`: the receiver was dropped.
fn unpacking(
    blob: &Blob,
    compression: Compression,
    expected: &Expected,
    bounds: Bounds,
    seen: &AtomicU64,
    to: &SyncSender<Vec<u8>>,
) -> Result<Option<Digest>, Option<LayerError>> {
    let read = AtomicU64::new(0);
    let mut compressed = Compressed {
        stream: blob.stream(),
        hasher: expected.digest.map(|_| Hasher::new()),
        read: &read,
        seen,
    };
    let unpacked = unpack_stream(compression, &mut compressed, &read, bounds, to);
    if matches!(unpacked, Err(None)) {
        return Err(None);
    }
    // Bytes behind the compressed data belong to the blob and its digest. A wrong digest is reported in
    // preference to the decoder's error.
    let mut rest = vec![0; STRIDE];
    let mut drained = Ok(1);
    while matches!(drained, Ok(got) if got > 0) {
        drained = compressed.read(&mut rest);
    }
    let digest = compressed.hasher.take();
    let digest = digest.map(Hasher::finish);
    drained.map_err(|error| Some(LayerError::Unpack(error)))?;
    if let (Some(actual), Some(wanted)) = (digest, expected.digest)
        && actual != wanted
    {
        return Err(Some(LayerError::Digest {
            actual,
            expected: wanted,
        }));
    }
    unpacked.map(|()| digest)
}

/// Unpacks to the end of the stream.
fn unpack_stream(
    compression: Compression,
    compressed: &mut Compressed<'_>,
    read: &AtomicU64,
    bounds: Bounds,
    to: &SyncSender<Vec<u8>>,
) -> Result<(), Option<LayerError>> {
    let fail = |error| Some(LayerError::Unpack(error));
    let mut unpacked = decoder(compression, compressed).map_err(fail)?;
    let mut out = 0u64;
    loop {
        let mut piece = vec![0; STRIDE];
        let got = read_full(&mut unpacked, &mut piece).map_err(fail)?;
        if got == 0 {
            return Ok(());
        }
        out += got as u64;
        // Bytes in the decoder's buffer count as read, so the ratio is never overestimated.
        bounds.check(out, read.load(Ordering::Relaxed))?;
        piece.truncate(got);
        to.send(piece).map_err(|_| None)?;
    }
}

fn decoder<'a>(
    compression: Compression,
    compressed: impl Read + 'a,
) -> io::Result<Box<dyn Read + 'a>> {
    let buffered = io::BufReader::with_capacity(STRIDE, compressed);
    Ok(match compression {
        Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(buffered)),
        Compression::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(buffered)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG)?;
            Box::new(decoder)
        }
        Compression::Xz => {
            let stream = liblzma::stream::Stream::new_stream_decoder(
                XZ_MEMORY,
                liblzma::stream::CONCATENATED,
            )?;
            Box::new(liblzma::bufread::XzDecoder::new_stream(buffered, stream))
        }
        Compression::Plain | Compression::Bzip2 => Box::new(buffered),
    })
}

/// Reads the blob's bytes, counts and hashes them.
struct Compressed<'a> {
    stream: BlobStream,
    hasher: Option<Hasher>,
    read: &'a AtomicU64,
    seen: &'a AtomicU64,
}

impl Read for Compressed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.stream.read(buffer)?;
        if let Some(hasher) = &mut self.hasher {
            hasher.update(&buffer[..got]);
        }
        self.read.fetch_add(got as u64, Ordering::Relaxed);
        self.seen.fetch_add(got as u64, Ordering::Relaxed);
        Ok(got)
    }
}

/// A layer's tar while it is unpacked; its bytes are hashed and spooled as they pass.
pub struct LayerStream<'a> {
    origin: Origin,
    /// Unpacked bytes; the first `used` have been read.
    piece: Vec<u8>,
    used: usize,
    hasher: Option<Hasher>,
    spool: Option<&'a mut Spool>,
    /// The file from which the tar's bytes can be read again, and the tar's offset in it.
    pub file: Arc<File>,
    /// Offset of the tar in `file`, bytes.
    pub base: u64,
    /// Why the stream ended too early.
    failure: Option<LayerError>,
    /// Counter of a plain blob's bytes.
    seen: Option<&'a AtomicU64>,
    tick: Tick<'a>,
}

enum Origin {
    Plain(BlobStream),
    Thread(Receiver<Vec<u8>>),
}

impl LayerStream<'_> {
    /// Makes sure that `piece` has unread bytes; false at the end.
    fn fill(&mut self) -> io::Result<bool> {
        if self.used < self.piece.len() {
            return Ok(true);
        }
        if (self.tick)().is_break() {
            self.failure.get_or_insert(LayerError::Cancelled);
            return Err(io::ErrorKind::Other.into());
        }
        self.used = 0;
        self.piece = match &mut self.origin {
            Origin::Thread(receiver) => receiver.recv().unwrap_or_default(),
            Origin::Plain(stream) => {
                let mut piece = std::mem::take(&mut self.piece);
                piece.resize(STRIDE, 0);
                let got = stream.read(&mut piece)?;
                piece.truncate(got);
                if let Some(seen) = self.seen {
                    seen.fetch_add(got as u64, Ordering::Relaxed);
                }
                piece
            }
        };
        if let Some(hasher) = &mut self.hasher {
            hasher.update(&self.piece);
        }
        if let Some(spool) = &mut self.spool {
            if let Err(error) = spool.file.write_all_at(&self.piece, spool.end) {
                self.failure = Some(LayerError::Spool(error));
                return Err(io::ErrorKind::Other.into());
            }
            spool.end += self.piece.len() as u64;
        }
        Ok(!self.piece.is_empty())
    }

    /// Reads to the end, because the digests cover the whole tar.
    fn drain(&mut self) {
        let idle = matches!(self.origin, Origin::Plain(_)) && self.hasher.is_none();
        if idle {
            return;
        }
        loop {
            match self.fill() {
                Ok(true) => self.used = self.piece.len(),
                Ok(false) => return,
                Err(error) => {
                    let failure = LayerError::Unpack(error);
                    self.failure.get_or_insert(failure);
                    return;
                }
            }
        }
    }
}

impl Read for LayerStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if !self.fill()? {
            return Ok(0);
        }
        let waiting = &self.piece[self.used..];
        let most = waiting.len().min(buffer.len());
        buffer[..most].copy_from_slice(&waiting[..most]);
        self.used += most;
        Ok(most)
    }
}

impl Skip for LayerStream<'_> {
    fn skip(&mut self, bytes: u64) -> io::Result<u64> {
        let mut left = bytes;
        while left > 0 {
            let waiting = (self.piece.len() - self.used) as u64;
            if waiting == 0
                && self.hasher.is_none()
                && let Origin::Plain(stream) = &mut self.origin
            {
                // The bytes are not hashed, so they need not be read.
                let skipped = stream.skip(left)?;
                if let Some(seen) = self.seen {
                    seen.fetch_add(skipped, Ordering::Relaxed);
                }
                left -= skipped;
                break;
            }
            if waiting == 0 && !self.fill()? {
                break;
            }
            let most = left.min((self.piece.len() - self.used) as u64);
            self.used += most as usize;
            left -= most;
        }
        Ok(bytes - left)
    }
}
