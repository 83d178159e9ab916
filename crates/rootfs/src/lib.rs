//! Root file systems: a tar becomes one read-only EROFS image.
//!
//! * [`import_tar`]: a tar stream into an image file, in bounded memory, with
//!   nothing ever unpacked onto the host.
//! * [`archive`]: reads tar headers, PAX and GNU extensions, each bounded.
//! * [`tree`]: the names and attributes of what is imported.
//! * [`erofs`]: writes the image.
//!
//! The same input gives the same bytes, hence the same digest.

pub mod archive;
pub mod config;
pub mod erofs;
mod import;
pub mod source;
pub mod tree;

pub use config::{ConfigError, ExposedPort, ImageConfig, Platform};
pub use import::{
    Child, ImportError, Imported, Limits, Progress, Watch, child, import, import_tar, rebuild,
};
pub use source::{Choice, Layer, Source, SourceError, SourceKind};
