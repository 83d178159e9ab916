//! The program.

use clap::Parser;
use jiffy_files::options::Options;
use jiffy_files::server;
use jiffy_sys::causes;
use std::process::ExitCode;

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_target(false)
        .init();
    match server::serve(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("jiffy-files: {}", causes::sentence(&error));
            ExitCode::FAILURE
        }
    }
}
