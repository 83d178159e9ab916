//! Work that may have to wait for memory, done aside.
//!
//! Devices and their locks may wait for a page that is missing. Only the main thread sees
//! that the pager is gone, so it must not wait with them.

use crate::mailbox::{Mailbox, Notice};
use crate::workers::STACK;
use jiffy_sys::termination;
use std::io;
use std::sync::mpsc::{TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Rings the main thread's bell at the end, however that comes.
struct Rings(Arc<Mailbox>);

impl Drop for Rings {
    fn drop(&mut self) {
        self.0.push(Notice::DoneAside);
    }
}

/// Does that on a thread of its own. `meanwhile` is called whenever the main thread may
/// have something to do; it waits for that, and says whether it is worth going on: if
/// not, the thread is left where it is, and there is no result.
pub fn aside<T: Send + 'static>(
    mailbox: &Arc<Mailbox>,
    work: impl FnOnce() -> T + Send + 'static,
    mut meanwhile: impl FnMut() -> bool,
) -> io::Result<Option<T>> {
    let result = Arc::new(Mutex::new(None));
    let place = result.clone();
    let put = move || {
        let done = work();
        *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(done);
    };
    on_a_thread(mailbox, Box::new(put), &mut meanwhile)?;
    let result = result.lock().unwrap_or_else(PoisonError::into_inner).take();
    Ok(result)
}

/// The same whatever the work is: there is one of it in the program.
fn on_a_thread(
    mailbox: &Arc<Mailbox>,
    work: Box<dyn FnOnce() + Send>,
    meanwhile: &mut dyn FnMut() -> bool,
) -> io::Result<()> {
    let (tell, done) = sync_channel(1);
    let mailbox = mailbox.clone();
    thread::Builder::new()
        .name("aside".into())
        .stack_size(STACK)
        .spawn(move || {
            // The bell rings after the channel is closed.
            let _rings = Rings(mailbox);
            let tell = tell;
            termination::leave_to_others();
            work();
            let _ = tell.send(());
        })?;
    loop {
        match done.try_recv() {
            Ok(()) => return Ok(()),
            Err(TryRecvError::Disconnected) => return Err(io::Error::other("it panicked")),
            Err(TryRecvError::Empty) => {}
        }
        if !meanwhile() {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::readable::readable;
    use rustix::event::poll;
    use std::sync::mpsc::channel;

    fn mailbox() -> Arc<Mailbox> {
        Arc::new(Mailbox::new().unwrap())
    }

    fn wait_for(mailbox: &Mailbox) {
        poll(&mut [readable(mailbox.bell())], None).unwrap();
        mailbox.take();
    }

    #[test]
    fn it_may_need_what_the_main_thread_does_meanwhile() {
        let mailbox = mailbox();
        let (page, comes) = channel();
        let mut page = Some(page);
        let sum = aside(
            &mailbox,
            move || comes.recv().map_or(0, |page: u32| page + 1),
            || {
                match page.take() {
                    Some(page) => page.send(41).unwrap(),
                    None => wait_for(&mailbox),
                }
                true
            },
        );
        assert_eq!(sum.unwrap(), Some(42));
    }

    #[test]
    fn what_will_never_come_is_not_waited_for() {
        let (_page, comes) = channel::<u32>();
        let never = aside(&mailbox(), move || comes.recv(), || false);
        assert!(never.unwrap().is_none());
    }

    #[test]
    fn a_panic_there_is_an_error_here() {
        let mailbox = mailbox();
        let panics = aside(
            &mailbox,
            || assert_eq!(1, 2, "on purpose"),
            || {
                wait_for(&mailbox);
                true
            },
        );
        assert!(panics.is_err());
    }
}
