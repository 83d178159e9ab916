//! An artifact in a registry, whose files are read in ranges or fetched whole.

use super::blocks::{self, Blocks};
use super::hash::hash;
use super::{
    IMAGE_TYPE, MAX_CONFIG, MAX_PACK, PACK_TYPE, Pack, SNAPSHOT_TYPE, annotations, is_name, is_role,
};
use crate::client::Fetched;
use crate::error::Result;
use crate::folder::publish;
use crate::lock::open_locked;
use crate::{
    Client, Content, Descriptor, ImageManifest, Progress, Reference, RegistryError, parallel,
};
use jiffy_oci::one_line;
use jiffy_sys::mutex::lock;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// An artifact in a registry: its manifest and configuration were fetched, its files were not.
#[derive(Clone, Debug)]
pub struct RemoteArtifact {
    reference: Reference,
    fetched: Fetched,
    artifact_type: String,
    config: Vec<u8>,
    annotations: BTreeMap<String, String>,
    files: Vec<RemoteFile>,
}

/// A file of an artifact. Cheap enough to clone; any thread may read.
#[derive(Clone, Debug)]
pub struct RemoteFile {
    client: Client,
    repository: Reference,
    name: String,
    size: u64,
    packs: Vec<Pack>,
    /// The hashes of its blocks; artifacts pushed by Jiffy 0.1 have none.
    pub(super) blocks: Option<Blocks>,
    /// The pack that was read last, if the file has no block hashes.
    last_pack: Arc<Mutex<Option<LastPack>>>,
}

/// The offset of a pack in its file, and the pack's bytes.
type LastPack = (u64, Arc<Vec<u8>>);

/// The largest pack that is read into memory whole, because its parts can't be verified alone.
const MOST_WHOLE: u64 = 2 * MAX_PACK;

impl RemoteArtifact {
    /// Whether a manifest says that it is an artifact of Jiffy, of any version.
    pub fn is_artifact(fetched: &Fetched) -> bool {
        matches!(&fetched.content, Content::Image(manifest)
            if type_of(manifest).starts_with("application/vnd.jiffy."))
    }

    /// Fetches the manifest and configuration.
    ///
    /// # Errors
    ///
    /// If [`Client::manifest`] fails, or as for [`of`](Self::of).
    pub fn open(client: &Client, reference: &Reference, progress: &dyn Progress) -> Result<Self> {
        let fetched = client.manifest(reference, progress)?;
        Self::of(client, reference, fetched, progress)
    }

    /// Like [`open`](Self::open), with a manifest that was already fetched by the reference.
    ///
    /// # Errors
    ///
    /// If it is not an artifact of Jiffy, its packs have gaps, overlap or have invalid names, or
    /// the configuration can't be fetched or has more than 4 MiB.
    pub fn of(
        client: &Client,
        reference: &Reference,
        fetched: Fetched,
        progress: &dyn Progress,
    ) -> Result<Self> {
        let what = format!("artifact {reference}");
        let unsupported = |reason: String| RegistryError::Unsupported {
            what: what.clone(),
            reason,
        };
        let Content::Image(manifest) = &fetched.content else {
            return Err(unsupported("it is an index of several images".to_owned()));
        };
        let artifact_type = type_of(manifest).to_owned();
        if ![IMAGE_TYPE, SNAPSHOT_TYPE].contains(&&*artifact_type) {
            let shown = one_line(&artifact_type);
            let why = format!("its type is {shown:?}, which this version of Jiffy does not know");
            return Err(unsupported(why));
        }
        let reference = reference.with_digest(fetched.digest);
        let files = files(client, &reference, &manifest.layers)
            .map_err(|why| RegistryError::damaged(&what, why))?;
        let config = client.small_blob(&reference, &manifest.config, MAX_CONFIG, progress)?;
        Ok(Self {
            artifact_type,
            config,
            annotations: manifest.annotations.clone(),
            files,
            reference,
            fetched,
        })
    }

    /// Its reference, pinned to its digest.
    pub fn reference(&self) -> &Reference {
        &self.reference
    }

    /// Its manifest.
    pub fn manifest(&self) -> &Fetched {
        &self.fetched
    }

    /// [`IMAGE_TYPE`] or [`SNAPSHOT_TYPE`].
    pub fn artifact_type(&self) -> &str {
        &self.artifact_type
    }

    /// The configuration's bytes.
    pub fn config(&self) -> &[u8] {
        &self.config
    }

    /// The manifest's annotations.
    pub fn annotations(&self) -> &BTreeMap<String, String> {
        &self.annotations
    }

    /// Its files, in the order of the manifest.
    pub fn files(&self) -> &[RemoteFile] {
        &self.files
    }

    /// The file of this name.
    pub fn file(&self, name: &str) -> Option<&RemoteFile> {
        self.files.iter().find(|file| file.name == name)
    }

    /// Fetches all files into an existing folder; each appears under its name when it is whole.
    ///
    /// # Errors
    ///
    /// As for [`RemoteFile::fetch`].
    pub fn fetch_all(&self, folder: &Path, progress: &dyn Progress) -> Result<()> {
        for file in &self.files {
            file.fetch(folder, progress)?;
        }
        Ok(())
    }
}

/// OCI image specification 1.1: without `artifactType`, the type is the configuration's media type.
fn type_of(manifest: &ImageManifest) -> &str {
    match &manifest.artifact_type {
        Some(artifact_type) if !artifact_type.is_empty() => artifact_type,
        _ => &manifest.config.media_type,
    }
}

/// Groups packs into files.
pub(crate) fn files(
    client: &Client,
    reference: &Reference,
    layers: &[Descriptor],
) -> std::result::Result<Vec<RemoteFile>, String> {
    let mut files: Vec<RemoteFile> = Vec::new();
    let mut by_name: BTreeMap<&str, usize> = BTreeMap::new();
    for (number, layer) in layers.iter().enumerate() {
        let bad = |why: &str| format!("layer {number} {why}");
        if layer.media_type != PACK_TYPE {
            return Err(bad(&format!(
                "is not a pack but {:?}",
                one_line(&layer.media_type)
            )));
        }
        let annotation = |key: &str| layer.annotations.get(key).map(String::as_str);
        let name = annotation(annotations::FILE)
            .filter(|name| is_name(name))
            .ok_or_else(|| bad("has no valid file name"))?;
        let role = annotation(annotations::ROLE)
            .filter(|role| is_role(role))
            .ok_or_else(|| bad("has no role"))?;
        let offset: u64 = annotation(annotations::OFFSET)
            .and_then(|offset| offset.parse().ok())
            .ok_or_else(|| bad("has no valid offset in its file"))?;
        let at = *by_name.entry(name).or_insert_with(|| {
            files.push(RemoteFile {
                client: client.clone(),
                repository: reference.clone(),
                name: name.to_owned(),
                size: 0,
                packs: Vec::new(),
                blocks: None,
                last_pack: Arc::default(),
            });
            files.len() - 1
        });
        let file = &mut files[at];
        if offset != file.size {
            let end = file.size;
            return Err(bad(&format!(
                "begins at byte {offset} of {name:?}, not at {end}"
            )));
        }
        file.size = offset
            .checked_add(layer.size)
            .filter(|size| i64::try_from(*size).is_ok())
            .ok_or_else(|| bad("makes its file too large"))?;
        file.packs.push(Pack {
            blob: layer.clone(),
            offset,
            role: role.to_owned(),
        });
    }
    attach_blocks(files)
}

/// Attaches block hashes to their files; hashes without a file are an error.
fn attach_blocks(files: Vec<RemoteFile>) -> std::result::Result<Vec<RemoteFile>, String> {
    let is_hashes = |file: &RemoteFile| file.packs.iter().any(|pack| pack.role == blocks::ROLE);
    let (hashes, mut files): (Vec<_>, Vec<_>) = files.into_iter().partition(is_hashes);
    for file in hashes {
        let bad = |why: &str| format!("the file {:?} {why}", file.name);
        let [Pack { blob, .. }] = &file.packs[..] else {
            return Err(bad("has block hashes and is not a single pack"));
        };
        let of = blocks::file_of(&file.name);
        let of = files.iter_mut().find(|it| Some(&*it.name) == of);
        let of = of.ok_or_else(|| bad("has the block hashes of a file that does not exist"))?;
        let blocks = Blocks::of(blob, of.size);
        of.blocks = Some(blocks.ok_or_else(|| bad("does not have one hash for each block"))?);
    }
    Ok(files)
}

impl RemoteFile {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Size, bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Its packs, in order and without gaps.
    pub fn packs(&self) -> &[Pack] {
        &self.packs
    }

    /// The artifact it belongs to, pinned to its digest.
    pub fn repository(&self) -> &Reference {
        &self.repository
    }

    /// A file without a registry.
    #[cfg(test)]
    pub(super) fn for_tests(packs: Vec<Pack>) -> Self {
        let options = crate::ClientOptions::default();
        Self {
            client: Client::new(options).expect("the default options are good"),
            repository: Reference::parse("127.0.0.1:1/a", None).expect("it is a name"),
            name: "file".to_owned(),
            size: packs.last().map_or(0, Pack::end),
            packs,
            blocks: None,
            last_pack: Arc::default(),
        }
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// Whether a local file is as long as this one and has the same packs with this role at the
    /// same offsets, by their SHA-256.
    ///
    /// # Errors
    ///
    /// If the local file can't be opened, or `progress` is cancelled.
    pub fn has_same(&self, role: &str, path: &Path, progress: &dyn Progress) -> Result<bool> {
        let failed = |error| RegistryError::file("read", path, error);
        let file = File::open(path).map_err(failed)?;
        if file.metadata().map_err(failed)?.len() != self.size {
            return Ok(false);
        }
        let mut packs = self
            .packs
            .iter()
            .filter(|pack| pack.role == role)
            .peekable();
        if packs.peek().is_none() {
            return Ok(false);
        }
        for pack in packs {
            if !has_pack(&file, pack, &self.name, progress)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The range, in bytes, of the packs with this role; `None` if there are none, or if other
    /// packs lie between them.
    pub fn range_of(&self, role: &str) -> Option<Range<u64>> {
        let first = self.packs.iter().position(|pack| pack.role == role)?;
        let run = self.packs[first..]
            .iter()
            .take_while(|pack| pack.role == role);
        let count = run.clone().count();
        let all = self.packs.iter().filter(|pack| pack.role == role).count();
        let end = run.last()?.end();
        (count == all).then(|| self.packs[first].offset..end)
    }

    /// Reads a range of the file, across packs, as [`RemoteFile::read_into`].
    ///
    /// # Errors
    ///
    /// As for [`RemoteFile::read_into`].
    pub fn read(&self, range: Range<u64>, progress: &dyn Progress) -> Result<Vec<u8>> {
        let around = self.verifiable(&range)?;
        let mut bytes = vec![0; (around.end - around.start) as usize];
        self.read_into(&around, &mut bytes, progress)?;
        bytes.truncate((range.end - around.start) as usize);
        bytes.drain(..(range.start - around.start) as usize);
        Ok(bytes)
    }

    /// Extends a range to the nearest one that [`RemoteFile::read_into`] reads: to whole blocks,
    /// unless it consists of whole packs or the file has no block hashes.
    ///
    /// # Errors
    ///
    /// If the range is not within the file.
    pub fn verifiable(&self, range: &Range<u64>) -> Result<Range<u64>> {
        if range.start > range.end || range.end > self.size {
            return Err(RegistryError::damaged(
                format!("file {:?} of {}", self.name, self.repository),
                format!(
                    "bytes {}..{} of {} were requested",
                    range.start, range.end, self.size
                ),
            ));
        }
        Ok(match self.blocks_of(range) {
            Some(_) => Blocks::around(range, self.size),
            None => range.clone(),
        })
    }

    /// Reads a range that is [`verifiable`](RemoteFile::verifiable) into memory of its length, from
    /// the connection without another buffer. All bytes are verified by a hash that the manifest's
    /// digest covers: whole packs by their SHA-256, parts of packs by whole blocks. If a file has
    /// no block hashes, whole packs are read.
    ///
    /// # Errors
    ///
    /// If the range is not within the file, the registry can't be reached or refuses, bytes do not
    /// match their hash, a pack without block hashes is too large to be read whole, or `progress`
    /// is cancelled.
    ///
    /// # Panics
    ///
    /// If the memory or the range has another length.
    pub fn read_into(
        &self,
        range: &Range<u64>,
        into: &mut [u8],
        progress: &dyn Progress,
    ) -> Result<()> {
        assert_eq!(self.verifiable(range)?, *range);
        assert_eq!(into.len() as u64, range.end - range.start);
        if range.is_empty() {
            return Ok(());
        }
        let Some(blocks) = self.blocks_of(range) else {
            return self.read_packs(range, into, progress);
        };
        for pack in self.packs_of(range) {
            let part = range.start.max(pack.offset)..range.end.min(pack.end());
            let place = &mut into[within(&part, range.start)];
            let part = part.start - pack.offset..part.end - pack.offset;
            self.client
                .blob_range_into(&self.repository, &pack.blob, part, place, progress)?;
        }
        let fetch = |blob: &Descriptor| {
            let mut hashes = Vec::new();
            self.client
                .blob(&self.repository, blob, &mut hashes, progress)?;
            Ok(hashes)
        };
        match blocks.first_wrong(range.start, into, fetch)? {
            None => Ok(()),
            Some(number) => Err(RegistryError::damaged(
                format!("file {:?} of {}", self.name, self.repository),
                format!("block {number} does not match its hash in the artifact"),
            )),
        }
    }

    /// The hashes by which a range is verified; `None` if that is done by packs.
    fn blocks_of(&self, range: &Range<u64>) -> Option<&Blocks> {
        let blocks = self.blocks.as_ref();
        blocks.filter(|_| !range.is_empty() && self.packs_around(range) != *range)
    }

    /// Number of bytes that are fetched to read this range.
    pub fn bytes_to_read(&self, range: &Range<u64>) -> u64 {
        let around = match &self.blocks {
            Some(_) => Blocks::around(range, self.size),
            None => self.packs_around(range),
        };
        around.end - around.start
    }

    /// The packs that overlap this range.
    fn packs_of<'a>(&'a self, range: &'a Range<u64>) -> impl Iterator<Item = &'a Pack> {
        let first = self.packs.partition_point(|pack| pack.end() <= range.start);
        let packs = self.packs[first..].iter();
        packs.take_while(|pack| pack.offset < range.end)
    }

    /// Extends a range to whole packs.
    fn packs_around(&self, range: &Range<u64>) -> Range<u64> {
        let mut packs = self.packs_of(range);
        let Some(first) = packs.next() else {
            return range.clone();
        };
        first.offset..packs.last().unwrap_or(first).end()
    }

    /// Reads a range by whole packs.
    fn read_packs(
        &self,
        range: &Range<u64>,
        into: &mut [u8],
        progress: &dyn Progress,
    ) -> Result<()> {
        for pack in self.packs_of(range) {
            let part = range.start.max(pack.offset)..range.end.min(pack.end());
            let place = &mut into[within(&part, range.start)];
            if part == (pack.offset..pack.end()) {
                self.client
                    .blob_into(&self.repository, &pack.blob, place, progress)?;
            } else {
                let whole = self.whole_pack(pack, progress)?;
                place.copy_from_slice(&whole[within(&part, pack.offset)]);
            }
        }
        Ok(())
    }

    /// Fetches a whole pack for a part of it and keeps it, because the next read is likely in it,
    /// too.
    fn whole_pack(&self, pack: &Pack, progress: &dyn Progress) -> Result<Arc<Vec<u8>>> {
        if pack.blob.size > MOST_WHOLE {
            return Err(RegistryError::Unsupported {
                what: format!("file {:?} of {}", self.name, self.repository),
                reason: format!(
                    "reading parts of it requires block hashes, or packs of at most {MOST_WHOLE} \
                     bytes; it has no block hashes, and a pack of {} bytes; push it \
                     again with this version of Jiffy",
                    pack.blob.size
                ),
            });
        }
        let mut last = lock(&self.last_pack);
        if let Some((offset, bytes)) = &*last
            && *offset == pack.offset
        {
            return Ok(bytes.clone());
        }
        let mut bytes = Vec::new();
        self.client
            .blob(&self.repository, &pack.blob, &mut bytes, progress)?;
        let bytes = Arc::new(bytes);
        *last = Some((pack.offset, bytes.clone()));
        Ok(bytes)
    }

    /// Fetches the file into `folder` under its name and returns its path. The file is verified,
    /// synced and renamed. Continues from `.NAME.partial` of an interrupted fetch; waits for
    /// another process that fetches the same file.
    ///
    /// # Errors
    ///
    /// If the registry can't be reached or refuses, a pack is damaged, a file can't be locked,
    /// written or renamed, or `progress` is cancelled.
    pub fn fetch(&self, folder: &Path, progress: &dyn Progress) -> Result<PathBuf> {
        let path = folder.join(&self.name);
        if self.is_whole(&path, progress)? {
            return Ok(path);
        }
        // A name has up to 255 bytes; the prefix and suffix must fit as well.
        let short: String = self.name.chars().take(60).collect();
        let partial = folder.join(format!(".{short}.partial"));
        let what = format!("file {:?}", self.name);
        let Some(file) = open_locked(&partial, &what, progress, &|| false)? else {
            return Ok(path);
        };
        if self.is_whole(&path, progress)? {
            let _ = fs::remove_file(&partial);
            return Ok(path);
        }
        let write_failed = |error| RegistryError::file("write", &partial, error);
        let fresh = file.metadata().map_err(write_failed)?.len() == 0;
        file.set_len(self.size).map_err(write_failed)?;
        parallel::for_each(&self.packs, |pack| {
            if !fresh && has_pack(&file, pack, &self.name, progress)? {
                progress.moved(&pack.blob, pack.blob.size);
                return Ok(());
            }
            let mut into = At {
                file: &file,
                offset: pack.offset,
            };
            match self
                .client
                .blob(&self.repository, &pack.blob, &mut into, progress)
            {
                Err(RegistryError::Sink { source, .. }) => Err(write_failed(source)),
                other => other,
            }
        })?;
        publish(&file, &partial, &path)
            .map_err(|error| RegistryError::file("write", &path, error))?;
        Ok(path)
    }

    /// Whether the file exists and all its packs have the right digests.
    fn is_whole(&self, path: &Path, progress: &dyn Progress) -> Result<bool> {
        let Ok(metadata) = fs::symlink_metadata(path) else {
            return Ok(false);
        };
        if !metadata.is_file() || metadata.len() != self.size {
            return Ok(false);
        }
        let file = File::open(path).map_err(|error| RegistryError::file("read", path, error))?;
        for pack in &self.packs {
            if !has_pack(&file, pack, &self.name, progress)? {
                return Ok(false);
            }
            progress.moved(&pack.blob, pack.blob.size);
        }
        Ok(true)
    }
}

/// Where bytes of the file are in memory that begins with byte `start`.
fn within(part: &Range<u64>, start: u64) -> Range<usize> {
    (part.start - start) as usize..(part.end - start) as usize
}

/// Whether a file has a pack's bytes at the pack's offset.
fn has_pack(file: &File, pack: &Pack, name: &str, progress: &dyn Progress) -> Result<bool> {
    let digest = hash(file, pack.offset, pack.blob.size, name, progress)?;
    Ok(digest.is_ok_and(|digest| digest == pack.blob.digest))
}

/// Writes into a file from an offset on, so that several threads can write different parts.
struct At<'a> {
    file: &'a File,
    offset: u64,
}

impl Write for At<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.file.write_at(bytes, self.offset)?;
        self.offset += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
