//! What connections ask of the agent.

use super::connection::{Connection, Need};
use super::run::{Agent, SIGPIPE};
use super::shutdown::Reason;
use super::{changes, copy_in, copy_out};
use crate::boot;
use crate::freezer::Frozen;
use crate::program::prepare::reason;
use crate::program::process;
use crate::supervisor::first_command::FirstCommand;
use crate::syscalls::{self, SignalSet};
use alloc::{format, string::String};
use jiffy_wire::agent::{Command, Request};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::process::Pid;

/// Most programs of connections, detached ones included. The remaining connections let the node
/// stop or capture the VM.
const MOST_PROGRAMS: usize = 240;
/// Most processes that copy files.
const MOST_COPIES: usize = 64;

impl Agent {
    /// Does what a connection needs.
    pub(super) fn handle_need(&mut self, index: usize, need: Need, now: u64) {
        match need {
            Need::Nothing => {}
            Need::Close => self.drop_connection(index, now),
            Need::Copy(request) if self.copies.len() >= MOST_COPIES => {
                let message =
                    format!("{MOST_COPIES} copies are running in this guest; one has to end first");
                self.connections[index].refuse(&request, message, now);
            }
            Need::Copy(request @ Request::Changes { .. }) => self.changes(index, &request, now),
            Need::Copy(request) => {
                let _ = self.copy(index, &request, None);
            }
            Need::Exec(command) => self.exec(index, &command, now),
            Need::Shutdown { grace_ms } => {
                self.begin_shutdown(Reason::PowerOff, u64::from(grace_ms) * 1_000_000, now);
            }
            Need::Quiesce { drop_caches } => self.quiesce(index, drop_caches, now),
            Need::SignalMain(signal) => {
                let result = match self.first.as_ref().and_then(FirstCommand::program) {
                    None => Err(String::from("the first command does not run")),
                    Some(program) => program
                        .signal(signal)
                        .map_err(|error| format!("signal {signal}: {}", reason(error))),
                };
                self.connections[index].answer(result, now);
            }
        }
    }

    fn exec(&mut self, index: usize, command: &Command, now: u64) {
        let has_program = |connection: &&Connection| connection.program().is_some();
        let programs = self.connections.iter().filter(has_program).count();
        if programs + self.detached.len() >= MOST_PROGRAMS {
            let message = format!(
                "{MOST_PROGRAMS} programs that were started from the host run in this guest; one has to end first"
            );
            return self.connections[index].refuse_exec(message, now);
        }
        let need = self.connections[index].exec(command, now);
        self.handle_need(index, need, now);
    }

    /// Freezes programs and sends the changes of the root.
    fn changes(&mut self, index: usize, request: &Request, now: u64) {
        let begun = match (&self.hold, &self.changes_reader, &self.shutdown) {
            (None, None, None) => self.begin_changes(now),
            _ => Err("programs are already frozen, or the VM is about to end".into()),
        };
        match begun {
            Ok((frozen, upper)) => match self.copy(index, request, Some(upper)) {
                Some(pid) => self.changes_reader = Some((pid, frozen)),
                None => frozen.thaw(),
            },
            Err(message) => self.connections[index].refuse(request, message, now),
        }
    }

    fn begin_changes(&mut self, now: u64) -> Result<(Frozen, OwnedFd), String> {
        let upper = match &self.options.teardown.initramfs {
            Some(initramfs) => boot::upper_layer(initramfs),
            None => Err(Errno::NOENT),
        };
        let upper = upper
            .map_err(|_| String::from("the root file system has no writable layer of its own"))?;
        let frozen = match self.has_no_programs(now) && !self.options.beside_init {
            true => Frozen::default(),
            false => self.options.freezer.freeze()?,
        };
        Ok((frozen, upper))
    }

    /// Forks a process that serves a request; returns its id.
    fn copy(&mut self, index: usize, request: &Request, upper: Option<OwnedFd>) -> Option<Pid> {
        process::note_start();
        let (socket, undecoded) = self.connections.swap_remove(index).into_parts();
        match syscalls::fork() {
            Ok(None) => serve_copy(socket, &undecoded, request, upper),
            Ok(Some(pid)) => {
                self.copies.push(pid);
                Some(pid)
            }
            Err(error) => {
                self.options.report.warn(
                    "copy",
                    &format!("no process could be created: {}", reason(error)),
                );
                None
            }
        }
    }
}

/// Main function of a forked process that serves a request.
fn serve_copy(socket: OwnedFd, undecoded: &[u8], request: &Request, upper: Option<OwnedFd>) -> ! {
    // Other inherited descriptors would keep pipes of other programs open. The connection is moved
    // to the descriptors that stay open.
    const KEPT: i32 = 3;
    let _ = syscalls::duplicate_to(&socket, KEPT);
    core::mem::forget(socket);
    let upper = upper.map(|upper| {
        let _ = syscalls::duplicate_to(&upper, KEPT + 1);
        core::mem::forget(upper);
    });
    syscalls::close_from(KEPT as u32 + 1 + u32::from(upper.is_some()));
    syscalls::block_only(SignalSet::of(&[SIGPIPE]));
    let Some(socket) = syscalls::inherited(KEPT) else {
        syscalls::exit(1)
    };
    let mut pipe = copy_out::Pipe::new(socket, undecoded);
    let whole = match request {
        Request::CopyIn { path, .. } => copy_in::serve(&mut pipe, path),
        Request::CopyOut { path, .. } => copy_out::serve(&mut pipe, path),
        Request::Changes { .. } => match syscalls::inherited(KEPT + 1) {
            Some(upper) => changes::serve(&mut pipe, &upper),
            None => false,
        },
        _ => false,
    };
    syscalls::exit(i32::from(!whole))
}
