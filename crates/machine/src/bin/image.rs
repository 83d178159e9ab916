//! `jiffy-machine-image`: builds the machine's kernel and initramfs.

use clap::Parser;
use jiffy_machine::image::build::{Addition, Recipe, build};
use std::path::PathBuf;

/// Builds what the machine boots: `vmlinux`, `initramfs.cpio`, `meta.json`.
#[derive(Debug, Parser)]
struct Options {
    /// A Debian kernel package, unpacked.
    #[arg(long)]
    kernel_package: PathBuf,
    /// A static busybox.
    #[arg(long, default_value = "/bin/busybox")]
    busybox: PathBuf,
    /// The program that becomes PID 1.
    #[arg(long)]
    init: PathBuf,
    /// A file or folder of the host and its absolute path in the machine.
    #[arg(long = "add", value_name = "HOST:GUEST", value_parser = addition)]
    additions: Vec<Addition>,
    /// The folder the files go to.
    #[arg(long)]
    output: PathBuf,
}

fn addition(text: &str) -> Result<Addition, String> {
    match text.split_once(':') {
        Some((host, guest)) if guest.starts_with('/') => Ok(Addition {
            host: host.into(),
            guest: guest.into(),
        }),
        _ => Err("expected HOST:/PATH/IN/THE/MACHINE".into()),
    }
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let recipe = Recipe {
        kernel_package: options.kernel_package,
        busybox: options.busybox,
        init: options.init,
        additions: options.additions,
    };
    let meta = build(&recipe, &options.output)?;
    println!("{}", meta.kernel);
    Ok(())
}
