//! Uploads manifests and blobs to a registry.

use super::Client;
use super::blobs::blob_name;
use super::exchange::{Call, Payload};
use super::manifests::{CONTENT_DIGEST, check_claim};
use super::source::Source;
use super::url::Url;
use crate::error::Result;
use crate::{Descriptor, Digest, Progress, Reference, RegistryError};
use jiffy_oci::MAX_MANIFEST;
use ureq::http::header;
use ureq::http::{Method, StatusCode};

/// How a blob came into a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uploaded {
    /// It existed already.
    Existed,
    /// The registry took it from another of its repositories.
    Mounted,
    /// Its bytes were sent.
    Sent,
}

/// The answer to the start of an upload.
enum Opened {
    /// It has the blob now, from another repository.
    Mounted,
    /// Where to put the bytes.
    At(Url),
}

impl Client {
    /// Whether a repository has a blob.
    ///
    /// # Errors
    ///
    /// If the registry can't be reached or refuses.
    pub fn has_blob(
        &self,
        repository: &Reference,
        blob: &Descriptor,
        progress: &dyn Progress,
    ) -> Result<bool> {
        let what = blob_name(repository, blob);
        let found = self.inner.retrier(&what, progress).run(|| {
            self.inner.send(Call {
                what: &what,
                repository,
                method: Method::HEAD,
                url: self
                    .inner
                    .url(repository, &format!("blobs/{}", blob.digest))?,
                headers: Vec::new(),
                // The scope of the upload that may follow, so that one token is enough for both.
                scopes: push_scope(repository),
                payload: Payload::Nothing,
                deadline: None,
            })
        });
        match found {
            Ok(_) => Ok(true),
            Err(RegistryError::NotFound { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Makes sure that a repository has a blob: checks for it, else mounts it from `mount_from`, a
    /// repository of the same registry, else sends it from `source`'s current position.
    ///
    /// The bytes are sent in one request. If the connection breaks, they are sent again from the
    /// start, so blobs should not be too large to be sent twice.
    ///
    /// # Errors
    ///
    /// If the registry can't be reached or refuses, its upload address is not acceptable, `source`
    /// can't be read, or `progress` is cancelled.
    pub fn upload_blob(
        &self,
        repository: &Reference,
        blob: &Descriptor,
        mount_from: Option<&str>,
        source: &mut dyn Source,
        progress: &dyn Progress,
    ) -> Result<Uploaded> {
        let what = blob_name(repository, blob);
        let start = source
            .stream_position()
            .map_err(|source| RegistryError::Sink {
                what: what.clone(),
                source,
            })?;
        let mut mount_from = mount_from.filter(|&from| from != repository.repository());
        let mut retrier = self.inner.retrier(&what, progress);
        loop {
            // Checked before every attempt, because the upload may have succeeded and its answer
            // been lost.
            if self.has_blob(repository, blob, progress)? {
                progress.moved(blob, blob.size);
                return Ok(Uploaded::Existed);
            }
            let sent = match self.open_upload(&what, repository, blob, mount_from) {
                Ok(Opened::Mounted) => {
                    progress.moved(blob, blob.size);
                    return Ok(Uploaded::Mounted);
                }
                Ok(Opened::At(url)) => self.send_blob(
                    &what,
                    repository,
                    blob,
                    url,
                    (&mut *source, start),
                    progress,
                ),
                Err(error) => Err(error),
            };
            match sent {
                Ok(()) => return Ok(Uploaded::Sent),
                // Without read access to the other repository, the blob is sent.
                Err(RegistryError::Unauthorised { .. } | RegistryError::NotFound { .. })
                    if mount_from.is_some() =>
                {
                    mount_from = None;
                }
                Err(error) => retrier.wait_or_fail(error)?,
            }
        }
    }

    /// `POST`: begins an upload, or has the blob mounted.
    fn open_upload(
        &self,
        what: &str,
        repository: &Reference,
        blob: &Descriptor,
        mount_from: Option<&str>,
    ) -> Result<Opened> {
        let mut url = self.inner.url(repository, "blobs/uploads/")?;
        let mut scopes = push_scope(repository);
        if let Some(from) = mount_from {
            url = url
                .with_query("mount", &blob.digest.to_string())
                .with_query("from", from);
            scopes.push(format!("repository:{from}:pull"));
        }
        let answer = self.inner.send(Call {
            what,
            repository,
            method: Method::POST,
            url,
            headers: Vec::new(),
            scopes,
            payload: Payload::Bytes(b""),
            deadline: None,
        })?;
        if answer.status() == StatusCode::CREATED && mount_from.is_some() {
            return Ok(Opened::Mounted);
        }
        let to = answer.header(&header::LOCATION).ok_or_else(|| {
            RegistryError::protocol(what, "the registry gives no address to upload it to")
        })?;
        let to = answer
            .url
            .join(to)
            .map_err(|why| RegistryError::protocol(what, format!("can't upload it: {why}")))?;
        let is_other_host = to.origin() != answer.url.origin();
        if is_other_host && to.is_this_computer() && !repository.is_loopback() {
            let host = to.authority();
            let reason = format!("the upload address of the registry, {host}, is this computer");
            return Err(RegistryError::protocol(what, reason));
        }
        if to.is_plain() && !answer.url.is_plain() {
            let host = to.authority();
            let reason = format!("the upload address of the registry, {host}, is without TLS");
            return Err(RegistryError::protocol(what, reason));
        }
        Ok(Opened::At(to))
    }

    /// `PUT`: sends all bytes and the digest. An upload that fails is cancelled.
    fn send_blob(
        &self,
        what: &str,
        repository: &Reference,
        blob: &Descriptor,
        to: Url,
        (source, start): (&mut dyn Source, u64),
        progress: &dyn Progress,
    ) -> Result<()> {
        let sent = self.inner.send(Call {
            what,
            repository,
            method: Method::PUT,
            url: to.clone().with_query("digest", &blob.digest.to_string()),
            headers: vec![(header::CONTENT_TYPE, "application/octet-stream".to_owned())],
            scopes: push_scope(repository),
            payload: Payload::Blob {
                source,
                start,
                blob,
                progress,
            },
            deadline: progress.deadline(),
        });
        let Err(error) = sent else {
            progress.moved(blob, blob.size);
            return Ok(());
        };
        let called_off = self.inner.send(Call {
            what,
            repository,
            method: Method::DELETE,
            url: to,
            headers: Vec::new(),
            scopes: push_scope(repository),
            payload: Payload::Nothing,
            deadline: None,
        });
        if let Err(error) = called_off {
            tracing::debug!(%what, "the upload could not be cancelled: {error}");
        }
        Err(error)
    }

    /// Puts a manifest under the reference's tag, or under its digest if it has no tag. Everything
    /// that the manifest names must exist.
    ///
    /// # Errors
    ///
    /// If it has more than 4 MiB, or another digest than the reference or the registry's answer, or
    /// the registry can't be reached or refuses.
    pub fn put_manifest(
        &self,
        reference: &Reference,
        media_type: &str,
        bytes: &[u8],
        progress: &dyn Progress,
    ) -> Result<Digest> {
        let what = format!("manifest {reference}");
        let digest = Digest::of(bytes);
        if bytes.len() as u64 > MAX_MANIFEST {
            return Err(RegistryError::Unsupported {
                what,
                reason: format!("it has more than {MAX_MANIFEST} bytes"),
            });
        }
        if reference.digest().is_some_and(|named| named != digest) {
            return Err(RegistryError::damaged(
                what,
                format!("its digest is {digest}"),
            ));
        }
        let selector = match reference.tag() {
            Some(tag) => tag.to_owned(),
            None => digest.to_string(),
        };
        self.inner.retrier(&what, progress).run(|| {
            let answer = self.inner.send(Call {
                what: &what,
                repository: reference,
                method: Method::PUT,
                url: self
                    .inner
                    .url(reference, &format!("manifests/{selector}"))?,
                headers: vec![(header::CONTENT_TYPE, media_type.to_owned())],
                scopes: push_scope(reference),
                payload: Payload::Bytes(bytes),
                deadline: progress.deadline(),
            })?;
            check_claim(&what, answer.header(&CONTENT_DIGEST), &digest)
        })?;
        Ok(digest)
    }
}

fn push_scope(repository: &Reference) -> Vec<String> {
    vec![format!("repository:{}:pull,push", repository.repository())]
}
