//! A thread that serves the pager's connection while the VM is built.
//!
//! The main thread builds the VM and resumes its devices, and may wait for a missing page
//! meanwhile, so it can't notice that the pager has ended.

use super::{PagedMemory, PagerError};
use crate::ending::Ending;
use crate::poll::{readable, timespec};
use crate::workers::STACK;
use jiffy_sys::termination;
use rustix::event::{PollFd, PollFlags, poll};
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// A thread that serves the pager's connection until it is [stopped](PagerThread::stop).
#[derive(Debug)]
pub struct PagerThread {
    stop: Arc<EventFd>,
    thread: JoinHandle<(PagedMemory, Option<Ending>)>,
}

impl PagerThread {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// If the event descriptor or the thread can't be created.
    pub fn start(mut memory: PagedMemory) -> Result<PagerThread, PagerError> {
        let event = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(PagerError::Thread)?;
        let stop = Arc::new(event);
        let ordered = stop.clone();
        let thread = thread::Builder::new()
            .name("pager".into())
            .stack_size(STACK)
            .spawn(move || {
                termination::block_in_this_thread();
                let ending = serve(&mut memory, &ordered);
                (memory, ending)
            })
            .map_err(PagerError::Thread)?;
        Ok(PagerThread { stop, thread })
    }

    /// Ends the thread, and returns the memory.
    ///
    /// # Errors
    ///
    /// If part of the memory is lost: it reads as zero.
    pub fn stop(self) -> Result<PagedMemory, PagerError> {
        self.stop.write(1).map_err(PagerError::Thread)?;
        let (memory, ending) = self.thread.join().map_err(|_| {
            PagerError::Thread(io::Error::other("the thread for the pager panicked"))
        })?;
        match ending {
            Some(ending) => Err(PagerError::Lost(ending.message)),
            None => Ok(memory),
        }
    }
}

fn serve(memory: &mut PagedMemory, stop: &EventFd) -> Option<Ending> {
    loop {
        if let Some(ending) = memory.process_events() {
            memory.wake_waiters();
            return Some(ending);
        }
        let mut wait = vec![readable(stop)];
        let pager = memory.descriptor();
        wait.extend(pager.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let _ = poll(&mut wait, memory.timeout().map(timespec).as_ref());
        if !wait[0].revents().is_empty() {
            return None;
        }
    }
}
