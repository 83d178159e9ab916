//! Jiffy's own files as an artifact, whole or read in ranges.
//!
//! `docs/registry-artifacts.md` specifies what is in the registry. An artifact is a
//! configuration and named files; each file is cut into *packs*, which are its layers.
//!
//! * [`plan`](Artifact::plan): how files become an artifact.
//! * [`push`](Artifact::push): sends what the registry lacks.
//! * [`remote`]: [`RemoteArtifact`], its files read in ranges or fetched whole.

pub mod annotations;
mod plan;
mod push;
pub mod remote;

pub use plan::{Artifact, Config, FileToPush, Pack};
pub use push::Pushed;
pub use remote::{RemoteArtifact, RemoteFile};

/// An artifact that holds an image: a root file system.
pub const IMAGE_TYPE: &str = "application/vnd.jiffy.image.v1";
/// An artifact that holds a snapshot: memory, disks and state.
pub const SNAPSHOT_TYPE: &str = "application/vnd.jiffy.snapshot.v1";
/// The media type of a pack: some bytes of a file, as they are.
pub const PACK_TYPE: &str = "application/vnd.jiffy.pack.v1";
/// The largest pack, bytes: what is sent again when a connection breaks in a push.
pub const MAX_PACK: u64 = 32 << 20;
