//! The strategies that a replay compares.

use super::raw::RawImage;
use super::{ReplayError, Touches};
use crate::image::{ChunkImage, StoredImage, Unreadable};
use jiffy_store::optimise::Contents;
use jiffy_store::{Codec, WriteOptions, write_image, write_raw};
use rustix::fs::{Advice, fadvise};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How bytes are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// By plain reads, on one core.
    Read,
    /// By page faults.
    Fault,
}

/// How bytes are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// A sparse file as long as RAM.
    Sparse,
    /// An image.
    Image {
        /// How its chunks are compressed.
        codec: Codec,
        /// With a dictionary.
        dictionary: bool,
        /// A chunk that does not shrink to this percentage of its size stays raw.
        raw_above: u8,
    },
}

/// A way to store and read chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strategy {
    /// How bytes are read.
    pub kind: Kind,
    /// How they are stored.
    pub form: Form,
    /// Bytes of a chunk.
    pub chunk_size: u32,
    /// The recorded chunks are stored first and prefetched.
    pub prefetch: bool,
    /// The recorded chunks are stored for quick reads, as `optimise` does.
    pub optimised: bool,
    /// Bytes filled around a fault; 0 for none.
    pub fault_around: u64,
}

const KIB: u32 = 1 << 10;
const LZ4: Form = Form::Image {
    codec: Codec::Lz4,
    dictionary: false,
    raw_above: 50,
};
const COMPACT: Form = Form::Image {
    codec: Codec::None,
    dictionary: false,
    raw_above: 50,
};
const ZSTD: Form = Form::Image {
    codec: Codec::Zstd(3),
    dictionary: false,
    raw_above: 50,
};
const ZSTD_DICTIONARY: Form = Form::Image {
    codec: Codec::Zstd(3),
    dictionary: true,
    raw_above: 50,
};
/// Compressed wherever it saves anything.
const LZ4_ALL: Form = Form::Image {
    codec: Codec::Lz4,
    dictionary: false,
    raw_above: 99,
};
const LZ4_HIGH: Form = Form::Image {
    codec: Codec::Lz4High,
    dictionary: false,
    raw_above: 50,
};

/// All strategies, the simplest first.
pub fn all() -> Vec<Strategy> {
    let mut all = Vec::new();
    for kind in [Kind::Read, Kind::Fault] {
        let plain = |form, chunk_size| Strategy {
            kind,
            form,
            chunk_size,
            prefetch: false,
            optimised: false,
            fault_around: 0,
        };
        all.push(plain(Form::Sparse, 4 * KIB));
        all.push(plain(Form::Sparse, 8 * KIB));
        all.push(plain(COMPACT, 8 * KIB));
        for chunk_size in [4, 8, 16, 64, 256, 2048] {
            all.push(plain(LZ4, chunk_size * KIB));
        }
        for form in [LZ4_ALL, LZ4_HIGH, ZSTD, ZSTD_DICTIONARY] {
            all.push(plain(form, 8 * KIB));
        }
        if kind == Kind::Fault {
            for around in [16, 32, 64, 128] {
                all.push(Strategy {
                    fault_around: around << 10,
                    ..plain(LZ4, 8 * KIB)
                });
            }
        }
        for form in [COMPACT, LZ4, LZ4_HIGH, ZSTD, ZSTD_DICTIONARY] {
            all.push(Strategy {
                prefetch: true,
                ..plain(form, 8 * KIB)
            });
        }
        for form in [LZ4, ZSTD] {
            all.push(Strategy {
                prefetch: true,
                optimised: true,
                ..plain(form, 8 * KIB)
            });
        }
    }
    all
}

impl Strategy {
    /// The name that is printed and that `--only` selects by.
    pub fn name(&self) -> String {
        let kind = match self.kind {
            Kind::Read => "read",
            Kind::Fault => "fault",
        };
        let mut name = format!("{kind}/{}/{}K", self.stored(), self.chunk_size / KIB);
        if self.fault_around > 0 {
            name.push_str(&format!("/around-{}K", self.fault_around >> 10));
        }
        name.push_str(match (self.prefetch, self.optimised) {
            (_, true) => "/optimised",
            (true, false) => "/prefetch",
            (false, false) => "",
        });
        name
    }

    /// How the bytes are stored.
    pub fn stored(&self) -> String {
        match self.form {
            Form::Sparse => "sparse".into(),
            Form::Image {
                codec,
                dictionary,
                raw_above,
            } => {
                let codec = match codec {
                    Codec::None => "compact".into(),
                    Codec::Lz4 => "lz4".into(),
                    Codec::Lz4High => "lz4-high".into(),
                    Codec::Zstd(level) => format!("zstd-{level}"),
                };
                let dictionary = if dictionary { "-dictionary" } else { "" };
                let all = if raw_above > 50 { "-always" } else { "" };
                format!("{codec}{dictionary}{all}")
            }
        }
    }

    /// Writes its file.
    pub(super) fn prepare(
        &self,
        image: &StoredImage,
        touches: &Touches,
        folder: &Path,
    ) -> Result<Prepared, ReplayError> {
        let path = folder.join("strategy");
        let contents = Contents(image.reader());
        let failed = |error| ReplayError::Write {
            name: self.name(),
            source: Box::new(error),
        };
        match self.form {
            Form::Sparse => {
                write_raw(&path, &contents).map_err(failed)?;
            }
            Form::Image {
                codec,
                dictionary,
                raw_above,
            } => {
                let options = WriteOptions {
                    chunk_size: self.chunk_size,
                    codec,
                    dictionary,
                    raw_above_percent: raw_above,
                    working_set: self.prefetch.then(|| self.working_set(touches)),
                    quick_working_set: self.optimised,
                    ..WriteOptions::default()
                };
                write_image(&path, &contents, &options).map_err(failed)?;
            }
        }
        Ok(Prepared {
            path,
            form: self.form,
            chunk_size: self.chunk_size as usize,
        })
    }

    /// The recorded chunks, in this strategy's chunk size.
    fn working_set(&self, touches: &Touches) -> Vec<u32> {
        let size = u64::from(self.chunk_size);
        let mut seen = std::collections::HashSet::new();
        touches
            .offsets
            .iter()
            .flat_map(|offset| offset / size..(offset + touches.chunk_size).div_ceil(size))
            .map(|chunk| chunk as u32)
            .filter(|chunk| seen.insert(*chunk))
            .collect()
    }
}

/// A strategy's file.
pub(super) struct Prepared {
    path: PathBuf,
    form: Form,
    chunk_size: usize,
}

impl Prepared {
    /// Opens it as an image.
    ///
    /// # Errors
    ///
    /// If it can't be opened, or is no image.
    pub fn open(&self) -> Result<Arc<dyn ChunkImage>, Unreadable> {
        Ok(match self.form {
            Form::Sparse => Arc::new(RawImage::open(&self.path, self.chunk_size)?),
            Form::Image { .. } => Arc::new(StoredImage::open(&self.path)?),
        })
    }

    /// Bytes on the disk.
    ///
    /// # Errors
    ///
    /// If the file can't be opened.
    pub fn file_bytes(&self) -> io::Result<u64> {
        use std::os::unix::fs::MetadataExt;
        Ok(File::open(&self.path)?.metadata()?.blocks() * 512)
    }

    /// Removes its pages from the page cache.
    ///
    /// # Errors
    ///
    /// If the file can't be opened or synced, or `fadvise` fails.
    pub fn evict(&self) -> io::Result<()> {
        let file = File::open(&self.path)?;
        file.sync_all()?;
        Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
    }

    /// Reads all of it into the page cache.
    ///
    /// # Errors
    ///
    /// If the file can't be read.
    pub fn warm(&self) -> io::Result<()> {
        let mut file = File::open(&self.path)?;
        let mut buffer = vec![0; 1 << 20];
        while file.read(&mut buffer)? > 0 {}
        Ok(())
    }
}
