//! Configuration of a VM.

use super::disk::Disk;
use super::net::{Net, NetBackend};
use super::restore::{Restore, Source};
use crate::cpu::Wanted;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Configuration of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmmConfig {
    /// [`VERSION`](super::VERSION).
    pub version: u32,
    /// The VM's id; only for messages.
    pub id: String,
    /// vCPUs, 1 to 32.
    pub vcpus: u8,
    /// Guest RAM.
    pub memory: Memory,
    /// Kernel, initrd and kernel parameters.
    pub boot: Boot,
    /// Disks, `/dev/vda` first.
    #[serde(default)]
    pub disks: Vec<Disk>,
    /// The vsock device.
    #[serde(default)]
    pub vsock: Option<Vsock>,
    /// A virtio entropy device.
    #[serde(default)]
    pub rng: bool,
    /// COM1, if there is one.
    #[serde(default)]
    pub serial: Option<Serial>,
    /// Files of the fw_cfg device, which exists even without files.
    #[serde(default)]
    pub fw_cfg: Vec<FwCfgFile>,
    /// The control socket to listen on.
    #[serde(default)]
    pub control: Option<PathBuf>,
    /// File for the [`ExitRecord`](super::ExitRecord).
    #[serde(default)]
    pub exit_record: Option<PathBuf>,
    /// A memory balloon, which also takes back free pages that the guest reports.
    #[serde(default)]
    pub balloon: bool,
    /// RAM that a guest that boots may use, MiB: a second balloon withholds the rest. Of a restored
    /// VM this says only that it has the second balloon; without a number there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usable_memory_mib: Option<u32>,
    /// The part of the host's processor that a booting VM sees; `None` means all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_profile: Option<Wanted>,
    /// Files that the VMM inherits open and does not open by path. Paths of Unix sockets to which
    /// it connects are relative to its working directory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub handed: Vec<Handed>,
    /// Network interfaces, `eth0` first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nets: Vec<Net>,
    /// Folders of the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub folders: Vec<Folder>,
    /// Record what its threads do, and its exits, for [`VmmEvent::Activity`](super::VmmEvent).
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub record_activity: bool,
    /// Restores a captured VM. `boot` and `cpu_profile` are then not used.
    #[serde(default)]
    pub restore: Option<Restore>,
}

/// An open file that a VMM inherits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Handed {
    /// Its path in the configuration: of a file, or of a socket to listen on.
    pub name: PathBuf,
    /// Its descriptor's number.
    pub fd: i32,
}

impl VmmConfig {
    /// The numbers of all descriptors in the configuration.
    pub fn descriptors(&mut self) -> impl Iterator<Item = &mut i32> {
        let nets = self.nets.iter_mut().flat_map(|net| match &mut net.backend {
            NetBackend::Tap(numbers) => numbers.as_mut_slice(),
            NetBackend::Passt(Source::Fd(number)) => std::slice::from_mut(number),
            NetBackend::Passt(Source::Path(_)) | NetBackend::None => &mut [],
        });
        let restore = self.restore.iter_mut().flat_map(Restore::descriptors);
        let folders = self
            .folders
            .iter_mut()
            .filter_map(|folder| folder.server.as_mut());
        let handed = self.handed.iter_mut().map(|file| &mut file.fd);
        restore.chain(handed).chain(nets).chain(folders)
    }
}

/// A folder of the host, as a file system device (Virtio 1.3 §5.11).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Folder {
    /// By which the guest mounts it, 1 to 36 bytes.
    pub tag: String,
    /// Number of the inherited socket to its server ([`crate::files`]); without one the guest gets
    /// ENOTCONN.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<i32>,
}

/// Guest RAM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// Size in MiB; 64 or more.
    pub size_mib: u32,
    /// Size of the backing pages.
    #[serde(default)]
    pub pages: PageSize,
    /// Touch every page before the guest starts.
    #[serde(default)]
    pub prefault: bool,
}

/// Pages that back guest RAM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PageSize {
    /// 4 KiB.
    #[default]
    #[serde(rename = "4K")]
    Small,
    /// 2 MiB huge pages.
    #[serde(rename = "2M")]
    Huge2M,
    /// 1 GiB huge pages.
    #[serde(rename = "1G")]
    Huge1G,
}

/// Kernel, initrd and kernel parameters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Boot {
    /// An ELF kernel with a PVH note, or a bzImage.
    pub kernel: PathBuf,
    /// The initrd (first PVH module).
    #[serde(default)]
    pub initrd: Option<PathBuf>,
    /// Kernel parameters; the VMM appends `virtio_mmio.device=` parameters.
    #[serde(default)]
    pub command_line: String,
}

/// The vsock device. Host programs reach the guest's port N by connecting to `path` and sending
/// `CONNECT N\n` (answer `OK <port>\n`). A guest that connects to the host's port N reaches the
/// Unix socket `<path>_N`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vsock {
    /// The guest's context id, 3 or more.
    pub cid: u64,
    /// The Unix socket to listen on.
    pub path: PathBuf,
}

/// Output of COM1; with `Stdio`, stdin is its input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Serial {
    /// The VMM's own stdin and stdout.
    Stdio,
    /// Append to this file.
    File(PathBuf),
}

/// A file of the fw_cfg device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FwCfgFile {
    /// Name, at most 55 bytes: `opt/jiffy/config`.
    pub name: String,
    /// Contents.
    pub contents: FwCfgContents,
}

/// Contents of a fw_cfg file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FwCfgContents {
    /// This text.
    Text(String),
    /// The contents of this file at start.
    File(PathBuf),
}
