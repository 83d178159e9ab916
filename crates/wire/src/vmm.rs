//! Configuration, commands and events of `jiffy-vmm`.
//!
//! The node writes a [`VmmConfig`] as JSON into the VM's folder and starts `jiffy-vmm run --config
//! FILE [--events-fd N]`. The VMM writes events to the inherited descriptor, one JSON object per
//! line. The node sends commands to the Unix socket `control`, one JSON object per line, and each
//! is answered with one line. At its end the VMM writes an [`ExitRecord`] to `exit.json`.
//!
//! A spare VMM, `jiffy-vmm run --config PLACEHOLDER --spare-fd N`, does everything that needs no
//! configuration and then waits on that socket for a [`TakeSpare`].
//!
//! With [`VmmConfig::restore`] the VM is not booted but restored from a captured one
//! ([`ControlRequest::Capture`]).

use crate::cpu::{Profile, Wanted};
use crate::mac::Mac;
use serde::{Deserialize, Serialize, Serializer};
use std::num::NonZeroU64;
use std::path::PathBuf;

/// Version that is written, and the only one that is read.
pub const VERSION: u32 = 1;

/// Makes a spare VMM this VM. One message of JSON with descriptors: standard output and error,
/// events, then those that [`Source::Fd`] refers to by the numbers that they would have if
/// inherited, from 4 on ([`TakeSpare::FIRST_SOURCE`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TakeSpare {
    /// Path of the configuration, as long as the placeholder on the command line, which it
    /// replaces. Its folder becomes the working directory.
    pub config: PathBuf,
    /// Number of the open configuration file among the descriptors, for a VMM that can't open
    /// files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_fd: Option<i32>,
}

impl TakeSpare {
    /// Number of the first descriptor after those of output and events.
    pub const FIRST_SOURCE: i32 = 4;
}

/// Configuration of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmmConfig {
    /// [`VERSION`].
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
    /// File for the [`ExitRecord`].
    #[serde(default)]
    pub exit_record: Option<PathBuf>,
    /// A memory balloon, which also takes back free pages that the guest reports.
    #[serde(default)]
    pub balloon: bool,
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
        let handed = self.handed.iter_mut().map(|file| &mut file.fd);
        restore.chain(handed).chain(nets)
    }
}

/// A captured VM to restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Restore {
    /// Captured state of vCPUs, interrupt controllers and devices.
    pub state: Source,
    /// Its RAM.
    pub memory: SavedMemory,
    /// Ranges of RAM that the VM is expected to write first, as its parent reported with
    /// [`Written`]. The VMM gives them pages of their own before the VM runs.
    ///
    /// [`Written`]: ControlRequest::Written
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prefault: Vec<Extent>,
    /// The guest's new identity. Without one it keeps the old identity, which is right only for a
    /// guest without `jiffy-init`.
    #[serde(default)]
    pub generation: Option<NewGeneration>,
    /// Prepare everything, but do not enter the guest before [`ControlRequest::Begin`], which comes
    /// with the VM's configuration.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hold: bool,
}

impl Restore {
    /// The numbers of all descriptors in it.
    pub fn descriptors(&mut self) -> impl Iterator<Item = &mut i32> {
        let (layers, layout) = match &mut self.memory {
            SavedMemory::Mapped { layers, layout } => (layers.as_mut_slice(), layout.as_mut()),
            SavedMemory::Paged { .. } => (&mut [][..], None),
        };
        let sources = layers.iter_mut().chain(layout).chain([&mut self.state]);
        sources.filter_map(|source| match source {
            Source::Fd(number) => Some(number),
            Source::Path(_) => None,
        })
    }

    /// From the descriptors of [`ControlResponse::Captured`], by number, which the VMM must
    /// inherit. `None` if there are too few.
    pub fn of_captured(fds: &[i32]) -> Option<Restore> {
        let [state, layout, layers @ ..] = fds else {
            return None;
        };
        Some(Restore {
            state: Source::Fd(*state),
            memory: SavedMemory::Mapped {
                layers: layers.iter().copied().map(Source::Fd).collect(),
                layout: Some(Source::Fd(*layout)),
            },
            prefault: Vec::new(),
            generation: None,
            hold: false,
        })
    }
}

/// A file, by path or as an inherited descriptor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// By path.
    Path(PathBuf),
    /// By number.
    Fd(i32),
}

/// Location of captured RAM. Nothing is read in advance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SavedMemory {
    /// Sparse files as long as RAM, mapped privately; the VM never writes to them. A later layer
    /// covers earlier ones where `layout` says so. Without a layout there is one layer, which is
    /// complete.
    Mapped {
        /// The lowest first.
        layers: Vec<Source>,
        /// A [`MemoryLayout`] as JSON.
        #[serde(default)]
        layout: Option<Source>,
    },
    /// A pager serves page faults: the VMM connects to its socket and makes the handshake of
    /// [`crate::pager`].
    Paged {
        /// Unix socket on which the pager listens for this VM.
        socket: PathBuf,
        /// Ask the pager for the part of the image's working set that it has in memory.
        #[serde(default)]
        working_set: bool,
    },
}

/// Which layer holds which part of RAM. Offsets count RAM without the hole below 4 GiB, and are the
/// same in every file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryLayout {
    /// Bytes of RAM, and of every layer.
    pub size: u64,
    /// Ranges that each layer except the lowest (which is complete) covers, lowest layer first;
    /// sorted, in whole pages, without overlap within a layer.
    pub covers: Vec<Vec<Extent>>,
}

/// A range of RAM. Written as `[offset, length]`, because a VMM may read hundreds before its guest
/// runs. A map with the field names is accepted as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

impl Serialize for Extent {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (self.offset, self.length).serialize(serializer)
    }
}

/// The new identity of a restored guest. The VMM adds a seed and the time, and passes it to the
/// guest as [`crate::guest::GENERATION_NAME`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewGeneration {
    /// A UUID that no other VM has had.
    pub id: String,
    /// Start the first command of the new configuration, in place of one that may run already.
    pub start_main: bool,
    /// Time limit for the guest to take it on, milliseconds; after it the VM ends.
    pub deadline_ms: u32,
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

/// A disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// A raw file or block device.
    pub path: PathBuf,
    /// Refuse writes.
    #[serde(default)]
    pub read_only: bool,
    /// Bypass the host's page cache (O_DIRECT).
    #[serde(default)]
    pub direct: bool,
    /// Serial number that the guest reads, at most 20 bytes.
    #[serde(default)]
    pub serial: Option<String>,
    /// Limit on the guest's use.
    #[serde(default, skip_serializing_if = "DiskLimit::is_none")]
    pub limit: DiskLimit,
    /// The file is a cache that is filled on demand. Only for read-only disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residency: Option<Residency>,
    /// Record the guest's reads, for [`ControlRequest::Reads`]. Not for a disk with a residency,
    /// whose pager records them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub note_reads: bool,
}

/// How missing bytes of a disk are put into its file ([`crate::disk`]). The disk's `path` is then
/// the cache's `contents`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residency {
    /// The map of present chunks: the cache's `present`.
    pub present: PathBuf,
    /// Socket on which the pager listens for VMMs with this disk.
    pub pager_socket: PathBuf,
}

/// Limits on a guest's use of a disk. Up to one second's worth can be used in a burst.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskLimit {
    /// Bytes read and written per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<NonZeroU64>,
    /// Requests per second: reads, writes, flushes, discards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operations_per_second: Option<NonZeroU64>,
}

impl DiskLimit {
    /// Whether there is no limit.
    pub fn is_none(&self) -> bool {
        *self == DiskLimit::default()
    }
}

/// A network interface of the guest. It has a pair of queues for each descriptor of a TAP
/// interface, otherwise one pair.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Net {
    /// Its MAC address. Frames of the guest with another source address are dropped. A restored
    /// guest must set it ([`crate::guest::Interface::mac`]).
    pub mac: Mac,
    /// Largest packet without Ethernet header, bytes: 68 or more. `None` keeps the driver's default
    /// of 1500.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// Where its frames go.
    #[serde(default)]
    pub backend: NetBackend,
    /// Limit on what the guest receives.
    #[serde(default, skip_serializing_if = "NetLimit::is_none")]
    pub receive_limit: NetLimit,
    /// Limit on what the guest sends.
    #[serde(default, skip_serializing_if = "NetLimit::is_none")]
    pub send_limit: NetLimit,
}

/// Limits of a network interface in one direction. After a pause, `burst` or one second's worth
/// passes at once. Segments of a connection that the host passes in one piece count as one packet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetLimit {
    /// Bytes of frames per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<NonZeroU64>,
    /// Packets per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packets_per_second: Option<NonZeroU64>,
    /// Bytes in a burst.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_burst: Option<NonZeroU64>,
    /// Packets in a burst.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packets_burst: Option<NonZeroU64>,
}

impl NetLimit {
    /// Whether there is no limit.
    pub fn is_none(&self) -> bool {
        *self == NetLimit::default()
    }
}

/// Peer of a network interface.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NetBackend {
    /// None: the link is down.
    #[default]
    None,
    /// Queues of a TAP interface: inherited descriptors, created with `IFF_TAP | IFF_NO_PI |
    /// IFF_VNET_HDR`, and with `IFF_MULTI_QUEUE` if there are several.
    Tap(Vec<i32>),
    /// passt: its Unix socket (`passt --socket`), or a connection to it.
    Passt(Source),
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

/// Event of a VMM, one per line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmmEvent {
    /// A step of the VMM, in host CLOCK_MONOTONIC nanoseconds.
    Span {
        /// One of [`crate::timeline::names`].
        name: String,
        /// Start.
        start_ns: u64,
        /// End.
        end_ns: u64,
        /// A remark.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        detail: Option<String>,
    },
    /// The guest wrote `value` to the trace port.
    Mark {
        /// The byte.
        value: u8,
        /// Time, host CLOCK_MONOTONIC nanoseconds.
        at_ns: u64,
    },
    /// The VMM ends; the same record as in `exit.json`.
    Exited(ExitRecord),
}

/// How a VM ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// The kind of end.
    pub reason: ExitReason,
    /// One sentence for the user.
    pub message: String,
    /// A hint for the user, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// Kind of a VM's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ExitReason {
    /// The guest powered off or reset.
    Shutdown,
    /// Stopped by the control socket or SIGTERM.
    Stopped,
    /// The guest crashed (triple fault outside an orderly reset, KVM_EXIT_INTERNAL_ERROR).
    GuestFault,
    /// The VM could not be built: bad kernel, no memory, no KVM.
    StartFailed,
    /// An error in the VMM or the host while it ran.
    HostError,
}

/// A command on the control socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlRequest {
    /// Whether the VM runs. Answered with `Status`.
    Status,
    /// Stop all vCPUs; they keep their state.
    Pause,
    /// Resume the vCPUs.
    Resume,
    /// Begin a VM that is held ([`Restore::hold`]). The VMM reads its configuration again, from the
    /// file with which it was started, and takes fw_cfg files and generation from it; all else
    /// stays. If the VM is paused as well, it enters the guest when it is resumed.
    Begin,
    /// End the VM at once. Answered before it ends.
    Stop,
    /// KVM's counters. Answered with `Stats`.
    Stats,
    /// Pause, save the state, freeze RAM. Answered with `Captured`, which carries descriptors of
    /// the state, the layout and the layers of RAM. Their contents never change, whatever the VM
    /// does later.
    Capture {
        /// Resume the VM afterwards; otherwise it stays paused.
        resume: bool,
    },
    /// Pages that the VM has written since the last capture or its restore. Answered with
    /// `Written`.
    Written,
    /// The guest's processor at the last capture. Answered with `CpuProfile`.
    CpuProfile,
    /// The guest's reads of the first disk whose reads are recorded. Answered with `Reads`.
    Reads,
    /// Set the memory that the guest should give back. Answered with `Balloon`.
    SetBalloon {
        /// Target size of the balloon, MiB.
        target_mib: u32,
    },
    /// Size of the balloon, and the guest's statistics. Answered with `Balloon`.
    Balloon,
    /// Replace the limits of all disks and network interfaces, each in the order of the
    /// configuration. Requests that wait for a previous limit are checked against the new one.
    SetLimits {
        /// Of each disk.
        disks: Vec<DiskLimit>,
        /// Of each network interface, in each direction.
        nets: Vec<NetLimit>,
    },
}

/// Answer on the control socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlResponse {
    /// Done.
    Ok,
    /// State of the vCPUs.
    Status {
        /// The VM's id.
        id: String,
        /// The VMM's process id.
        pid: u32,
        /// True while paused.
        paused: bool,
    },
    /// Counters by KVM's names (`exits`, `io_exits`, `mmio_exits`, `halt_exits`, …), summed over
    /// vCPUs. For each network interface `net0_received_frames`, `net0_received_bytes`,
    /// `net0_received_dropped`, the same with `sent` for what the guest sent, and
    /// `net0_sent_spoofed`.
    Stats(std::collections::BTreeMap<String, u64>),
    /// The VM was captured. Attached by `SCM_RIGHTS`: the state, the layout (JSON), then `layers`
    /// files.
    Captured {
        /// Number of layers of RAM.
        layers: u32,
        /// Pause of the vCPUs (until now, if they are still paused), nanoseconds.
        pause_ns: u64,
        /// Bytes copied because they were written since the last capture.
        copied_bytes: u64,
    },
    /// Ranges of RAM, sorted.
    Written(Vec<Extent>),
    /// The guest's processor.
    CpuProfile(Box<Profile>),
    /// Ranges of a disk.
    Reads(ReadUnits),
    /// The balloon.
    Balloon(BalloonStatus),
    /// It failed, for this reason.
    Error(String),
}

/// Ranges of a disk that were read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadUnits {
    /// Size of a unit, bytes.
    pub unit: u32,
    /// First unit and number of units of each range, in the order of the first read.
    pub rows: Vec<(u32, u32)>,
}

/// The balloon, and the guest's memory statistics.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonStatus {
    /// Target size, MiB.
    pub target_mib: u32,
    /// Current size, MiB.
    pub actual_mib: u32,
    /// Bytes returned by free page reporting so far.
    pub reported_bytes: u64,
    /// The guest's statistics by name (Virtio 1.3 §5.5.6.4), bytes or counts.
    pub stats: std::collections::BTreeMap<String, u64>,
}

/// Result of `jiffy-vmm probe` about the host's KVM, as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvmProbe {
    /// The verdict.
    pub kind: KvmKind,
    /// The findings, as one sentence.
    pub detail: String,
    /// Picoseconds per iteration of the ring-0 loop.
    pub ring0_ps_per_iteration: Option<u64>,
    /// Whether `syscall` in ring 3 entered ring 0.
    pub syscall_enters_ring0: Option<bool>,
    /// Duration of the whole probe, microseconds.
    pub took_us: u64,
}

/// Kind of a host's KVM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvmKind {
    /// Guest kernel code runs on the processor.
    Real,
    /// Guest kernel code is emulated in software; ordinary guests crash.
    Emulated,
    /// There is no KVM, or it can't be opened.
    None,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_extent_is_read_in_its_current_and_old_form() {
        let range = Extent {
            offset: 8192,
            length: 4096,
        };
        let text = serde_json::to_string(&range).unwrap();
        assert_eq!(text, "[8192,4096]");
        for text in [&*text, r#"{"offset":8192,"length":4096}"#] {
            assert_eq!(serde_json::from_str::<Extent>(text).unwrap(), range);
        }
        assert!(serde_json::from_str::<Extent>("[8192]").is_err());
    }

    #[test]
    fn a_network_interface_has_defaults_and_refers_to_descriptors() {
        let text = r#"{"version":1,"id":"a","vcpus":1,"memory":{"size_mib":64},
            "boot":{"kernel":"/k"},"nets":[
            {"mac":"02:4a:46:00:00:01","mtu":1400,"backend":{"tap":[5,6]},
             "send_limit":{"bytes_per_second":1000000,"packets_burst":10}},
            {"mac":"02:4a:46:00:00:02","backend":{"passt":{"fd":7}}},
            {"mac":"02:4a:46:00:00:03","backend":{"passt":{"path":"/s"}}},
            {"mac":"02:4a:46:00:00:04"}]}"#;
        let mut config: VmmConfig = serde_json::from_str(text).unwrap();
        assert_eq!(config.nets[3].backend, NetBackend::None);
        assert_eq!((config.nets[0].mtu, config.nets[1].mtu), (Some(1400), None));
        assert!(config.nets[0].receive_limit.is_none() && config.nets[1].send_limit.is_none());
        assert_eq!(config.nets[0].send_limit.packets_burst, NonZeroU64::new(10));
        config.restore = Restore::of_captured(&[8, 9, 4]);
        let numbers: Vec<i32> = config.descriptors().map(|number| *number).collect();
        assert_eq!(numbers, [4, 9, 8, 5, 6, 7]);
        let written = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<VmmConfig>(&written).unwrap(), config);
        for bad in [
            r#"{"mac":"02:4a:46:00:00"}"#,
            r#"{"mac":"02:4a:46:00:00:01","mtu":65536}"#,
            r#"{"mac":"02:4a:46:00:00:01","queues":2}"#,
            r#"{"mac":"02:4a:46:00:00:01","backend":"tap"}"#,
            r#"{"backend":"none"}"#,
        ] {
            assert!(serde_json::from_str::<Net>(bad).is_err(), "{bad}");
        }
    }
}
