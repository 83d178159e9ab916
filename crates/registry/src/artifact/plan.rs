//! Makes an artifact from files.

use super::hash::hash;
use super::{MAX_CONFIG, MAX_PACK, PACK_TYPE, Pack, annotations, blocks, is_name, is_role};
use crate::error::Result;
use crate::{
    Descriptor, Digest, ImageManifest, Progress, RegistryError, RemoteFile, media_type, parallel,
};
use jiffy_oci::MAX_MANIFEST;
use jiffy_sys::mutex::{lock, unpoisoned};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// The configuration blob of an artifact, in a format of Jiffy's.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its media type.
    pub media_type: String,
    /// Its bytes, usually JSON; at most 4 MiB.
    pub bytes: Vec<u8>,
}

/// A file to divide into packs.
#[derive(Clone, Debug)]
pub struct FileToPush {
    name: String,
    from: FileSource,
}

#[derive(Clone, Debug)]
enum FileSource {
    Local {
        path: PathBuf,
        /// Offset and role of each segment.
        segments: Vec<(u64, String)>,
        /// Whether the artifact gets block hashes of the file.
        in_parts: bool,
    },
    Remote(Box<RemoteFile>),
}

/// A planned artifact: its manifest, and where the bytes of its packs are.
#[derive(Clone, Debug)]
pub struct Artifact {
    pub(super) manifest: Vec<u8>,
    pub(super) config: Config,
    pub(super) packs: Vec<Planned>,
}

/// A pack and the source of its bytes.
#[derive(Clone, Debug)]
pub(super) struct Planned {
    pub(super) pack: Pack,
    pub(super) bytes: Bytes,
}

#[derive(Clone, Debug)]
pub(super) enum Bytes {
    /// In a local file, at the pack's offset.
    Local(PathBuf),
    /// In a registry, in another artifact's repository.
    Remote(Box<RemoteFile>),
    /// In memory.
    Memory(Arc<[u8]>),
}

impl FileToPush {
    /// A local file, in one segment with this role. It must not change until it is pushed.
    pub fn local(name: &str, path: impl Into<PathBuf>, role: &str) -> Self {
        Self {
            name: name.to_owned(),
            from: FileSource::Local {
                path: path.into(),
                segments: vec![(0, role.to_owned())],
                in_parts: false,
            },
        }
    }

    /// Begins a new segment, and so a new pack, at this offset of a local file. Call it in
    /// ascending order. A cut at 0 replaces the first segment's role; a cut at the file's end or
    /// behind it has no effect.
    #[must_use]
    pub fn cut(mut self, offset: u64, role: &str) -> Self {
        if let FileSource::Local { segments, .. } = &mut self.from {
            if segments.last().is_some_and(|(last, _)| *last == offset) {
                segments.pop();
            }
            segments.push((offset, role.to_owned()));
        }
        self
    }

    /// Adds block hashes, because parts of the file will be read. Has no effect on a remote file,
    /// which keeps its hashes if it has any.
    #[must_use]
    pub fn read_in_parts(mut self) -> Self {
        if let FileSource::Local { in_parts, .. } = &mut self.from {
            *in_parts = true;
        }
        self
    }

    /// A file of an artifact in a registry, such as a parent's. Its packs stay as they are: a push
    /// finds them in the target repository, mounts them from that artifact's repository, or copies
    /// them from there.
    pub fn remote(name: &str, file: &RemoteFile) -> Self {
        Self {
            name: name.to_owned(),
            from: FileSource::Remote(Box::new(file.clone())),
        }
    }
}

impl Artifact {
    /// Divides the files into packs and hashes them. The same type, configuration, annotations and
    /// files give the same artifact, byte for byte.
    ///
    /// # Errors
    ///
    /// If a name, a role, the order of the cuts or the configuration's size is not valid, the packs
    /// do not fit into one manifest, a file can't be read, or `progress` is cancelled.
    pub fn plan(
        artifact_type: &str,
        config: Config,
        annotations: BTreeMap<String, String>,
        files: &[FileToPush],
        progress: &dyn Progress,
    ) -> Result<Self> {
        if config.bytes.len() as u64 > MAX_CONFIG {
            let why = format!("its configuration has more than {MAX_CONFIG} bytes");
            return Err(unsupported(why));
        }
        let mut names = BTreeSet::new();
        let mut packs = Vec::new();
        for file in files {
            if !is_name(&file.name) || !names.insert(&file.name) {
                return Err(unsupported(format!(
                    "{:?} can't be the name of a file in it",
                    file.name
                )));
            }
            match &file.from {
                FileSource::Local {
                    path,
                    segments,
                    in_parts,
                } => {
                    packs.extend(cut_and_hash(&file.name, path, segments, progress)?);
                    if *in_parts {
                        packs.extend(hashes(&file.name, path, progress)?);
                    }
                }
                FileSource::Remote(remote) => packs.extend(remote_packs(&file.name, remote)),
            }
        }
        let manifest = ImageManifest {
            schema_version: 2,
            media_type: Some(media_type::OCI_MANIFEST.to_owned()),
            artifact_type: Some(artifact_type.to_owned()),
            config: Descriptor::of(&config.media_type, &config.bytes),
            layers: packs
                .iter()
                .map(|planned| planned.pack.blob.clone())
                .collect(),
            annotations,
        };
        let manifest =
            serde_json::to_vec(&manifest).map_err(|error| unsupported(error.to_string()))?;
        if manifest.len() as u64 > MAX_MANIFEST {
            let why = format!("its {} packs do not fit into one manifest", packs.len());
            return Err(unsupported(why));
        }
        Ok(Self {
            manifest,
            config,
            packs,
        })
    }

    /// The manifest's bytes.
    pub fn manifest(&self) -> &[u8] {
        &self.manifest
    }

    /// The manifest's digest, which identifies the artifact.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.manifest)
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// All packs in the manifest's order.
    pub fn packs(&self) -> impl Iterator<Item = &Pack> {
        self.packs.iter().map(|planned| &planned.pack)
    }

    /// Bytes of all blobs; equal blobs count once.
    pub fn size(&self) -> u64 {
        let config = Descriptor::of(&self.config.media_type, &self.config.bytes);
        let blobs = self.packs().map(|pack| (pack.blob.digest, pack.blob.size));
        let distinct: BTreeSet<(Digest, u64)> =
            blobs.chain([(config.digest, config.size)]).collect();
        distinct.iter().map(|(_, size)| size).sum()
    }
}

fn unsupported(why: String) -> RegistryError {
    RegistryError::Unsupported {
        what: "the artifact".to_owned(),
        reason: why,
    }
}

fn cut_and_hash(
    name: &str,
    path: &Path,
    segments: &[(u64, String)],
    progress: &dyn Progress,
) -> Result<Vec<Planned>> {
    let failed = |error| RegistryError::file("read", path, error);
    let file = File::open(path).map_err(failed)?;
    let size = file.metadata().map_err(failed)?.len();
    let cuts = cuts(segments, size).map_err(unsupported)?;
    let digests = Mutex::new(BTreeMap::new());
    parallel::for_each(&cuts, |cut| {
        let digest = hash(&file, cut.offset, cut.size, name, progress)?.map_err(failed)?;
        let mut digests = lock(&digests);
        digests.insert(cut.offset, digest);
        Ok(())
    })?;
    let digests = unpoisoned(digests.into_inner());
    let packs = cuts.iter().filter_map(|cut| {
        let digest = *digests.get(&cut.offset)?;
        Some(Planned {
            pack: new_pack(name, cut.offset, cut.role, digest, cut.size),
            bytes: Bytes::Local(path.to_owned()),
        })
    });
    Ok(packs.collect())
}

/// The packs of a remote file, and of its block hashes.
fn remote_packs(name: &str, remote: &RemoteFile) -> Vec<Planned> {
    let planned = |name: &str, offset, role: &str, blob: &Descriptor| Planned {
        pack: new_pack(name, offset, role, blob.digest, blob.size),
        bytes: Bytes::Remote(Box::new(remote.clone())),
    };
    let packs = remote.packs().iter();
    let mut packs: Vec<Planned> = packs
        .map(|pack| planned(name, pack.offset, &pack.role, &pack.blob))
        .collect();
    if let (Some(blocks), Some(name)) = (&remote.blocks, blocks::name_of(name)) {
        packs.push(planned(&name, 0, blocks::ROLE, blocks.blob()));
    }
    packs
}

/// Block hashes of a local file; `None` if its name is too long for the suffix.
fn hashes(name: &str, path: &Path, progress: &dyn Progress) -> Result<Option<Planned>> {
    /// Bytes that one thread hashes at a time; a multiple of the block size.
    const PIECE: u64 = 64 * blocks::BLOCK;
    let failed = |error| RegistryError::file("read", path, error);
    let Some(hashes_name) = blocks::name_of(name) else {
        return Ok(None);
    };
    let file = File::open(path).map_err(failed)?;
    let size = file.metadata().map_err(failed)?.len();
    let pieces: Vec<u64> = (0..size).step_by(PIECE as usize).collect();
    let found = Mutex::new(BTreeMap::new());
    parallel::for_each(&pieces, |start| {
        if progress.cancelled() {
            let what = format!("reading {name}");
            return Err(RegistryError::Cancelled { what });
        }
        let mut bytes = vec![0; PIECE.min(size - start) as usize];
        file.read_exact_at(&mut bytes, *start).map_err(failed)?;
        let mut found = lock(&found);
        found.insert(*start, blocks::hashes(&bytes));
        Ok(())
    })?;
    let found = unpoisoned(found.into_inner());
    let bytes: Vec<u8> = found.into_values().flatten().collect();
    Ok(Some(Planned {
        pack: new_pack(
            &hashes_name,
            0,
            blocks::ROLE,
            Digest::of(&bytes),
            bytes.len() as u64,
        ),
        bytes: Bytes::Memory(bytes.into()),
    }))
}

#[derive(Debug, PartialEq, Eq)]
struct Cut<'a> {
    offset: u64,
    size: u64,
    role: &'a str,
}

/// Divides the segments into packs. An empty file has one empty pack.
fn cuts(segments: &[(u64, String)], size: u64) -> std::result::Result<Vec<Cut<'_>>, String> {
    let mut cuts = Vec::new();
    for (number, (start, role)) in segments.iter().enumerate() {
        if !is_role(role) {
            return Err(format!("{role:?} can't be the role of a pack"));
        }
        let end = match segments.get(number + 1) {
            Some((next, _)) if next <= start => {
                return Err(format!(
                    "its cut at byte {next} comes after the cut at byte {start}"
                ));
            }
            Some((next, _)) => (*next).min(size),
            None => size,
        };
        let mut offset = *start;
        while offset < end || (offset == 0 && size == 0 && cuts.is_empty()) {
            let size = (end - offset).min(MAX_PACK);
            cuts.push(Cut { offset, size, role });
            offset += size;
        }
    }
    Ok(cuts)
}

fn new_pack(name: &str, offset: u64, role: &str, digest: Digest, size: u64) -> Pack {
    let mut blob = Descriptor::new(PACK_TYPE, digest, size);
    blob.annotations = BTreeMap::from([
        (annotations::FILE.to_owned(), name.to_owned()),
        (annotations::OFFSET.to_owned(), offset.to_string()),
        (annotations::ROLE.to_owned(), role.to_owned()),
    ]);
    Pack {
        blob,
        offset,
        role: role.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(offset: u64, size: u64, role: &str) -> Cut<'_> {
        Cut { offset, size, role }
    }

    #[test]
    fn segments_begin_packs_and_packs_are_bounded() {
        let file = |file: FileToPush, size| {
            let FileSource::Local { segments, .. } = file.from else {
                panic!("a local file");
            };
            let shown = cuts(&segments, size).map(|cuts| {
                cuts.iter()
                    .map(|cut| (cut.offset, cut.size, cut.role.to_owned()))
                    .collect::<Vec<_>>()
            });
            shown.map(|cuts| {
                cuts.iter()
                    .map(|(o, s, r)| format!("{o}+{s} {r}"))
                    .collect::<Vec<_>>()
                    .join(", ")
            })
        };
        let plain = || FileToPush::local("f", "/f", "data");
        assert_eq!(file(plain(), 0).unwrap(), "0+0 data");
        assert_eq!(file(plain(), 5).unwrap(), "0+5 data");
        let image = plain().cut(0, "boot").cut(10, "data").cut(90, "tail");
        assert_eq!(
            file(image.clone(), 100).unwrap(),
            "0+10 boot, 10+80 data, 90+10 tail"
        );
        assert_eq!(file(image.clone(), 50).unwrap(), "0+10 boot, 10+40 data");
        assert_eq!(file(image, 0).unwrap(), "0+0 boot");
        assert!(file(plain().cut(9, "a").cut(3, "b"), 100).is_err());
        assert!(file(plain().cut(9, "A B"), 100).is_err());

        let segments = [(0, "boot".to_owned()), (7, "data".to_owned())];
        assert_eq!(
            cuts(&segments, 7 + MAX_PACK + 1).unwrap(),
            [
                cut(0, 7, "boot"),
                cut(7, MAX_PACK, "data"),
                cut(7 + MAX_PACK, 1, "data")
            ]
        );
    }
}
