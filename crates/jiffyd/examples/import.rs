//! `jiffy-import` itself, built with the tests of the daemon that starts it.

use std::process::ExitCode;

fn main() -> ExitCode {
    jiffy_import::run()
}
