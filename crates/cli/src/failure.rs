//! Errors for users, and exit statuses.

use crate::render::harmless;
use jiffy_wire::agent::{ExitStatus, StartError};
use jiffy_wire::api::ApiError;
use thiserror::Error;

/// An error of jiffy itself: a sentence and an optional hint.
#[derive(Debug, Error)]
#[error("{message}")]
pub struct Failure {
    /// One sentence.
    pub message: String,
    /// What the user can do.
    pub hint: Option<String>,
    /// The kind, for callers that handle some kinds differently.
    pub kind: Kind,
}

/// The kind of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The node returned an error.
    Api(jiffy_wire::api::ErrorKind),
    /// The first command of a VM could not be started: its exit status for the shell.
    NotStarted(u8),
    /// No node answers.
    Unreachable,
    /// The reader of stdout has closed it (EPIPE).
    BrokenPipe,
    /// Anything else.
    Other,
}

/// The result of most functions here.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// A failure without a hint.
    pub fn new(message: impl Into<String>) -> Failure {
        Failure {
            message: message.into(),
            hint: None,
            kind: Kind::Other,
        }
    }

    /// Adds a hint.
    pub fn hint(mut self, hint: impl Into<String>) -> Failure {
        self.hint = Some(hint.into());
        self
    }

    /// Sets the kind.
    pub fn kind(mut self, kind: Kind) -> Failure {
        self.kind = kind;
        self
    }

    /// A failed system call: `what`, and the cause.
    pub fn io(what: impl std::fmt::Display, error: impl Into<std::io::Error>) -> Failure {
        let error = error.into();
        let kind = match error.kind() {
            std::io::ErrorKind::BrokenPipe => Kind::BrokenPipe,
            _ => Kind::Other,
        };
        Failure::new(format!("{what}: {}", reason(&error))).kind(kind)
    }

    /// Whether the node reports that something does not exist.
    pub fn is_not_found(&self) -> bool {
        self.kind == Kind::Api(jiffy_wire::api::ErrorKind::NotFound)
    }

    /// Whether the node refuses a name: nothing has it, or it can't be one.
    pub fn is_about_a_name(&self) -> bool {
        use jiffy_wire::api::ErrorKind::{Invalid, NotFound};
        matches!(self.kind, Kind::Api(Invalid | NotFound))
    }

    /// Writes `jiffy: sentence` and the hint to stderr.
    pub fn report(&self) {
        report(&self.message, self.hint.as_deref());
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Failure {
        Failure {
            message: error.message,
            hint: error.hint,
            kind: error
                .exit_code
                .map_or(Kind::Api(error.kind), Kind::NotStarted),
        }
    }
}

/// An I/O error without Rust's `(os error N)`.
pub fn reason(error: &std::io::Error) -> String {
    let text = error.to_string();
    match text.rfind(" (os error ") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}

/// Writes `jiffy: sentence` and perhaps a hint to stderr. Messages may quote
/// a guest, so control characters are replaced.
pub fn report(message: &str, hint: Option<&str>) {
    use std::io::Write;
    let plain = |text| harmless(text).trim_end().trim_end_matches('.').to_owned();
    let mut text = format!("jiffy: {}\n", plain(message));
    if let Some(hint) = hint {
        text.push_str(&format!("  hint: {}\n", plain(hint)));
    }
    // If stderr is closed, the report is lost.
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// Reports the listed things that can't be used.
pub fn report_all<'a>(problems: impl Iterator<Item = &'a str>) {
    for problem in problems {
        report(problem, None);
    }
}

/// The outcome of a verb that did not fail.
#[derive(Debug)]
pub enum Outcome {
    /// It is done.
    Done,
    /// A program in a VM ended with this status.
    Ended(ExitStatus),
    /// A program in a VM could not be started.
    NotStarted(StartError),
    /// It failed for some of several names; these failures were reported.
    Partly,
    /// The user left the session with this signal.
    GaveUp(i32),
    /// The exit status of `doctor` or a `status`.
    Verdict(u8),
}

/// Exit status of Jiffy's own errors.
pub const OWN_FAILURE: u8 = 125;
/// 128 + SIGPIPE, as of any filter whose reader has closed its output.
const READER_GONE: u8 = 141;

/// Reports a failure and returns the exit status.
pub fn conclude(result: Result<Outcome>) -> u8 {
    match result {
        Ok(Outcome::Done) => 0,
        Ok(Outcome::Ended(status)) => shell_code(status),
        Ok(Outcome::NotStarted(error)) => {
            report(&error.message, None);
            error.kind.exit_code() as u8
        }
        Ok(Outcome::Partly) => OWN_FAILURE,
        Ok(Outcome::GaveUp(signal)) => shell_code(ExitStatus::Signal(signal)),
        Ok(Outcome::Verdict(code)) => code,
        Err(failure) if failure.kind == Kind::BrokenPipe => READER_GONE,
        Err(failure) => {
            failure.report();
            match failure.kind {
                Kind::NotStarted(status) => status,
                _ => OWN_FAILURE,
            }
        }
    }
}

/// The exit status for the shell. A guest may send any number, but a status has eight bits, and a
/// signal that ended a program must not become 0.
fn shell_code(status: ExitStatus) -> u8 {
    match status {
        ExitStatus::Code(code) => code as u8,
        ExitStatus::Signal(signal) => 128u8.saturating_add(signal.clamp(1, 127) as u8),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_wire::agent::StartFailure;

    #[test]
    fn exit_statuses_follow_the_conventions_of_shells() {
        let ended = |status| conclude(Ok(Outcome::Ended(status)));
        assert_eq!(ended(ExitStatus::Code(0)), 0);
        assert_eq!(ended(ExitStatus::Code(42)), 42);
        assert_eq!(ended(ExitStatus::Signal(9)), 137);
        assert_eq!(ended(ExitStatus::Code(-1)), 255);
        assert_eq!(ended(ExitStatus::Signal(i32::MIN)), 129);
        assert_eq!(ended(ExitStatus::Signal(i32::MAX)), 255);
    }

    #[test]
    fn a_command_that_cannot_start_exits_with_125_to_127() {
        let status = |kind| {
            conclude(Ok(Outcome::NotStarted(StartError {
                kind,
                message: "x".into(),
            })))
        };
        assert_eq!(status(StartFailure::NotFound), 127);
        assert_eq!(status(StartFailure::NotExecutable), 126);
        assert_eq!(status(StartFailure::NoSuchUser), 125);
    }

    #[test]
    fn errno_numbers_are_left_out_of_messages() {
        let error = std::io::Error::from_raw_os_error(2);
        assert_eq!(reason(&error), "No such file or directory");
    }
}
