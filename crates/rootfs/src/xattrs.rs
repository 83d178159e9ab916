//! Which extended attributes an image can hold.

use crate::erofs;

/// Most bytes of all attributes of one entry (Linux XATTR_LIST_MAX).
pub(crate) const MAX_XATTRS: usize = 64 * 1024;
/// Longest attribute name without the prefix of its namespace, bytes.
pub(crate) const MAX_XATTR_NAME: usize = 255;

/// Whether an image can and should hold an attribute of that name. Attributes of overlayfs are left
/// out: they describe the layers of another overlay.
pub(crate) fn is_storable(name: &[u8]) -> bool {
    erofs::xattr_index(name).is_some()
        && !name.starts_with(b"trusted.overlay.")
        && !name.starts_with(b"user.overlay.")
}
