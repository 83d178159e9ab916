//! Fetches manifests, images and tags.

use super::Client;
use super::blobs::pull_scope;
use super::exchange::{Call, Payload};
use crate::error::Result;
use crate::{
    Content, Descriptor, Digest, ImageManifest, Platform, Progress, Reference, RegistryError,
    media_type,
};
use jiffy_oci::{MAX_MANIFEST, guess_media_type, one_line};
use ureq::http::Method;
use ureq::http::header::{self, HeaderName};

/// The most tags that are listed.
const MAX_TAGS: usize = 100_000;
/// The most pages of tags that are fetched.
const MAX_PAGES: usize = 1000;

/// The header with the manifest's digest according to the registry.
pub(super) const CONTENT_DIGEST: HeaderName = HeaderName::from_static("docker-content-digest");

/// A manifest or index as it was received. Its digest was computed from its bytes, and equals the
/// one in the reference, if there was one.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// Its bytes as received.
    pub bytes: Vec<u8>,
    /// Their media type.
    pub media_type: String,
    /// Their SHA-256.
    pub digest: Digest,
    /// The parsed manifest or index.
    pub content: Content,
}

/// An image for one platform.
#[derive(Clone, Debug)]
pub struct Image {
    /// Where it came from, pinned to the digest of the image's own manifest.
    pub reference: Reference,
    /// The index it was chosen from, if there was one.
    pub index: Option<Fetched>,
    /// Its manifest.
    pub fetched: Fetched,
    /// The manifest, parsed.
    pub manifest: ImageManifest,
}

impl Client {
    /// The manifest or index that a reference names.
    ///
    /// # Errors
    ///
    /// If there is no such manifest, the registry can't be reached or refuses, or the bytes are
    /// over 4 MiB, have another digest, or are neither an image nor an index.
    pub fn manifest(&self, reference: &Reference, progress: &dyn Progress) -> Result<Fetched> {
        let what = format!("manifest {reference}");
        let (bytes, media_type) = self.inner.retrier(&what, progress).run(|| {
            let answer =
                self.inner
                    .send(self.manifest_call(&what, reference, Method::GET, progress)?)?;
            let claimed = answer.header(&CONTENT_DIGEST).map(str::to_owned);
            let media_type = answer.header(&header::CONTENT_TYPE).map(str::to_owned);
            let bytes = self.inner.read_small(&what, answer, MAX_MANIFEST)?;
            check_claim(&what, claimed.as_deref(), &Digest::of(&bytes))?;
            Ok((bytes, media_type))
        })?;
        let digest = Digest::of(&bytes);
        if let Some(wanted) = reference.digest()
            && wanted != digest
        {
            let reason = format!("its digest is {digest}");
            return Err(RegistryError::damaged(what, reason));
        }
        let media_type = media_type
            .map(|text| text.split(';').next().unwrap_or_default().trim().to_owned())
            .filter(|text| !text.is_empty() && text != "application/octet-stream")
            .or_else(|| guess_media_type(&bytes))
            .unwrap_or_default();
        let content = jiffy_oci::parse(&bytes, &media_type)
            .map_err(|error| RegistryError::manifest(what, error))?;
        Ok(Fetched {
            bytes,
            media_type,
            digest,
            content,
        })
    }

    /// The current digest of the manifest or index that a reference names, without fetching it if
    /// the registry sends the digest in a header; `None` if there is none.
    ///
    /// # Errors
    ///
    /// If the registry can't be reached or refuses, or its header is not a digest; without a
    /// header, as for [`manifest`](Self::manifest).
    pub fn digest(&self, reference: &Reference, progress: &dyn Progress) -> Result<Option<Digest>> {
        let what = format!("manifest {reference}");
        let head = self.inner.retrier(&what, progress).run(|| {
            let answer =
                self.inner
                    .send(self.manifest_call(&what, reference, Method::HEAD, progress)?)?;
            Ok(answer.header(&CONTENT_DIGEST).map(str::to_owned))
        });
        match head {
            Ok(Some(claimed)) => match claimed.parse() {
                Ok(digest) => Ok(Some(digest)),
                Err(error) => Err(RegistryError::damaged(what, error.to_string())),
            },
            Ok(None) => Ok(Some(self.manifest(reference, progress)?.digest)),
            Err(RegistryError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The image that a reference names; from an index, the image for `platform`.
    ///
    /// # Errors
    ///
    /// If [`manifest`](Self::manifest) fails, or the index has no image for the platform or names
    /// an index.
    pub fn image(
        &self,
        reference: &Reference,
        platform: &Platform,
        progress: &dyn Progress,
    ) -> Result<Image> {
        let fetched = self.manifest(reference, progress)?;
        self.image_of(reference, fetched, platform, progress)
    }

    /// The same, of a manifest or index that was fetched by the reference.
    ///
    /// # Errors
    ///
    /// If the index has no image for the platform or names an index, or
    /// [`manifest`](Self::manifest) fails.
    pub fn image_of(
        &self,
        reference: &Reference,
        fetched: Fetched,
        platform: &Platform,
        progress: &dyn Progress,
    ) -> Result<Image> {
        let (index, fetched) = match &fetched.content {
            Content::Image(_) => (None, fetched),
            Content::Index(index) => {
                let chosen = index
                    .choose(platform)
                    .ok_or_else(|| RegistryError::NoPlatform {
                        what: reference.to_string(),
                        wanted: platform.to_string(),
                        available: index.platforms(),
                    })?;
                let chosen = chosen.clone();
                if chosen.size > MAX_MANIFEST {
                    let reason = format!("its size in the index is {} bytes", chosen.size);
                    return Err(RegistryError::damaged(
                        format!("manifest {}", chosen.digest),
                        reason,
                    ));
                }
                let image = self.manifest(&reference.with_digest(chosen.digest), progress)?;
                (Some(fetched), image)
            }
        };
        let Content::Image(manifest) = &fetched.content else {
            return Err(RegistryError::Unsupported {
                what: format!("manifest {reference}"),
                reason: "it is an index in an index".to_owned(),
            });
        };
        Ok(Image {
            reference: reference.with_digest(fetched.digest),
            manifest: manifest.clone(),
            index,
            fetched,
        })
    }

    /// The tags of a repository, as the registry orders them; at most 100,000.
    ///
    /// # Errors
    ///
    /// If there is no such repository, the registry can't be reached or refuses, or its answer is
    /// not a list or continues on another host.
    pub fn tags(&self, repository: &Reference, progress: &dyn Progress) -> Result<Vec<String>> {
        #[derive(serde::Deserialize)]
        struct Page {
            tags: Option<Vec<String>>,
        }
        let name = format!("{}/{}", repository.registry(), repository.repository());
        let what = format!("tags of {name}");
        let mut tags = Vec::new();
        let mut next = Some(self.inner.url(repository, "tags/list?n=1000")?);
        let mut pages = 0;
        while let Some(url) = next {
            pages += 1;
            let (page, link) = self.inner.retrier(&what, progress).run(|| {
                let answer = self.inner.send(Call {
                    what: &what,
                    repository,
                    method: Method::GET,
                    url: url.clone(),
                    headers: Vec::new(),
                    scopes: pull_scope(repository),
                    payload: Payload::Nothing,
                    deadline: progress.deadline(),
                })?;
                let link = answer
                    .header(&header::LINK)
                    .and_then(next_link)
                    .map(str::to_owned);
                Ok((self.inner.read_small(&what, answer, MAX_MANIFEST)?, link))
            })?;
            let page: Page = serde_json::from_slice(&page).map_err(|error| {
                RegistryError::protocol(&what, format!("it is not a list: {error}"))
            })?;
            let page = page.tags.unwrap_or_default();
            // A page that links to itself would never end.
            let more = link.filter(|_| {
                let room = tags.len() + page.len() < MAX_TAGS && pages < MAX_PAGES;
                !page.is_empty() && room
            });
            tags.extend(page);
            tags.truncate(MAX_TAGS);
            next = match more {
                None => None,
                Some(link) => {
                    let link = url
                        .join(&link)
                        .map_err(|why| RegistryError::protocol(&what, why))?;
                    if link.origin() != url.origin() {
                        let why =
                            format!("the list continues on another host, {}", link.authority());
                        return Err(RegistryError::protocol(&what, why));
                    }
                    Some(link)
                }
            };
        }
        Ok(tags)
    }

    /// The manifests that refer to the one with this digest: its referrers (OCI distribution
    /// specification 1.1, "Listing Referrers"), or the entries of the referrers tag if the registry
    /// does not support the API. At most one page.
    ///
    /// # Errors
    ///
    /// If the registry can't be reached, or its answer, or what the tag names, is not an index.
    pub fn referrers(
        &self,
        repository: &Reference,
        digest: &Digest,
        progress: &dyn Progress,
    ) -> Result<Vec<Descriptor>> {
        let what = format!("referrers of {}", repository.with_digest(*digest));
        let answer = self.inner.retrier(&what, progress).run(|| {
            let answer = self.inner.send(Call {
                what: &what,
                repository,
                method: Method::GET,
                url: self.inner.url(repository, &format!("referrers/{digest}"))?,
                headers: vec![(header::ACCEPT, media_type::OCI_INDEX.to_owned())],
                scopes: pull_scope(repository),
                payload: Payload::Nothing,
                deadline: progress.deadline(),
            })?;
            self.inner.read_small(&what, answer, MAX_MANIFEST)
        });
        let content = match answer {
            Ok(bytes) => jiffy_oci::parse(&bytes, media_type::OCI_INDEX)
                .map_err(|error| RegistryError::manifest(&what, error))?,
            // Registries without the referrers API answer with any error status.
            Err(
                RegistryError::NotFound { .. }
                | RegistryError::Refused { .. }
                | RegistryError::Unauthorised { .. },
            ) => {
                let tag = repository.with_tag(&format!("sha256-{}", digest.hex()))?;
                match self.manifest(&tag, progress) {
                    Ok(fetched) => fetched.content,
                    Err(RegistryError::NotFound { .. }) => return Ok(Vec::new()),
                    Err(error) => return Err(error),
                }
            }
            Err(error) => return Err(error),
        };
        match content {
            Content::Index(index) => Ok(index.manifests),
            Content::Image(_) => Err(RegistryError::damaged(what, "they are not an index")),
        }
    }

    fn manifest_call<'a>(
        &self,
        what: &'a str,
        reference: &'a Reference,
        method: Method,
        progress: &dyn Progress,
    ) -> Result<Call<'a>> {
        let mut accept = vec![
            media_type::OCI_MANIFEST,
            media_type::OCI_INDEX,
            media_type::DOCKER_MANIFEST,
            media_type::DOCKER_INDEX,
        ];
        // Schema 1 is accepted so that the registry sends it, and the error can name it.
        accept.extend(media_type::DOCKER_SCHEMA_1);
        Ok(Call {
            what,
            repository: reference,
            method,
            url: self
                .inner
                .url(reference, &format!("manifests/{}", reference.selector()))?,
            headers: vec![(header::ACCEPT, accept.join(", "))],
            scopes: pull_scope(reference),
            payload: Payload::Nothing,
            deadline: progress.deadline(),
        })
    }
}

/// Checks the digest in the registry's header: if it differs, the registry sent other bytes.
pub(super) fn check_claim(what: &str, claimed: Option<&str>, digest: &Digest) -> Result<()> {
    match claimed {
        Some(claimed) if claimed.trim() != digest.to_string() => Err(RegistryError::damaged(
            what,
            format!(
                "its digest is {digest}, the registry says {:?}",
                one_line(claimed)
            ),
        )),
        _ => Ok(()),
    }
}

/// RFC 8288: `<ADDRESS>; rel="next"`.
pub(super) fn next_link(header: &str) -> Option<&str> {
    let (address, parameters) = header.trim().strip_prefix('<')?.split_once('>')?;
    let next = parameters
        .split([';', ','])
        .map(|parameter| parameter.trim().replace(['"', ' '], ""))
        .any(|parameter| parameter.eq_ignore_ascii_case("rel=next"));
    next.then_some(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_leads_to_the_next_page() {
        assert_eq!(
            next_link(r#"</v2/a/tags/list?n=2&last=b>; rel="next""#),
            Some("/v2/a/tags/list?n=2&last=b")
        );
        assert_eq!(next_link("</x>; rel=prev"), None);
        assert_eq!(next_link("/x; rel=next"), None);
    }
}
