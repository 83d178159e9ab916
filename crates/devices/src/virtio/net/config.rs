//! The configuration space (Virtio 1.3 §5.1.4) and the link's state.

use super::Counters;
use super::guard::Gate;
use super::mac::Mac;
use super::options::NetArgs;
use crate::virtio::device::Interrupt;
use crate::virtio::queue::limit::Limiter;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use virtio_bindings::virtio_net::{VIRTIO_NET_S_ANNOUNCE, VIRTIO_NET_S_LINK_UP};

/// Configuration, state and limits that device and workers share.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) mac: Mac,
    pub(super) mtu: Option<u16>,
    pub(super) gate: Option<Arc<Gate>>,
    /// Pairs of queues of the device.
    pub(super) pairs: u16,
    /// Pairs of queues that the driver uses.
    pub(super) used_pairs: AtomicU16,
    up: AtomicBool,
    /// The guest must announce itself to its neighbours, and has not confirmed it.
    announce: AtomicBool,
    pub(super) counters: Counters,
    /// Limits for all pairs together. They outlive a pause.
    pub(super) receive_limiter: Limiter,
    pub(super) send_limiter: Limiter,
}

impl Link {
    pub(super) fn new(args: &NetArgs, gate: Option<Arc<Gate>>, pairs: u16, up: bool) -> Link {
        Link {
            mac: args.mac,
            mtu: args.mtu,
            gate,
            pairs,
            receive_limiter: Limiter::new(args.receive_limit),
            send_limiter: Limiter::new(args.send_limit),
            used_pairs: AtomicU16::new(1),
            up: AtomicBool::new(up),
            announce: AtomicBool::new(false),
            counters: Counters::default(),
        }
    }

    /// Whether the guest may send a frame that begins like this.
    pub(super) fn lets_pass(&self, head: &[u8]) -> bool {
        self.gate.as_ref().is_none_or(|gate| gate.passes(head))
    }

    /// Whether the link is up.
    pub(super) fn is_up(&self) -> bool {
        self.up.load(Ordering::SeqCst)
    }

    /// The other end is gone for good. The guest is notified once.
    pub(super) fn set_down(&self, interrupt: &dyn Interrupt) {
        if self.up.swap(false, Ordering::SeqCst) {
            interrupt.config_changed();
        }
    }

    pub(super) fn set_announce(&self, wanted: bool) {
        self.announce.store(wanted, Ordering::SeqCst);
    }

    pub(super) fn is_announce_wanted(&self) -> bool {
        self.announce.load(Ordering::SeqCst)
    }

    fn status(&self) -> u16 {
        let bit = |set, bit: u32| if set { bit as u16 } else { 0 };
        bit(self.is_up(), VIRTIO_NET_S_LINK_UP)
            | bit(self.is_announce_wanted(), VIRTIO_NET_S_ANNOUNCE)
    }

    /// Reads the configuration space; bytes past its end are zeros.
    pub(super) fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0; 12];
        config[..6].copy_from_slice(&self.mac.0);
        config[6..8].copy_from_slice(&self.status().to_le_bytes());
        config[8..10].copy_from_slice(&self.pairs.to_le_bytes());
        config[10..].copy_from_slice(&self.mtu.unwrap_or(0).to_le_bytes());
        for (index, byte) in (0..).zip(data) {
            let place = offset.checked_add(index).map(usize::try_from);
            *byte = match place {
                Some(Ok(place)) => config.get(place).copied().unwrap_or(0),
                _ => 0,
            };
        }
    }
}
