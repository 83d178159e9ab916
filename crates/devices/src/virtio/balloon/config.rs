//! The configuration space (Virtio 1.3 §5.5.4) and the features.

/// The driver fills the statistics queue.
pub(super) const F_STATISTICS: u64 = 1 << 1;
/// The driver deflates the balloon before the guest runs out of memory.
const F_DEFLATE_ON_OOM: u64 = 1 << 2;
/// The driver reports the value with which it fills free pages.
pub(super) const F_PAGE_POISON: u64 = 1 << 4;
/// The driver reports free pages.
pub(super) const F_REPORTING: u64 = 1 << 5;

/// The features that a balloon offers. Not offered: MUST_TELL_HOST, because a page that the guest
/// takes back needs no action; free page hints, which serve the migration of running VMs; indirect descriptors
/// and EVENT_IDX, so that the driver notifies after every buffer it adds and no buffer is left
/// unanswered when a notification stops after a queue's worth.
pub(super) const FEATURES: u64 = F_STATISTICS | F_DEFLATE_ON_OOM | F_PAGE_POISON | F_REPORTING;

/// The features of a balloon that withholds memory. Without DEFLATE_ON_OOM Linux does not take
/// pages back before the target says so, and shows their memory neither as total nor as used.
pub(super) const WITHHOLDING: u64 = 0;

/// Offsets of the fields, all of four bytes.
const TARGET: usize = 0;
const ACTUAL: usize = 4;
const POISON: usize = 12;
const BYTES: usize = 16;

/// The configuration space. The driver writes all fields but the first, with any values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ConfigSpace {
    /// The target size in pages.
    pub(super) target_pages: u32,
    /// The size in pages, as the driver reports it.
    pub(super) actual_pages: u32,
    /// The value with which the driver fills free pages.
    pub(super) poison: u32,
}

impl ConfigSpace {
    fn bytes(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        for (place, value) in [
            (TARGET, self.target_pages),
            (ACTUAL, self.actual_pages),
            (POISON, self.poison),
        ] {
            bytes[place..place + 4].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    /// Reads from `offset` into `data`; bytes past the end are zeros.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let bytes = self.bytes();
        let from = usize::try_from(offset)
            .ok()
            .and_then(|offset| bytes.get(offset..))
            .unwrap_or(&[]);
        for (to, from) in data.iter_mut().zip(from) {
            *to = *from;
        }
    }

    /// Writes the driver's bytes to the fields that it may write.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) {
        let mut bytes = self.bytes();
        let places = usize::try_from(offset)
            .ok()
            .and_then(|offset| bytes.get_mut(offset..))
            .unwrap_or(&mut []);
        for (to, from) in places.iter_mut().zip(data) {
            *to = *from;
        }
        let field = |place: usize| {
            let [a, b, c, d] = [0, 1, 2, 3].map(|index| bytes[place + index]);
            u32::from_le_bytes([a, b, c, d])
        };
        self.actual_pages = field(ACTUAL);
        self.poison = field(POISON);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_writes_only_its_own_fields() {
        let mut config = ConfigSpace {
            target_pages: 0x0403_0201,
            ..ConfigSpace::default()
        };
        config.write(0, &[0xff; 16]);
        assert_eq!(config.target_pages, 0x0403_0201);
        assert_eq!((config.actual_pages, config.poison), (u32::MAX, u32::MAX));
        config.write(4, &7u32.to_le_bytes());
        config.write(13, &[0]);
        config.write(15, &[1, 2, 3]);
        config.write(16, &[1]);
        config.write(u64::MAX, &[1; 8]);
        let mut bytes = [9; 20];
        config.read(0, &mut bytes);
        assert_eq!(
            bytes,
            [
                1, 2, 3, 4, 7, 0, 0, 0, 0, 0, 0, 0, 0xff, 0, 0xff, 1, 0, 0, 0, 0
            ]
        );
        config.read(u64::MAX, &mut bytes[..4]);
        assert_eq!(bytes[..4], [0; 4]);
        config.read(6, &mut bytes[..1]);
        assert_eq!(bytes[0], 0);
    }
}
