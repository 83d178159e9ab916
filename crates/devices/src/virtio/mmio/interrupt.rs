//! InterruptStatus, ConfigGeneration and the interrupt line.

use crate::virtio::device::Interrupt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use vmm_sys_util::eventfd::EventFd;

const USED_BUFFERS: u32 = 1;
const CONFIG_CHANGED: u32 = 2;

/// One device's interrupt: an event descriptor (an irqfd, edge-triggered) and the status
/// bits that say why it was raised.
#[derive(Debug)]
pub struct MmioInterrupt {
    status: AtomicU32,
    generation: AtomicU32,
    failed: AtomicBool,
    line: EventFd,
}

impl MmioInterrupt {
    pub(super) fn new(line: EventFd) -> MmioInterrupt {
        MmioInterrupt::with(line, 0, 0, false)
    }

    pub(super) fn with(line: EventFd, status: u32, generation: u32, failed: bool) -> MmioInterrupt {
        MmioInterrupt {
            status: AtomicU32::new(status & (USED_BUFFERS | CONFIG_CHANGED)),
            generation: AtomicU32::new(generation),
            failed: AtomicBool::new(failed),
            line,
        }
    }

    /// The descriptor of the interrupt line.
    pub fn line(&self) -> &EventFd {
        &self.line
    }

    pub(super) fn status(&self) -> u32 {
        self.status.load(Ordering::SeqCst)
    }

    pub(super) fn acknowledge(&self, bits: u32) {
        self.status.fetch_and(!bits, Ordering::SeqCst);
    }

    pub(super) fn generation(&self) -> u32 {
        self.generation.load(Ordering::SeqCst)
    }

    pub(super) fn failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    pub(super) fn reset(&self) {
        self.status.store(0, Ordering::SeqCst);
        self.failed.store(false, Ordering::SeqCst);
    }

    /// Whether the driver has bits to acknowledge.
    pub(super) fn is_pending(&self) -> bool {
        self.status() != 0
    }

    /// Raises the interrupt again if the driver has not acknowledged all bits: an edge may
    /// have been lost with the interrupt controller's old state.
    pub(super) fn repeat(&self) {
        self.ring();
    }

    // Signalled even if the bit is set already: an edge is lost while the interrupt is masked, and
    // the new one must not be.
    fn raise(&self, bit: u32) {
        self.status.fetch_or(bit, Ordering::SeqCst);
        self.ring();
    }

    fn ring(&self) {
        if let Err(error) = self.line.write(1) {
            tracing::error!(%error, "a virtio interrupt could not be delivered");
        }
    }
}

impl Interrupt for MmioInterrupt {
    fn used_buffers(&self) {
        self.raise(USED_BUFFERS);
    }

    fn config_changed(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.raise(CONFIG_CHANGED);
    }

    fn needs_reset(&self) {
        self.failed.store(true, Ordering::SeqCst);
        self.config_changed();
    }
}
