//! The program.

use clap::Parser;
use jiffy_disk::options::{Options, Verb};
use jiffy_disk::server;
use jiffy_sys::causes;
use std::process::ExitCode;

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_target(false)
        .init();
    let Verb::Serve(serve) = Options::parse().verb;
    match server::serve(&serve) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("jiffy-disk: {}", causes::sentence(&error));
            if let server::ServeError::Disk(error) = &error
                && let Some(hint) = error.hint()
            {
                eprintln!("  {hint}");
            }
            ExitCode::FAILURE
        }
    }
}
