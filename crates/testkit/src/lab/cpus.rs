//! The number of a machine's CPUs.

use anyhow::{Context, Result, ensure};
use jiffy_machine::Accelerator;
use std::process::Command;

/// The first QEMU that gives CPUs equal turns on the instruction clock (docs/laboratory.md).
const QEMU_FOR_SEVERAL_CPUS: u32 = 10;

/// Refuses several CPUs on the instruction clock with a QEMU that lets one of them starve.
pub(super) fn check(cpus: u8, accelerator: Accelerator) -> Result<()> {
    if accelerator != Accelerator::TcgInstructionClock || cpus == 1 {
        return Ok(());
    }
    let output = Command::new("qemu-system-x86_64").arg("--version").output();
    let text = String::from_utf8_lossy(&output.context("qemu-system-x86_64")?.stdout).into_owned();
    let version = major(&text).with_context(|| format!("QEMU's version is not in {text:?}"))?;
    ensure!(
        version >= QEMU_FOR_SEVERAL_CPUS,
        "{cpus} CPUs on the instruction clock need QEMU {QEMU_FOR_SEVERAL_CPUS} or newer, and \
         qemu-system-x86_64 on PATH is version {version}: docs/laboratory.md says where it is"
    );
    Ok(())
}

/// `10` of `QEMU emulator version 10.0.2 (Debian …)`.
fn major(text: &str) -> Option<u32> {
    let version = text.split_once("version ")?.1;
    version.split_once('.')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_qemu_is_read() {
        let text = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright (c) 2003";
        assert_eq!(major(text), Some(10));
        assert_eq!(major("qemu: not found"), None);
    }
}
