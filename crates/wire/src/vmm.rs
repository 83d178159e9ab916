//! Configuration, commands and events of `jiffy-vmm`.
//!
//! The node writes a [`VmmConfig`] as JSON into the VM's folder and starts
//! `jiffy-vmm run --config FILE [--events-fd N]`. Events come back as one JSON
//! object a line on the inherited descriptor; commands go, one JSON object a
//! line, to the Unix socket `control`, which answers each with one line. The
//! last thing a VMM writes is [`ExitRecord`], into `exit.json`.
//!
//! A spare VMM, `jiffy-vmm run --config PLACEHOLDER --spare-fd N`, does what
//! needs no configuration and waits on that socket for a [`TakeSpare`].
//!
//! With [`VmmConfig::restore`] the VM is not booted but restored from a captured one
//! ([`ControlRequest::Capture`]).

use crate::cpu::{Profile, Wanted};
use crate::mac::Mac;
use serde::{Deserialize, Serialize, Serializer};
use std::num::NonZeroU64;
use std::path::PathBuf;

/// The version written and the only one read.
pub const VERSION: u32 = 1;

/// To a spare VMM: be this VM. One message, JSON, with descriptors: standard
/// output and error, events, then those that [`Source::Fd`] names as they would
/// have been inherited, from 4 on ([`TakeSpare::FIRST_SOURCE`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TakeSpare {
    /// The configuration's file, as long as the name on the command line: it
    /// is put in its place there. Its folder becomes the working directory.
    pub config: PathBuf,
    /// The number that the configuration's file, open, would have: for a VMM that can open
    /// nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_fd: Option<i32>,
}

impl TakeSpare {
    /// The number by which a configuration names the first descriptor that
    /// follows output and events.
    pub const FIRST_SOURCE: i32 = 4;
}

/// A VM, as `jiffy-vmm` builds it.
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
    /// Kernel and what goes with it.
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
    /// COM1, if asked for.
    #[serde(default)]
    pub serial: Option<Serial>,
    /// Files of the fw_cfg device; the device exists even when empty.
    #[serde(default)]
    pub fw_cfg: Vec<FwCfgFile>,
    /// The control socket to listen on.
    #[serde(default)]
    pub control: Option<PathBuf>,
    /// Where to write the [`ExitRecord`].
    #[serde(default)]
    pub exit_record: Option<PathBuf>,
    /// A memory balloon, which also takes back pages the guest reports free.
    #[serde(default)]
    pub balloon: bool,
    /// What of this host's processor a VM that boots is shown; none for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_profile: Option<Wanted>,
    /// Files that the VMM is handed open: it opens none of these names itself. Names of Unix
    /// sockets that it connects to are relative to its working directory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub handed: Vec<Handed>,
    /// Network interfaces, `eth0` first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nets: Vec<Net>,
    /// Go on from a captured VM. `boot` and `cpu_profile` are then not used.
    #[serde(default)]
    pub restore: Option<Restore>,
}

/// A file that a VMM is handed open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Handed {
    /// Its name, as the configuration has it: of a file, or of a socket to listen on.
    pub name: PathBuf,
    /// The number by which it is inherited.
    pub fd: i32,
}

impl VmmConfig {
    /// The numbers of all descriptors it names.
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

/// A captured VM to go on from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Restore {
    /// vCPUs, chips and devices, as captured.
    pub state: Source,
    /// Its RAM.
    pub memory: SavedMemory,
    /// Ranges of RAM that the VM will write to at once, as [`Written`] told of
    /// its parent: given pages of their own before it runs, all in one go.
    ///
    /// [`Written`]: ControlRequest::Written
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prefault: Vec<Extent>,
    /// What the guest must become before its workload runs; none lets it go
    /// on as it was, which is only right for a guest without `jiffy-init`.
    #[serde(default)]
    pub generation: Option<NewGeneration>,
    /// Everything is made ready, but the guest is not entered before
    /// [`ControlRequest::Begin`]: it waits for a configuration of its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hold: bool,
}

impl Restore {
    /// The numbers of all descriptors it names.
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

    /// Of what came with [`ControlResponse::Captured`], by number: to be left
    /// open for the VMM. None if that is not all of it.
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

/// A file, by name or as a descriptor left open for the VMM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// By name.
    Path(PathBuf),
    /// By number, inherited.
    Fd(i32),
}

/// Where the bytes of a captured RAM are. Nothing is read in advance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SavedMemory {
    /// In files as long as RAM (sparse), mapped privately; the VM never
    /// writes to them. A later layer covers the earlier ones where `layout`
    /// says so; without a layout there is one layer, and it is whole.
    Mapped {
        /// The lowest first.
        layers: Vec<Source>,
        /// A [`MemoryLayout`] as JSON.
        #[serde(default)]
        layout: Option<Source>,
    },
    /// A pager serves faults: the VMM connects here and shakes hands as
    /// [`crate::pager`] says.
    Paged {
        /// The Unix socket the pager listens on for this VM.
        socket: PathBuf,
        /// Ask the pager for what it has in memory of the image's working set.
        #[serde(default)]
        working_set: bool,
    },
}

/// Which layer holds which part of RAM. Offsets count RAM without its hole
/// below 4 GiB, and are the same in every file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryLayout {
    /// Bytes of RAM, and of every layer.
    pub size: u64,
    /// What each layer but the lowest (which is whole) covers, lowest first;
    /// sorted, in whole pages, without overlap within a layer.
    pub covers: Vec<Vec<Extent>>,
}

/// A range of RAM. Written as `[offset, length]`: there may be hundreds, which a
/// VMM reads before its guest runs. With names it is read as well.
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

/// The identity a restored guest takes on. The VMM adds a seed and the time,
/// and gives it to the guest as [`crate::guest::GENERATION_NAME`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewGeneration {
    /// A UUID no other VM ever had.
    pub id: String,
    /// The first command of the new configuration is to be started, in place
    /// of one that may already run.
    pub start_main: bool,
    /// How long the guest has to take it on, milliseconds; after that the VM
    /// ends.
    pub deadline_ms: u32,
}

/// Guest RAM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// MiB; 64 or more.
    pub size_mib: u32,
    /// Backing pages.
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

/// Kernel and what goes with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Boot {
    /// ELF with a PVH note, or bzImage.
    pub kernel: PathBuf,
    /// Loaded as the initrd (first PVH module).
    #[serde(default)]
    pub initrd: Option<PathBuf>,
    /// Given to the kernel; the VMM appends `virtio_mmio.device=` parameters.
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
    /// What the guest reads as serial number, at most 20 bytes.
    #[serde(default)]
    pub serial: Option<String>,
    /// How fast the guest may use it.
    #[serde(default, skip_serializing_if = "DiskLimit::is_none")]
    pub limit: DiskLimit,
    /// The file is a cache that is filled on demand; only for read-only disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residency: Option<Residency>,
    /// Note what the guest reads of it, for [`ControlRequest::Reads`]; not of
    /// one with a residency, whose pager does so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub note_reads: bool,
}

/// How to have missing bytes of a disk put into its file
/// ([`crate::disk`]). `path` of the disk is then the cache's `contents`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residency {
    /// The map of what is there: the cache's `present`.
    pub present: PathBuf,
    /// Where the pager listens for VMMs of this disk.
    pub pager_socket: PathBuf,
}

/// What a guest may use a disk for at most. Up to one second's worth can be
/// used at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskLimit {
    /// Bytes read and written in a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<NonZeroU64>,
    /// Requests in a second: reads, writes, flushes, discards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operations_per_second: Option<NonZeroU64>,
}

impl DiskLimit {
    /// Is there none?
    pub fn is_none(&self) -> bool {
        *self == DiskLimit::default()
    }
}

/// A network interface of the guest's. It has a pair of queues for each descriptor of a
/// TAP interface, else one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Net {
    /// Its address. Frames that the guest sends with another are dropped. A restored guest
    /// is to take it on ([`crate::guest::Interface::mac`]).
    pub mac: Mac,
    /// Largest packet without Ethernet header, bytes: 68 or more. None leaves the driver's,
    /// which is 1500.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// Where frames go.
    #[serde(default)]
    pub backend: NetBackend,
    /// How fast the guest may receive.
    #[serde(default, skip_serializing_if = "NetLimit::is_none")]
    pub receive_limit: NetLimit,
    /// How fast it may send.
    #[serde(default, skip_serializing_if = "NetLimit::is_none")]
    pub send_limit: NetLimit,
}

/// What may go through a network interface in one direction at most. After a rest the
/// burst goes at once, or one second's worth. What the host hands over in one piece, as
/// segments of a connection, is one packet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetLimit {
    /// Bytes of frames in a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<NonZeroU64>,
    /// Packets in a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packets_per_second: Option<NonZeroU64>,
    /// Bytes at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_burst: Option<NonZeroU64>,
    /// Packets at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packets_burst: Option<NonZeroU64>,
}

impl NetLimit {
    /// Is there none?
    pub fn is_none(&self) -> bool {
        *self == NetLimit::default()
    }
}

/// Where the frames of a network interface go and come from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NetBackend {
    /// Nowhere: the link is down.
    #[default]
    None,
    /// A TAP interface, by its queues: descriptors left open for the VMM, made with
    /// `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`, and `IFF_MULTI_QUEUE` if there are several.
    Tap(Vec<i32>),
    /// passt: its Unix socket (`passt --socket`), or a connection to it.
    Passt(Source),
}

/// The vsock device. Host programs reach guest port N by connecting to `path`
/// and sending `CONNECT N\n` (answer `OK <port>\n`); a guest that connects to
/// port N of the host reaches the Unix socket `<path>_N`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vsock {
    /// The guest's context id, 3 or more.
    pub cid: u64,
    /// The Unix socket to listen on.
    pub path: PathBuf,
}

/// Where COM1's output goes; input comes from stdin with `Stdio`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Serial {
    /// The VMM's own stdin and stdout.
    Stdio,
    /// Appended to this file.
    File(PathBuf),
}

/// One file of the fw_cfg device.
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
    /// Read from this file at start.
    File(PathBuf),
}

/// From the VMM, one a line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmmEvent {
    /// A step of the VMM's own work, host CLOCK_MONOTONIC nanoseconds.
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
        /// When, host CLOCK_MONOTONIC nanoseconds.
        at_ns: u64,
    },
    /// The VMM ends; the same as in `exit.json`.
    Exited(ExitRecord),
}

/// How a VM ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// What kind of end.
    pub reason: ExitReason,
    /// One sentence for the user.
    pub message: String,
    /// What the user can do, if anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// What kind of end a VM had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ExitReason {
    /// The guest powered off or reset.
    Shutdown,
    /// Asked to stop over the control socket or by SIGTERM.
    Stopped,
    /// The guest crashed (triple fault outside an orderly reset, KVM_EXIT_INTERNAL_ERROR).
    GuestFault,
    /// The VM could not be built: bad kernel, no memory, no KVM.
    StartFailed,
    /// An error in the VMM or the host while it ran.
    HostError,
}

/// A command on the control socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlRequest {
    /// Is it running? Answered with `Status`.
    Status,
    /// Stop all vCPUs; they keep their state.
    Pause,
    /// Let them go on.
    Resume,
    /// Let a VM that is held ([`Restore::hold`]) begin. Its configuration is
    /// read once more, from the file the VMM was started with: fw_cfg files
    /// and generation are taken from it, all else stays. One that is paused as well
    /// enters its guest when it is resumed.
    Begin,
    /// End the VM at once. Answered before it ends.
    Stop,
    /// KVM's exit counters. Answered with `Stats`.
    Stats,
    /// Pause, save the state, freeze RAM. Answered with `Captured`, which
    /// carries descriptors: the state, the layout, and the layers of RAM.
    /// What they hold never changes, whatever the VM does next.
    Capture {
        /// Let the VM go on afterwards; otherwise it stays paused.
        resume: bool,
    },
    /// Which pages the VM has written since it was last captured, or restored.
    /// Answered with `Written`.
    Written,
    /// The processor of the guest as it was captured last. Answered with `CpuProfile`.
    CpuProfile,
    /// What the guest has read of the first disk whose reads are noted.
    /// Answered with `Reads`.
    Reads,
    /// How much memory the guest is to give back. Answered with `Balloon`.
    SetBalloon {
        /// MiB that the balloon shall hold.
        target_mib: u32,
    },
    /// What the balloon holds, and the guest's figures. Answered with `Balloon`.
    Balloon,
}

/// The answer on the control socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlResponse {
    /// Done.
    Ok,
    /// Whether the vCPUs run.
    Status {
        /// The VM's id.
        id: String,
        /// The VMM's process id.
        pid: u32,
        /// True while paused.
        paused: bool,
    },
    /// Counters by KVM's own names (`exits`, `io_exits`, `mmio_exits`,
    /// `halt_exits`, …), summed over vCPUs; and of each network interface, as
    /// `net0_received_frames`, `net0_received_bytes`, `net0_received_dropped`, the same of
    /// what the guest `sent`, and `net0_sent_spoofed`.
    Stats(std::collections::BTreeMap<String, u64>),
    /// Captured. Sent with `SCM_RIGHTS`: the state, the layout (JSON), then
    /// `layers` files.
    Captured {
        /// How many layers of RAM.
        layers: u32,
        /// How long the vCPUs stood still (until now, if they still do),
        /// nanoseconds.
        pause_ns: u64,
        /// Bytes copied because they were written since the last capture.
        copied_bytes: u64,
    },
    /// Ranges of RAM, sorted.
    Written(Vec<Extent>),
    /// The guest's processor.
    CpuProfile(Box<Profile>),
    /// Parts of a disk.
    Reads(ReadUnits),
    /// The balloon.
    Balloon(BalloonStatus),
    /// Not done, and why.
    Error(String),
}

/// What was read of a disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadUnits {
    /// Bytes of a unit.
    pub unit: u32,
    /// First unit and number of units of each row that was read, in the order
    /// in which they were first read.
    pub rows: Vec<(u32, u32)>,
}

/// The balloon and what the guest says of its memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonStatus {
    /// MiB asked for.
    pub target_mib: u32,
    /// MiB the balloon holds.
    pub actual_mib: u32,
    /// Bytes given back by free page reporting so far.
    pub reported_bytes: u64,
    /// The guest's statistics by name (Virtio 1.3 §5.5.6.4), bytes or counts.
    pub stats: std::collections::BTreeMap<String, u64>,
}

/// What `jiffy-vmm probe` prints about the host's KVM, as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvmProbe {
    /// The verdict.
    pub kind: KvmKind,
    /// One sentence: what was seen.
    pub detail: String,
    /// Picoseconds per iteration of the ring-0 loop.
    pub ring0_ps_per_iteration: Option<u64>,
    /// Did `syscall` from ring 3 arrive in ring 0?
    pub syscall_enters_ring0: Option<bool>,
    /// What the whole probe took, microseconds.
    pub took_us: u64,
}

/// What kind of KVM a host has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvmKind {
    /// Guest kernel code runs on the processor.
    Real,
    /// Guest kernel code is emulated in software; ordinary guests crash.
    Emulated,
    /// There is none, or it can't be opened.
    None,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_read_as_it_is_written_and_as_it_was() {
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
    fn a_network_interface_is_read_with_defaults_and_named_by_its_descriptors() {
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
