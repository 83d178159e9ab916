//! The annotations of a pack.

/// The file it is part of: a name, never a path.
pub const FILE: &str = "dev.jiffy.file";
/// Its first byte in the file, decimal.
pub const OFFSET: &str = "dev.jiffy.offset";
/// What its bytes are to the file; see `docs/registry-artifacts.md`.
pub const ROLE: &str = "dev.jiffy.role";
