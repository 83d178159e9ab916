//! Who attends to the pager while the VM is built.
//!
//! The thread that builds a VM, and has its devices go on, looks into RAM that may be
//! missing, and so can't see that the pager is gone that it waits for.

use super::{PagedMemory, PagerError};
use crate::ending::Ending;
use crate::readable::{readable, timespec};
use crate::workers::STACK;
use jiffy_sys::termination;
use rustix::event::{PollFd, PollFlags, poll};
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// A thread that attends to the pager, until it is told to [`end`](Attendant::end).
#[derive(Debug)]
pub struct Attendant {
    enough: Arc<EventFd>,
    thread: JoinHandle<(PagedMemory, Option<Ending>)>,
}

impl Attendant {
    /// Starts it.
    pub fn start(mut memory: PagedMemory) -> Result<Attendant, PagerError> {
        let event = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(PagerError::Attendant)?;
        let enough = Arc::new(event);
        let told = enough.clone();
        let thread = thread::Builder::new()
            .name("pager".into())
            .stack_size(STACK)
            .spawn(move || {
                termination::leave_to_others();
                let ending = attend(&mut memory, &told);
                (memory, ending)
            })
            .map_err(PagerError::Attendant)?;
        Ok(Attendant { enough, thread })
    }

    /// The memory, for the thread that goes on with it. An error if a part of it
    /// can't be had any more: then that part is zero.
    pub fn end(self) -> Result<PagedMemory, PagerError> {
        self.enough.write(1).map_err(PagerError::Attendant)?;
        let (memory, ending) = self.thread.join().map_err(|_| {
            PagerError::Attendant(io::Error::other("the thread for the pager panicked"))
        })?;
        match ending {
            Some(ending) => Err(PagerError::Lost(ending.message)),
            None => Ok(memory),
        }
    }
}

fn attend(memory: &mut PagedMemory, enough: &EventFd) -> Option<Ending> {
    loop {
        if let Some(ending) = memory.attend() {
            memory.give_up();
            return Some(ending);
        }
        let mut wait = vec![readable(enough)];
        let pager = memory.descriptor();
        wait.extend(pager.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let _ = poll(&mut wait, memory.patience().map(timespec).as_ref());
        if !wait[0].revents().is_empty() {
            return None;
        }
    }
}
