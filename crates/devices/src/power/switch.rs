//! Passes the devices' requests on to the VMM.

use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// A request of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PowerRequest {
    /// Reset the processor.
    Reset,
    /// Power off.
    PowerOff,
}

/// Stores the first request and signals an event descriptor.
#[derive(Debug)]
pub struct PowerSwitch {
    request: AtomicU8,
    event: EventFd,
}

const NONE: u8 = 0;
const RESET: u8 = 1;
const POWER_OFF: u8 = 2;

impl PowerSwitch {
    /// A switch without a request.
    ///
    /// # Errors
    ///
    /// If the event descriptor can't be created.
    pub fn new() -> io::Result<PowerSwitch> {
        Ok(PowerSwitch {
            request: AtomicU8::new(NONE),
            event: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    /// Stores a request, unless there is one already.
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
            tracing::error!(%error, "the guest's request to reset or power off could not be signalled");
        }
    }

    /// The first request, if any. Cheap: a vCPU may check it after every port write.
    pub fn request(&self) -> Option<PowerRequest> {
        match self.request.load(Ordering::SeqCst) {
            RESET => Some(PowerRequest::Reset),
            POWER_OFF => Some(PowerRequest::PowerOff),
            _ => None,
        }
    }

    /// Readable once there is a request.
    pub fn event(&self) -> &EventFd {
        &self.event
    }
}
