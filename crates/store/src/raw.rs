//! Writes contents as a sparse file, which a VMM can map.

use crate::codec::is_zero;
use crate::error::WriteError;
use crate::source::ChunkSource;
use crate::temporary::{Existing, Temporary};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Bytes of a page: a page of zeros becomes a hole.
const PAGE: usize = 4096;
/// Bytes that a thread copies at once.
const PIECE: u64 = 1 << 20;

/// Writes `source` as a sparse raw file called `target`; pages of zeros become holes. The file is
/// written under a temporary name, synced and renamed over `target`, and the folder is synced.
/// Returns the bytes that are not holes.
///
/// # Errors
///
/// If the source can't be read, or the file can't be written, synced or renamed.
pub fn write_raw(
    target: &Path,
    source: &(impl ChunkSource + Sync + ?Sized),
) -> Result<u64, WriteError> {
    let temporary = Temporary::create(target)?;
    let file = temporary.file();
    file.set_len(source.size())
        .map_err(|error| temporary.failed(error))?;
    let ranges = source
        .data_ranges()
        .map_err(|source| WriteError::Source { offset: 0, source })?;
    let pieces = Mutex::new(ranges.into_iter().flat_map(pieces));
    let threads = thread::available_parallelism().map_or(1, |cores| cores.get());
    let failed = AtomicBool::new(false);
    let work = || -> Result<u64, WriteError> {
        let mut buffer = Vec::new();
        let mut written = 0;
        loop {
            let piece = pieces.lock().ok().and_then(|mut pieces| pieces.next());
            let Some(piece) = piece.filter(|_| !failed.load(Ordering::Relaxed)) else {
                return Ok(written);
            };
            let copied = copy(source, &temporary, file, piece, &mut buffer);
            written += copied.inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
        }
    };
    let written = thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut written = work();
        for other in others {
            let other = other.join().expect("a writer of pages does not panic");
            written = written.and_then(|bytes| Ok(bytes + other?));
        }
        written
    })?;
    temporary.commit(Existing::Replace)?;
    Ok(written)
}

/// Cuts a range at multiples of [`PIECE`].
fn pieces(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let start = at;
        at = range.end.min((start / PIECE + 1) * PIECE);
        (start < range.end).then_some(start..at)
    })
}

fn copy(
    source: &(impl ChunkSource + ?Sized),
    temporary: &Temporary,
    file: &File,
    piece: Range<u64>,
    buffer: &mut Vec<u8>,
) -> Result<u64, WriteError> {
    buffer.resize((piece.end - piece.start) as usize, 0);
    let offset = piece.start;
    source
        .read_at(offset, buffer)
        .map_err(|source| WriteError::Source { offset, source })?;
    let mut written = 0;
    // Contiguous pages that are not zero are written with one call.
    let mut run = 0..0;
    let pages = buffer.chunks(PAGE).map(|page| (page.len(), is_zero(page)));
    for (length, zero) in pages.chain([(0, true)]) {
        if !zero {
            run.end += length;
            continue;
        }
        if !run.is_empty() {
            written += run.len() as u64;
            file.write_all_at(&buffer[run.clone()], offset + run.start as u64)
                .map_err(|error| temporary.failed(error))?;
        }
        run = run.end + length..run.end + length;
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn zero_pages_become_holes_and_other_pages_are_written() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("ram");
        let mut contents = vec![0; (3 << 20) + 5];
        contents[PAGE * 3 + 7] = 1;
        contents[PAGE * 4] = 2;
        contents[(1 << 20) - 1] = 3;
        contents[1 << 20] = 4;
        contents[(3 << 20) + 4] = 5;
        let written = write_raw(&target, &contents).unwrap();
        assert_eq!(written, 4 * PAGE as u64 + 5);
        assert_eq!(std::fs::read(&target).unwrap(), contents);
        let blocks = std::fs::metadata(&target).unwrap().blocks();
        assert!(blocks * 512 <= 6 * PAGE as u64, "{blocks}");
        // Copies the file, which has holes.
        let again = folder.path().join("again");
        let file = File::open(&target).unwrap();
        assert_eq!(write_raw(&again, &file).unwrap(), written);
        assert_eq!(std::fs::read(&again).unwrap(), contents);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_failing_source_leaves_no_file() {
        struct Failing;
        impl ChunkSource for Failing {
            fn size(&self) -> u64 {
                8 << 20
            }
            fn read_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
                buffer.fill(1);
                match offset {
                    0x50_0000.. => Err(std::io::Error::other("broken")),
                    _ => Ok(()),
                }
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let error = write_raw(&folder.path().join("ram"), &Failing).unwrap_err();
        assert!(matches!(error, WriteError::Source { .. }), "{error}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
