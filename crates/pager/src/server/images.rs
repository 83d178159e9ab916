//! Open images, each opened once, and their origins.

use crate::image::StoredImage;
use crate::origins::client::Reader;
use crate::origins::origins;
use jiffy_store::partial::packings;
use jiffy_store::reader::{Opening, parents};
use jiffy_store::{ImageError, ImageReader};
use jiffy_sys::mutex::lock;
use jiffy_wire::pager::Origin;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};

/// Device and inode, which identify a file.
type Identity = (u64, u64);

/// Opening a partial image reads its whole manifest, so it is never done on the thread that serves
/// the sockets.
pub(super) struct Images(Mutex<Known>);

impl Images {
    pub fn new(reader: Reader) -> Images {
        Images(Mutex::new(Known {
            reader: Arc::new(reader),
            images: HashMap::new(),
            readers: HashMap::new(),
            origins: HashMap::new(),
        }))
    }

    /// Sets the origins of an image, whether it is open or not.
    ///
    /// # Errors
    ///
    /// If the image's file can't be found.
    pub fn set_origins(&self, path: &Path, described: Vec<Origin>) -> Result<(), String> {
        self.known().set_origins(path, described)
    }

    /// Opens an image, once for all its users.
    ///
    /// # Errors
    ///
    /// If the image or a parent can't be opened.
    pub fn open(&self, path: &Path) -> Result<Arc<StoredImage>, String> {
        self.known().open(path)
    }

    fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        lock(&self.0)
    }
}

struct Known {
    /// Reads from origins.
    reader: Arc<Reader>,
    images: HashMap<Identity, Weak<StoredImage>>,
    /// Open images and their parents.
    readers: HashMap<Identity, Weak<ImageReader>>,
    origins: HashMap<Identity, Vec<Origin>>,
}

impl Known {
    fn set_origins(&mut self, path: &Path, described: Vec<Origin>) -> Result<(), String> {
        let identity = StoredImage::identity(path)
            .ok_or_else(|| format!("{} cannot be accessed", path.display()))?;
        if let Some(reader) = self.readers.get(&identity).and_then(Weak::upgrade) {
            reader.set_origins(origins(&self.reader, &described, reader.id(), path));
        }
        match described.is_empty() {
            true => self.origins.remove(&identity),
            false => self.origins.insert(identity, described),
        };
        self.find_packings();
        Ok(())
    }

    fn open(&mut self, path: &Path) -> Result<Arc<StoredImage>, String> {
        self.images.retain(|_, image| image.strong_count() > 0);
        self.readers.retain(|_, reader| reader.strong_count() > 0);
        let identity = StoredImage::identity(path);
        let open = identity.and_then(|identity| self.images.get(&identity)?.upgrade());
        if let Some(image) = open {
            return Ok(image);
        }
        let image = self.with_opening(|opening| StoredImage::open_with(path, opening));
        let image = image.map_err(|error| error.0)?;
        let image = Arc::new(image);
        let mut generation = Some(image.reader());
        while let Some(reader) = generation {
            if let Some(identity) = StoredImage::identity(reader.path()) {
                self.readers.insert(identity, Arc::downgrade(reader));
            }
            generation = reader.parent().map(|(_, parent)| parent);
        }
        if let Some(identity) = identity {
            self.images.insert(identity, Arc::downgrade(&image));
        }
        self.find_packings();
        Ok(image)
    }

    fn with_opening<T>(&self, open: impl FnOnce(&Opening<'_>) -> T) -> T {
        open(&Opening {
            resolve: &parents::in_folder,
            origins: &|path, id| {
                let identity = StoredImage::identity(path);
                let described = identity.and_then(|identity| self.origins.get(&identity));
                origins(&self.reader, described.map_or(&[], Vec::as_slice), id, path)
            },
            known: &|path| {
                let identity = StoredImage::identity(path)?;
                self.readers.get(&identity)?.upgrade()
            },
        })
    }

    /// Gives open partial images the other packings that exist by now.
    fn find_packings(&mut self) {
        let open: Vec<Arc<ImageReader>> = self.readers.values().filter_map(Weak::upgrade).collect();
        for reader in open.iter().filter(|reader| reader.is_partial()) {
            let have = reader.packings();
            let mut others = Vec::new();
            for path in packings(reader.path()) {
                let Some(identity) = StoredImage::identity(&path) else {
                    continue;
                };
                let known = have
                    .iter()
                    .find(|other| other.path() == path && self.is_open_as(identity, other));
                match known.map_or_else(|| self.open_packing(&path), |it| Ok(it.clone())) {
                    Ok(other) => {
                        self.readers.insert(identity, Arc::downgrade(&other));
                        others.push(other);
                    }
                    // The image works without this packing.
                    Err(error) => tracing::warn!("{error}"),
                }
            }
            if !(have.is_empty() && others.is_empty()) {
                reader.set_packings(others);
            }
        }
    }

    fn is_open_as(&self, identity: Identity, reader: &Arc<ImageReader>) -> bool {
        let known = self.readers.get(&identity);
        known.is_some_and(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(reader)))
    }

    fn open_packing(&self, path: &Path) -> Result<Arc<ImageReader>, ImageError> {
        self.with_opening(|opening| {
            if let Some(known) = (opening.known)(path) {
                return Ok(known);
            }
            ImageReader::open_with(path, opening).map(Arc::new)
        })
    }
}
