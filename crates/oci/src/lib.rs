//! The types of the OCI image specification 1.1, and of Docker's schema 2, which differs only in
//! its media types.
//!
//! * [`digest`]: SHA-256, the name of every blob.
//! * [`platform`]: operating system and processor of an image.
//! * [`descriptor`]: type, digest and size of a blob or manifest.
//! * [`index`]: manifests by platform; chooses one.
//! * [`manifest`]: images, and [`parse`], which tells images and indexes apart.
//! * [`media_type`]: what a blob or manifest is.
//! * [`text`], [`null`]: untrusted text made printable; lists and maps that are `null`.
//!
//! The bytes come from registries and archives, and are untrusted. Unknown fields are ignored, as the
//! specification requires; manifests that different clients would read differently are refused.

pub mod descriptor;
pub mod digest;
pub mod index;
pub mod manifest;
pub mod media_type;
pub mod null;
pub mod platform;
pub mod text;

pub use descriptor::Descriptor;
pub use digest::{Digest, DigestError, Hasher};
pub use index::Index;
pub use manifest::{Content, ImageManifest, MAX_MANIFEST, ManifestError, guess_media_type, parse};
pub use null::null_as_default;
pub use platform::{Platform, PlatformError};
pub use text::one_line;
