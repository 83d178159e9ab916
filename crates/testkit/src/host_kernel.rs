//! Debian's kernels for the machine, beside the one that `make build` puts into it.

use anyhow::{Context, Result, ensure};
use jiffy_machine::image::build::{self, Recipe, installed};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The name of the kernel with sched_ext.
pub const SCHED: &str = "sched";

/// A kernel of this checkout, by its flavour. Built unless it is cached.
///
/// # Errors
///
/// If `kernel/build` can't be run, or fails.
pub fn built(flavour: &str) -> Result<PathBuf> {
    checkout_script("../kernel/build", &[flavour])
}

/// The newest packaged kernel of a series (`6.1`, `6.12`), unpacked. Downloaded unless it is
/// cached.
///
/// # Errors
///
/// If `scripts/machine-kernel` can't be run, or fails.
pub fn package(series: &str) -> Result<PathBuf> {
    checkout_script("machine-kernel", &[series])
}

/// Runs `scripts/NAME` of this checkout and returns the path that it prints.
pub(crate) fn checkout_script(name: &str, arguments: &[&str]) -> Result<PathBuf> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../scripts")
        .join(name);
    let output = Command::new(&script)
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("running {}", script.display()))?;
    ensure!(
        output.status.success(),
        "scripts/{name} {} failed; its message is above",
        arguments.join(" ")
    );
    let printed = String::from_utf8(output.stdout).context("the path is not UTF-8")?;
    Ok(PathBuf::from(printed.trim_end()))
}

/// Inputs of a machine's image with that kernel, with or without Jiffy's programs.
pub(crate) fn recipe(kernel_package: PathBuf, dist: &Path, with_jiffy: bool) -> Result<Recipe> {
    let busybox = ["/bin/busybox", "/usr/bin/busybox"]
        .map(PathBuf::from)
        .into_iter()
        .find(|path| path.is_file())
        .context("there is no /bin/busybox: apt-get install busybox-static")?;
    Ok(Recipe {
        kernel_package,
        busybox,
        init: dist.join("lib/jiffy/jiffy-init"),
        additions: if with_jiffy {
            installed(dist)
        } else {
            Vec::new()
        },
    })
}

/// Builds the machine's `vmlinux` and `initramfs.cpio` in `folder`, with the newest kernel of a
/// series and the programs of `dist`.
///
/// # Errors
///
/// If the kernel's package can't be had (see [`package`]), a program is missing in `dist`, or a
/// file can't be written.
pub fn machine_image(series: &str, dist: &Path, folder: &Path) -> Result<()> {
    let recipe = recipe(package(series)?, dist, true)?;
    build::build(&recipe, folder)
        .with_context(|| format!("building a machine with Linux {series}"))?;
    Ok(())
}
