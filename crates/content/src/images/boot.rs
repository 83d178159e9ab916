//! What a boot needs of an image: the chunks that a guest has read by the time
//! it has run a program that does nothing. It is noted of the guests that are
//! booted to be kept (golden snapshots), costs those nothing to speak of, and
//! is what a node elsewhere fetches at once when it starts the image lazily.

use super::Images;
use super::chunks::CHUNK;
use crate::error::{Error, Result};
use crate::model::image::BootSet;
use crate::records;
use jiffy_wire::vmm::ReadUnits;
use std::path::{Path, PathBuf};

/// Most chunks taken, 256 MiB: a VMM notes no more.
const MOST: usize = 16 << 10;

/// Where it is in an image's folder.
fn file(folder: &Path) -> PathBuf {
    folder.join("boot.json")
}

/// The chunks, in the order in which they were read; none if they are not
/// known of this file system.
pub fn load(folder: &Path, digest: &str) -> Option<Vec<u32>> {
    let known = records::boot_set::load(&file(folder)).ok()?;
    let fits = known.digest == digest && known.reads.unit == CHUNK;
    let rows = known.reads.rows.into_iter().filter(|_| fits);
    let chunks: Vec<u32> = rows
        .flat_map(|(first, count)| first..first.saturating_add(count))
        .take(MOST)
        .collect();
    (!chunks.is_empty()).then_some(chunks)
}

impl Images {
    /// Keeps what a guest has read of this image.
    pub fn keep_boot(&self, name: &str, digest: &str, reads: &ReadUnits) -> Result<()> {
        let folder = self.folder_of(name)?;
        // Another may have taken its name.
        if self.record(name)?.digest != digest {
            return Ok(());
        }
        let path = file(&folder);
        let known = BootSet {
            digest: digest.to_owned(),
            reads: reads.clone(),
        };
        records::boot_set::save(&path, known)
            .map_err(|error| Error::io("keep what a boot needs", &path, &error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_counts_for_its_file_system_and_size_of_chunks() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(load(folder.path(), "d"), None);
        let save = |unit, rows| {
            let set = BootSet {
                digest: "d".into(),
                reads: ReadUnits { unit, rows },
            };
            records::boot_set::save(&file(folder.path()), set).unwrap();
        };
        save(CHUNK, vec![(7, 2), (0, 1)]);
        assert_eq!(load(folder.path(), "d").unwrap(), [7, 8, 0]);
        assert_eq!(load(folder.path(), "e"), None);
        save(CHUNK / 2, vec![(7, 2)]);
        assert_eq!(load(folder.path(), "d"), None);
        save(CHUNK, vec![(0, u32::MAX), (u32::MAX, u32::MAX)]);
        assert_eq!(load(folder.path(), "d").unwrap().len(), MOST);
    }
}
