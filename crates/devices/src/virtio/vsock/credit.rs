//! Credit: how many bytes each side may send (Virtio 1.3 §5.10.6.3). Counters wrap at 32 bits, as
//! in packets.

use super::BUFFER;
use std::num::Wrapping;

/// Freed bytes after which a CREDIT_UPDATE is sent unasked. A quarter keeps a bulk sender
/// going without a packet for every packet.
const ANNOUNCE_AT: u32 = BUFFER / 4;

/// Credit for packets from the guest.
#[derive(Debug, Default)]
pub struct ReceiveCredit {
    forwarded: Wrapping<u32>,
    announced: Wrapping<u32>,
}

impl ReceiveCredit {
    /// Counts bytes that the host program has taken from the buffer.
    pub fn forward(&mut self, bytes: usize) {
        self.forwarded += Wrapping(bytes as u32);
    }

    /// Whether a CREDIT_UPDATE is due: [`ANNOUNCE_AT`] bytes were freed since the last `fwd_cnt`.
    pub fn is_update_due(&self) -> bool {
        (self.forwarded - self.announced).0 >= ANNOUNCE_AT
    }

    /// `fwd_cnt` for a packet that is sent now.
    pub fn announce(&mut self) -> u32 {
        self.announced = self.forwarded;
        self.forwarded.0
    }
}

/// Credit for packets to the guest.
#[derive(Debug, Default)]
pub struct SendCredit {
    sent: Wrapping<u32>,
    taken: Wrapping<u32>,
    allocated: u32,
}

impl SendCredit {
    /// Takes over the guest's `buf_alloc` and `fwd_cnt`.
    pub fn update(&mut self, buf_alloc: u32, fwd_cnt: u32) {
        self.allocated = buf_alloc;
        self.taken = Wrapping(fwd_cnt);
    }

    /// Bytes that may be sent now; 0 if a guest claims to have taken more than was sent, or has
    /// shrunk its buffer.
    pub fn available(&self) -> u32 {
        self.allocated.saturating_sub((self.sent - self.taken).0)
    }

    /// Counts bytes that were sent.
    pub fn spend(&mut self, bytes: usize) {
        self.sent += Wrapping(bytes as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sending_stops_at_the_allocation_and_continues_after_an_update() {
        let mut credit = SendCredit::default();
        assert_eq!(credit.available(), 0, "nothing is known yet");
        credit.update(100, 0);
        credit.spend(100);
        assert_eq!(credit.available(), 0);
        credit.update(100, 60);
        assert_eq!(credit.available(), 60);
    }

    #[test]
    fn credit_counters_wrap() {
        let mut credit = SendCredit::default();
        credit.update(1000, 0);
        credit.sent = Wrapping(u32::MAX - 9);
        credit.taken = Wrapping(u32::MAX - 9);
        credit.spend(20);
        assert_eq!(credit.available(), 980);
        credit.update(1000, 10);
        assert_eq!(credit.available(), 1000);
    }

    #[test]
    fn impossible_credit_updates_give_no_credit() {
        let mut credit = SendCredit::default();
        credit.update(1000, 1);
        assert_eq!(credit.available(), 0, "took a byte that was never sent");
        credit.update(u32::MAX, 0);
        credit.spend(500);
        credit.update(499, 0);
        assert_eq!(credit.available(), 0, "shrank its buffer");
    }

    #[test]
    fn credit_is_announced_once_it_is_worth_a_packet() {
        let mut credit = ReceiveCredit::default();
        credit.forward(ANNOUNCE_AT as usize - 1);
        assert!(!credit.is_update_due());
        credit.forward(1);
        assert!(credit.is_update_due());
        assert_eq!(credit.announce(), ANNOUNCE_AT);
        assert!(!credit.is_update_due());
    }
}
