//! From a record to a running VMM.

use crate::clock::monotonic_ns;
use crate::error::{Error, Result};
use crate::paths::Paths;
use crate::vm::process::{Events, VmmProcess};
use crate::vm::record::{Spec, VmRecord};
use crate::volumes::Lease;
use jiffy_sys::spawn::{Detached, spawn_detached};
use jiffy_wire::guest::{self, GuestConfig, Root};
use jiffy_wire::vmm::{
    self, Boot, Disk, FwCfgContents, FwCfgFile, Memory, Serial, VmmConfig, Vsock,
};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use tokio::net::UnixListener;

/// Longest kernel command line Linux takes on x86, less what the VMM appends.
const MAX_COMMAND_LINE: usize = 1536;

/// What a start needs, looked up and held.
#[derive(Debug)]
pub struct Prepared {
    /// The kernel.
    pub kernel: PathBuf,
    /// The image of the root file system.
    pub image: PathBuf,
    /// Volumes, held while the VM runs.
    pub volumes: Vec<Lease>,
    /// When the request came.
    pub received_ns: u64,
    /// When looking up began.
    pub lookup_ns: u64,
    /// When everything was found.
    pub ready_ns: u64,
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
}

/// Makes the run folder and the configuration, and spawns the VMM. After an
/// error nothing runs; the caller removes the run folder.
pub fn spawn(paths: &Paths, record: &VmRecord, prepared: &Prepared) -> Result<Spawned> {
    let folder = paths.vm(&record.id);
    let run = paths.vm_run(&record.id);
    if record.started.is_some() {
        // A VM that starts again: nothing of its last life may be mistaken
        // for this one's.
        let _ = fs::remove_dir_all(&run);
        for stale in ["exit.json", "console.log", "timeline.json", "vmm.log"] {
            let _ = fs::remove_file(folder.join(stale));
        }
    }
    fs::DirBuilder::new()
        .mode(0o700)
        .create(&run)
        .map_err(|error| Error::io("make the VM's run folder", &run, &error))?;
    let supervisor = paths.supervisor_socket(&record.id);
    let listener = UnixListener::bind(&supervisor)
        .map_err(|error| Error::io("listen for the guest", &supervisor, &error))?;
    let config = folder.join("vmm.json");
    let json = serde_json::to_vec(&vmm_config(paths, record, prepared)?).map_err(|error| {
        Error::internal(format!("The VM's configuration can't be written: {error}."))
    })?;
    fs::write(&config, json)
        .map_err(|error| Error::io("write the VM's configuration", &config, &error))?;
    let log = open_log(&folder.join("vmm.log"))
        .map_err(|error| Error::io("open the VMM's log", &folder.join("vmm.log"), &error))?;
    let (events, their_end) =
        Events::new().map_err(|error| Error::io("make a pipe for the VMM", &folder, &error))?;
    let program = paths.vmm();
    let before = monotonic_ns();
    let pid = spawn_detached(&Detached {
        program: &program,
        arguments: &[
            OsStr::new("run"),
            OsStr::new("--config"),
            config.as_os_str(),
            OsStr::new("--events-fd"),
            OsStr::new("3"),
        ],
        directory: &folder,
        output: log.as_fd(),
        descriptor: Some(their_end.as_fd()),
    })
    .map_err(|error| spawn_error(&program, &error))?;
    let after = monotonic_ns();
    let process = VmmProcess::child(pid)
        .map_err(|error| Error::internal(format!("The VMM can't be watched: {error}.")))?;
    Ok(Spawned {
        process,
        events,
        listener,
        spawn_ns: (before, after),
    })
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
    OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(path)
}

fn vmm_config(paths: &Paths, record: &VmRecord, prepared: &Prepared) -> Result<VmmConfig> {
    let spec = &record.spec;
    let folder = paths.vm(&record.id);
    let guest = serde_json::to_string(&guest_config(record)).map_err(|error| {
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
    let root = Disk {
        path: prepared.image.clone(),
        read_only: true,
        direct: false,
        serial: Some("root".into()),
    };
    let volumes = prepared.volumes.iter().map(|lease| Disk {
        path: lease.path.clone(),
        read_only: lease.read_only,
        direct: false,
        // virtio gives the serial number 20 bytes.
        serial: Some(lease.name.chars().take(20).collect()),
    });
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
        disks: std::iter::once(root).chain(volumes).collect(),
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
        balloon: false,
        restore: None,
    })
}

fn guest_config(record: &VmRecord) -> GuestConfig {
    let spec = &record.spec;
    GuestConfig {
        version: guest::VERSION,
        vm_id: record.id.clone(),
        hostname: Some(spec.hostname.clone().unwrap_or_else(|| record.name.clone())),
        root: Root::Overlay {
            device: "/dev/vda".into(),
            fstype: "erofs".into(),
            upper: None,
        },
        handover: spec.init.clone(),
        main: spec.command.clone(),
        power_off_after_main: spec.command.is_some(),
        timeline: spec.timeline,
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
