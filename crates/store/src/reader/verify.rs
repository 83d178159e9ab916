//! Reads all of an image.

use super::{ImageReader, Place};
use crate::codec::Decoder;
use crate::error::{Fault, ImageError};
use crate::format::{GROUP, IdHasher, content_hash};

impl ImageReader {
    /// Reads every chunk and checks it against its checksum, its content hash and the image's id;
    /// checks the backing file against its digest.
    ///
    /// # Errors
    ///
    /// If a part can't be read or is damaged: the first such error.
    pub fn verify(&self) -> Result<(), ImageError> {
        let mut id = IdHasher::new(self.size(), self.chunk_size());
        for first in (0..self.chunks()).step_by(GROUP as usize) {
            let mut bitmap = 0;
            for index in first..self.chunks().min(first.saturating_add(GROUP)) {
                let present = self.place(index)? != Place::Zero;
                bitmap |= u64::from(present) << (index - first);
            }
            id.bitmap(bitmap);
        }
        if let Some(backing) = self.backing() {
            backing.verify().map_err(|fault| self.failed(fault))?;
        }
        let mut decoder = Decoder::new();
        let mut chunk = vec![0; self.chunk_size() as usize];
        for index in 0..self.chunks() {
            let Place::Entry(entry) = self.place(index)? else {
                continue;
            };
            self.read_chunk_with(&mut decoder, index, &mut chunk)?;
            let hash = content_hash(&chunk);
            if self.content_hash(index)? != Some(hash) {
                return Err(self.damaged_chunk(index, &entry, "its content hash is wrong"));
            }
            id.chunk(&hash);
        }
        self.working_set()?;
        if id.finish() != self.id() {
            return Err(self.failed(Fault::Damaged {
                offset: self.file_bytes() - crate::format::footer::BYTES as u64,
                what: "the image's id is not that of its contents",
            }));
        }
        Ok(())
    }
}
