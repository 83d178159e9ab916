//! Runs Rust test binaries in the machine.

use crate::intel::{self, IntelOptions, Program};
use crate::lab::Lab;
use anyhow::{Context, Result, ensure};
use jiffy_machine::image::build::Addition;
use jiffy_wire::agent::Stream;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Results of one or more test binaries.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tests that passed.
    pub passed: u64,
    /// Tests, or whole binaries, that failed.
    pub failed: u64,
    /// Tests marked `#[ignore]`.
    pub ignored: u64,
}

impl Counts {
    /// Adds up the `test result:` lines of libtest's output.
    pub fn parse(output: &str) -> Counts {
        let mut counts = Counts::default();
        for line in output
            .lines()
            .filter(|line| line.starts_with("test result: "))
        {
            let words: Vec<_> = line.split_whitespace().collect();
            for pair in words.windows(2) {
                let Ok(number) = pair[0].parse::<u64>() else {
                    continue;
                };
                match pair[1] {
                    "passed;" => counts.passed += number,
                    "failed;" => counts.failed += number,
                    "ignored;" => counts.ignored += number,
                    _ => {}
                }
            }
        }
        counts
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }
}

/// Environment of test binaries in a machine.
const ENVIRONMENT: [(&str, &str); 2] = [("RUST_BACKTRACE", "1"), ("JIFFY_IN_LAB", "1")];

/// Runs a static libtest binary in the machine and relays its output. A binary that crashes or
/// prints no result counts as a failure.
///
/// # Errors
///
/// If the binary can't be copied into the machine or started there, or runs longer than `limit`. A
/// test that fails is no error.
pub fn run(lab: &Lab, binary: &Path, arguments: &[String], limit: Duration) -> Result<Counts> {
    let name = name(binary)?;
    let guest = place(name);
    lab.push(binary, &guest)?;
    let mut argv = vec![guest.clone()];
    argv.extend(arguments.iter().cloned());
    println!("     Running {name} in the machine");
    let mut output = Vec::new();
    let mut command = lab.command(argv).cwd("/tmp").time_limit(limit);
    for (variable, value) in ENVIRONMENT {
        command = command.env(variable, value);
    }
    let status = command.start()?.relay(|stream, data| {
        let _ = match stream {
            Stream::Stdout => {
                output.extend_from_slice(data);
                std::io::stdout().write_all(data)
            }
            Stream::Stderr => std::io::stderr().write_all(data),
        };
        let _ = std::io::stdout().flush();
    })?;
    lab.run(["/bin/rm", "-f", &guest])?;
    Ok(counts_of(name, &output, status.shell_code()))
}

/// Runs several binaries in one machine with an Intel processor.
///
/// # Errors
///
/// If `strip` fails, or the machine can't be booted or ends before the binaries have (see
/// [`intel::run`]).
pub fn run_on_intel(
    options: &IntelOptions,
    binaries: &[PathBuf],
    arguments: &[String],
) -> Result<Counts> {
    let mut options = options.clone();
    let folder = tempfile::tempdir().context("making a temporary folder")?;
    let mut programs = Vec::new();
    for binary in binaries {
        let name = name(binary)?;
        options.files.push(Addition {
            host: without_symbols(binary, &folder.path().join(name))?,
            guest: place(name),
        });
        let variables = ENVIRONMENT.map(|(variable, value)| format!("{variable}={value}"));
        programs.push(Program {
            argv: std::iter::once(place(name))
                .chain(arguments.iter().cloned())
                .collect(),
            env: variables.into(),
        });
    }
    let mut outputs = vec![Vec::new(); binaries.len()];
    let statuses = intel::run(&options, &programs, &mut |number, bytes| {
        if outputs[number].is_empty() {
            println!("     Running {} on Intel", programs[number].argv[0]);
        }
        outputs[number].extend_from_slice(bytes);
        let _ = std::io::stdout().write_all(bytes);
        let _ = std::io::stdout().flush();
    })?;
    let mut counts = Counts::default();
    for ((binary, output), status) in binaries.iter().zip(&outputs).zip(statuses) {
        counts += counts_of(name(binary)?, output, status);
    }
    Ok(counts)
}

/// Strips a binary, because Bochs loads the disc byte by byte.
fn without_symbols(binary: &Path, to: &Path) -> Result<PathBuf> {
    let status = std::process::Command::new("strip")
        .arg("-o")
        .args([to, binary])
        .status()
        .context("running strip: apt-get install binutils")?;
    ensure!(status.success(), "strip failed on {}", binary.display());
    Ok(to.into())
}

fn name(binary: &Path) -> Result<&str> {
    binary
        .file_name()
        .and_then(|name| name.to_str())
        .context("a test binary needs a name")
}

/// Its path in the machine.
fn place(name: &str) -> String {
    format!("/tmp/tests/{name}")
}

/// The result of a binary, from its output and exit status.
fn counts_of(name: &str, output: &[u8], status: i32) -> Counts {
    let mut counts = Counts::parse(&String::from_utf8_lossy(output));
    if status != 0 && counts.failed == 0 {
        println!("{name} ended with status {status}");
        counts.failed += 1;
    }
    let empty = output.starts_with(b"\nrunning 0 tests");
    if status == 0 && counts == Counts::default() && !empty {
        println!("{name} printed no result");
        counts.failed += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_result_lines_are_summed() {
        let text = "running 3 tests\ntest result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s\n\
                    test result: FAILED. 4 passed; 2 failed; 0 ignored; 0 measured; 7 filtered out; finished in 0.00s\n";
        let counts = Counts::parse(text);
        assert_eq!(
            counts,
            Counts {
                passed: 7,
                failed: 2,
                ignored: 1
            }
        );
    }

    #[test]
    fn a_test_binary_without_a_result_or_with_a_bad_status_failed() {
        let failed = |output: &str, status| counts_of("x", output.as_bytes(), status).failed;
        assert_eq!(failed("", 0), 1);
        assert_eq!(failed("\nrunning 0 tests\n", 0), 0);
        assert_eq!(failed("test result: ok. 3 passed; 0 failed;", 137), 1);
        assert_eq!(failed("test result: FAILED. 3 passed; 2 failed;", 101), 2);
        assert_eq!(failed("test result: ok. 3 passed; 0 failed;", 0), 0);
    }
}
