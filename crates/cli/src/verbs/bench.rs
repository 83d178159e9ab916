//! `jiffy bench`

use super::Context;
use crate::args::bench::{Bench, BenchFormat, BenchPager};
use crate::failure::{Failure, Outcome, Result};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Name of the image in a snapshot's folder, which also contains the recording.
const IMAGE: &str = "ram.image";

/// `jiffy bench`
///
/// # Errors
///
/// If the program or the recorded image is missing, or can't be run. Otherwise it does not return.
pub fn bench(context: &Context, bench: Bench) -> Result<Outcome> {
    match bench {
        Bench::Pager(options) => pager(context, options),
    }
}

/// `jiffy bench pager`: replaces this process by jiffy-pager (execve), which gets its
/// signals and sets the exit status.
fn pager(context: &Context, options: BenchPager) -> Result<Outcome> {
    let program = context.folders.program("jiffy-pager")?;
    let image = match options.image {
        Some(image) => image,
        None => {
            let beside = options.recording.with_file_name(IMAGE);
            if !beside.exists() {
                return Err(Failure::new(format!("there is no {}", beside.display()))
                    .hint("give the recorded image with --image"));
            }
            beside
        }
    };
    let mut command = Command::new(&program);
    command.arg("replay").arg("--image").arg(image);
    if let Some(folder) = options.scratch {
        command.arg("--scratch").arg(folder);
    }
    if let Some(repeat) = options.repeat {
        command.arg("--repeat").arg(repeat.to_string());
    }
    if options.cold {
        command.arg("--cold");
    }
    if let Some(only) = options.only {
        // One argument, because the text may begin with a dash.
        command.arg(format!("--only={only}"));
    }
    command.arg("--format").arg(match options.format {
        BenchFormat::Text => "text",
        BenchFormat::Json => "json",
    });
    command.arg("--").arg(options.recording);
    let error = command.exec();
    Err(Failure::io(
        format_args!("{} can't be run", program.display()),
        error,
    ))
}
