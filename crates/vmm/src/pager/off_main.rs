//! Runs work that may wait for memory on a thread of its own.
//!
//! Devices and their locks may wait for a missing page. Only the main thread notices that
//! the pager has ended, so it must not wait for that page, too.

use crate::mailbox::{Mailbox, Notice};
use crate::workers::STACK;
use jiffy_sys::mutex::lock;
use jiffy_sys::termination;
use std::io;
use std::sync::mpsc::{TryRecvError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;

/// Notifies the main thread when it is dropped, also after a panic.
struct NotifyOnDrop(Arc<Mailbox>);

impl Drop for NotifyOnDrop {
    fn drop(&mut self) {
        self.0.push(Notice::WorkDone);
    }
}

/// Runs `work` on a thread of its own. `meanwhile` is called again and again until it has ended: it
/// waits for events of the main thread, and returns whether to continue. If not, the thread is
/// abandoned, and there is no result.
///
/// # Errors
///
/// If the thread can't be started, or `work` panicked.
pub fn run_off_main<T: Send + 'static>(
    mailbox: &Arc<Mailbox>,
    work: impl FnOnce() -> T + Send + 'static,
    mut meanwhile: impl FnMut() -> bool,
) -> io::Result<Option<T>> {
    let result = Arc::new(Mutex::new(None));
    let place = result.clone();
    let put = move || {
        let done = work();
        *lock(&place) = Some(done);
    };
    on_a_thread(mailbox, Box::new(put), &mut meanwhile)?;
    let result = lock(&result).take();
    Ok(result)
}

/// The part that does not depend on the type of the result.
fn on_a_thread(
    mailbox: &Arc<Mailbox>,
    work: Box<dyn FnOnce() + Send>,
    meanwhile: &mut dyn FnMut() -> bool,
) -> io::Result<()> {
    let (tell, done) = sync_channel(1);
    let mailbox = mailbox.clone();
    thread::Builder::new()
        .name("off-main".into())
        .stack_size(STACK)
        .spawn(move || {
            // Dropped last: the notice comes after the channel is closed.
            let _notify = NotifyOnDrop(mailbox);
            let tell = tell;
            termination::block_in_this_thread();
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
    use crate::poll::readable;
    use rustix::event::poll;
    use std::sync::mpsc::channel;

    fn mailbox() -> Arc<Mailbox> {
        Arc::new(Mailbox::new().unwrap())
    }

    fn wait_for(mailbox: &Mailbox) {
        poll(&mut [readable(mailbox.event())], None).unwrap();
        mailbox.take();
    }

    #[test]
    fn the_main_thread_serves_events_while_a_task_runs() {
        let mailbox = mailbox();
        let (page, comes) = channel();
        let mut page = Some(page);
        let sum = run_off_main(
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
    fn an_abandoned_task_is_not_waited_for() {
        let (_page, comes) = channel::<u32>();
        let never = run_off_main(&mailbox(), move || comes.recv(), || false);
        assert!(never.unwrap().is_none());
    }

    #[test]
    fn a_panic_off_the_main_thread_is_an_error() {
        let mailbox = mailbox();
        let panics = run_off_main(
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
