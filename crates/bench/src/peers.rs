//! Other VMMs that are on PATH: their files in the machine, and their commands to boot a kernel to
//! the marker.
//!
//! All get the same kernel, initramfs, command line, RAM and one vCPU, a serial port for the
//! marker, and no other device that can be left out.

use anyhow::{Context, Result, bail};
use jiffy_machine::image::build::Addition;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A VMM other than Jiffy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// QEMU's microvm machine.
    Qemu,
    /// Firecracker.
    Firecracker,
    /// Cloud Hypervisor.
    CloudHypervisor,
}

/// A guest to boot; paths in the machine.
pub struct Boot<'a> {
    /// An ELF kernel with a PVH note.
    pub kernel: &'a str,
    /// The initramfs that writes the marker.
    pub initramfs: &'a str,
    /// Kernel parameters.
    pub command_line: &'a str,
    /// Guest RAM in MiB.
    pub ram_mib: u64,
}

impl Peer {
    /// All supported peers.
    pub const ALL: [Peer; 3] = [Peer::Qemu, Peer::Firecracker, Peer::CloudHypervisor];

    /// The name in figures.
    pub fn name(self) -> &'static str {
        match self {
            Peer::Qemu => "qemu-microvm",
            Peer::Firecracker => "firecracker",
            Peer::CloudHypervisor => "cloud-hypervisor",
        }
    }

    /// The name of its program.
    pub fn program(self) -> &'static str {
        match self {
            Peer::Qemu => "qemu-system-x86_64",
            Peer::Firecracker => "firecracker",
            Peer::CloudHypervisor => "cloud-hypervisor",
        }
    }

    /// First line of `--version`; `None` if it is not on PATH.
    pub fn version(self) -> Option<String> {
        let output = Command::new(find_on_path(self.program())?)
            .arg("--version")
            .output()
            .ok()?;
        let text = String::from_utf8_lossy(&output.stdout);
        Some(text.lines().next().unwrap_or("unknown").to_string())
    }

    /// Files, libraries and firmware that it needs in the machine; `None` if it is not on PATH.
    pub fn additions(self) -> Result<Option<Vec<Addition>>> {
        let Some(host) = find_on_path(self.program()) else {
            return Ok(None);
        };
        let mut additions = shared_libraries(&host)?;
        additions.push(Addition {
            host,
            guest: format!("/bench/{}", self.program()),
        });
        if self == Peer::Qemu {
            additions.extend(firmware());
        }
        Ok(Some(additions))
    }

    /// The command that boots to the marker and, if it needs one, a configuration file: its path in
    /// the machine and its contents.
    pub fn boot(self, boot: &Boot) -> (Vec<String>, Option<(String, String)>) {
        let program = format!("/bench/{}", self.program());
        let words = |list: &[&str]| -> Vec<String> {
            std::iter::once(program.as_str())
                .chain(list.iter().copied())
                .map(String::from)
                .collect()
        };
        let ram = boot.ram_mib.to_string();
        match self {
            Peer::Qemu => {
                let list = [
                    "-L",
                    "/bench/firmware",
                    "-nodefaults",
                    "-no-user-config",
                    "-no-reboot",
                    "-display",
                    "none",
                    "-machine",
                    "microvm,accel=kvm,x-option-roms=off,pit=off,pic=off,rtc=off,isa-serial=on",
                    "-cpu",
                    "host",
                    "-smp",
                    "1",
                    "-m",
                    &ram,
                    "-kernel",
                    boot.kernel,
                    "-initrd",
                    boot.initramfs,
                    "-append",
                    boot.command_line,
                    "-chardev",
                    "stdio,id=com1,signal=off",
                    "-serial",
                    "chardev:com1",
                ];
                (words(&list), None)
            }
            Peer::Firecracker => {
                let path = "/bench/firecracker.json".to_string();
                let config = serde_json::json!({
                    "boot-source": {
                        "kernel_image_path": boot.kernel,
                        "initrd_path": boot.initramfs,
                        "boot_args": boot.command_line,
                    },
                    "drives": [],
                    "machine-config": { "vcpu_count": 1, "mem_size_mib": boot.ram_mib },
                });
                let argv = words(&["--no-api", "--config-file", &path]);
                (argv, Some((path, config.to_string())))
            }
            Peer::CloudHypervisor => {
                let memory = format!("size={ram}M");
                let list = [
                    "--kernel",
                    boot.kernel,
                    "--initramfs",
                    boot.initramfs,
                    "--cmdline",
                    boot.command_line,
                    "--cpus",
                    "boot=1",
                    "--memory",
                    &memory,
                    "--serial",
                    "tty",
                    "--console",
                    "off",
                ];
                (words(&list), None)
            }
        }
    }
}

fn find_on_path(program: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|folder| folder.join(program))
        .find(|path| path.is_file())
}

/// Loader and libraries of a dynamically linked program, at the same paths.
fn shared_libraries(program: &Path) -> Result<Vec<Addition>> {
    let output = Command::new("ldd").arg(program).output().context("ldd")?;
    if !output.status.success() {
        return Ok(Vec::new()); // static
    }
    let text = String::from_utf8_lossy(&output.stdout);
    if let Some(line) = text.lines().find(|line| line.contains("not found")) {
        bail!("{}: {}", program.display(), line.trim());
    }
    Ok(text
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(|path| Addition {
            host: path.into(),
            guest: path.into(),
        })
        .collect())
}

/// Firmware of QEMU's microvm.
fn firmware() -> Vec<Addition> {
    let folders = ["/usr/share/qemu", "/usr/share/seabios"];
    let names = [
        "qboot.rom",
        "bios-microvm.bin",
        "linuxboot_dma.bin",
        "pvh.bin",
    ];
    let paths = folders.iter().flat_map(|folder| {
        names
            .iter()
            .map(|name| (Path::new(*folder).join(name), *name))
    });
    let mut found: Vec<Addition> = Vec::new();
    for (host, name) in paths {
        let guest = format!("/bench/firmware/{name}");
        if host.is_file() && found.iter().all(|addition| addition.guest != guest) {
            found.push(Addition { host, guest });
        }
    }
    found
}
