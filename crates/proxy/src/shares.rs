//! Places shared by VMs. No VM can take all, so one that never answers leaves some to others.

use jiffy_sys::mutex::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A number of places, of which one VM may take three quarters.
#[derive(Debug)]
pub(crate) struct Shares {
    all: Arc<Semaphore>,
    of_one: usize,
    /// By VM id. An entry may remain after a VM's last place was freed.
    vms: Mutex<HashMap<String, Weak<Semaphore>>>,
}

/// A VM's place; dropping it frees it.
#[derive(Debug)]
pub(crate) struct Share {
    _of_vm: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

impl Shares {
    pub(crate) fn new(most: usize) -> Shares {
        Shares {
            all: Arc::new(Semaphore::new(most)),
            of_one: most - most / 4,
            vms: Mutex::default(),
        }
    }

    /// A place for the VM with this id, if one is free.
    pub(crate) fn try_take(&self, vm: &str) -> Option<Share> {
        Some(Share {
            _of_vm: self.of(vm).try_acquire_owned().ok()?,
            _of_all: Arc::clone(&self.all).try_acquire_owned().ok()?,
        })
    }

    /// As [`Shares::try_take`]; waits until one is free.
    pub(crate) async fn take(&self, vm: &str) -> Share {
        const OPEN: &str = "the semaphores are never closed";
        Share {
            _of_vm: self.of(vm).acquire_owned().await.expect(OPEN),
            _of_all: Arc::clone(&self.all).acquire_owned().await.expect(OPEN),
        }
    }

    fn of(&self, vm: &str) -> Arc<Semaphore> {
        let mut vms = lock(&self.vms);
        if let Some(places) = vms.get(vm).and_then(Weak::upgrade) {
            return places;
        }
        vms.retain(|_, places| places.strong_count() > 0);
        let places = Arc::new(Semaphore::new(self.of_one));
        vms.insert(vm.to_owned(), Arc::downgrade(&places));
        places
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    #[test]
    fn one_vm_gets_at_most_three_quarters_of_the_shares() {
        let shares = Shares::new(8);
        let mut first: Vec<_> = (0..6).map(|_| shares.try_take("first").unwrap()).collect();
        assert!(shares.try_take("first").is_none());
        let second: Vec<_> = (0..2).map(|_| shares.try_take("second").unwrap()).collect();
        assert!(shares.try_take("second").is_none(), "all are taken");
        let mut waits = pin!(shares.take("first"));
        let mut context = Context::from_waker(Waker::noop());
        assert!(waits.as_mut().poll(&mut context).is_pending());
        first.pop();
        let Poll::Ready(more) = waits.as_mut().poll(&mut context) else {
            panic!("one is free");
        };
        drop((first, second, more));
        assert!(shares.try_take("third").is_some());
        assert_eq!(shares.vms.lock().unwrap().len(), 1, "others are forgotten");
    }
}
