//! Annotations of a pack's descriptor.

/// The name of the file that the pack belongs to; never a path.
pub const FILE: &str = "dev.jiffy.file";
/// Offset of the pack in the file, bytes, decimal.
pub const OFFSET: &str = "dev.jiffy.offset";
/// Role of the pack in the file; see `docs/registry-artifacts.md`.
pub const ROLE: &str = "dev.jiffy.role";
