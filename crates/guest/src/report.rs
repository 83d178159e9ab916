//! Queues init's spans and warnings for the host.

use crate::{files, syscalls};
use alloc::{
    format,
    string::{String, ToString},
    vec::Vec,
};
use jiffy_wire::agent::{FromGuest, GuestSpan};
use rustix::fs::{Mode, OFlags};

/// Most spans and warnings that are queued while there is no host.
const LIMIT: usize = 512;

/// Spans and warnings in the order they happened.
#[derive(Debug, Default)]
pub struct Report {
    spans: Vec<GuestSpan>,
    warnings: Vec<FromGuest>,
    missing: Option<String>,
}

impl Report {
    /// Runs one step and records its duration. A failure is recorded as a warning and
    /// gives `None`; the boot continues without the step.
    pub fn step<T>(
        &mut self,
        name: &str,
        work: impl FnOnce(&mut Report) -> Result<T, String>,
    ) -> Option<T> {
        let start_ns = syscalls::monotonic_ns();
        let result = work(self);
        let end_ns = syscalls::monotonic_ns();
        let (value, error) = match result {
            Ok(value) => (Some(value), None),
            Err(message) => {
                self.warn(name, &message);
                (None, Some(message))
            }
        };
        self.span(GuestSpan {
            kernel: false,
            name: name.to_string(),
            start_ns,
            end_ns,
            error,
        });
        value
    }

    /// As [`Report::step`]; after a failure the first command is not started.
    pub fn required_step<T>(
        &mut self,
        name: &str,
        work: impl FnOnce(&mut Report) -> Result<T, String>,
    ) -> Option<T> {
        let mut why = None;
        let value = self.step(name, |report| {
            work(report).inspect_err(|message| why = Some(message.clone()))
        });
        self.missing = self.missing.take().or(why);
        value
    }

    /// The failure of the first required step that failed.
    pub fn missing(&self) -> Option<&str> {
        self.missing.as_deref()
    }

    /// Records a span measured elsewhere.
    pub fn span(&mut self, span: GuestSpan) {
        if self.spans.len() < LIMIT {
            self.spans.push(span);
        }
    }

    /// Records a failure for the host and writes it to the kernel's log.
    pub fn warn(&mut self, step: &str, message: &str) {
        log(&format!("{step}: {message}"));
        if self.warnings.len() < LIMIT {
            self.warnings.push(FromGuest::Warning {
                step: step.to_string(),
                message: message.to_string(),
            });
        }
    }

    /// Takes the warnings that were recorded since the last call.
    pub fn take_warnings(&mut self) -> Vec<FromGuest> {
        core::mem::take(&mut self.warnings)
    }

    /// Takes the spans that were recorded since the last call.
    pub fn take_spans(&mut self) -> Vec<FromGuest> {
        let spans = core::mem::take(&mut self.spans);
        let messages = spans.chunks(64);
        messages
            .map(|spans| FromGuest::Spans(spans.to_vec()))
            .collect()
    }
}

/// Writes a line to the kernel's log, which prints it on the console if there is one. Does nothing
/// unless this process is PID 1.
pub fn log(line: &str) {
    if rustix::process::getpid() != rustix::process::Pid::INIT {
        return;
    }
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    if let Ok(kmsg) = rustix::fs::open(c"/dev/kmsg", flags, Mode::empty()) {
        let _ = files::write_all(&kmsg, format!("<4>jiffy-init: {line}\n").as_bytes());
    }
}
