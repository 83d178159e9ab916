//! Writes a VM's record in the background; skips all versions but the newest.

use crate::supervisor::Stored;
use crate::task::actor::Actor;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::MainState;
use jiffy_wire::agent::Stream;
use std::io;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::warn;

/// How long a change that nobody waits for may wait for the next one. A VM becomes ready, its
/// command starts and a short command ends within it, and are one write instead of three. The next
/// daemon hears from a VM that runs whether it is ready and its command has started.
const SOON: Duration = Duration::from_millis(10);

/// Writes the record in the background, the newest only.
#[derive(Default)]
pub(super) struct Saver {
    writing: Option<JoinHandle<io::Result<()>>>,
    dirty: bool,
    /// When the record is written, if all changes since the last write may wait.
    due: Option<Instant>,
    pub(super) waiting: Vec<oneshot::Sender<Result<()>>>,
    written_for: Vec<oneshot::Sender<Result<()>>>,
    /// Told when the newest record is on disk, even after failed writes.
    on_disk: Vec<oneshot::Sender<()>>,
}

impl Saver {
    pub(super) async fn done(&mut self) -> io::Result<()> {
        match &mut self.writing {
            Some(writing) => {
                let result = writing.await;
                self.writing = None;
                result.unwrap_or_else(|error| Err(io::Error::other(error)))
            }
            None => std::future::pending().await,
        }
    }

    /// The record has changed, and is written now.
    pub(super) fn write_now(&mut self) {
        self.dirty = true;
        self.due = None;
    }

    /// The record has changed, and is written within [`SOON`].
    fn write_soon(&mut self) {
        if !self.dirty {
            self.dirty = true;
            self.due = Some(Instant::now() + SOON);
        }
    }

    /// When [`Self::write_now`] is to be called.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    pub(super) fn is_idle(&self) -> bool {
        self.writing.is_none() && !self.dirty
    }

    /// Resolves when the record, with the change that follows this call, is on disk; with an error
    /// if the record was removed instead. The caller must mark the record as changed.
    pub(super) fn on_disk(&mut self) -> oneshot::Receiver<()> {
        let (told, known) = oneshot::channel();
        self.on_disk.push(told);
        known
    }

    /// Tells those that wait for the finished write.
    fn tell(&mut self, result: &Result<()>) {
        for waiting in self.written_for.drain(..) {
            let _ = waiting.send(result.clone());
        }
        // A record that changed during the write is written again.
        if result.is_ok() && !self.dirty {
            for waiting in self.on_disk.drain(..) {
                let _ = waiting.send(());
            }
        }
    }
}

impl Actor {
    /// As [`Self::changed`], for a change that need not be on disk before anything follows.
    pub(super) fn changed_in_passing(&mut self) {
        self.publish();
        self.saver.write_soon();
    }

    pub(super) fn write_record(&mut self) {
        let saver = &self.saver;
        if !saver.dirty || saver.due.is_some() || saver.writing.is_some() || self.removal.is_done()
        {
            return;
        }
        self.saver.dirty = false;
        self.saver.written_for = std::mem::take(&mut self.saver.waiting);
        let (kept, folder) = (self.kept(), self.folder());
        self.saver.writing = Some(tokio::task::spawn_blocking(move || kept.save(&folder)));
    }

    pub(super) fn saved(&mut self, result: io::Result<()>) {
        let result =
            result.map_err(|error| Error::io("write the VM's record", &self.folder(), &error));
        if let Err(error) = &result {
            warn!(vm = %self.record.name, %error, "a VM's record could not be written");
        }
        let unsaved = result.as_ref().err().map(Error::to_string);
        if self.unsaved != unsaved {
            self.unsaved = unsaved;
            self.publish();
        }
        self.saver.tell(&result);
        self.record_saved();
        if !self.saver.dirty {
            self.acknowledge_end();
        }
    }

    /// Tells the guest that the end of its command is stored, so that it powers off. It is told
    /// even if the write failed, because it would wait forever otherwise. The message is delayed
    /// until the pager's statistics have arrived, because the pager forgets them with the VM.
    pub(super) fn acknowledge_end(&mut self) {
        let over = matches!(self.record.main, MainState::Ended(_));
        if over
            && let Some(running) = self.phase.running_mut()
            && running.faults_asked == 0
        {
            let stored = Stored {
                stdout: running.log.offset(Stream::Stdout),
                stderr: running.log.offset(Stream::Stderr),
                end: true,
            };
            running.acknowledge(stored);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiters_are_told_after_a_successful_write_only() {
        let mut saver = Saver::default();
        let mut known = saver.on_disk();
        saver.tell(&Err(Error::internal("The disk is full.")));
        assert_eq!(known.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        // The record changed while it was written.
        saver.write_now();
        saver.tell(&Ok(()));
        assert_eq!(known.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        saver.dirty = false;
        saver.tell(&Ok(()));
        assert_eq!(known.try_recv(), Ok(()));
    }

    #[test]
    fn a_change_that_may_wait_does_not_delay_one_that_may_not() {
        let mut saver = Saver::default();
        saver.write_soon();
        assert!(!saver.is_idle() && saver.due().is_some());
        saver.write_now();
        assert_eq!(saver.due(), None);
        saver.write_soon();
        assert_eq!(saver.due(), None);
    }
}
