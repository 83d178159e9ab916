//! Blobs from a registry, whole and in parts.

use super::Client;
use super::answer::Answer;
use super::exchange::{Call, Payload};
use super::failure::{broken, unreachable};
use crate::error::Result;
use crate::{Descriptor, Progress, Reference, RegistryError};
use jiffy_oci::{Digest, Hasher, one_line};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use ureq::http::header;
use ureq::http::{Method, StatusCode};

/// Bytes per read.
const PIECE: usize = 64 << 10;

/// Most bytes that are skipped if a registry sends a blob from its start although a range was
/// requested.
const MAX_SKIPPED: u64 = 64 << 20;

/// Destination of received bytes.
enum Sink<'a> {
    /// Each piece is passed to a function.
    Pieces(&'a mut dyn FnMut(&[u8]) -> Result<()>),
    /// They are put there, directly from the connection without another buffer.
    Memory(Memory<'a>),
}

/// Memory for received bytes.
struct Memory<'a> {
    all: &'a mut [u8],
    /// How many of them have been received.
    filled: &'a mut usize,
}

impl Memory<'_> {
    /// The place of the next bytes.
    fn rest(&mut self) -> &mut [u8] {
        &mut self.all[*self.filled..]
    }
}

/// The blob of a request for bytes.
struct Wanted<'a> {
    what: &'a str,
    repository: &'a Reference,
    blob: &'a Descriptor,
    /// Most bytes that may be skipped if the registry also sends the bytes before the range.
    max_skipped: u64,
    progress: &'a dyn Progress,
}

impl Client {
    /// A whole blob in memory, such as a configuration, of at most `limit` bytes.
    ///
    /// # Errors
    ///
    /// If the blob is larger than `limit`, or [`blob`](Self::blob) fails.
    pub fn small_blob(
        &self,
        repository: &Reference,
        blob: &Descriptor,
        limit: u64,
        progress: &dyn Progress,
    ) -> Result<Vec<u8>> {
        if blob.size > limit {
            return Err(RegistryError::Unsupported {
                what: blob_name(repository, blob),
                reason: format!("it has {} bytes, the limit is {limit}", blob.size),
            });
        }
        let mut bytes = Vec::new();
        self.blob(repository, blob, &mut bytes, progress)?;
        Ok(bytes)
    }

    /// Streams a blob into `sink`. A broken connection is resumed where it broke. `sink` never gets
    /// more bytes than the blob's size.
    ///
    /// # Errors
    ///
    /// If the registry can't be reached or refuses, the blob has another size or digest, `sink`
    /// fails, or `progress` is cancelled. `sink` may then have got wrong bytes, because the digest
    /// is checked at the end.
    pub fn blob(
        &self,
        repository: &Reference,
        blob: &Descriptor,
        sink: &mut dyn Write,
        progress: &dyn Progress,
    ) -> Result<()> {
        self.stream(repository, blob, 0, Hasher::new(), sink, progress)
    }

    /// Completes a file that may contain the beginning of a blob. If the result is wrong and a part
    /// of it was present before, the whole blob is fetched again, once. Does not sync.
    ///
    /// # Errors
    ///
    /// As for [`blob`](Self::blob), or if the file can't be read or truncated.
    pub fn blob_to_file(
        &self,
        repository: &Reference,
        blob: &Descriptor,
        file: &mut File,
        progress: &dyn Progress,
    ) -> Result<()> {
        let what = blob_name(repository, blob);
        let failed = |source| RegistryError::Sink {
            what: what.clone(),
            source,
        };
        let (there, hasher) = hash_beginning(file, blob.size).map_err(failed)?;
        let result = self.stream(repository, blob, there, hasher, file, progress);
        if there == 0 || !matches!(result, Err(RegistryError::Damaged { .. })) {
            return result;
        }
        tracing::debug!(%what, there, "the partial file of an earlier attempt is wrong, downloading it again");
        file.set_len(0).map_err(failed)?;
        file.rewind().map_err(failed)?;
        self.stream(repository, blob, 0, Hasher::new(), file, progress)
    }

    /// Streams a blob from `done` on; `hasher` has hashed the bytes before.
    fn stream(
        &self,
        repository: &Reference,
        blob: &Descriptor,
        mut done: u64,
        mut hasher: Hasher,
        sink: &mut dyn Write,
        progress: &dyn Progress,
    ) -> Result<()> {
        let what = blob_name(repository, blob);
        let mut retrier = self.inner.retrier(&what, progress);
        progress.moved(blob, done);
        let wanted = Wanted {
            what: &what,
            repository,
            blob,
            // The whole blob is wanted, so a transfer from its start is always accepted.
            max_skipped: u64::MAX,
            progress,
        };
        let mut mark = done;
        while done < blob.size {
            retrier.check()?;
            let mut take = |bytes: &[u8]| -> Result<()> {
                hasher.update(bytes);
                sink.write_all(bytes)
                    .map_err(|source| RegistryError::Sink {
                        what: what.clone(),
                        source,
                    })?;
                done += bytes.len() as u64;
                progress.moved(blob, done);
                if progress.cancelled() {
                    return Err(RegistryError::Cancelled { what: what.clone() });
                }
                Ok(())
            };
            let from = mark;
            let sink = Sink::Pieces(&mut take);
            if let Err(error) = self.receive(&wanted, from..blob.size, sink) {
                if done >= mark + PIECE as u64 {
                    retrier.reset();
                }
                mark = done;
                retrier.wait_or_fail(error)?;
            }
        }
        check_digest(&what, blob, hasher.finish())
    }

    /// Some bytes of a blob (`range`, in bytes), in one ranged read. **Not verified**: a part of a
    /// blob has no digest, so the caller must have a checksum of its own.
    ///
    /// # Errors
    ///
    /// If the range is not within the blob, the registry can't be reached or refuses, or `progress`
    /// is cancelled.
    pub fn blob_range(
        &self,
        repository: &Reference,
        blob: &Descriptor,
        range: Range<u64>,
        progress: &dyn Progress,
    ) -> Result<Vec<u8>> {
        check_range(&blob_name(repository, blob), blob, &range)?;
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.blob_range_into(repository, blob, range, &mut bytes, progress)?;
        Ok(bytes)
    }

    /// The same, into memory of the range's length.
    pub(crate) fn blob_range_into(
        &self,
        repository: &Reference,
        blob: &Descriptor,
        range: Range<u64>,
        into: &mut [u8],
        progress: &dyn Progress,
    ) -> Result<()> {
        let what = blob_name(repository, blob);
        check_range(&what, blob, &range)?;
        let whole = range == (0..blob.size);
        let wanted = Wanted {
            what: &what,
            repository,
            blob,
            max_skipped: if whole { u64::MAX } else { MAX_SKIPPED },
            progress,
        };
        let mut retrier = self.inner.retrier(&what, progress);
        let mut filled = 0;
        while filled < into.len() {
            let before = filled;
            let left = range.start + before as u64..range.end;
            let memory = Memory {
                all: &mut *into,
                filled: &mut filled,
            };
            if let Err(error) = self.receive(&wanted, left, Sink::Memory(memory)) {
                if filled >= before + PIECE {
                    retrier.reset();
                }
                retrier.wait_or_fail(error)?;
            }
        }
        Ok(())
    }

    /// A whole blob, into memory of its size; checks its digest.
    pub(crate) fn blob_into(
        &self,
        repository: &Reference,
        blob: &Descriptor,
        into: &mut [u8],
        progress: &dyn Progress,
    ) -> Result<()> {
        self.blob_range_into(repository, blob, 0..blob.size, into, progress)?;
        progress.moved(blob, blob.size);
        check_digest(&blob_name(repository, blob), blob, Digest::of(into))
    }

    /// One request for a range of a blob. On success `sink` got all of it.
    fn receive(&self, wanted: &Wanted<'_>, range: Range<u64>, mut sink: Sink<'_>) -> Result<()> {
        let &Wanted {
            what,
            blob,
            progress,
            ..
        } = wanted;
        let (answer, skip) = self.request(wanted, &range)?;
        let host = answer.url.authority().to_owned();
        let length = range.end - range.start;
        let all_of_it = match answer.status() {
            StatusCode::OK => range.end == blob.size,
            _ => answer.length() == Some(length),
        };
        let mut body = answer.response.into_body().into_reader();
        let mut buffer = vec![0; PIECE];
        let mut read = |buffer: &mut [u8], seen: u64| match body.read(buffer) {
            Ok(0) => {
                let why = format!("the answer ended after {seen} of {} bytes", skip + length);
                Err(unreachable(what, &host, &why))
            }
            Ok(count) => Ok(count),
            Err(error) => Err(broken(what, &host, ureq::Error::from(error))),
        };
        let mut seen = 0;
        while seen < skip + length {
            if seen >= skip
                && let Sink::Memory(memory) = &mut sink
            {
                let rest = memory.rest();
                let most = rest.len().min(PIECE);
                let count = read(&mut rest[..most], seen)?;
                *memory.filled += count;
                seen += count as u64;
                if progress.cancelled() {
                    let what = what.to_owned();
                    return Err(RegistryError::Cancelled { what });
                }
                continue;
            }
            let left = usize::try_from(skip + length - seen).unwrap_or(usize::MAX);
            let wanted = buffer.len().min(left);
            let count = read(&mut buffer[..wanted], seen)?;
            let before = usize::try_from(skip.saturating_sub(seen)).unwrap_or(usize::MAX);
            if before < count {
                match &mut sink {
                    Sink::Pieces(take) => take(&buffer[before..count])?,
                    Sink::Memory(memory) => {
                        memory.rest()[..count - before].copy_from_slice(&buffer[before..count]);
                        *memory.filled += count - before;
                    }
                }
            }
            seen += count as u64;
        }
        // Reading to the end also returns the connection to the pool. There can be more bytes only
        // if no length was given.
        if all_of_it && matches!(body.read(&mut buffer[..1]), Ok(1)) {
            let reason = format!("it has more than its {} bytes", blob.size);
            return Err(RegistryError::damaged(what, reason));
        }
        Ok(())
    }

    /// Requests a range of a blob. Returns the answer, and how many of its bytes come before the
    /// range: a registry may send the whole blob.
    fn request(&self, wanted: &Wanted<'_>, range: &Range<u64>) -> Result<(Answer, u64)> {
        let &Wanted {
            what,
            repository,
            blob,
            max_skipped,
            progress,
        } = wanted;
        let whole = *range == (0..blob.size);
        let mut headers = Vec::new();
        if !whole {
            let text = format!("bytes={}-{}", range.start, range.end - 1);
            headers.push((header::RANGE, text));
        }
        let answer = self.inner.send(Call {
            what,
            repository,
            method: Method::GET,
            url: self
                .inner
                .url(repository, &format!("blobs/{}", blob.digest))?,
            headers,
            scopes: pull_scope(repository),
            payload: Payload::Nothing,
            deadline: progress.deadline(),
        })?;
        let skip = match answer.status() {
            StatusCode::PARTIAL_CONTENT if !whole => {
                check_content_range(what, &answer, range, blob.size)?;
                0
            }
            StatusCode::OK => {
                check_length(what, &answer, blob.size)?;
                if range.start > max_skipped {
                    return Err(RegistryError::protocol(
                        what,
                        "the registry does not support range requests, and this blob is large",
                    ));
                }
                range.start
            }
            status => {
                return Err(RegistryError::protocol(
                    what,
                    format!("unexpected answer {status}"),
                ));
            }
        };
        Ok((answer, skip))
    }
}

/// The length and hash of the beginning of a blob in a file. The file's position is then at its
/// end. A file that is too long is truncated to 0.
fn hash_beginning(file: &mut File, size: u64) -> std::io::Result<(u64, Hasher)> {
    let there = file.metadata()?.len();
    file.seek(SeekFrom::Start(0))?;
    let mut hasher = Hasher::new();
    if there > size {
        file.set_len(0)?;
        return Ok((0, hasher));
    }
    let mut piece = vec![0; PIECE];
    let mut seen = 0;
    while seen < there {
        let count = file.read(&mut piece)?;
        if count == 0 {
            break;
        }
        hasher.update(&piece[..count]);
        seen += count as u64;
    }
    Ok((seen, hasher))
}

/// The name of a blob in messages.
pub(super) fn blob_name(repository: &Reference, blob: &Descriptor) -> String {
    format!(
        "blob {} of {}/{}",
        blob.digest.short(),
        repository.registry(),
        repository.repository()
    )
}

pub(super) fn pull_scope(repository: &Reference) -> Vec<String> {
    vec![format!("repository:{}:pull", repository.repository())]
}

fn check_range(what: &str, blob: &Descriptor, range: &Range<u64>) -> Result<()> {
    match range.start <= range.end && range.end <= blob.size {
        true => Ok(()),
        false => Err(RegistryError::damaged(
            what,
            format!(
                "bytes {}..{} of {} were requested",
                range.start, range.end, blob.size
            ),
        )),
    }
}

fn check_digest(what: &str, blob: &Descriptor, digest: Digest) -> Result<()> {
    match digest == blob.digest {
        true => Ok(()),
        false => Err(RegistryError::damaged(
            what,
            format!("its digest is {digest}"),
        )),
    }
}

fn check_length(what: &str, answer: &Answer, size: u64) -> Result<()> {
    match answer.length() {
        Some(length) if length != size => Err(RegistryError::damaged(
            what,
            format!("the registry has {length} bytes of it, expected {size}"),
        )),
        _ => Ok(()),
    }
}

/// RFC 9110 §14.4: `bytes FIRST-LAST/SIZE`.
fn check_content_range(what: &str, answer: &Answer, range: &Range<u64>, size: u64) -> Result<()> {
    let text = answer.header(&header::CONTENT_RANGE).unwrap_or_default();
    let parse = || {
        let (part, whole) = text.strip_prefix("bytes ")?.split_once('/')?;
        let (first, last) = part.split_once('-')?;
        let (first, last): (u64, u64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        let whole: Option<u64> = match whole.trim() {
            "*" => None,
            whole => Some(whole.parse().ok()?),
        };
        Some((first, last, whole))
    };
    let (first, last, whole) = parse().ok_or_else(|| {
        RegistryError::protocol(what, format!("{:?} is not a byte range", one_line(text)))
    })?;
    if let Some(whole) = whole
        && whole != size
    {
        let reason = format!("the registry has {whole} bytes of it, expected {size}");
        return Err(RegistryError::damaged(what, reason));
    }
    if first != range.start || last < range.end - 1 {
        return Err(RegistryError::protocol(
            what,
            format!(
                "bytes {}-{} were requested, the registry sent {first}-{last}",
                range.start,
                range.end - 1
            ),
        ));
    }
    Ok(())
}
