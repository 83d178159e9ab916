//! Rust test binaries run in the machine.

use crate::lab::Lab;
use anyhow::{Context, Result};
use jiffy_wire::agent::{ExitStatus, Stream};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

/// What the tests of one or more binaries came to.
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
    /// Reads all `test result:` lines of libtest's output.
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

/// Runs a static libtest binary in the machine and relays what it prints. A
/// binary that ends badly, or without a result, counts as a failure.
pub fn run(lab: &Lab, binary: &Path, arguments: &[String], limit: Duration) -> Result<Counts> {
    let name = binary
        .file_name()
        .and_then(|name| name.to_str())
        .context("a test binary needs a name")?;
    let guest = format!("/tmp/tests/{name}");
    lab.push(binary, &guest)?;
    let mut argv = vec![guest.clone()];
    argv.extend(arguments.iter().cloned());
    println!("     Running {name} in the machine");
    let mut output = Vec::new();
    let status = lab
        .command(argv)
        .cwd("/tmp")
        .env("RUST_BACKTRACE", "1")
        .env("JIFFY_IN_LAB", "1")
        .time_limit(limit)
        .start()?
        .relay(|stream, data| {
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
    let mut counts = Counts::parse(&String::from_utf8_lossy(&output));
    let all_well = status == ExitStatus::Code(0);
    if !all_well && counts.failed == 0 {
        println!("{name} ended with {status:?}");
        counts.failed += 1;
    }
    if all_well && counts == Counts::default() && !output.starts_with(b"\nrunning 0 tests") {
        println!("{name} printed no result");
        counts.failed += 1;
    }
    Ok(counts)
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
}
