//! What a pull has made, before it has a name.

use crate::leases::Lease;
use crate::model::image::ImageRecord;
use crate::model::snapshot::Manifest;
use crate::snapshots::draft::Draft;
use tempfile::TempDir;

/// Result of a pull's blocking part.
pub enum Found {
    /// The image of this name is the registry's, and these keys have signed it.
    UpToDate(Vec<String>),
    /// An image was made and has no name yet.
    Made(Box<Made>),
    /// A snapshot was fetched and has no name yet.
    Snapshot(Box<MadeSnapshot>),
}

/// An image without a name.
pub struct Made {
    /// Its folder.
    pub folder: TempDir,
    /// Its record.
    pub record: ImageRecord,
    /// Bytes that came from the registry.
    pub fetched: u64,
    /// On its images of chunks, until it has a name.
    pub leases: Vec<Lease>,
}

/// A snapshot without a name.
pub struct MadeSnapshot {
    /// Its folder.
    pub draft: Draft,
    /// Its manifest.
    pub manifest: Manifest,
    /// Bytes that came from the registry.
    pub fetched: u64,
    /// On its images of chunks, until it has a name.
    pub leases: Vec<Lease>,
}
