//! From a record to a running VMM.

use crate::golden::standby::Standby;
use crate::pager::Serving;
use crate::vm::control;
use crate::vm::process::{Events, VmmProcess};
use crate::vm::spares::Spares;
use jiffy_content::clock::monotonic_ns;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::{Paged, Root, Spec, VmRecord};
use jiffy_content::names;
use jiffy_content::paths::Paths;
use jiffy_content::room::memory::Reserved;
use jiffy_content::roots;
use jiffy_content::volumes::Lease;
use jiffy_sys::durable::remove_any;
use jiffy_sys::regular;
use jiffy_sys::spawn::{Detached, FIRST_DESCRIPTOR, spawn_detached};
use jiffy_wire::api::{Origin, VolumeUse};
use jiffy_wire::guest::{self, DiskMount, GuestConfig};
use jiffy_wire::vmm::{
    self, Boot, Disk, Extent, FwCfgContents, FwCfgFile, Memory, NewGeneration, Restore,
    SavedMemory, Serial, Source, VmmConfig, Vsock,
};
use rustix::process::Pid;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tracing::debug;

/// Descriptors of the daemon that no VM gets: for requests, disks, and what makes room.
const KEPT_DESCRIPTORS: u64 = 128;
/// The nice value of VMs that are made for later.
const LOW_PRIORITY: i32 = 19;
/// Longest kernel command line Linux takes on x86, less what the VMM appends.
const MAX_COMMAND_LINE: usize = 1536;

/// What a start needs, looked up and held.
#[derive(Debug)]
pub struct Prepared {
    /// The kernel.
    pub kernel: PathBuf,
    /// What the root file system is.
    pub root: Root,
    /// The VM's disks, the root file system first.
    pub disks: Vec<Disk>,
    /// Volumes, held while the VM runs.
    pub volumes: Vec<Lease>,
    /// Boot, or what to do instead.
    pub beginning: Beginning,
    /// A VM restored ahead that this one may become.
    pub standby: Option<Standby>,
    /// Memory that was reserved for it; none of what is made for later, which has it elsewhere.
    pub room: Option<Reserved>,
    /// It is for later: whoever waits for something goes first.
    pub low_priority: bool,
    /// When the request came.
    pub received_ns: u64,
    /// When looking up began.
    pub lookup_ns: u64,
    /// When everything was found.
    pub ready_ns: u64,
}

/// How a VM begins.
#[derive(Debug, Clone)]
pub enum Beginning {
    /// The kernel boots.
    Boot,
    /// A captured VM goes on, as a new one or (woken) as the same.
    Restore(Restoring),
}

/// A captured VM to go on from.
#[derive(Debug, Clone)]
pub struct Restoring {
    /// Where this VM's memory came from; none if it is its own.
    pub origin: Option<Origin>,
    /// vCPUs, chips and devices.
    pub state: Handle,
    /// RAM.
    pub memory: SavedRam,
    /// What the guest writes to at once, as far as is known.
    pub prefault: Vec<Extent>,
    /// The VM's first command is a new one, to be started.
    pub start_main: bool,
    /// The golden snapshot it is, if that is what it is.
    pub golden: Option<String>,
}

/// A file of a captured VM.
#[derive(Debug, Clone)]
pub enum Handle {
    /// By name.
    Path(PathBuf),
    /// Open, to be inherited.
    Open(Arc<OwnedFd>),
}

/// RAM of a captured VM.
#[derive(Debug, Clone)]
pub enum SavedRam {
    /// Files to map.
    Mapped {
        /// The lowest first.
        layers: Vec<Handle>,
        /// What each covers.
        layout: Option<Handle>,
    },
    /// The pager serves it.
    Paged {
        /// Where the pager listens for this VM.
        serving: Serving,
        /// What it serves.
        paged: Paged,
    },
}

impl SavedRam {
    /// RAM that is kept as it is, in this file.
    pub fn of_file(path: PathBuf) -> SavedRam {
        SavedRam::Mapped {
            layers: vec![Handle::Path(path)],
            layout: None,
        }
    }
}

impl Prepared {
    /// Does a VM that slept go on?
    pub fn wakes(&self) -> bool {
        matches!(&self.beginning, Beginning::Restore(restoring) if restoring.origin.is_none())
    }

    /// For [`crate::pager::Pager::forget`], if the pager serves its memory.
    pub fn ticket(&self) -> Option<u64> {
        match &self.beginning {
            Beginning::Restore(Restoring {
                memory: SavedRam::Paged { serving, .. },
                ..
            }) => Some(serving.ticket),
            _ => None,
        }
    }

    /// What to do if the golden snapshot turns out to be none: boot.
    pub fn fallback(&self) -> Option<Prepared> {
        match &self.beginning {
            Beginning::Restore(restoring) if restoring.golden.is_some() => Some(Prepared {
                kernel: self.kernel.clone(),
                root: self.root.clone(),
                disks: self.disks.clone(),
                volumes: Vec::new(),
                beginning: Beginning::Boot,
                standby: None,
                room: None,
                ..*self
            }),
            _ => None,
        }
    }
}

/// A VMM that was just spawned.
#[derive(Debug)]
pub struct Spawned {
    /// Its process.
    pub process: VmmProcess,
    /// Its events.
    pub events: Events,
    /// Where the guest's init will connect.
    pub listener: UnixListener,
    /// Before and after the spawn, monotonic nanoseconds.
    pub spawn_ns: (u64, u64),
    /// It was restored ahead: what it did before this is no part of its start.
    pub was_standby: bool,
    /// Its process was there before.
    pub was_spare: bool,
}

/// Makes the run folder and the configuration, and spawns the VMM, or has a
/// spare be it, or takes over the standby; a guest that is restored has so long
/// to take on its new identity. After an error nothing runs; the caller removes
/// the run folder.
pub fn spawn(
    paths: &Paths,
    spares: &Spares,
    record: &VmRecord,
    prepared: &mut Prepared,
    gate_time: Duration,
) -> Result<Spawned> {
    if let Some(standby) = prepared.standby.take() {
        match take_over(paths, record, prepared, gate_time, standby) {
            Ok(spawned) => return Ok(spawned),
            Err(error) => {
                debug!(vm = record.name, %error, "a standby can't be had");
                let _ = remove_any(&paths.vm_run(&record.id));
            }
        }
    }
    // Spares are for what somebody waits for.
    let spares = (!prepared.low_priority).then_some(spares);
    spawn_process(paths, spares, record, prepared, gate_time, false)
}

/// Spawns a VMM that restores its VM and holds it.
pub fn hold(
    paths: &Paths,
    record: &VmRecord,
    prepared: &Prepared,
    gate_time: Duration,
) -> Result<Spawned> {
    spawn_process(paths, None, record, prepared, gate_time, true)
}

/// Gives a VM that is held the configuration it waits for. After an error its
/// process has ended.
fn take_over(
    paths: &Paths,
    record: &VmRecord,
    prepared: &Prepared,
    gate_time: Duration,
    standby: Standby,
) -> Result<Spawned> {
    let before = monotonic_ns();
    let mut spawned = standby
        .into_spawned()
        .ok_or_else(|| Error::internal("A standby was taken twice."))?;
    let begun = write_config(
        paths,
        record,
        prepared,
        gate_time,
        false,
        &mut Descriptors::default(),
    )
    .and_then(|_| {
        let socket = paths.control_socket(&record.id);
        control::begin(&socket).map_err(|error| Error::io("reach the VMM", &socket, &error))
    });
    if let Err(error) = begun {
        spawned.process.kill();
        return Err(error);
    }
    spawned.spawn_ns = (before, monotonic_ns());
    spawned.was_standby = true;
    Ok(spawned)
}

fn write_config<'a>(
    paths: &Paths,
    record: &VmRecord,
    prepared: &'a Prepared,
    gate_time: Duration,
    hold: bool,
    descriptors: &mut Descriptors<'a>,
) -> Result<PathBuf> {
    let mut vmm_config = vmm_config(paths, record, prepared, gate_time, descriptors)?;
    if let Some(restore) = &mut vmm_config.restore {
        restore.hold = hold;
    }
    let config = paths.vm(&record.id).join("vmm.json");
    let json = serde_json::to_vec(&vmm_config).map_err(|error| {
        Error::internal(format!("The VM's configuration can't be written: {error}."))
    })?;
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    regular::make_with(&mut options, &config)
        .and_then(|mut file| file.write_all(&json))
        .map_err(|error| Error::io("write the VM's configuration", &config, &error))?;
    Ok(config)
}

fn spawn_process(
    paths: &Paths,
    spares: Option<&Spares>,
    record: &VmRecord,
    prepared: &Prepared,
    gate_time: Duration,
    hold: bool,
) -> Result<Spawned> {
    let folder = paths.vm(&record.id);
    let run = paths.vm_run(&record.id);
    if record.started.is_some() {
        // A VM that starts again: nothing of its last life may be mistaken
        // for this one's.
        let _ = remove_any(&run);
        let stale: &[&str] = match prepared.wakes() {
            // It is the same life.
            true => &["exit.json"],
            false => &["exit.json", "console.log", "timeline.json", "vmm.log"],
        };
        for stale in stale {
            let _ = remove_any(&folder.join(stale));
        }
    }
    fs::DirBuilder::new()
        .mode(0o700)
        .create(&run)
        .map_err(|error| Error::io("make the VM's run folder", &run, &error))?;
    let supervisor = paths.supervisor_socket(&record.id);
    let listener = UnixListener::bind(&supervisor)
        .map_err(|error| Error::io("listen for the guest", &supervisor, &error))?;
    let (events, their_end) =
        Events::new().map_err(|error| Error::io("make a pipe for the VMM", &folder, &error))?;
    check_descriptors(their_end.as_fd())?;
    let mut descriptors = Descriptors::new(their_end.as_fd());
    let config = write_config(paths, record, prepared, gate_time, hold, &mut descriptors)?;
    let log = open_log(&folder.join("vmm.log"))
        .map_err(|error| Error::io("open the VMM's log", &folder.join("vmm.log"), &error))?;
    let before = monotonic_ns();
    let spare = spares.and_then(|spares| {
        let (log, passed) = (log.as_fd(), &descriptors.passed);
        spares.take(paths, &config, log, passed)
    });
    let was_spare = spare.is_some();
    let process = match spare {
        Some(process) => process,
        None => spawn_vmm(paths, &config, &log, &descriptors)?,
    };
    let after = monotonic_ns();
    if prepared.low_priority {
        // Its threads inherit it; they don't exist yet.
        let pid = Pid::from_raw(process.pid as i32);
        let _ = rustix::process::setpriority_process(pid, LOW_PRIORITY);
    }
    Ok(Spawned {
        process,
        events,
        listener,
        spawn_ns: (before, after),
        was_standby: false,
        was_spare,
    })
}

/// Refuses a further VM before its descriptors are missing for what ends others.
fn check_descriptors(newest: BorrowedFd<'_>) -> Result<()> {
    let Some(limit) = jiffy_sys::descriptors::are_short(newest, KEPT_DESCRIPTORS) else {
        return Ok(());
    };
    Err(Error::no_room(format!(
        "The node may open {limit} files, and its VMs have nearly all of them: no further VM can be started."
    ))
    .hint("End VMs, or start jiffyd with a higher limit (`ulimit -n`, LimitNOFILE= in its unit)."))
}

fn spawn_vmm(
    paths: &Paths,
    config: &Path,
    log: &File,
    descriptors: &Descriptors<'_>,
) -> Result<VmmProcess> {
    let program = paths.vmm();
    let pid = spawn_detached(&Detached {
        program: &program,
        arguments: &[
            OsStr::new("run"),
            OsStr::new("--config"),
            config.as_os_str(),
            OsStr::new("--events-fd"),
            OsStr::new("3"),
        ],
        directory: config.parent().unwrap_or(Path::new("/")),
        output: log.as_fd(),
        descriptors: &descriptors.passed,
    })
    .map_err(|error| spawn_error(&program, &error))?;
    VmmProcess::child(pid)
        .map_err(|error| Error::internal(format!("The VMM can't be watched: {error}.")))
}

/// What a VMM inherits: its events first.
#[derive(Default)]
struct Descriptors<'a> {
    passed: Vec<BorrowedFd<'a>>,
}

impl<'a> Descriptors<'a> {
    fn new(events: BorrowedFd<'a>) -> Descriptors<'a> {
        Descriptors {
            passed: vec![events],
        }
    }

    /// How the VMM finds this file.
    fn source(&mut self, handle: &'a Handle) -> Source {
        match handle {
            Handle::Path(path) => Source::Path(path.clone()),
            Handle::Open(file) => {
                let number = FIRST_DESCRIPTOR + self.passed.len() as i32;
                self.passed.push(file.as_fd());
                Source::Fd(number)
            }
        }
    }

    fn sources(&mut self, handles: &'a [Handle]) -> Vec<Source> {
        handles.iter().map(|handle| self.source(handle)).collect()
    }
}

fn spawn_error(program: &Path, error: &io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::NotFound => {
            Error::internal(format!("The VMM {} does not exist.", program.display())).hint(
                "Install Jiffy whole, or name the folder of jiffy-vmm with --lib or JIFFY_LIB.",
            )
        }
        io::ErrorKind::OutOfMemory => {
            Error::no_room("The host has no memory left to start another VMM.")
        }
        _ => Error::internal(format!(
            "The VMM {} can't be started: {error}.",
            program.display()
        )),
    }
}

fn open_log(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    regular::make_with(options.create(true).append(true).mode(0o600), path)
}

fn vmm_config<'a>(
    paths: &Paths,
    record: &VmRecord,
    prepared: &'a Prepared,
    gate_time: Duration,
    descriptors: &mut Descriptors<'a>,
) -> Result<VmmConfig> {
    let spec = &record.spec;
    let folder = paths.vm(&record.id);
    let guest = serde_json::to_string(&guest_config(record, &prepared.root)).map_err(|error| {
        Error::internal(format!(
            "The guest's configuration can't be written: {error}."
        ))
    })?;
    if guest.len() > guest::MAX_CONFIG {
        return Err(Error::invalid(format!(
            "The command and its environment make {} bytes of configuration; at most {} fit.",
            guest.len(),
            guest::MAX_CONFIG
        )));
    }
    Ok(VmmConfig {
        version: vmm::VERSION,
        id: record.id.clone(),
        vcpus: spec.cpus,
        memory: Memory {
            size_mib: spec.memory_mib,
            pages: spec.pages,
            prefault: false,
        },
        boot: Boot {
            kernel: prepared.kernel.clone(),
            initrd: Some(paths.initramfs()),
            command_line: command_line(spec)?,
        },
        disks: disks(paths, prepared),
        vsock: Some(Vsock {
            cid: record.cid.into(),
            path: paths.vsock_socket(&record.id),
        }),
        rng: true,
        serial: spec
            .console
            .then(|| Serial::File(folder.join("console.log"))),
        fw_cfg: vec![FwCfgFile {
            name: guest::FW_CFG_NAME.into(),
            contents: FwCfgContents::Text(guest),
        }],
        control: Some(paths.control_socket(&record.id)),
        exit_record: Some(folder.join("exit.json")),
        balloon: true,
        cpu_profile: spec.cpu_profile.clone(),
        restore: match &prepared.beginning {
            Beginning::Boot => None,
            Beginning::Restore(restoring) => Some(restore(restoring, gate_time, descriptors)),
        },
    })
}

/// A VM's disks; the first is filled on demand if its image is not all here.
fn disks(paths: &Paths, prepared: &Prepared) -> Vec<Disk> {
    let mut disks = prepared.disks.clone();
    // A copy of the image that the VM writes to is all there.
    let root = disks.first_mut().filter(|root| root.read_only);
    if let (Some(lazy), Some(root)) = (&prepared.root.lazy, root) {
        root.residency = Some(lazy.residency(paths));
    } else if let Some(root) = disks.first_mut() {
        // A guest that boots in the background, to be kept, shows what a boot
        // needs. All of the root is in a writable one's file.
        root.note_reads = prepared.low_priority
            && root.read_only
            && matches!(prepared.beginning, Beginning::Boot);
    }
    disks
}

fn restore<'a>(
    restoring: &'a Restoring,
    gate_time: Duration,
    descriptors: &mut Descriptors<'a>,
) -> Restore {
    Restore {
        state: descriptors.source(&restoring.state),
        memory: match &restoring.memory {
            SavedRam::Mapped { layers, layout } => SavedMemory::Mapped {
                layers: descriptors.sources(layers),
                layout: layout.as_ref().map(|layout| descriptors.source(layout)),
            },
            SavedRam::Paged { serving, paged } => SavedMemory::Paged {
                socket: serving.socket.clone(),
                working_set: paged.prefetch,
            },
        },
        prefault: restoring.prefault.clone(),
        generation: Some(NewGeneration {
            id: names::new_uuid(),
            start_main: restoring.start_main,
            deadline_ms: gate_time.as_millis().try_into().unwrap_or(u32::MAX),
        }),
        hold: false,
    }
}

/// The disk of a volume.
pub fn volume_disk(volume: &VolumeUse, path: PathBuf) -> Disk {
    Disk {
        path,
        read_only: volume.read_only,
        // virtio gives the serial number 20 bytes.
        serial: Some(volume.name.chars().take(20).collect()),
        limit: volume.limit,
        ..Disk::default()
    }
}

/// The volumes that the guest is to mount.
fn mounts(spec: &Spec) -> Vec<DiskMount> {
    let mount = |(index, volume): (usize, &VolumeUse)| {
        Some(DiskMount {
            device: roots::device(index + 1),
            fstype: "ext4".into(),
            mount_point: volume.mount.clone()?,
            read_only: volume.read_only,
        })
    };
    spec.disks.iter().enumerate().filter_map(mount).collect()
}

fn guest_config(record: &VmRecord, root: &Root) -> GuestConfig {
    let spec = &record.spec;
    GuestConfig {
        version: guest::VERSION,
        vm_id: record.id.clone(),
        hostname: Some(spec.hostname.clone().unwrap_or_else(|| record.name.clone())),
        root: roots::guest_root(spec, roots::fstype(root)),
        disks: mounts(spec),
        handover: spec.init.clone(),
        main: spec.command.clone(),
        // The node's own VMs are looked at afterwards.
        power_off_after_main: spec.command.is_some() && !spec.hidden,
        timeline: spec.timeline,
        preload: spec.preload.clone(),
        rehearsal: spec.hidden,
        ..GuestConfig::default()
    }
}

/// The kernel's command line: the default, then the user's parameters.
pub fn command_line(spec: &Spec) -> Result<String> {
    use jiffy_kernel::command_line::{console_command_line, default_command_line};
    let mut line = if spec.console {
        console_command_line()
    } else {
        default_command_line()
    };
    if let Some(more) = &spec.kernel_args {
        line.push(' ');
        line.push_str(more);
    }
    if line.len() > MAX_COMMAND_LINE {
        return Err(Error::invalid(format!(
            "The kernel's command line would have {} bytes; at most {MAX_COMMAND_LINE} fit.",
            line.len()
        )));
    }
    Ok(line)
}
