//! Extended attributes that an image can hold.

use crate::erofs;

/// Bytes of all attributes of one entry that Linux would accept (XATTR_LIST_MAX).
pub(crate) const MAX_XATTRS: usize = 64 * 1024;
/// Longest attribute name without its namespace's prefix.
pub(crate) const MAX_XATTR_NAME: usize = 255;

/// Whether an image can hold an attribute of that name, and should: those of
/// overlayfs are about the layers that it was made from.
pub(crate) fn is_storable(name: &[u8]) -> bool {
    erofs::xattr_index(name).is_some()
        && !name.starts_with(b"trusted.overlay.")
        && !name.starts_with(b"user.overlay.")
}
