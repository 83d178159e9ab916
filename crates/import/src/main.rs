//! The program.

use std::process::ExitCode;

fn main() -> ExitCode {
    jiffy_import::run()
}
