//! From a plan to a running VMM.

use super::config::{Descriptors, vmm_config};
use super::plan::Plan;
use super::spawned::Spawned;
use super::standby::{self, Standby};
use crate::control;
use crate::process::{Events, VmmProcess};
use crate::spares::Spares;
use jiffy_content::clock::monotonic_ns;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::VmRecord;
use jiffy_content::paths::Paths;
use jiffy_sys::durable::remove_any;
use jiffy_sys::regular;
use jiffy_sys::spawn::{Detached, spawn_detached};
use rustix::process::Pid;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixListener;
use tracing::debug;

/// Descriptors of the daemon that no VM gets: for requests, disks, and what makes room.
const KEPT_DESCRIPTORS: u64 = 128;
/// The nice value of VMs that are made for later.
const LOW_PRIORITY: i32 = 19;

/// Makes the run folder and the configuration, and spawns the VMM, or has a
/// spare be it, or takes over the standby; a guest that is restored has so long
/// to take on its new identity. After an error nothing runs; the caller removes
/// the run folder.
pub fn spawn(
    paths: &Paths,
    spares: &Spares,
    record: &VmRecord,
    plan: &mut Plan,
    gate_time: Duration,
) -> Result<Spawned> {
    if let Some(standby) = plan.standby.take() {
        match take_over(paths, record, plan, gate_time, standby) {
            Ok(spawned) => return Ok(spawned),
            Err(error) => {
                debug!(vm = record.name, %error, "a standby can't be had");
                let _ = remove_any(&paths.vm_run(&record.id));
            }
        }
    }
    // Spares are for what somebody waits for.
    let spares = (!plan.low_priority).then_some(spares);
    spawn_process(paths, spares, record, plan, gate_time, false)
}

/// Restores a VM, and holds it: it has a folder, and no record. After an error nothing of it
/// is left.
pub fn hold(paths: &Paths, record: &VmRecord, plan: &Plan, gate_time: Duration) -> Result<Standby> {
    let folder = paths.vm(&record.id);
    fs::DirBuilder::new()
        .mode(0o700)
        .create(&folder)
        .map_err(|error| Error::io("make a VM's folder", &folder, &error))?;
    let held = spawn_process(paths, None, record, plan, gate_time, true);
    let spawned = held.inspect_err(|_| standby::remove(paths, &record.id))?;
    Ok(Standby::new(paths, record, spawned))
}

/// Gives a VM that is held the configuration it waits for. After an error its
/// process has ended.
fn take_over(
    paths: &Paths,
    record: &VmRecord,
    plan: &Plan,
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
        plan,
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
    plan: &'a Plan,
    gate_time: Duration,
    hold: bool,
    descriptors: &mut Descriptors<'a>,
) -> Result<PathBuf> {
    let mut vmm_config = vmm_config(paths, record, plan, gate_time, descriptors)?;
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
    plan: &Plan,
    gate_time: Duration,
    hold: bool,
) -> Result<Spawned> {
    let folder = paths.vm(&record.id);
    let run = paths.vm_run(&record.id);
    if record.started.is_some() {
        // A VM that starts again: nothing of its last life may be mistaken
        // for this one's.
        let _ = remove_any(&run);
        let stale: &[&str] = match plan.wakes() {
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
    let config = write_config(paths, record, plan, gate_time, hold, &mut descriptors)?;
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
    if plan.low_priority {
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
