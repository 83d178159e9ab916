//! `jiffy-machine-image`: builds what machine and guests boot from.

use anyhow::Context;
use clap::{Args, Parser, Subcommand};
use jiffy_machine::image::build::{Addition, Recipe, additions_archive, build, installed};
use std::path::PathBuf;

/// Builds the files that the machine and guests boot from
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Build the machine's `vmlinux`, `initramfs.cpio` and `meta.json`
    Machine {
        /// An unpacked Debian kernel package
        #[arg(long)]
        kernel_package: PathBuf,
        /// A static busybox
        #[arg(long, default_value = "/bin/busybox")]
        busybox: PathBuf,
        /// An installation of Jiffy, with its programs and its guests' kernel and images
        #[arg(long)]
        dist: PathBuf,
        /// Folder for the files
        #[arg(long)]
        output: PathBuf,
    },
    /// Build an initramfs of these files and nothing else
    Archive {
        #[command(flatten)]
        additions: Additions,
        /// Path of the new file
        #[arg(long)]
        output: PathBuf,
    },
}

#[derive(Debug, Args)]
struct Additions {
    /// A file or folder of the host and its absolute path in the archive. Repeatable
    #[arg(long = "add", value_name = "HOST:GUEST", value_parser = addition)]
    files: Vec<Addition>,
}

fn addition(text: &str) -> Result<Addition, String> {
    match text.split_once(':') {
        Some((host, guest)) if guest.starts_with('/') => Ok(Addition {
            host: host.into(),
            guest: guest.into(),
        }),
        _ => Err("expected HOST:/PATH/IN/THE/ARCHIVE".into()),
    }
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().verb {
        Verb::Machine {
            kernel_package,
            busybox,
            dist,
            output,
        } => {
            let recipe = Recipe {
                kernel_package,
                busybox,
                init: dist.join("lib/jiffy/jiffy-init"),
                additions: installed(&dist),
            };
            let meta = build(&recipe, &output)?;
            println!("{}", meta.kernel);
        }
        Verb::Archive { additions, output } => {
            let archive = additions_archive(&additions.files)?;
            jiffy_sys::durable::replace(&output, &archive)
                .with_context(|| format!("writing {}", output.display()))?;
        }
    }
    Ok(())
}
