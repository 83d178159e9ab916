//! The configuration a guest reads from fw_cfg, as JSON.
//!
//! In Linux it is the file
//! `/sys/firmware/qemu_fw_cfg/by_name/opt/jiffy/config/raw`; any other system
//! reads it through the fw_cfg ports (QEMU, docs/specs/fw_cfg.rst).

use crate::agent::Command;
use crate::mac::Mac;
use alloc::{collections::BTreeMap, string::String, vec::Vec};
use serde::{Deserialize, Serialize};

/// The fw_cfg file that holds the configuration.
pub const FW_CFG_NAME: &str = "opt/jiffy/config";
/// The fw_cfg file that holds the [`Generation`], in guests that were restored.
pub const GENERATION_NAME: &str = "opt/jiffy/generation";
/// The version written and the only one read.
pub const VERSION: u32 = 1;
/// The largest configuration, in bytes of JSON.
pub const MAX_CONFIG: usize = 1024 * 1024;

/// Everything a guest is told before it starts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestConfig {
    /// [`VERSION`].
    pub version: u32,
    /// The VM's id, sent back in the agent's hello.
    pub vm_id: String,
    /// Host name; none leaves the kernel's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// Where `/` comes from.
    #[serde(default)]
    pub root: Root,
    /// Further disks to mount, in this order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskMount>,
    /// Network interfaces besides loopback, which is always brought up.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub interfaces: Vec<Interface>,
    /// Name servers, written to /etc/resolv.conf when not empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub name_servers: Vec<String>,
    /// Domains in which short names are looked up, for /etc/resolv.conf.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    /// Further lines of /etc/hosts. With any of these, or an interface, the whole file is
    /// init's, whatever the image has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostEntry>,
    /// `net.ipv4.ip_forward` = `1` and the like.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sysctls: BTreeMap<String, String>,
    /// Block devices or files to swap on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub swap: Vec<String>,
    /// Files to read before the agent is ready, so that whoever needs them
    /// later finds them in memory: for a guest that is to be captured without
    /// its caches being dropped. A program without a slash is looked up in
    /// PATH; the interpreter or loader a program names is read with it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub preload: Vec<String>,
    /// What runs before the first capture is the host's own rehearsal: it has
    /// looked at nothing that clones must not share.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub rehearsal: bool,
    /// Long-running programs beside the main command.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<Service>,
    /// Exec this program as PID 1 in the prepared root (`/sbin/init` and its
    /// arguments); the agent goes on as a process of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handover: Option<Vec<String>>,
    /// The first command: started as soon as the root is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub main: Option<Command>,
    /// Power off when the first command has ended and its output is delivered.
    #[serde(default)]
    pub power_off_after_main: bool,
    /// Report the kernel's milestones (from its log) on the timeline.
    #[serde(default)]
    pub timeline: bool,
}

/// Where the root file system comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
pub enum Root {
    /// The initramfs itself: no other root.
    #[default]
    Initramfs,
    /// A read-only image under an overlay kept in memory (tmpfs), or on a
    /// second disk when `upper` names one.
    Overlay {
        /// `/dev/vda` and the like.
        device: String,
        /// `erofs`, `ext4`, …
        fstype: String,
        /// A writable, formatted disk for the upper layer: `(device, fstype)`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        upper: Option<(String, String)>,
    },
    /// A disk mounted as it is.
    Disk {
        /// `/dev/vda` and the like.
        device: String,
        /// `ext4`, …
        fstype: String,
        /// Mount it read-only.
        #[serde(default)]
        read_only: bool,
    },
}

/// A disk to mount, or (no mount point) only to wait for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskMount {
    /// `/dev/vdb` and the like.
    pub device: String,
    /// File system type.
    pub fstype: String,
    /// Absolute path in the root; made when missing.
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
    /// Its names, one at least.
    pub names: Vec<String>,
}

/// Longest name of a host or domain, bytes (RFC 1035 §2.3.4).
const MAX_NAME: usize = 253;

/// Whether a guest takes this as the name of a host or domain: letters, digits, `-`, `.`, `_`.
/// Such a name is one word of a line in /etc/hosts and /etc/resolv.conf.
pub fn is_host_name(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    (1..=MAX_NAME).contains(&text.len()) && text.bytes().all(plain)
}

/// A neighbour whose address is known, and never asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Neighbour {
    /// An IP address.
    pub address: String,
    /// Where it is.
    pub mac: Mac,
}

/// One network interface.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Interface {
    /// `eth0` and the like.
    pub name: String,
    /// Addresses with prefix length: `10.0.0.2/24`, `fd00::2/64`.
    pub addresses: Vec<String>,
    /// Default routers.
    #[serde(default)]
    pub gateways: Vec<String>,
    /// MTU in bytes; none leaves the device's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// The MAC address it has: that of its device. A guest that was restored takes it on;
    /// in one that boots it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// Neighbours that are known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub neighbours: Vec<Neighbour>,
}

/// A long-running program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Service {
    /// A name for the log.
    pub name: String,
    /// What to run; its `stdin` and `tty` are ignored.
    pub command: Command,
    /// When to start it again.
    #[serde(default)]
    pub restart: Restart,
}

/// When a service is started again. The wait doubles from 100 ms to 10 s.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Restart {
    /// Never.
    #[default]
    Never,
    /// When it ended by a signal or with a status other than 0.
    OnFailure,
    /// Always.
    Always,
}

/// What a guest must become before its workload may run again, after it was
/// restored: two guests from one memory share nothing that must differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Generation {
    /// [`VERSION`].
    pub version: u32,
    /// A UUID, `8-4-4-4-12`. It differs from the one the guest knows exactly
    /// if the guest was restored in between. It becomes the boot id, unless
    /// no program of the guest has run yet, who could have read the old one:
    /// then the kernel makes up its own. Without its dashes it becomes the
    /// machine id.
    pub id: String,
    /// 64 bytes from the host's random source, as 128 hexadecimal digits.
    pub seed: String,
    /// The host's CLOCK_REALTIME as the vCPUs start, nanoseconds since 1970.
    pub realtime_ns: u64,
    /// Start the first command of the configuration, which is a new one too,
    /// in place of one that may run.
    pub start_main: bool,
}
