//! Builds `vmlinux`, `initramfs.cpio` and `meta.json` from an unpacked Debian kernel package and
//! files of the host.

use super::cpio::Archive;
use super::{ImageError, bzimage, module};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

/// Modules loaded at boot, in this order (dependencies come first): fw_cfg and KVM, devices for the
/// host and the data disk, and what the VMs' network needs (docs/network.md). Some kernels have
/// some of them built in.
pub const MODULES: &[&str] = &[
    "qemu_fw_cfg",
    "kvm-amd",
    "virtio_mmio",
    "virtio_console",
    "virtio_net",
    "virtio_blk",
    "tun",
    "xfs",
    "nf_tables",
    "nft_ct",
    "nft_chain_nat",
    "nft_nat",
    "nft_masq",
    "nft_reject_inet",
    "nft_fib_inet",
    "nft_connlimit",
    "nft_limit",
    "nf_conntrack_netlink",
];

/// Modules in `/lib/modules` that are loaded only if needed.
pub const OPTIONAL_MODULES: &[&str] = &["kvm-intel"];

/// A file or folder of the host for the initramfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Addition {
    /// Path on the host; links are followed.
    pub host: PathBuf,
    /// Absolute path in the machine.
    pub guest: String,
}

/// Programs of `lib/jiffy` that run in the machine. `jiffy-ssh` runs beside the user's ssh.
const PROGRAMS: [&str; 9] = [
    "jiffyd",
    "jiffy-disk",
    "jiffy-files",
    "jiffy-import",
    "jiffy-init",
    "jiffy-machine-agent",
    "jiffy-origins",
    "jiffy-pager",
    "jiffy-vmm",
];

/// The parts of an installation of Jiffy that the machine needs: its programs and the guests'
/// kernels and images.
pub fn installed(dist: &Path) -> Vec<Addition> {
    let programs = PROGRAMS.iter().map(|name| format!("lib/jiffy/{name}"));
    let others = [
        "bin/jiffy",
        "share/jiffy/initramfs.cpio",
        "share/jiffy/kernels",
        "share/jiffy/images",
    ];
    // `make build` makes them where `scripts/setup sched` was run.
    let optional = ["lib/jiffy/jiffy-sched", "lib/jiffy/jiffy-sched.bpf.o"];
    let optional = optional.into_iter().filter(|path| dist.join(path).exists());
    programs
        .chain(others.map(str::to_owned))
        .chain(optional.map(str::to_owned))
        .map(|path| Addition {
            host: dist.join(&path),
            guest: format!("/{path}"),
        })
        .collect()
}

/// Describes a built image; `meta.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Meta {
    /// Version of this format: 1.
    pub format: u32,
    /// Release of the kernel: `6.12.117+deb12-cloud-amd64`.
    pub kernel: String,
    /// Modules in load order.
    pub modules: Vec<String>,
}

/// Inputs of an image.
#[derive(Debug)]
pub struct Recipe {
    /// A Debian kernel package, unpacked: `boot/`, `lib/modules/`.
    pub kernel_package: PathBuf,
    /// A static busybox.
    pub busybox: PathBuf,
    /// The program for PID 1.
    pub init: PathBuf,
    /// All other files.
    pub additions: Vec<Addition>,
}

/// Builds all three files in `output` and replaces each atomically.
///
/// # Errors
///
/// If the package has no kernel or a module is missing in it, the kernel can't be unpacked, or a
/// file can't be read or written.
pub fn build(recipe: &Recipe, output: &Path) -> Result<Meta, ImageError> {
    let vmlinuz = vmlinuz(&recipe.kernel_package)?;
    let kernel = bzimage::elf_kernel(&read(&vmlinuz)?)?;
    let (initramfs, modules) = initramfs(recipe)?;
    let meta = Meta {
        format: 1,
        kernel: release(&vmlinuz).unwrap_or_default().into(),
        modules,
    };
    std::fs::create_dir_all(output).map_err(|error| ImageError::file(output, error))?;
    let description = serde_json::to_vec_pretty(&meta)
        .map_err(|error| ImageError::file(&output.join("meta.json"), error.into()))?;
    for (name, bytes) in [
        ("vmlinux", &kernel),
        ("initramfs.cpio", &initramfs),
        ("meta.json", &description),
    ] {
        let path = output.join(name);
        jiffy_sys::durable::replace(&path, bytes)
            .map_err(|error| ImageError::file(&path, error))?;
    }
    Ok(meta)
}

/// Builds the initramfs; also returns the modules that PID 1 loads, in order.
///
/// # Errors
///
/// If a module is missing or can't be unpacked, a file can't be read, or busybox does not run.
pub fn initramfs(recipe: &Recipe) -> Result<(Vec<u8>, Vec<String>), ImageError> {
    let modules_folder = modules_folder(&recipe.kernel_package)?;
    let modules = module::load_all(&modules_folder, MODULES)?;
    let spare: Vec<_> = module::load_all(&modules_folder, OPTIONAL_MODULES)?
        .into_iter()
        .filter(|module| OPTIONAL_MODULES.contains(&module.name.as_str()))
        .collect();

    let mut tree = Tree::new();
    for folder in [
        "bin",
        "dev",
        "etc",
        "etc/jiffy",
        "lib",
        "lib/modules",
        "proc",
        "root",
        "run",
        "sbin",
        "sys",
        "tmp",
        "usr",
        "usr/bin",
        "usr/sbin",
        "var",
        "var/lib",
    ] {
        tree.folder(folder)?;
    }
    tree.archive
        .character_device("dev/console", 0o600, 5, 1)
        .map_err(|error| ImageError::file(Path::new("dev/console"), error))?;
    tree.file("init", 0o755, &read(&recipe.init)?)?;
    tree.busybox(&recipe.busybox)?;
    tree.file(
        "etc/passwd",
        0o644,
        b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    )?;
    tree.file("etc/group", 0o644, b"root:x:0:\nnogroup:x:65534:\n")?;
    tree.file("etc/hosts", 0o644, b"127.0.0.1 localhost\n::1 localhost\n")?;
    let mut order = String::new();
    for module in modules.iter().chain(&spare) {
        let path = format!("lib/modules/{}.ko", module.name);
        tree.file(&path, 0o644, &module.contents)?;
        if !OPTIONAL_MODULES.contains(&module.name.as_str()) {
            order.push_str(&format!("/{path}\n"));
        }
    }
    tree.file("etc/jiffy/modules", 0o644, order.as_bytes())?;
    for addition in &recipe.additions {
        tree.add(addition)?;
    }
    let names = modules.into_iter().map(|module| module.name).collect();
    Ok((tree.finish()?, names))
}

/// An archive with additions only, to append to an existing initramfs.
///
/// # Errors
///
/// If a file can't be read, or has 4 GiB or more.
pub fn additions_archive(additions: &[Addition]) -> Result<Vec<u8>, ImageError> {
    let mut tree = Tree::new();
    for addition in additions {
        tree.add(addition)?;
    }
    tree.finish()
}

/// The path of the compressed kernel in an unpacked package.
///
/// # Errors
///
/// If the folder `boot` can't be read, or has no kernel.
pub fn vmlinuz(package: &Path) -> Result<PathBuf, ImageError> {
    let boot = package.join("boot");
    let entries = std::fs::read_dir(&boot).map_err(|error| ImageError::file(&boot, error))?;
    let is_kernel = |path: &PathBuf| release(path).is_some();
    let found = entries.flatten().map(|entry| entry.path()).find(is_kernel);
    found.ok_or_else(|| ImageError::file(&boot, io::Error::other("there is no vmlinuz-* in it")))
}

/// The release in a file name: `6.12.117+deb12-cloud-amd64` of
/// `boot/vmlinuz-6.12.117+deb12-cloud-amd64`.
fn release(vmlinuz: &Path) -> Option<&str> {
    vmlinuz.file_name()?.to_str()?.strip_prefix("vmlinuz-")
}

/// The folder of modules in an unpacked package.
fn modules_folder(package: &Path) -> Result<PathBuf, ImageError> {
    let vmlinuz = vmlinuz(package)?;
    let release = release(&vmlinuz).unwrap_or_default();
    let folders = ["lib/modules", "usr/lib/modules"].map(|place| package.join(place).join(release));
    let found = folders.iter().find(|folder| folder.is_dir());
    Ok(found.unwrap_or(&folders[0]).clone())
}

fn read(path: &Path) -> Result<Vec<u8>, ImageError> {
    std::fs::read(path).map_err(|error| ImageError::file(path, error))
}

/// An archive that contains each folder once.
struct Tree {
    archive: Archive<Vec<u8>>,
    folders: BTreeSet<String>,
}

impl Tree {
    fn new() -> Tree {
        Tree {
            archive: Archive::new(Vec::new()),
            folders: BTreeSet::new(),
        }
    }

    fn folder(&mut self, path: &str) -> Result<(), ImageError> {
        let path = path.trim_matches('/');
        if path.is_empty() || !self.folders.insert(path.into()) {
            return Ok(());
        }
        self.parents(path)?;
        let mode = if path == "tmp" { 0o1777 } else { 0o755 };
        self.archive
            .folder(path, mode)
            .map_err(|error| ImageError::file(Path::new(path), error))
    }

    fn parents(&mut self, path: &str) -> Result<(), ImageError> {
        match path.trim_matches('/').rsplit_once('/') {
            Some((parent, _)) => self.folder(parent),
            None => Ok(()),
        }
    }

    fn file(&mut self, path: &str, mode: u32, contents: &[u8]) -> Result<(), ImageError> {
        self.parents(path)?;
        self.archive
            .file(path, mode, contents)
            .map_err(|error| ImageError::file(Path::new(path), error))
    }

    fn symlink(&mut self, path: &str, target: &str) -> Result<(), ImageError> {
        self.parents(path)?;
        self.archive
            .symlink(path, target)
            .map_err(|error| ImageError::file(Path::new(path), error))
    }

    /// Adds busybox and a link for each of its programs.
    fn busybox(&mut self, busybox: &Path) -> Result<(), ImageError> {
        self.file("bin/busybox", 0o755, &read(busybox)?)?;
        let list = std::process::Command::new(busybox)
            .arg("--list-full")
            .output()
            .map_err(|error| ImageError::file(busybox, error))?;
        for path in String::from_utf8_lossy(&list.stdout).lines() {
            if path != "bin/busybox" && path != "linuxrc" {
                self.symlink(path, "/bin/busybox")?;
            }
        }
        Ok(())
    }

    fn add(&mut self, addition: &Addition) -> Result<(), ImageError> {
        use std::os::unix::fs::PermissionsExt;
        let host = &addition.host;
        let metadata = std::fs::metadata(host).map_err(|error| ImageError::file(host, error))?;
        if metadata.is_dir() {
            self.folder(&addition.guest)?;
            let mut names: Vec<_> = std::fs::read_dir(host)
                .and_then(|entries| {
                    entries
                        .map(|entry| entry.map(|entry| entry.file_name()))
                        .collect::<io::Result<Vec<_>>>()
                })
                .map_err(|error| ImageError::file(host, error))?;
            names.sort();
            for name in names {
                let guest = format!("{}/{}", addition.guest, name.to_string_lossy());
                self.add(&Addition {
                    host: host.join(&name),
                    guest,
                })?;
            }
            return Ok(());
        }
        let mode = metadata.permissions().mode() & 0o777;
        self.file(&addition.guest, mode, &read(host)?)
    }

    fn finish(self) -> Result<Vec<u8>, ImageError> {
        self.archive
            .finish()
            .map_err(|error| ImageError::file(Path::new("initramfs"), error))
    }
}
