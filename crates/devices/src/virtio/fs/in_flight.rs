//! Requests that the server has not answered, by the ids that the device gave them.

use super::QUEUE_SIZE;
use crate::virtio::queue::segment::Segment;

/// A request that the server has not answered.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct InFlight {
    /// The queue from which it came.
    pub(super) queue: u16,
    /// By which its chain is returned.
    pub(super) head: u16,
    /// The guest's id.
    pub(super) id: u64,
    /// Where its answer goes.
    pub(super) answer: Vec<Segment>,
}

/// A table of bounded size. No id is used twice, so a late answer can't match another request.
#[derive(Debug)]
pub(super) struct Table {
    slots: Vec<Option<(u64, InFlight)>>,
    free: Vec<usize>,
    /// The last id, divided by the number of slots.
    round: u64,
}

impl Default for Table {
    fn default() -> Table {
        let slots = usize::from(QUEUE_SIZE);
        Table {
            slots: (0..slots).map(|_| None).collect(),
            free: (0..slots).collect(),
            round: 0,
        }
    }
}

impl Table {
    /// Whether there is room for another request.
    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// The id for the next request, which [`Table::insert`] is given.
    pub(super) fn next_id(&mut self) -> Option<u64> {
        let slot = *self.free.last()?;
        self.round += 1;
        Some(self.round * self.slots.len() as u64 + slot as u64)
    }

    /// Adds a request under the id of the last [`Table::next_id`].
    pub(super) fn insert(&mut self, id: u64, request: InFlight) {
        if let Some(slot) = self.free.pop() {
            self.slots[slot] = Some((id, request));
        }
    }

    /// Takes the request with this id.
    pub(super) fn take(&mut self, id: u64) -> Option<InFlight> {
        let slot = (id % self.slots.len() as u64) as usize;
        let (_, request) = self.slots[slot].take_if(|(own, _)| *own == id)?;
        self.free.push(slot);
        Some(request)
    }

    /// Takes any request.
    pub(super) fn take_any(&mut self) -> Option<InFlight> {
        let id = self.slots.iter().flatten().map(|(id, _)| *id).next()?;
        self.take(id)
    }
}
