//! `jiffy-origins`: reads from registries and peers' folders for `jiffy-pager`, which starts it.

use jiffy_pager::origins::request::CHANNEL;
use jiffy_pager::origins::service;
use jiffy_sys::handed;
use std::path::Path;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(
            EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info")),
        )
        .init();
    // Closed on exec: programs that give credentials must not hold it.
    let name = Path::new("channel");
    let channel = handed::add_inherited(name.to_owned(), CHANNEL).map(|()| handed::take(name));
    let Ok(Some(channel)) = channel else {
        eprintln!("jiffy-origins: only jiffy-pager can start this program");
        return ExitCode::FAILURE;
    };
    match service::run(channel) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("jiffy-origins: {error}");
            ExitCode::FAILURE
        }
    }
}
