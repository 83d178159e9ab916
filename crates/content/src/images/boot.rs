//! The boot set of an image: the chunks that a guest has read by the time it has run a program
//! that does nothing. It is recorded when a golden snapshot is made, at almost no cost. A node
//! that starts the image lazily fetches these chunks at once.

use super::Images;
use super::chunks::CHUNK;
use crate::error::{Error, Result};
use crate::model::image::BootSet;
use crate::records;
use jiffy_wire::vmm::ReadUnits;
use std::path::{Path, PathBuf};

/// Most chunks kept, 256 MiB: a VMM records no more.
const MOST: usize = 16 << 10;

/// The boot set's file in an image's folder.
fn file(folder: &Path) -> PathBuf {
    folder.join("boot.json")
}

/// The chunks, in the order in which they were read; `None` if they are not known for the file
/// system with this digest.
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
    /// Saves what a guest has read of this image.
    ///
    /// # Errors
    ///
    /// If the image's record can't be read, or the file can't be written.
    pub fn save_boot_set(&self, name: &str, digest: &str, reads: &ReadUnits) -> Result<()> {
        let folder = self.folder_of(name)?;
        // The name may belong to another image by now.
        if self.record(name)?.digest != digest {
            return Ok(());
        }
        let path = file(&folder);
        let known = BootSet {
            digest: digest.to_owned(),
            reads: reads.clone(),
        };
        records::boot_set::save(&path, known)
            .map_err(|error| Error::io("write the boot set of an image", &path, &error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_set_is_valid_for_its_file_system_and_chunk_size() {
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
