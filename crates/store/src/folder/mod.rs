//! A folder of images and its garbage collection.
//!
//! Images are files `NAME`, written under temporary names. Removing one gives
//! it a hidden name, `.NAME.ID.removed`; it is deleted once no image names it
//! as parent and nobody has it open. Whoever writes a child holds its parent
//! open, so a parent cannot vanish under a child that is being written. Every
//! step is one rename or removal: after a crash between any two, the next
//! collection goes on.

use crate::error::{Fault, ImageError, WriteError};
use crate::format::{ImageId, ParentRef, footer};
use crate::reader::{ImageReader, Outline, parents};
use crate::source::ChunkSource;
use crate::temporary::{Existing, is_temporary, remove_unheld};
use crate::writer::{WriteOptions, Written, write_as};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The longest name, bytes: the hidden ones are longer.
pub const MAX_NAME: usize = 200;

/// A folder of images.
#[derive(Debug, Clone)]
pub struct Store {
    folder: PathBuf,
}

/// An image of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// What it holds.
    pub id: ImageId,
    /// Bytes of the contents.
    pub size: u64,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// The parent it names.
    pub parent: Option<ParentRef>,
}

/// What a collection did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// Files removed.
    pub removed: u32,
    /// Bytes they had.
    pub bytes: u64,
    /// Removed images that are kept for now: a child needs them, or somebody
    /// has them open.
    pub kept: u32,
}

impl Store {
    /// Uses `folder`, which is made if it is not there.
    pub fn open(folder: &Path) -> io::Result<Store> {
        fs::create_dir_all(folder)?;
        Ok(Store {
            folder: folder.to_owned(),
        })
    }

    /// Where an image is, or would be.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Opens an image and its parents.
    pub fn get(&self, name: &str) -> Result<ImageReader, ImageError> {
        let path = self.path(name);
        if !is_image_name(name) {
            let error = io::Error::from(io::ErrorKind::InvalidInput);
            return Err(ImageError::new(&path, Fault::Open(error)));
        }
        ImageReader::open(&path)
    }

    /// Writes an image. An image of that name that is there stays, and that is
    /// an error of kind `AlreadyExists`. A parent has to be of this folder.
    pub fn put(
        &self,
        name: &str,
        source: &(impl ChunkSource + Sync + ?Sized),
        options: &WriteOptions,
    ) -> Result<Written, WriteError> {
        let path = self.path(name);
        if !is_image_name(name) {
            return Err(WriteError::Options(format!(
                "'{name}' cannot be an image's name: one has 1 to {MAX_NAME} bytes, no '/', and \
                 does not begin with '.'"
            )));
        }
        if path.exists() {
            return Err(WriteError::Target {
                path,
                source: io::ErrorKind::AlreadyExists.into(),
            });
        }
        write_as(&path, source, options, Existing::Keep)
    }

    /// The images, by name. One that cannot be read is listed with what is
    /// wrong with it.
    pub fn list(&self) -> io::Result<Vec<Result<Listed, ImageError>>> {
        let mut names: Vec<String> = self.names()?;
        names.retain(|name| is_image_name(name));
        names.sort();
        Ok(names
            .into_iter()
            .filter_map(|name| match Outline::read(&self.path(&name)) {
                Ok(outline) => Some(Ok(outline.listed(name))),
                Err(error) if is_gone(&error) => None,
                Err(error) => Some(Err(error)),
            })
            .collect())
    }

    /// Removes an image. Its children and those who have it open keep it, but
    /// nobody else finds it any more.
    pub fn remove(&self, name: &str) -> io::Result<Collected> {
        if !is_image_name(name) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let path = self.path(name);
        let id = match Outline::read(&path) {
            Ok(outline) => outline.id(),
            Err(error) if is_gone(&error) => return Err(io::ErrorKind::NotFound.into()),
            // Damaged: it is nobody's parent.
            Err(_) => ImageId([0; 16]),
        };
        let hidden = parents::kept_name(&ParentRef {
            id,
            name: name.to_owned(),
        });
        fs::rename(&path, self.path(&hidden))?;
        jiffy_sys::durable::sync_folder_of(&path)?;
        self.collect()
    }

    /// Deletes what dead writers left behind, and removed images that nobody
    /// needs. Safe at any time, beside anybody.
    pub fn collect(&self) -> io::Result<Collected> {
        let mut collected = Collected::default();
        // A child that goes may free its parent.
        loop {
            let before = collected.removed;
            collected.kept = 0;
            for name in self.names()? {
                let path = self.path(&name);
                let temporary = is_temporary(&name);
                if !temporary && !is_removed(&name) {
                    continue;
                }
                let Ok(metadata) = fs::symlink_metadata(&path) else {
                    continue;
                };
                if remove_unheld(&path, || Ok(!temporary && self.has_children(&name)?))? {
                    collected.removed += 1;
                    collected.bytes += metadata.len();
                } else if !temporary {
                    collected.kept += 1;
                }
            }
            if collected.removed == before {
                break;
            }
        }
        if collected.removed > 0 {
            jiffy_sys::durable::sync_folder_of(&self.path("."))?;
        }
        Ok(collected)
    }

    /// Whether an image, removed or not, names the one of that hidden name as
    /// its parent. One that cannot be read might.
    fn has_children(&self, hidden: &str) -> io::Result<bool> {
        for name in self.names()? {
            if name == hidden || is_temporary(&name) {
                continue;
            }
            match Outline::read(&self.path(&name)) {
                Ok(outline) => {
                    if outline
                        .parent
                        .is_some_and(|parent| parents::kept_name(&parent) == hidden)
                    {
                        return Ok(true);
                    }
                }
                Err(error) => match *error.fault {
                    Fault::Open(source) | Fault::Read { source, .. }
                        if source.kind() != io::ErrorKind::NotFound =>
                    {
                        return Err(source);
                    }
                    // Nobody's child: it can never be read.
                    _ => {}
                },
            }
        }
        Ok(false)
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            if entry.file_type()?.is_file()
                && let Ok(name) = entry.file_name().into_string()
            {
                names.push(name);
            }
        }
        Ok(names)
    }
}

fn is_image_name(name: &str) -> bool {
    footer::is_name(name) && name.len() <= MAX_NAME && !name.starts_with('.')
}

fn is_removed(name: &str) -> bool {
    name.starts_with('.') && name.ends_with(".removed")
}

fn is_gone(error: &ImageError) -> bool {
    matches!(&*error.fault, Fault::Open(source) if source.kind() == io::ErrorKind::NotFound)
}

#[cfg(test)]
mod tests;
