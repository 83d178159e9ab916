//! What the devices tell the VMM.

use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// What the guest wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PowerRequest {
    /// A reset of the processor.
    Reset,
    /// The power off.
    PowerOff,
}

/// Remembers the first request and rings.
#[derive(Debug)]
pub struct PowerSwitch {
    request: AtomicU8,
    event: EventFd,
}

const NONE: u8 = 0;
const RESET: u8 = 1;
const POWER_OFF: u8 = 2;

impl PowerSwitch {
    /// A switch nobody has touched.
    pub fn new() -> io::Result<PowerSwitch> {
        Ok(PowerSwitch {
            request: AtomicU8::new(NONE),
            event: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    /// Records a request; the first one stands.
    pub fn ask(&self, request: PowerRequest) {
        let value = match request {
            PowerRequest::Reset => RESET,
            PowerRequest::PowerOff => POWER_OFF,
        };
        let first = self
            .request
            .compare_exchange(NONE, value, Ordering::SeqCst, Ordering::SeqCst);
        if first.is_ok()
            && let Err(error) = self.event.write(1)
        {
            tracing::error!(%error, "the guest's wish to stop could not be passed on");
        }
    }

    /// What was asked for first, if anything. Cheap: a vCPU may look after
    /// every port write.
    pub fn request(&self) -> Option<PowerRequest> {
        match self.request.load(Ordering::SeqCst) {
            RESET => Some(PowerRequest::Reset),
            POWER_OFF => Some(PowerRequest::PowerOff),
            _ => None,
        }
    }

    /// Readable once something was asked for.
    pub fn event(&self) -> &EventFd {
        &self.event
    }
}
