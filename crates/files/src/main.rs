//! The program.

use clap::Parser;
use jiffy_files::options::Options;
use jiffy_files::server;
use jiffy_sys::causes;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(
            EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info")),
        )
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
