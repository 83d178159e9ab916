//! A device's work on a thread: how it is stopped, and what it returns.

use super::device::{Job, WorkerRole, Workers};
use jiffy_sys::mutex::lock;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use vmm_sys_util::eventfd::EventFd;

/// Work that runs until it is stopped, and then returns a value.
#[derive(Debug)]
pub(crate) struct Work<T> {
    /// What the device is, for messages.
    device: &'static str,
    stop: Arc<AtomicBool>,
    wakeup: EventFd,
    job: Job,
    returned: Arc<Mutex<Option<T>>>,
}

impl<T: Send + 'static> Work<T> {
    /// Starts `body`, which must wait for `wakeup`, and return soon after `stop` is set.
    ///
    /// # Errors
    ///
    /// If a thread can't be started.
    pub(crate) fn start(
        device: &'static str,
        workers: &dyn Workers,
        (role, name): (WorkerRole, &str),
        (stop, wakeup): (Arc<AtomicBool>, EventFd),
        body: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<Work<T>> {
        let returned = Arc::new(Mutex::new(None));
        let slot = returned.clone();
        let body = Box::new(move || {
            let value = body();
            *lock(&slot) = Some(value);
        });
        Ok(Work {
            job: workers.spawn(role, name, body)?,
            device,
            stop,
            wakeup,
            returned,
        })
    }

    /// Makes it look at what it shares with the device, such as a rate limit.
    pub(crate) fn notify(&self) -> io::Result<()> {
        self.wakeup.write(1)
    }

    /// Tells it to stop.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Err(error) = self.notify() {
            let device = self.device;
            tracing::error!(%error, "the worker of a {device} could not be notified to stop");
        }
    }

    /// Whether it was told to stop.
    #[cfg(test)]
    pub(crate) fn stop_flag(&self) -> Arc<AtomicBool> {
        self.stop.clone()
    }

    /// Waits until it has stopped. `None` if it panicked.
    pub(crate) fn join(self) -> Option<T> {
        if self.job.join().is_err() {
            tracing::error!("the worker of a {} panicked", self.device);
        }
        lock(&self.returned).take()
    }
}
