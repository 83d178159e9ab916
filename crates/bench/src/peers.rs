//! Other VMMs that are on PATH: their files in the machine, and their commands to boot a kernel to
//! the marker.
//!
//! All get the same kernel, initramfs, command line, RAM and one vCPU, a serial port for the
//! marker, a network interface if the case needs one, and no other device that can be left out.

use crate::host_files::with_libraries;
use anyhow::Result;
use jiffy_machine::image::build::Addition;
use jiffy_sys::programs::on_path;
use std::path::Path;
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
    /// An existing TAP for a network interface.
    pub tap: Option<&'a str>,
    /// The configuration file, if the VMM needs one; a path in the machine.
    pub config: &'a str,
}

/// The MAC address of a guest's interface.
pub const MAC: &str = "02:4a:46:00:00:02";

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
        let output = Command::new(on_path(self.program())?)
            .arg("--version")
            .output()
            .ok()?;
        let text = String::from_utf8_lossy(&output.stdout);
        Some(text.lines().next().unwrap_or("unknown").to_string())
    }

    /// Files, libraries and firmware that it needs in the machine; `None` if it is not on PATH.
    ///
    /// # Errors
    ///
    /// If `ldd` can't be run, or a library is missing.
    pub fn additions(self) -> Result<Option<Vec<Addition>>> {
        let Some(host) = on_path(self.program()) else {
            return Ok(None);
        };
        let mut additions = with_libraries(&host, &format!("/bench/{}", self.program()))?;
        if self == Peer::Qemu {
            additions.extend(firmware());
        }
        Ok(Some(additions))
    }

    /// The command that boots to the marker and, if it needs one, the contents of its configuration
    /// file.
    pub fn boot(self, boot: &Boot) -> (Vec<String>, Option<String>) {
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
                let mut argv = words(&list);
                if let Some(tap) = boot.tap {
                    argv.extend(qemu_interface(tap));
                }
                (argv, None)
            }
            Peer::Firecracker => {
                let interfaces = boot.tap.map(|tap| {
                    serde_json::json!({
                        "iface_id": "eth0", "guest_mac": MAC, "host_dev_name": tap,
                    })
                });
                let config = serde_json::json!({
                    "boot-source": {
                        "kernel_image_path": boot.kernel,
                        "initrd_path": boot.initramfs,
                        "boot_args": boot.command_line,
                    },
                    "drives": [],
                    "machine-config": { "vcpu_count": 1, "mem_size_mib": boot.ram_mib },
                    "network-interfaces": interfaces.as_slice(),
                });
                let argv = words(&["--no-api", "--config-file", boot.config]);
                (argv, Some(config.to_string()))
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

/// QEMU's modern virtio-net-device, with the host's kernel (vhost-net) as its device.
fn qemu_interface(tap: &str) -> [String; 8] {
    [
        // Otherwise ACPI announces the device, and the kernel has no ACPI.
        "-machine",
        "acpi=off",
        "-global",
        "virtio-mmio.force-legacy=false",
        "-netdev",
        &format!("tap,id=net,ifname={tap},script=no,downscript=no,vhost=on"),
        "-device",
        &format!("virtio-net-device,netdev=net,mac={MAC}"),
    ]
    .map(String::from)
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
