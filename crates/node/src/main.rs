//! The daemon's binary: options, logging, exit status.

use clap::Parser;
use jiffy_node::options::Options;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// Requests are small and VMs' tasks mostly sleep.
const WORKERS: usize = 2;
/// A running VM takes five descriptors, and some more while it is started.
const DESCRIPTORS: u64 = 1 << 16;

fn main() -> ExitCode {
    let options = Options::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    jiffy_sys::descriptors::raise_limit(DESCRIPTORS);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .build();
    let result = runtime.map_err(anyhow::Error::from).and_then(|runtime| {
        let result = runtime.block_on(jiffy_node::run(options));
        // An import that is still under way is not waited for.
        runtime.shutdown_background();
        result
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("jiffyd: {error:#}");
            ExitCode::FAILURE
        }
    }
}
