//! Root file systems: OCI images, archives and folders become one read-only
//! EROFS image.
//!
//! * [`source`]: finds out what something is and where its layers are: an OCI
//!   layout, a `docker save` archive, a tar, a folder, layers of a registry.
//! * [`config`]: what an image says about running it.
//! * [`layer`]: unpacks a layer and checks its digests.
//! * [`archive`]: reads tar headers, PAX and GNU extensions, each bounded.
//! * [`tree`]: the names and attributes of all layers, flattened.
//! * [`erofs`]: lays the image out, writes it, reads it back.
//! * [`debian`]: has mmdebstrap make a Debian system, and imports that.
//! * [`import`](import()), [`child`], [`rebuild`]: put these together.
//!
//! All layers' names are read before the image's first byte is written, so
//! files that a higher layer hides take no room, and nothing is ever unpacked
//! onto the host. The same tree gives the same bytes, hence the same digest,
//! whatever it came as.

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
pub mod source;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tree;
mod xattrs;

pub use child::{Child, child, child_over, rebuild};
pub use config::{ConfigError, ExposedPort, ImageConfig, Platform};
pub use debian::{Debian, DebianError};
pub use erofs::ReadAt;
pub use error::ImportError;
pub use import::{Imported, Progress, Watch, import, import_tar};
pub use limits::Limits;
pub use source::folder::FolderError;
pub use source::{Choice, Layer, Source, SourceError, SourceKind};
