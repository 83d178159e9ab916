//! Root file systems: OCI images, archives and folders become one read-only
//! EROFS image.
//!
//! * [`source`]: finds out the format of a source and its layers: an OCI layout, a `docker save`
//!   archive, a tar, a folder, or layers of a registry.
//! * [`config`]: an image's run configuration.
//! * [`layer`]: unpacks a layer and checks its digests.
//! * [`archive`]: reads tar headers with PAX and GNU extensions, each of limited size.
//! * [`tree`]: the merged names and attributes of all layers.
//! * [`erofs`]: plans an image, writes it, reads it back.
//! * [`scratch`]: temporary files.
//! * [`debian`]: builds a Debian system with mmdebstrap and imports it.
//! * [`import`](import()), [`child`](mod@child), [`rebuild`]: the operations that use these. [`import_into`] and
//!   [`child_into`] are for a process that can't open files.
//!
//! All layers' names are read before the image's first byte is written, so files that a higher
//! layer hides take no space, and nothing is ever unpacked onto the host. The same tree gives the
//! same bytes and digest, whatever the format of its source.

mod apply;
pub mod archive;
mod child;
mod chunk_table;
pub mod config;
pub mod debian;
pub mod erofs;
mod error;
mod import;
pub mod layer;
mod limits;
pub mod scratch;
pub mod source;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tree;
mod xattrs;

pub use child::{Child, child, child_into, child_over, rebuild};
pub use config::{ConfigError, ExposedPort, ImageConfig};
pub use debian::{Debian, DebianError};
pub use erofs::ReadAt;
pub use error::ImportError;
pub use import::{Imported, Progress, Watch, import, import_into, import_tar};
pub use jiffy_oci::{Digest, Platform};
pub use limits::Limits;
pub use scratch::Scratch;
pub use source::folder::FolderError;
pub use source::{Choice, Layer, Source, SourceError, SourceKind};
