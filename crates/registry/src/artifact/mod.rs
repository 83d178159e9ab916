//! Jiffy's own files as an artifact, read in ranges or fetched whole.
//!
//! `docs/registry-artifacts.md` specifies the format. An artifact is a configuration and named
//! files; each file is divided into *packs*, which are the layers of the manifest.
//!
//! * [`plan`](Artifact::plan): makes an artifact from files.
//! * [`push`](Artifact::push): uploads what the registry lacks.
//! * `blocks`: block hashes, which verify parts of files.
//! * [`remote`]: [`RemoteArtifact`], whose files are read in ranges or fetched whole.

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

/// Type of an artifact with an image: a root file system.
pub const IMAGE_TYPE: &str = "application/vnd.jiffy.image.v1";
/// Type of an artifact with a snapshot: memory, disks and state.
pub const SNAPSHOT_TYPE: &str = "application/vnd.jiffy.snapshot.v1";
/// Media type of a pack: a range of a file, unchanged.
pub const PACK_TYPE: &str = "application/vnd.jiffy.pack.v1";
/// Largest pack that is made, bytes. A broken connection in a push costs at most one pack.
pub const MAX_PACK: u64 = 32 << 20;
/// Largest configuration, bytes.
pub const MAX_CONFIG: u64 = 4 << 20;

/// A range of a file, which is one layer of the manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pack {
    /// Digest, size and annotations.
    pub blob: Descriptor,
    /// Offset in the file, bytes.
    pub offset: u64,
    /// Its role in the file.
    pub role: String,
}

impl Pack {
    /// Offset of the end in the file, bytes.
    pub fn end(&self) -> u64 {
        // No overflow: `plan` and `files` check the sum when they make a pack.
        self.offset + self.blob.size
    }
}

/// Whether a file name is valid: 1 to 255 bytes, without `/` and control characters, not `.` or
/// `..`.
fn is_name(name: &str) -> bool {
    (1..=255).contains(&name.len())
        && !name.chars().any(|c| c == '/' || c.is_control())
        && !matches!(name, "." | "..")
}

/// Whether a role is valid: 1 to 32 lower-case letters, digits and `-`.
fn is_role(role: &str) -> bool {
    (1..=32).contains(&role.len())
        && role
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}
