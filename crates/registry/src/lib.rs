//! Images and artifacts from and to OCI registries.
//!
//! * [`mod@reference`]: names of images, `HOST[:PORT]/REPO[:TAG][@DIGEST]`.
//! * [`credentials`]: a given user, Docker's file, credential helpers.
//! * [`client`]: [`Client`], which implements the distribution protocol.
//! * [`folder`]: [`BlobFolder`], blobs on disk, each fetched once.
//! * [`artifact`]: Jiffy's own files as an artifact, whole or read in ranges
//!   (`docs/registry-artifacts.md`).
//! * [`signature`]: manifests signed with a key, compatible with cosign.
//! * `testing` (feature): a real registry for tests.
//! * [`progress`]: progress and cancellation.
//!
//! Digests, platforms, descriptors and manifests are those of [`jiffy_oci`].
//!
//! # Why not `oci-client`
//!
//! It is built on reqwest and tokio. A page fault of a lazily started VM ends in a ranged read
//! here, on a thread of the pager, which has no async runtime. `ureq` is blocking, speaks HTTP/1.1
//! and TLS by `rustls` with `ring`, has a time limit for each single read, and links statically.
//! Only the protocol remains to be implemented, and there `oci-client` lacks what a lazy start
//! needs: ranged reads, resuming, renewal of tokens, several processes that share one folder.
//!
//! Names are resolved by glibc. Linked statically it still reads `/etc/hosts` and asks the servers
//! of `/etc/resolv.conf` (since glibc 2.34 both are built in); other sources in
//! `/etc/nsswitch.conf` are ignored. Addresses and `localhost` are resolved without it, so that
//! loopback works without `/etc`.

pub mod artifact;
pub mod client;
pub mod credentials;
pub mod error;
pub mod folder;
mod lock;
mod parallel;
pub mod progress;
pub mod reference;
pub mod signature;
#[cfg(feature = "testing")]
pub mod testing;

pub use artifact::{Artifact, RemoteArtifact, RemoteFile};
pub use client::{Client, ClientOptions, Fetched, Image, PlainHttp, Retries, Uploaded};
pub use credentials::{Credentials, HelperOutput, RunHelper, run_helper};
pub use error::RegistryError;
pub use folder::BlobFolder;
pub use jiffy_oci::{Content, Descriptor, Digest, ImageManifest, Index, Platform, media_type};
pub use progress::Progress;
pub use reference::Reference;
