//! Images that are open, each once, and who has what is missing of them.

use crate::image::StoredImage;
use crate::origins::origins;
use jiffy_store::ImageReader;
use jiffy_store::reader::{Opening, parents};
use jiffy_wire::pager::Origin;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Weak};

/// Tells two files apart.
type Identity = (u64, u64);

#[derive(Default)]
pub(super) struct Images {
    images: HashMap<Identity, Weak<StoredImage>>,
    /// These and their parents.
    readers: HashMap<Identity, Weak<ImageReader>>,
    origins: HashMap<Identity, Vec<Origin>>,
}

impl Images {
    /// Says who has what is missing of an image, open or not.
    pub fn set_origins(&mut self, path: &Path, described: Vec<Origin>) -> Result<(), String> {
        let identity = StoredImage::identity(path)
            .ok_or_else(|| format!("{} cannot be looked at", path.display()))?;
        if let Some(reader) = self.readers.get(&identity).and_then(Weak::upgrade) {
            reader.set_origins(origins(&described, reader.id()));
        }
        match described.is_empty() {
            true => self.origins.remove(&identity),
            false => self.origins.insert(identity, described),
        };
        Ok(())
    }

    /// Opens an image, once for all that have it.
    pub fn open(&mut self, path: &Path) -> Result<Arc<StoredImage>, String> {
        self.images.retain(|_, image| image.strong_count() > 0);
        self.readers.retain(|_, reader| reader.strong_count() > 0);
        let identity = StoredImage::identity(path);
        let open = identity.and_then(|identity| self.images.get(&identity)?.upgrade());
        if let Some(image) = open {
            return Ok(image);
        }
        let opening = Opening {
            resolve: &parents::in_folder,
            origins: &|path, id| {
                let identity = StoredImage::identity(path);
                let described = identity.and_then(|identity| self.origins.get(&identity));
                origins(described.map_or(&[], Vec::as_slice), id)
            },
            known: &|path| {
                let identity = StoredImage::identity(path)?;
                self.readers.get(&identity)?.upgrade()
            },
        };
        let image = StoredImage::open_with(path, &opening).map_err(|error| error.0)?;
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
        Ok(image)
    }
}
