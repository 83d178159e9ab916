//! Builds a kernel with the `kernel/build` script.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::list::Flavour;

/// Lines of the script's standard error that are kept for the error message.
const KEPT_LINES: usize = 30;

/// Progress of the script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// A step began: "unpacking linux-source-6.12.tar.xz".
    Step(String),
    /// Object files were compiled.
    Objects {
        /// Compiled so far.
        done: u64,
        /// Expected total; an estimate.
        total: u64,
    },
}

/// Why the kernel was not built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The script cannot be run.
    #[error("cannot run {script}")]
    Run {
        /// The script.
        script: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The script failed.
    #[error("the kernel was not built: {reason}")]
    Failed {
        /// Its error message.
        reason: String,
        /// Lines it printed before, such as the compiler's errors.
        details: Vec<String>,
    },
    /// The script succeeded, but printed no path.
    #[error("{script} ended without naming a kernel")]
    NoKernel {
        /// The script.
        script: PathBuf,
    },
}

/// Builds a flavour, or finds it in the cache, and returns the path of its vmlinux.
///
/// `folder` contains the `build` script. `progress` is called while it runs.
///
/// # Errors
///
/// If the script can't be run, fails, or prints no path of a file.
pub fn build(
    folder: &Path,
    flavour: Flavour,
    progress: &mut dyn FnMut(Progress),
) -> Result<PathBuf, BuildError> {
    let script = folder.join("build");
    let run = |source| BuildError::Run {
        script: script.clone(),
        source,
    };
    let mut child = Command::new(&script)
        .arg(flavour.name())
        .env("JIFFY_PROGRESS", "lines")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(run)?;

    let mut details = Vec::new();
    if let Some(stderr) = child.stderr.take() {
        for line in BufReader::new(stderr).split(b'\n') {
            let line = String::from_utf8_lossy(&line.map_err(run)?).into_owned();
            match parse(&line) {
                Some(event) => progress(event),
                None => details.push(line),
            }
        }
    }
    // The script prints a single line at its end, so it can't block on a full pipe.
    let mut path = String::new();
    if let Some(mut stdout) = child.stdout.take() {
        stdout.read_to_string(&mut path).map_err(run)?;
    }
    let status = child.wait().map_err(run)?;
    if !status.success() {
        let reason = match details.pop() {
            Some(line) => line.trim_start_matches("kernel/build: ").to_owned(),
            None => format!("{} printed no error message ({status})", script.display()),
        };
        let skipped = details.len().saturating_sub(KEPT_LINES);
        return Err(BuildError::Failed {
            reason,
            details: details.split_off(skipped),
        });
    }
    let path = PathBuf::from(path.trim_end());
    if !path.is_file() {
        return Err(BuildError::NoKernel { script });
    }
    Ok(path)
}

/// Parses `progress: 12/1200` or `step: unpacking`; `None` for any other message.
fn parse(line: &str) -> Option<Progress> {
    if let Some(step) = line.strip_prefix("step: ") {
        return Some(Progress::Step(step.to_owned()));
    }
    let (done, total) = line.strip_prefix("progress: ")?.split_once('/')?;
    Some(Progress::Objects {
        done: done.parse().ok()?,
        total: total.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(text: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("build");
        jiffy_sys::testing::write_program(&path, &format!("#!/bin/sh\n{text}\n"));
        folder
    }

    fn run(folder: &tempfile::TempDir) -> (Result<PathBuf, BuildError>, Vec<Progress>) {
        let mut events = Vec::new();
        let result = build(folder.path(), Flavour::Full, &mut |event| {
            events.push(event)
        });
        (result, events)
    }

    #[test]
    fn build_progress_and_result_are_reported() {
        let folder = script(
            "[ \"$1 $JIFFY_PROGRESS\" = 'full lines' ] || exit 1\n\
             echo 'step: unpacking it' >&2; echo 'progress: 3/40' >&2\n\
             echo 'warning: something' >&2; echo \"$0\"",
        );
        let (result, events) = run(&folder);
        assert_eq!(result.unwrap(), folder.path().join("build"));
        let expected = [
            Progress::Step("unpacking it".into()),
            Progress::Objects { done: 3, total: 40 },
        ];
        assert_eq!(events, expected);
    }

    #[test]
    fn a_build_failure_contains_the_scripts_message() {
        let folder =
            script("echo 'x.c:1: error' >&2; echo 'kernel/build: gcc is missing' >&2; exit 1");
        let (result, _) = run(&folder);
        let error = result.unwrap_err();
        assert_eq!(
            error.to_string(),
            "the kernel was not built: gcc is missing"
        );
        assert!(matches!(error, BuildError::Failed { details, .. } if details == ["x.c:1: error"]));
    }

    #[test]
    fn a_script_without_output_is_a_failure() {
        let (result, _) = run(&script("exit 3"));
        assert!(
            result
                .unwrap_err()
                .to_string()
                .contains("printed no error message (exit status: 3)")
        );
        let (result, _) = run(&script("echo /nowhere/vmlinux"));
        assert!(matches!(result, Err(BuildError::NoKernel { .. })));
    }

    #[test]
    fn a_missing_script_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (result, _) = run(&folder);
        let message = result.unwrap_err().to_string();
        assert_eq!(
            message,
            format!("cannot run {}/build", folder.path().display())
        );
    }
}
