//! Programs, libraries and kernel modules of this host, for the machine.

use anyhow::{Context, Result, bail, ensure};
use jiffy_machine::image::build::Addition;
use jiffy_machine::image::cpio::Archive;
use jiffy_machine::image::module::{self, Module};
use jiffy_wire::vmm::VmmConfig;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file of the host, and its path in the machine.
pub fn addition(host: PathBuf, guest: &str) -> Addition {
    Addition {
        host,
        guest: guest.into(),
    }
}

/// A program, with loader and libraries at the same paths as on this host.
///
/// # Errors
///
/// If `ldd` can't be run, or a library is missing.
pub fn with_libraries(program: &Path, guest: &str) -> Result<Vec<Addition>> {
    let mut additions = vec![addition(program.into(), guest)];
    let output = Command::new("ldd").arg(program).output().context("ldd")?;
    if !output.status.success() {
        return Ok(additions); // static
    }
    let text = String::from_utf8_lossy(&output.stdout);
    if let Some(line) = text.lines().find(|line| line.contains("not found")) {
        bail!("{}: {}", program.display(), line.trim());
    }
    let paths = text
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    additions.extend(paths.map(|path| addition(path.into(), path)));
    Ok(additions)
}

/// Modules of the machine's kernel that the machine's image does not contain, and those on which
/// they depend, in the order in which they are loaded.
///
/// # Errors
///
/// If `scripts/machine-kernel` fails, or a module is missing in its package.
pub fn kernel_modules(names: &[&str]) -> Result<Vec<Module>> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/machine-kernel");
    let output = Command::new(&script).output()?;
    ensure!(output.status.success(), "{} failed", script.display());
    let package = PathBuf::from(String::from_utf8(output.stdout)?.trim());
    let modules = ["lib/modules", "usr/lib/modules"].map(|folder| package.join(folder));
    let modules = modules
        .iter()
        .find(|folder| folder.is_dir())
        .context("the kernel's package has no modules")?;
    let release = std::fs::read_dir(modules)?.flatten().next();
    let release = release.context("the kernel's package has no modules")?;
    Ok(module::load_all(&release.path(), names)?)
}

/// A VMM's configuration, as a file of this name; returns its path in the machine.
///
/// # Errors
///
/// If the file can't be written.
pub fn add_config(
    scratch: &Path,
    name: &str,
    config: &VmmConfig,
    files: &mut Vec<Addition>,
) -> Result<String> {
    let (host, guest) = (scratch.join(name), format!("/bench/{name}"));
    std::fs::write(&host, serde_json::to_vec(config)?)?;
    files.push(addition(host, &guest));
    Ok(guest)
}

/// In the machine: the initramfs of guests that measure something.
pub const GUEST_INITRAMFS: &str = "/bench/guest.cpio";

/// Adds [`GUEST_INITRAMFS`].
///
/// # Errors
///
/// If the guest's program can't be read, or the file can't be written.
pub fn add_guest_initramfs(scratch: &Path, files: &mut Vec<Addition>) -> Result<()> {
    let host = scratch.join("guest.cpio");
    std::fs::write(&host, guest_initramfs()?)?;
    files.push(addition(host, GUEST_INITRAMFS));
    Ok(())
}

fn guest_initramfs() -> Result<Vec<u8>> {
    let program = guest_program()?;
    let program = std::fs::read(&program).with_context(|| program.display().to_string())?;
    let mut archive = Archive::new(Vec::new());
    archive.folder("dev", 0o755)?;
    archive.character_device("dev/port", 0o600, 1, 4)?;
    // Without a console Rust's runtime opens /dev/null as the standard streams, and aborts if it
    // can't.
    archive.character_device("dev/null", 0o666, 1, 3)?;
    archive.file("init", 0o755, &program)?;
    Ok(archive.finish()?)
}

/// The program in such guests, in the folder of this program.
///
/// # Errors
///
/// If the path of this program can't be read.
pub fn guest_program() -> Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name("jiffy-bench-guest"))
}
