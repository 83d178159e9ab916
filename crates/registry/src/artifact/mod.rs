//! Jiffy's own files as an artifact, whole or read in ranges.
//!
//! `docs/registry-artifacts.md` specifies what is in the registry. An artifact is a
//! configuration and named files; each file is cut into *packs*, which are its layers.
//!
//! * [`plan`](Artifact::plan): how files become an artifact.
//! * [`push`](Artifact::push): sends what the registry lacks.
//! * `blocks`: the hashes by which parts of files are checked.
//! * [`remote`]: [`RemoteArtifact`], its files read in ranges or fetched whole.

pub mod annotations;
mod blocks;
mod hash;
mod plan;
mod push;
pub mod remote;
#[cfg(test)]
mod tests;

pub use plan::{Artifact, Config, FileToPush};
pub use push::Pushed;
pub use remote::{RemoteArtifact, RemoteFile};

use crate::Descriptor;

/// An artifact that holds an image: a root file system.
pub const IMAGE_TYPE: &str = "application/vnd.jiffy.image.v1";
/// An artifact that holds a snapshot: memory, disks and state.
pub const SNAPSHOT_TYPE: &str = "application/vnd.jiffy.snapshot.v1";
/// The media type of a pack: some bytes of a file, as they are.
pub const PACK_TYPE: &str = "application/vnd.jiffy.pack.v1";
/// The largest pack that is made, bytes: what is sent again when a connection breaks
/// in a push.
pub const MAX_PACK: u64 = 32 << 20;
/// The largest configuration, bytes.
pub const MAX_CONFIG: u64 = 4 << 20;

/// Some bytes of a file: one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pack {
    /// Its digest, size, and annotations.
    pub blob: Descriptor,
    /// Its first byte in the file.
    pub offset: u64,
    /// What its bytes are to the file.
    pub role: String,
}

impl Pack {
    /// The byte behind its last in the file.
    pub fn end(&self) -> u64 {
        // Packs were added up without overflow when they were made or read.
        self.offset + self.blob.size
    }
}

/// Whether a name may be a file's: 1 to 255 bytes, no `/`, no control characters,
/// neither `.` nor `..`.
fn is_name(name: &str) -> bool {
    (1..=255).contains(&name.len())
        && !name.chars().any(|c| c == '/' || c.is_control())
        && !matches!(name, "." | "..")
}

/// Whether a text may be a role: 1 to 32 small letters, digits and `-`.
fn is_role(role: &str) -> bool {
    (1..=32).contains(&role.len())
        && role
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}
