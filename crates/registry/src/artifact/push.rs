//! Uploads an artifact.

use super::plan::Bytes;
use super::{Artifact, RemoteFile};
use crate::client::Uploaded;
use crate::error::Result;
use crate::{Client, Descriptor, Digest, Progress, Reference, RegistryError, media_type, parallel};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Result of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pushed {
    /// The manifest's digest.
    pub digest: Digest,
    /// Bytes of the blobs that were uploaded.
    pub bytes_uploaded: u64,
    /// Bytes of all blobs; equal blobs count once.
    pub bytes_total: u64,
}

impl Artifact {
    /// Uploads the artifact to the reference's repository and tag. The manifest is put last, so
    /// nobody sees an incomplete artifact. What has to be copied from another registry is held in
    /// unnamed files in `scratch` meanwhile.
    ///
    /// # Errors
    ///
    /// If a file can't be read or a pack copied, the registry can't be reached or refuses, or
    /// `progress` is cancelled.
    pub fn push(
        &self,
        client: &Client,
        reference: &Reference,
        scratch: &Path,
        progress: &dyn Progress,
    ) -> Result<Pushed> {
        let uploaded = AtomicU64::new(0);
        let note = |blob: &Descriptor, how| {
            if how == Uploaded::Sent {
                uploaded.fetch_add(blob.size, Ordering::Relaxed);
            }
        };
        let mut seen = BTreeSet::new();
        let distinct: Vec<_> = self
            .packs
            .iter()
            .filter(|planned| seen.insert(planned.pack.blob.digest))
            .collect();
        parallel::for_each(&distinct, |planned| {
            let blob = &planned.pack.blob;
            let how = match &planned.bytes {
                Bytes::Local(path) => {
                    let mut file = File::open(path)
                        .and_then(|mut file| {
                            file.seek(SeekFrom::Start(planned.pack.offset))?;
                            Ok(file)
                        })
                        .map_err(|error| RegistryError::file("read", path, error))?;
                    client.upload_blob(reference, blob, None, &mut file, progress)?
                }
                Bytes::Remote(origin) => {
                    copy(client, reference, blob, (origin, scratch), progress)?
                }
                Bytes::Memory(bytes) => {
                    client.upload_blob(reference, blob, None, &mut Cursor::new(bytes), progress)?
                }
            };
            note(blob, how);
            Ok(())
        })?;
        let config = Descriptor::of(&self.config.media_type, &self.config.bytes);
        let mut bytes = Cursor::new(&self.config.bytes);
        let how = client.upload_blob(reference, &config, None, &mut bytes, progress)?;
        note(&config, how);
        let digest = client.put_manifest(
            reference,
            media_type::OCI_MANIFEST,
            &self.manifest,
            progress,
        )?;
        Ok(Pushed {
            digest,
            bytes_uploaded: uploaded.into_inner(),
            bytes_total: self.size(),
        })
    }
}

/// Mounts a pack from the repository of its artifact, or copies it from there.
fn copy(
    client: &Client,
    reference: &Reference,
    blob: &Descriptor,
    (origin, scratch): (&RemoteFile, &Path),
    progress: &dyn Progress,
) -> Result<Uploaded> {
    let from = origin.repository();
    let same_registry = from.registry() == reference.registry();
    let mut bytes = Fetched {
        origin,
        blob,
        scratch,
        file: None,
    };
    let mount_from = same_registry.then(|| from.repository());
    client.upload_blob(reference, blob, mount_from, &mut bytes, progress)
}

/// The bytes of a remote pack, fetched into an unnamed file at first use.
struct Fetched<'a> {
    origin: &'a RemoteFile,
    blob: &'a Descriptor,
    scratch: &'a Path,
    file: Option<File>,
}

impl Fetched<'_> {
    fn file(&mut self) -> io::Result<&mut File> {
        if self.file.is_none() {
            // Not in the folder for temporary files, which may be a small part of memory.
            let mut file = tempfile::tempfile_in(self.scratch)?;
            self.origin
                .client()
                .blob(self.origin.repository(), self.blob, &mut file, &())
                .map_err(io::Error::other)?;
            file.rewind()?;
            self.file = Some(file);
        }
        self.file
            .as_mut()
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Read for Fetched<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.file()?.read(buffer)
    }
}

impl Seek for Fetched<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        match (&mut self.file, to) {
            (Some(file), to) => file.seek(to),
            // A query of the position must not fetch anything.
            (None, SeekFrom::Start(0) | SeekFrom::Current(0)) => Ok(0),
            (None, to) => self.file()?.seek(to),
        }
    }
}
