//! Handles the end of a VMM, and the removal of a VM.

use crate::folders;
use crate::handle::{Command, is_active};
use crate::process::Ended;
use crate::task::actor::Actor;
use crate::task::phase::Course;
use crate::text::short;
use jiffy_content::clock::unix_seconds;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::{Failure, MainEnd, MainState};
use jiffy_content::records;
use jiffy_sys::durable::remove_any;
use jiffy_sys::regular;
use jiffy_wire::agent::ExitStatus;
use jiffy_wire::api::{Action, VmState};
use jiffy_wire::timeline::Timeline;
use jiffy_wire::vmm::{ExitReason, ExitRecord};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;
use tokio::sync::oneshot;
use tracing::{info, warn};

/// How much of the end of a log is searched for its last line.
const TAIL: u64 = 4096;
/// Largest exit record that is read.
const MAX_EXIT_RECORD: u64 = 64 * 1024;

/// Why a VM is ended by the node or its user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EndReason {
    /// `stop`.
    Stopped,
    /// `kill`, or removal by force.
    Killed,
    /// The guest wasn't ready in time.
    StartTimeout,
    /// A signal to `run` before its command started.
    Interrupted(i32),
}

impl Actor {
    /// The VMM has ended and all messages of its guest are processed.
    pub(super) fn finish(&mut self) {
        let Some((running, how)) = self.phase.take_drained() else {
            return;
        };
        let wanted = match &running.course {
            Course::Stops(stopping) => Some(stopping.reason),
            // The guest passed its gate meanwhile.
            Course::GivesUp => Some(EndReason::StartTimeout),
            Course::Runs | Course::Hibernates(_) => None,
        };
        let how = match how {
            Ended::Signal(_) | Ended::Unknown if running.process.was_oom_killed() => {
                Ended::OutOfMemory
            }
            how => how,
        };
        // Releases the volumes before the end is published.
        drop(running);
        self.conclude(wanted, how);
    }

    /// A VM whose VMM had ended before this daemon started.
    pub(super) fn ended_without_process(&mut self) {
        self.conclude(None, Ended::Unknown);
    }

    /// A VM that could not boot in place of a golden snapshot.
    pub(super) fn fail_start(&mut self, error: Error) {
        let failure = Failure {
            message: error.0.message,
            hint: error.0.hint,
        };
        self.concluded(None, Some(failure));
    }

    pub(super) fn conclude(&mut self, wanted: Option<EndReason>, how: Ended) {
        let failure = self.why_ended(wanted, how, &self.folder());
        self.concluded(wanted, failure);
    }

    fn concluded(&mut self, wanted: Option<EndReason>, failure: Option<Failure>) {
        if let Some(failure) = &failure {
            warn!(vm = %self.record.name, error = %failure.message, "VM ended unexpectedly");
        }
        self.end_main(wanted, failure.as_ref());
        self.record.failure = failure;
        self.record.state = VmState::Exited;
        self.record.ended = Some(unix_seconds());
        self.record.pid = None;
        self.input.send_replace(None);
        let _ = remove_any(&self.host.paths.vm_run(&self.record.id));
        self.host.network.release(&self.record);
        self.record.addresses.clear();
        self.forget_memory();
        self.save_timeline();
        info!(vm = %self.record.name, id = %self.record.id, "VM ended");
        self.changed();
    }

    /// The failure; `None` if the end was clean or requested.
    fn why_ended(&self, wanted: Option<EndReason>, how: Ended, folder: &Path) -> Option<Failure> {
        let name = &self.record.name;
        match wanted {
            Some(EndReason::Stopped | EndReason::Killed) => return None,
            Some(EndReason::StartTimeout) => {
                let seconds = self.host.start_timeout.as_secs();
                return Some(Failure {
                    message: with_last_line(
                        format!("The guest of the VM {name} was not ready after {seconds} s"),
                        folder,
                    ),
                    hint: Some(
                        "See `jiffy logs --console`; start the VM with --console if it has no console log. A slow host may need a longer JIFFY_START_TIMEOUT."
                            .into(),
                    ),
                });
            }
            Some(EndReason::Interrupted(signal)) => {
                return Some(Failure {
                    message: format!(
                        "Signal {signal} ended the VM {name} before its command started."
                    ),
                    hint: None,
                });
            }
            None => {}
        }
        let record = exit_record(folder);
        if let Some(record) = record {
            let main_over = self.record.spec.command.is_none()
                || matches!(self.record.main, MainState::Ended(_));
            return match record.reason {
                ExitReason::Shutdown if main_over => None,
                ExitReason::Shutdown => Some(Failure {
                    message: format!(
                        "The guest of the VM {name} powered off before its command ended."
                    ),
                    hint: None,
                }),
                _ => Some(Failure {
                    message: short(&record.message),
                    hint: record.hint.as_deref().map(short),
                }),
            };
        }
        let message = match how {
            Ended::Signal(signal) => {
                format!("The VM {name} ended because its VMM was killed by signal {signal}")
            }
            Ended::OutOfMemory => format!(
                "The VM {name} ended because its VMM reached its memory limit, twice the VM's memory"
            ),
            Ended::Code(code) => {
                format!("The VM {name} ended because its VMM ended with status {code}")
            }
            Ended::Unknown => {
                format!("The VM {name} ended because its VMM ended for an unknown reason")
            }
        };
        Some(Failure {
            message: with_last_line(message, folder),
            hint: None,
        })
    }

    /// Ends the first command, if it has not ended: it can't outlive the VM.
    fn end_main(&mut self, wanted: Option<EndReason>, failure: Option<&Failure>) {
        if self.record.spec.command.is_none() || matches!(self.record.main, MainState::Ended(_)) {
            return;
        }
        let end = match (wanted, failure) {
            // The command's status if only the command had been killed.
            (Some(EndReason::Stopped | EndReason::Killed), _) => {
                MainEnd::Exited(ExitStatus::Signal(9))
            }
            (_, Some(failure)) => MainEnd::Lost(failure.clone()),
            (_, None) => MainEnd::Lost(Failure {
                message: format!("The VM {} ended before its command did.", self.record.name),
                hint: None,
            }),
        };
        self.record.main = MainState::Ended(end);
    }

    pub(super) fn remove(&mut self, force: bool, reply: oneshot::Sender<Result<()>>) {
        let name = self.record.name.clone();
        if self.record.state == VmState::Hibernated {
            if !force {
                let refusal = Error::wrong_state(format!(
                    "The VM {name} is hibernated: its memory would be lost."
                ))
                .hint(format!(
                    "Wake it with `jiffy wake {name}`, or use `jiffy rm --force {name}`."
                ));
                let _ = reply.send(Err(refusal));
                return;
            }
            let _ = self.kill(EndReason::Killed);
        }
        if is_active(self.record.state) {
            if !force && matches!(self.record.main, MainState::Ended(_)) {
                // It powers off by itself.
                self.removal.request(reply);
                return;
            }
            if !force {
                let refusal = Error::wrong_state(format!("The VM {name} runs.")).hint(format!(
                    "Stop it first with `jiffy stop {name}`, or use `jiffy rm --force {name}`."
                ));
                let _ = reply.send(Err(refusal));
                return;
            }
            let _ = self.kill(EndReason::Killed);
        }
        self.removal.request(reply);
        self.publish();
    }

    /// Removes a VM that has ended, if its removal was requested.
    pub(super) async fn remove_if_over(&mut self) {
        if self.removal.is_done() || is_active(self.record.state) || !self.saver.is_idle() {
            return;
        }
        // A VM of `run --rm` is kept until all clients have read its output. A hibernated VM has
        // not ended.
        let by_itself = self.record.spec.remove
            && self.record.state == VmState::Exited
            && self.clients.is_empty();
        if !by_itself && !self.removal.is_requested() {
            return;
        }
        let timeline = match self.kept_timeline() {
            Some(kept) => kept,
            None => self.recorder.build(),
        };
        // Blocking: a VM may have many and large files.
        let (paths, id) = (self.host.paths.clone(), self.record.id.clone());
        let network = Arc::clone(&self.host.network);
        let removal = tokio::task::spawn_blocking(move || {
            network.forget(&id);
            folders::remove(&paths, &id)
        });
        let gone = removal.await;
        let gone = gone.unwrap_or_else(|error| Err(io::Error::other(error)));
        if let Err(error) = &gone {
            let path = self.folder();
            let error = Error::io("remove the VM's folder", &path, error);
            warn!(vm = %self.record.name, %error, "a VM's files could not be removed");
            if self.removal.is_requested() {
                self.removal.conclude(&Err(error));
                self.publish();
                return;
            }
        }
        let vm = self.record.view();
        self.registry.remove(vm, timeline);
        // Who sees in the view that it is removed finds that event among those that were published.
        self.host.events.publish_vm(Action::Removed, &self.record);
        self.view.send_modify(|view| view.removed = true);
        self.removal.conclude(&Ok(()));
        info!(vm = %self.record.name, id = %self.record.id, "VM removed");
        // Answers the commands that are still queued; then the task ends.
        self.mailbox.close();
        while let Ok(command) = self.mailbox.try_recv() {
            if let Command::Remove(_, reply) = command {
                let _ = reply.send(Ok(()));
            }
        }
    }

    pub(super) fn save_timeline(&mut self) {
        if self.record.spec.remove {
            return;
        }
        let path = self.folder().join("timeline.json");
        let timeline = self.recorder.build();
        if timeline.spans.is_empty() {
            return;
        }
        // Not synced: a timeline may be lost when the host crashes.
        let saved = records::timeline::save(&path, timeline);
        if let Err(error) = saved {
            warn!(vm = %self.record.name, %error, "a VM's timeline could not be written");
        }
    }

    pub(super) fn kept_timeline(&self) -> Option<Timeline> {
        let path = self.folder().join("timeline.json");
        records::timeline::load(&path).ok()
    }
}

/// The last message of a VMM that has ended.
pub(super) fn why_a_vmm_ended(folder: &Path) -> String {
    match exit_record(folder) {
        Some(record) => short(&record.message),
        None => with_last_line("its VMM left no message".to_owned(), folder),
    }
}

pub(crate) fn exit_record(folder: &Path) -> Option<ExitRecord> {
    let mut text = Vec::new();
    let file = regular::open(&folder.join("exit.json")).ok()?;
    file.take(MAX_EXIT_RECORD).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

/// Appends the last line of the VMM's log, or of the console.
fn with_last_line(sentence: String, folder: &Path) -> String {
    let last = ["vmm.log", "console.log"]
        .iter()
        .filter_map(|name| Some((*name, last_line(&folder.join(name))?)))
        .next_back();
    match last {
        Some((name, line)) => format!("{sentence}; the last line of its {name}: {line}"),
        None => format!("{sentence}."),
    }
}

fn last_line(path: &Path) -> Option<String> {
    let mut file = regular::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))
        .ok()?;
    let mut tail = Vec::new();
    file.take(TAIL).read_to_end(&mut tail).ok()?;
    let text = String::from_utf8_lossy(&tail);
    text.lines()
        .map(short)
        .rfind(|line| !line.trim().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_last_non_empty_log_line_is_quoted() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(
            with_last_line("It ended".into(), folder.path()),
            "It ended."
        );
        fs::write(folder.path().join("vmm.log"), "first\nthe\x1b reason\r\n\n").unwrap();
        assert_eq!(
            with_last_line("It ended".into(), folder.path()),
            "It ended; the last line of its vmm.log: the reason"
        );
        fs::write(folder.path().join("console.log"), "x\nKernel panic").unwrap();
        assert!(with_last_line("It ended".into(), folder.path()).ends_with("Kernel panic"));
    }
}
