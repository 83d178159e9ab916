//! The configuration space (Virtio 1.3 §5.11.4).

use thiserror::Error;

/// Longest tag, bytes.
pub const TAG_MAX: usize = 36;

/// Bytes of `struct virtio_fs_config` without the size of notification buffers, for which there is
/// no queue.
const BYTES: usize = TAG_MAX + size_of::<u32>();
/// The device has one queue of requests.
const REQUEST_QUEUES: u32 = 1;

/// A tag that a driver can't be shown.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("the tag of a shared folder has 1 to {TAG_MAX} bytes and no zero byte, not '{0}'")]
pub struct TagError(pub String);

/// The configuration of a device with this tag.
#[derive(Debug, Clone)]
pub(super) struct Config([u8; BYTES]);

impl Config {
    pub(super) fn new(tag: &str) -> Result<Config, TagError> {
        if !(1..=TAG_MAX).contains(&tag.len()) || tag.contains('\0') {
            return Err(TagError(tag.to_owned()));
        }
        let mut bytes = [0; BYTES];
        bytes[..tag.len()].copy_from_slice(tag.as_bytes());
        bytes[TAG_MAX..].copy_from_slice(&REQUEST_QUEUES.to_le_bytes());
        Ok(Config(bytes))
    }

    /// Reads from byte `offset` on; bytes past the end are zeros.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let rest = usize::try_from(offset)
            .ok()
            .and_then(|offset| self.0.get(offset..));
        for (target, byte) in data.iter_mut().zip(rest.unwrap_or_default()) {
            *target = *byte;
        }
    }
}
