//! Images cut into chunks, so that they can be pushed and shared.

use super::lazy::cache_in;
use super::{Images, ROOT, boot};
use crate::error::{Error, Result};
use crate::leases::Lease;
use crate::model::image::{ImageRecord, LazyDisk};
use jiffy_wire::api::Image;
use jiffy_wire::disk::CONTENTS;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

impl Images {
    /// The record of an image with its chunks, which are made if there are none, with leases on
    /// them: blocking.
    pub(crate) fn with_chunks(&self, name: &str) -> Result<(ImageRecord, Vec<Lease>)> {
        let mut record = (*self.record(name)?).clone();
        let held = self.chunks.hold(&record.chunks);
        if !record.chunks.is_empty() && record.chunks.iter().all(|id| self.chunks.has(id)) {
            return Ok((record, held));
        }
        let above = match self.parent_of(&record)? {
            Some(parent) if parent != name => Some(self.with_chunks(&parent)?),
            _ => None,
        };
        let parent = above.iter().find_map(|(parent, _)| parent.chunks.first());
        let parent = parent.filter(|id| !self.chunks.is_partial(id));
        let folder = self.folder_of(name)?;
        let root = folder.join(ROOT);
        let boot = boot::load(&folder, &record.digest);
        let (made, held) = self
            .chunks
            .make(&self.room, &root, parent.map(String::as_str), boot)?;
        record.chunks = made;
        self.keep_chunks(name, &record)?;
        Ok((record, held))
    }

    /// The images of chunks of a snapshot's root file system, with its ancestors and leases on
    /// them: blocking. The root is in the file `root`, or is the disk `lazy`.
    pub(crate) fn chunks_of_root(
        &self,
        lazy: Option<&LazyDisk>,
        root: &Path,
    ) -> Result<(Vec<String>, Vec<Lease>)> {
        // A pulled root has chunks, here or in a registry, and no file.
        if let Some(disk) = lazy {
            return Ok((disk.chunks.clone(), self.chunks.hold(&disk.chunks)));
        }
        match self.with_file(root)? {
            Some(name) => {
                let (record, held) = self.with_chunks(&name)?;
                Ok((record.chunks, held))
            }
            None => self.chunks.make(&self.room, root, None, None),
        }
    }

    /// Saves the new chunks in the image's record, unless another image has the name by now:
    /// blocking.
    fn keep_chunks(&self, name: &str, made: &ImageRecord) -> Result<()> {
        let folder = self.folder_of(name)?;
        let _one = self.changing.blocking_lock();
        let now = ImageRecord::load(&folder).ok();
        let Some(mut now) = now.filter(|now| now.digest == made.digest) else {
            // It is not known which of the two images the chunks were made of.
            return Err(Error::conflict(format!(
                "The image {name} was replaced or removed while it was cut into chunks."
            ))
            .hint("Push it again."));
        };
        now.chunks.clone_from(&made.chunks);
        now.save(&folder)
            .map_err(|error| Error::io("write an image's record", &folder, &error))?;
        self.drop_cached(&folder);
        Ok(())
    }

    /// The image that has this file as its file system, found by inode. Digests are not compared,
    /// because the digest of a partial image is only claimed by whoever pushed it.
    fn with_file(&self, file: &Path) -> Result<Option<String>> {
        let number = |path: &Path| fs::metadata(path).ok().map(|it| (it.dev(), it.ino()));
        let Some(wanted) = number(file) else {
            return Ok(None);
        };
        let is_same = |image: &Image| {
            let lazy = || cache_in(&self.disks, image.chunks.as_slice()).join(CONTENTS);
            number(&image.file.clone().unwrap_or_else(lazy)) == Some(wanted)
        };
        let same = self.list()?.into_iter().find(is_same);
        Ok(same.map(|image| image.name))
    }

    /// The image that this one was made of, if it is here.
    fn parent_of(&self, record: &ImageRecord) -> Result<Option<String>> {
        let Some(parent) = &record.parent else {
            return Ok(None);
        };
        let images = self.list()?;
        let parent = images.into_iter().find(|image| image.digest == *parent);
        Ok(parent.map(|image| image.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::tests::images;

    #[test]
    fn chunks_are_not_recorded_for_a_new_image_of_the_same_name() {
        let folder = tempfile::tempdir().unwrap();
        let (images, old) = images(folder.path());
        let web = images.folder_of("web").unwrap();
        let cut = ImageRecord {
            chunks: vec!["1".repeat(32)],
            ..old.clone()
        };
        let new = ImageRecord {
            digest: "2".repeat(64),
            ..old.clone()
        };
        new.save(&web).unwrap();
        let refused = images.keep_chunks("web", &cut).unwrap_err();
        assert!(refused.0.message.contains("web"), "{}", refused.0.message);
        assert_eq!(ImageRecord::load(&web).unwrap(), new);

        // The same file system with another configuration must not lose that configuration.
        let again = ImageRecord {
            created: 7,
            ..old.clone()
        };
        again.save(&web).unwrap();
        images.keep_chunks("web", &cut).unwrap();
        let kept = ImageRecord::load(&web).unwrap();
        assert_eq!((kept.created, &kept.chunks), (7, &cut.chunks));
        fs::remove_dir_all(&web).unwrap();
        assert!(images.keep_chunks("web", &cut).is_err());
        assert!(!web.exists());
    }

    #[test]
    fn chunks_that_are_being_pushed_outlive_their_image() {
        let folder = tempfile::tempdir().unwrap();
        let (images, _) = images(folder.path());
        // The first push makes the chunks; the second one finds them.
        for _ in 0..2 {
            let (record, held) = images.with_chunks("web").unwrap();
            let web = images.folder_of("web").unwrap();
            let aside = folder.path().join("aside");
            fs::rename(&web, &aside).unwrap();
            images.drop_cached(&web);
            images.collect_garbage();
            assert!(images.chunks.has(&record.chunks[0]));
            fs::rename(&aside, &web).unwrap();
            drop(held);
        }
        fs::remove_dir_all(images.folder_of("web").unwrap()).unwrap();
        images.collect_garbage();
        assert!(images.chunks.held().is_empty());
        assert_eq!(
            fs::read_dir(folder.path().join("data/chunks"))
                .unwrap()
                .count(),
            0
        );
    }
}
