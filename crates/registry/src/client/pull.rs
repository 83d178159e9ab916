//! Manifests and blobs from a registry.

use super::exchange::{Answer, Call, Payload, broken, unreachable};
use super::{Client, MAX_MANIFEST};
use crate::digest::Hasher;
use crate::error::{Result, one_line};
use crate::manifest::{self, Content, media_type};
use crate::{Descriptor, Digest, ImageManifest, Platform, Progress, Reference, RegistryError};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use ureq::http::header::{self, HeaderName};
use ureq::http::{Method, StatusCode};

/// Bytes that are moved at a time.
const PIECE: usize = 64 << 10;

/// The most that is read and thrown away when a registry sends a blob from its start
/// though only some of it was asked for.
const MOST_SKIPPED: u64 = 64 << 20;

/// The most tags that are listed.
const MOST_TAGS: usize = 100_000;

/// Where a registry says which digest it thinks a manifest has.
pub(super) const CONTENT_DIGEST: HeaderName = HeaderName::from_static("docker-content-digest");

/// A manifest or index as it came. Its digest is that of its bytes, and the one in the
/// reference, if there was one.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// The bytes, which the digest is of.
    pub bytes: Vec<u8>,
    /// Their media type.
    pub media_type: String,
    /// Their SHA-256.
    pub digest: Digest,
    /// What they say.
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
    /// The same, read.
    pub manifest: ImageManifest,
}

impl Client {
    /// The manifest or index a reference stands for.
    pub fn manifest(&self, reference: &Reference, progress: &dyn Progress) -> Result<Fetched> {
        let what = format!("manifest {reference}");
        let (bytes, media_type) = self.inner.patience(&what, progress).until(|| {
            let answer = self
                .inner
                .send(self.manifest_call(&what, reference, Method::GET))?;
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
            .or_else(|| manifest::guess_media_type(&bytes))
            .unwrap_or_default();
        let content = manifest::parse(&bytes, &media_type, &what)?;
        Ok(Fetched {
            bytes,
            media_type,
            digest,
            content,
        })
    }

    /// The digest of the manifest or index a reference stands for now, without
    /// fetching it if the registry says it by itself; `None` if there is none.
    pub fn digest(&self, reference: &Reference, progress: &dyn Progress) -> Result<Option<Digest>> {
        let what = format!("manifest {reference}");
        let head = self.inner.patience(&what, progress).until(|| {
            let answer = self
                .inner
                .send(self.manifest_call(&what, reference, Method::HEAD))?;
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

    /// The image a reference stands for; of an index, the one for `platform`.
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
                let chosen = platform.choose(index, &reference.to_string())?.clone();
                if chosen.size > MAX_MANIFEST {
                    let reason = format!("its index says it has {} bytes", chosen.size);
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

    /// A whole blob in memory, refused when it is larger than `limit` bytes: for
    /// configurations.
    pub fn small_blob(
        &self,
        repository: &Reference,
        blob: &Descriptor,
        limit: u64,
        progress: &dyn Progress,
    ) -> Result<Vec<u8>> {
        if blob.size > limit {
            return Err(RegistryError::Unsupported {
                what: blob_name(repository, blob),
                reason: format!(
                    "it has {} bytes, more than the {limit} that are read",
                    blob.size
                ),
            });
        }
        let mut bytes = Vec::new();
        self.blob(repository, blob, &mut bytes, progress)?;
        Ok(bytes)
    }

    /// Streams a blob into `sink`. A connection that breaks is taken up where it
    /// broke. `sink` never gets more bytes than the blob's size, but it may have got
    /// wrong ones when this fails: only success says that the digest is right.
    pub fn blob(
        &self,
        repository: &Reference,
        blob: &Descriptor,
        sink: &mut dyn Write,
        progress: &dyn Progress,
    ) -> Result<()> {
        self.stream(repository, blob, 0, Hasher::new(), sink, progress)
    }

    /// Completes a file that may have the beginning of a blob. If the whole turns out
    /// wrong and part of it was there before, all is fetched anew, once. Does not sync.
    pub fn blob_to_file(
        &self,
        repository: &Reference,
        blob: &Descriptor,
        file: &mut File,
        progress: &dyn Progress,
    ) -> Result<()> {
        let what = blob_name(repository, blob);
        let failed = |source| RegistryError::Sink {
            what: what.clone(),
            source,
        };
        let (there, hasher) = hash_beginning(file, blob.size).map_err(failed)?;
        let result = self.stream(repository, blob, there, hasher, file, progress);
        if there == 0 || !matches!(result, Err(RegistryError::Damaged { .. })) {
            return result;
        }
        tracing::debug!(%what, there, "what was left of an earlier try is wrong, starting over");
        file.set_len(0).map_err(failed)?;
        file.rewind().map_err(failed)?;
        self.stream(repository, blob, 0, Hasher::new(), file, progress)
    }

    /// Streams a blob from `done` on; `hasher` has seen what is before.
    fn stream(
        &self,
        repository: &Reference,
        blob: &Descriptor,
        mut done: u64,
        mut hasher: Hasher,
        sink: &mut dyn Write,
        progress: &dyn Progress,
    ) -> Result<()> {
        let what = blob_name(repository, blob);
        let mut patience = self.inner.patience(&what, progress);
        progress.moved(blob, done);
        let mut buffer = vec![0; PIECE];
        let mut mark = done;
        while done < blob.size {
            patience.check()?;
            let mut take = |bytes: &[u8]| -> Result<()> {
                hasher.update(bytes);
                sink.write_all(bytes)
                    .map_err(|source| RegistryError::Sink {
                        what: what.clone(),
                        source,
                    })?;
                done += bytes.len() as u64;
                progress.moved(blob, done);
                if progress.cancelled() {
                    return Err(RegistryError::Cancelled { what: what.clone() });
                }
                Ok(())
            };
            let from = mark;
            if let Err(error) = self.receive(
                &what,
                repository,
                blob,
                from..blob.size,
                &mut buffer,
                &mut take,
            ) {
                if done >= mark + PIECE as u64 {
                    patience.got_further();
                }
                mark = done;
                patience.failed(error)?;
            }
        }
        let digest = hasher.finish();
        if digest != blob.digest {
            return Err(RegistryError::damaged(
                what,
                format!("its digest is {digest}"),
            ));
        }
        Ok(())
    }

    /// Some bytes of a blob, in one ranged read. **Not verified**: a part of a blob has
    /// no digest, so the caller must have a checksum of its own.
    pub fn blob_range(
        &self,
        repository: &Reference,
        blob: &Descriptor,
        range: Range<u64>,
        progress: &dyn Progress,
    ) -> Result<Vec<u8>> {
        let what = blob_name(repository, blob);
        if range.start > range.end || range.end > blob.size {
            return Err(RegistryError::damaged(
                what,
                format!(
                    "bytes {}..{} of {} were asked for",
                    range.start, range.end, blob.size
                ),
            ));
        }
        let mut buffer = vec![0; PIECE];
        let mut bytes = Vec::new();
        let mut patience = self.inner.patience(&what, progress);
        let wanted = range.end - range.start;
        while (bytes.len() as u64) < wanted {
            let before = bytes.len();
            let from = range.start + before as u64;
            let mut take = |piece: &[u8]| {
                // Grows with what comes, not by what was promised.
                bytes.extend_from_slice(piece);
                if progress.cancelled() {
                    return Err(RegistryError::Cancelled { what: what.clone() });
                }
                Ok(())
            };
            if let Err(error) = self.receive(
                &what,
                repository,
                blob,
                from..range.end,
                &mut buffer,
                &mut take,
            ) {
                if bytes.len() >= before + PIECE {
                    patience.got_further();
                }
                patience.failed(error)?;
            }
        }
        Ok(bytes)
    }

    /// One request for some bytes of a blob, all of which `take` gets or it fails.
    fn receive(
        &self,
        what: &str,
        repository: &Reference,
        blob: &Descriptor,
        range: Range<u64>,
        buffer: &mut [u8],
        take: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let whole = range.start == 0 && range.end == blob.size;
        let mut headers = Vec::new();
        if !whole {
            let text = format!("bytes={}-{}", range.start, range.end - 1);
            headers.push((header::RANGE, text));
        }
        let answer = self.inner.send(Call {
            what,
            repository,
            method: Method::GET,
            url: self
                .inner
                .url(repository, &format!("blobs/{}", blob.digest)),
            headers,
            scopes: pull_scope(repository),
            payload: Payload::Nothing,
        })?;
        let skip = match answer.status() {
            StatusCode::PARTIAL_CONTENT if !whole => {
                check_content_range(what, &answer, &range, blob.size)?;
                0
            }
            StatusCode::OK => {
                check_length(what, &answer, blob.size)?;
                if range.start > MOST_SKIPPED && range.end != blob.size {
                    return Err(RegistryError::protocol(
                        what,
                        "the registry does not give parts of blobs, and this one is large",
                    ));
                }
                range.start
            }
            status => {
                return Err(RegistryError::protocol(
                    what,
                    format!("an answer of {status} was not expected"),
                ));
            }
        };
        let open_end = answer.length().is_none() && answer.status() == StatusCode::OK;
        let host = answer.url.authority().to_owned();
        let mut body = answer.response.into_body().into_reader();
        let length = range.end - range.start;
        let mut seen = 0;
        while seen < skip + length {
            let left = usize::try_from(skip + length - seen).unwrap_or(usize::MAX);
            let wanted = buffer.len().min(left);
            let count = body
                .read(&mut buffer[..wanted])
                .map_err(|error| broken(what, &host, ureq::Error::from(error)))?;
            if count == 0 {
                let why = format!("the answer ended after {seen} of {} bytes", skip + length);
                return Err(unreachable(what, &host, &why));
            }
            let before = usize::try_from(skip.saturating_sub(seen)).unwrap_or(usize::MAX);
            if before < count {
                take(&buffer[before..count])?;
            }
            seen += count as u64;
        }
        if open_end && range.end == blob.size && matches!(body.read(&mut buffer[..1]), Ok(1)) {
            let reason = format!("it has more than its {} bytes", blob.size);
            return Err(RegistryError::damaged(what, reason));
        }
        Ok(())
    }

    /// The tags of a repository, as the registry orders them; at most 100,000.
    pub fn tags(&self, repository: &Reference, progress: &dyn Progress) -> Result<Vec<String>> {
        #[derive(serde::Deserialize)]
        struct Page {
            tags: Option<Vec<String>>,
        }
        let name = format!("{}/{}", repository.registry(), repository.repository());
        let what = format!("tags of {name}");
        let mut tags = Vec::new();
        let mut next = Some(self.inner.url(repository, "tags/list?n=1000"));
        while let Some(url) = next {
            let (page, link) = self.inner.patience(&what, progress).until(|| {
                let answer = self.inner.send(Call {
                    what: &what,
                    repository,
                    method: Method::GET,
                    url: url.clone(),
                    headers: Vec::new(),
                    scopes: pull_scope(repository),
                    payload: Payload::Nothing,
                })?;
                let link = answer
                    .header(&header::LINK)
                    .and_then(next_link)
                    .map(str::to_owned);
                Ok((self.inner.read_small(&what, answer, MAX_MANIFEST)?, link))
            })?;
            let page: Page = serde_json::from_slice(&page).map_err(|error| {
                RegistryError::protocol(&what, format!("it is no list: {error}"))
            })?;
            let page = page.tags.unwrap_or_default();
            // A last page that is followed by itself would never end.
            let more = link.filter(|_| !page.is_empty() && tags.len() + page.len() < MOST_TAGS);
            tags.extend(page);
            tags.truncate(MOST_TAGS);
            next = match more {
                None => None,
                Some(link) => Some(
                    url.join(&link)
                        .map_err(|why| RegistryError::protocol(&what, why))?,
                ),
            };
        }
        Ok(tags)
    }

    fn manifest_call<'a>(
        &self,
        what: &'a str,
        reference: &'a Reference,
        method: Method,
    ) -> Call<'a> {
        let mut accept = vec![
            media_type::OCI_MANIFEST,
            media_type::OCI_INDEX,
            media_type::DOCKER_MANIFEST,
            media_type::DOCKER_INDEX,
        ];
        // So that the registry says what it has, and we why it is refused.
        accept.extend(media_type::DOCKER_SCHEMA_1);
        Call {
            what,
            repository: reference,
            method,
            url: self
                .inner
                .url(reference, &format!("manifests/{}", reference.selector())),
            headers: vec![(header::ACCEPT, accept.join(", "))],
            scopes: pull_scope(reference),
            payload: Payload::Nothing,
        }
    }
}

/// The beginning of a blob that a file has: how long, and its hash. The file is left at
/// its end. A file that is too long is none of it.
fn hash_beginning(file: &mut File, size: u64) -> std::io::Result<(u64, Hasher)> {
    let there = file.metadata()?.len();
    file.seek(SeekFrom::Start(0))?;
    let mut hasher = Hasher::new();
    if there > size {
        file.set_len(0)?;
        return Ok((0, hasher));
    }
    let mut piece = vec![0; PIECE];
    let mut seen = 0;
    while seen < there {
        let count = file.read(&mut piece)?;
        if count == 0 {
            break;
        }
        hasher.update(&piece[..count]);
        seen += count as u64;
    }
    Ok((seen, hasher))
}

/// A blob in a sentence.
pub(super) fn blob_name(repository: &Reference, blob: &Descriptor) -> String {
    format!(
        "blob {} of {}/{}",
        blob.digest.short(),
        repository.registry(),
        repository.repository()
    )
}

pub(super) fn pull_scope(repository: &Reference) -> Vec<String> {
    vec![format!("repository:{}:pull", repository.repository())]
}

/// A registry that says another digest than the bytes have sent other bytes.
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

fn check_length(what: &str, answer: &Answer, size: u64) -> Result<()> {
    match answer.length() {
        Some(length) if length != size => Err(RegistryError::damaged(
            what,
            format!("the registry has {length} bytes of it, it must be {size}"),
        )),
        _ => Ok(()),
    }
}

/// RFC 9110 §14.4: `bytes FIRST-LAST/SIZE`.
fn check_content_range(what: &str, answer: &Answer, range: &Range<u64>, size: u64) -> Result<()> {
    let text = answer.header(&header::CONTENT_RANGE).unwrap_or_default();
    let parse = || {
        let (part, whole) = text.strip_prefix("bytes ")?.split_once('/')?;
        let (first, last) = part.split_once('-')?;
        let (first, last): (u64, u64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        let whole: Option<u64> = match whole.trim() {
            "*" => None,
            whole => Some(whole.parse().ok()?),
        };
        Some((first, last, whole))
    };
    let (first, last, whole) = parse().ok_or_else(|| {
        RegistryError::protocol(what, format!("{:?} is no range of bytes", one_line(text)))
    })?;
    if let Some(whole) = whole
        && whole != size
    {
        let reason = format!("the registry has {whole} bytes of it, it must be {size}");
        return Err(RegistryError::damaged(what, reason));
    }
    if first != range.start || last < range.end - 1 {
        return Err(RegistryError::protocol(
            what,
            format!(
                "bytes {}-{} were asked for, {first}-{last} came",
                range.start,
                range.end - 1
            ),
        ));
    }
    Ok(())
}

/// RFC 8288: `<ADDRESS>; rel="next"`.
fn next_link(header: &str) -> Option<&str> {
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
