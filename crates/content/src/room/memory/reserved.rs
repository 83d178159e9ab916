//! What a VM has reserved, while it starts and while it runs.

use super::Room;
use super::amount::Amount;
use crate::error::Result;
use std::sync::Arc;

/// Memory and vCPUs that were reserved; they are given back when this is dropped.
#[derive(Debug)]
pub struct Reserved {
    room: Arc<Room>,
    amount: Amount,
    count: u32,
    is_background: bool,
    /// When the wait for it began and ended, if there was one: monotonic nanoseconds.
    pub waited_ns: Option<(u64, u64)>,
}

impl Room {
    pub(super) fn reserved(
        self: &Arc<Self>,
        amount: Amount,
        count: u32,
        is_background: bool,
    ) -> Reserved {
        Reserved {
            room: Arc::clone(self),
            amount,
            count,
            is_background,
            waited_ns: None,
        }
    }
}

impl Reserved {
    /// The VM is ready: what it took is no longer available to others.
    pub fn note_ready(&mut self) {
        let soon = self.amount.until_ready();
        self.amount = self.amount.less(soon);
        if soon.soon > 0 {
            self.room.give_back(soon, self.is_background);
        }
    }

    /// Changes the number of vCPUs.
    ///
    /// # Errors
    ///
    /// If more would be reserved than there are. The number is then unchanged.
    pub fn set_cpus(&mut self, cpus: u64) -> Result<()> {
        let of = |cpus| Amount {
            cpus,
            ..Amount::default()
        };
        let before = std::mem::replace(&mut self.amount.cpus, cpus);
        if cpus < before {
            self.room.give_back(of(before - cpus), self.is_background);
        } else if let Err(error) = self.room.add(of(cpus - before)) {
            self.amount.cpus = before;
            return Err(error);
        }
        Ok(())
    }

    /// Adds memory that was reserved for the same VM; the VM can use it from now on.
    pub fn add(&mut self, mut more: Reserved) {
        more.note_ready();
        self.amount = self.amount.plus(std::mem::take(&mut more.amount));
    }

    /// Gives back the memory above this many MiB, which the VM has given up.
    pub fn shrink_memory(&mut self, mib: u64) {
        let less = self.amount.whole.saturating_sub(mib);
        if less > 0 {
            self.amount.whole = mib;
            let less = Amount {
                whole: less,
                ..Amount::default()
            };
            self.room.give_back(less, self.is_background);
        }
    }

    /// Splits it into one reservation for each VM.
    pub fn split(mut self) -> Vec<Reserved> {
        let count = self.count.max(1);
        let each = self.amount.divided(count);
        self.amount = self.amount.less(each.times(count));
        let part = |_| {
            let mut part = self.room.reserved(each, 1, self.is_background);
            part.waited_ns = self.waited_ns;
            part
        };
        (0..count).map(part).collect()
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if self.amount != Amount::default() {
            self.room.give_back(self.amount, self.is_background);
        }
    }
}
