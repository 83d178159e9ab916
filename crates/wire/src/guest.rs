//! The configuration that a guest reads from fw_cfg, as JSON.
//!
//! On Linux it is the file `/sys/firmware/qemu_fw_cfg/by_name/opt/jiffy/config/raw`. Other systems
//! read it through the fw_cfg ports (QEMU, docs/specs/fw_cfg.rst).

use crate::agent::Command;
use crate::mac::Mac;
use alloc::{collections::BTreeMap, string::String, vec::Vec};
use serde::{Deserialize, Serialize};

/// fw_cfg file with the configuration.
pub const FW_CFG_NAME: &str = "opt/jiffy/config";
/// fw_cfg file with the [`Generation`] of a restored guest.
pub const GENERATION_NAME: &str = "opt/jiffy/generation";
/// Version that is written, and the only one that is read.
pub const VERSION: u32 = 1;
/// Largest configuration, bytes of JSON.
pub const MAX_CONFIG: usize = 1024 * 1024;

/// The whole configuration of a guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestConfig {
    /// [`VERSION`].
    pub version: u32,
    /// The VM's id, which the agent's hello repeats.
    pub vm_id: String,
    /// Host name; `None` keeps the kernel's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// The root file system.
    #[serde(default)]
    pub root: Root,
    /// Further disks to mount, in this order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskMount>,
    /// Folders of the host, mounted after the disks, in this order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub folders: Vec<FolderMount>,
    /// Network interfaces besides loopback, which is always brought up.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub interfaces: Vec<Interface>,
    /// Name servers for /etc/resolv.conf, which is written unless this is empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub name_servers: Vec<String>,
    /// Search domains for /etc/resolv.conf.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    /// Further lines of /etc/hosts. If there are any, or an interface, init writes the whole file,
    /// whatever the image contains.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostEntry>,
    /// Sysctls, such as `net.ipv4.ip_forward` = `1`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sysctls: BTreeMap<String, String>,
    /// Block devices or files to swap to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub swap: Vec<String>,
    /// Files to read before the agent is ready, so that they are in memory when they are needed:
    /// for a guest that is captured without dropping its caches. A program without a slash is
    /// looked up in PATH; its interpreter or loader is read as well.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub preload: Vec<String>,
    /// Programs that run before the first capture are the host's own rehearsal: they have read
    /// nothing that clones must not share.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub rehearsal: bool,
    /// Long-running programs beside the main command.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<Service>,
    /// Executes this program as PID 1 in the prepared root (`/sbin/init` and its arguments). The
    /// agent continues as a separate process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handover: Option<Vec<String>>,
    /// The first command, started as soon as the root is mounted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub main: Option<Command>,
    /// Power off when the first command has ended and its output was delivered.
    #[serde(default)]
    pub power_off_after_main: bool,
    /// Memory that programs may use, MiB, if that is less than RAM: init starts none before a balloon
    /// has taken the rest, so that no program sees more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u32>,
    /// Report the kernel's milestones (from its log) on the timeline.
    #[serde(default)]
    pub timeline: bool,
}

/// Source of the root file system.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
pub enum Root {
    /// The initramfs; there is no other root.
    #[default]
    Initramfs,
    /// A read-only image below an overlay, whose upper layer is in memory (tmpfs) or, with `upper`,
    /// on a second disk.
    Overlay {
        /// Such as `/dev/vda`.
        device: String,
        /// `erofs`, `ext4`, …
        fstype: String,
        /// A writable, formatted disk for the upper layer: device and file system type.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        upper: Option<(String, String)>,
    },
    /// A disk that is mounted as the root.
    Disk {
        /// Such as `/dev/vda`.
        device: String,
        /// `ext4`, …
        fstype: String,
        /// Mount it read-only.
        #[serde(default)]
        read_only: bool,
    },
}

/// A disk to mount or, without a mount point, to wait for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskMount {
    /// Such as `/dev/vdb`.
    pub device: String,
    /// File system type.
    pub fstype: String,
    /// Absolute path in the root; created if it is missing.
    pub mount_point: String,
    /// Mount it read-only.
    #[serde(default)]
    pub read_only: bool,
}

/// A folder of the host to mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FolderMount {
    /// Tag of its file system device (Virtio 1.3 §5.11.4).
    pub tag: String,
    /// Absolute path in the root; created if it is missing.
    pub mount_point: String,
    /// Mount it read-only.
    #[serde(default)]
    pub read_only: bool,
}

/// A line of /etc/hosts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostEntry {
    /// An IP address.
    pub address: String,
    /// Its names, at least one.
    pub names: Vec<String>,
}

/// Longest host or domain name, bytes (RFC 1035 §2.3.4).
const MAX_NAME: usize = 253;

/// Whether a guest accepts this as a host or domain name: letters, digits, `-`, `.`, `_`. Such a
/// name is one word of a line in /etc/hosts and /etc/resolv.conf.
pub fn is_host_name(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    (1..=MAX_NAME).contains(&text.len()) && text.bytes().all(plain)
}

/// A permanent neighbour entry, which is never resolved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Neighbour {
    /// An IP address.
    pub address: String,
    /// Its MAC address.
    pub mac: Mac,
}

/// A network interface.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Interface {
    /// Such as `eth0`.
    pub name: String,
    /// Addresses with prefix length: `10.0.0.2/24`, `fd00::2/64`.
    pub addresses: Vec<String>,
    /// Default gateways.
    #[serde(default)]
    pub gateways: Vec<String>,
    /// MTU in bytes; `None` keeps the device's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// MAC address of its device. A restored guest sets it; in a guest that boots it is set
    /// already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// Permanent neighbour entries.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub neighbours: Vec<Neighbour>,
}

/// A long-running program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Service {
    /// Name for the log.
    pub name: String,
    /// The program; its `stdin` and `tty` are ignored.
    pub command: Command,
    /// When it is restarted.
    #[serde(default)]
    pub restart: Restart,
}

/// When a service is restarted. The delay doubles from 100 ms to 10 s.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Restart {
    /// Never.
    #[default]
    Never,
    /// If it ended by a signal or with a status other than 0.
    OnFailure,
    /// Always.
    Always,
}

/// The new identity of a restored guest, which it must take on before its workload runs. Two guests
/// from one memory then share nothing that must differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Generation {
    /// [`VERSION`].
    pub version: u32,
    /// A UUID, `8-4-4-4-12`. It differs from the one the guest knows exactly if the guest was
    /// restored meanwhile. It becomes the boot id, unless no program of the guest has run that
    /// could have read the old one; the kernel then generates its own. Without dashes it becomes
    /// the machine id.
    pub id: String,
    /// 64 bytes from the host's random source, as 128 hexadecimal digits.
    pub seed: String,
    /// The host's CLOCK_REALTIME when the vCPUs start, nanoseconds since 1970.
    pub realtime_ns: u64,
    /// Start the first command of the new configuration, in place of one that may run.
    pub start_main: bool,
}
