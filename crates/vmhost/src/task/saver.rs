//! Writes a VM's record in the background; of several versions only the newest.

use crate::supervisor::Stored;
use crate::task::actor::Actor;
use crate::task::phase::Phase;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::MainState;
use jiffy_wire::agent::Stream;
use std::io;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tracing::warn;

/// Writes the record in the background, the newest only.
#[derive(Default)]
pub(super) struct Saver {
    writing: Option<JoinHandle<io::Result<()>>>,
    pub(super) dirty: bool,
    pub(super) waiting: Vec<oneshot::Sender<Result<()>>>,
    written_for: Vec<oneshot::Sender<Result<()>>>,
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

    pub(super) fn is_idle(&self) -> bool {
        self.writing.is_none() && !self.dirty
    }
}

impl Actor {
    pub(super) fn write_record(&mut self) {
        if !self.saver.dirty || self.saver.writing.is_some() || self.removed {
            return;
        }
        self.saver.dirty = false;
        self.saver.written_for = std::mem::take(&mut self.saver.waiting);
        let (record, folder) = (self.record.clone(), self.folder());
        self.saver.writing = Some(tokio::task::spawn_blocking(move || record.save(&folder)));
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
        for waiting in self.saver.written_for.drain(..) {
            let _ = waiting.send(result.clone());
        }
        self.record_saved();
        if !self.saver.dirty {
            self.acknowledge_end();
        }
    }

    /// Tells the guest that the end of its command is stored, so that it powers off. It is told
    /// even if the write failed, because it would wait forever otherwise. This is delayed while
    /// the pager's statistics are outstanding, because the pager forgets them with the VM.
    pub(super) fn acknowledge_end(&mut self) {
        let over = matches!(self.record.main, MainState::Ended(_));
        if over
            && let Phase::Active(running) = &mut self.phase
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
