//! Turns a plan into a running VMM.

use super::config::vmm_config;
use super::folders::{self, SharedFolder};
use super::handover::Descriptors;
use super::plan::{Beginning, Plan, SavedRam};
use super::spawned::Spawned;
use super::standby::{self, Standby};
use crate::control;
use crate::jails::{self, Launcher, Monitor, MonitorLimits, file_size_limit, share_of};
use crate::network::{Attachment, Network};
use crate::pager::links;
use crate::process::{Events, VmmProcess};
use crate::spares::{Spare, Spares};
use jiffy_content::clock::monotonic_ns;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::VmRecord;
use jiffy_content::paths::Paths;
use jiffy_jail::Identity;
use jiffy_jail::access::{open_folder, open_socket};
use jiffy_sys::durable::remove_any;
use jiffy_sys::priority::BACKGROUND;
use jiffy_sys::regular;
use rustix::process::Pid;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tracing::debug;

/// Descriptors reserved for the daemon itself: for requests, disks, and cleanup.
const KEPT_DESCRIPTORS: u64 = 128;
/// Most descriptors that the daemon keeps open for a running VM without clients: its process,
/// events, socket and connection of its guest, three channels, log, link, and one in reserve.
const DESCRIPTORS_OF_A_VM: u64 = 10;

/// Makes the run folder and the configuration, and spawns the VMM, or uses a spare or the standby.
/// A restored guest has `gate_time` to pass its gate.
///
/// # Errors
///
/// If the VM can't be attached to the network, a file of it can't be opened or made, or the VMM
/// can't be started. Nothing runs then; the caller removes the run folder.
pub fn spawn(
    paths: &Paths,
    launcher: &Launcher,
    spares: &Spares,
    network: &Arc<Network>,
    record: &VmRecord,
    plan: &mut Plan,
    gate_time: Duration,
) -> Result<Spawned> {
    if let Some(standby) = plan.standby.take() {
        match take_over(paths, launcher, network, record, plan, gate_time, standby) {
            Ok(spawned) => return Ok(spawned),
            Err(error) => {
                debug!(vm = record.name, %error, "a standby can't be used: the VM is started without it");
                plan.network = None;
                let _ = remove_any(&paths.vm_run(&record.id));
            }
        }
    }
    plan.network = network.attach(record)?;
    // Background work does not use up spares.
    let spares = (!plan.low_priority).then_some(spares);
    let spawned = spawn_process(paths, launcher, spares, record, plan, gate_time, false)?;
    settle(spawned, plan)
}

/// Waits for the other end of the VM's network interface, which was started before the VMM.
fn settle(spawned: Spawned, plan: &mut Plan) -> Result<Spawned> {
    match plan.network.as_mut().map_or(Ok(()), Attachment::settle) {
        Ok(()) => Ok(spawned),
        Err(error) => {
            spawned.process.end();
            Err(error)
        }
    }
}

/// Restores a VM as a standby, with a folder but without a record.
///
/// # Errors
///
/// As in [`spawn`], or if the folder exists. Nothing of it is left then.
pub fn hold(
    paths: &Paths,
    launcher: &Launcher,
    record: &VmRecord,
    mut plan: Plan,
    gate_time: Duration,
) -> Result<Standby> {
    let folder = paths.vm(&record.id);
    fs::DirBuilder::new()
        .mode(0o700)
        .create(&folder)
        .map_err(|error| Error::io("make a VM's folder", &folder, &error))?;
    let held = spawn_process(paths, launcher, None, record, &plan, gate_time, true);
    let held = held.and_then(|spawned| settle(spawned, &mut plan));
    let spawned = held.inspect_err(|_| standby::remove(paths, &record.id))?;
    Ok(Standby::new(paths, record, spawned, plan.network.take()))
}

/// Sends a standby the configuration it waits for. After an error its process has ended.
fn take_over(
    paths: &Paths,
    launcher: &Launcher,
    network: &Arc<Network>,
    record: &VmRecord,
    plan: &mut Plan,
    gate_time: Duration,
    standby: Standby,
) -> Result<Spawned> {
    let before = monotonic_ns();
    let (mut spawned, attachment) = standby
        .into_parts()
        .ok_or_else(|| Error::internal("A standby was taken twice."))?;
    plan.network = attachment;
    let settled = match &plan.network {
        Some(attachment) => network.apply_record(attachment, record),
        None => Ok(()),
    };
    let mut descriptors = Descriptors::none(launcher);
    let begun = settled.and_then(|()| {
        write_config(paths, record, plan, &[], gate_time, false, &mut descriptors)?;
        let socket = paths.control_socket(&record.id);
        control::begin(&socket).map_err(|error| Error::io("reach the VMM", &socket, &error))
    });
    if let Err(error) = begun {
        spawned.process.end();
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
    shared: &'a [SharedFolder],
    gate_time: Duration,
    hold: bool,
    descriptors: &mut Descriptors<'a>,
) -> Result<PathBuf> {
    let mut vmm_config = vmm_config(paths, record, plan, shared, gate_time, descriptors)?;
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

/// Makes the VM's run folder, without files of an earlier run, and listens there for its guest. A
/// spare sees its own folder only, which becomes the VM's; a spare without it is of no use.
fn begin_run_folder(
    paths: &Paths,
    record: &VmRecord,
    plan: &Plan,
    spare: &mut Option<Spare>,
) -> Result<UnixListener> {
    let folder = paths.vm(&record.id);
    let run = paths.vm_run(&record.id);
    if record.started.is_some() {
        // Files of an earlier run of the VM must not be taken for this run's.
        let _ = remove_any(&run);
        let stale: &[&str] = match plan.wakes() {
            // A wake continues the same run.
            true => &["exit.json"],
            false => &["exit.json", "console.log", "timeline.json", "vmm.log"],
        };
        for stale in stale {
            let _ = remove_any(&folder.join(stale));
        }
    }
    spare.take_if(|spare| fs::rename(spare.folder(), &run).is_err());
    if spare.is_none() {
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&run)
            .map_err(|error| Error::io("make the VM's run folder", &run, &error))?;
    }
    let supervisor = paths.supervisor_socket(&record.id);
    UnixListener::bind(&supervisor)
        .map_err(|error| Error::io("listen for the guest", &supervisor, &error))
}

fn spawn_process(
    paths: &Paths,
    launcher: &Launcher,
    spares: Option<&Spares>,
    record: &VmRecord,
    plan: &Plan,
    gate_time: Duration,
    hold: bool,
) -> Result<Spawned> {
    let folder = paths.vm(&record.id);
    let mut spare = spares.and_then(|spares| spares.take(paths));
    let listener = begin_run_folder(paths, record, plan, &mut spare)?;
    let shared = folders::open(record)?;
    let mut identity = None;
    if spare.is_none() {
        identity = launcher.identity()?;
    }
    let user = spare
        .as_ref()
        .map_or_else(|| identity.as_ref().map(Identity::id), |spare| spare.user());
    let (events, their_end) =
        Events::new().map_err(|error| Error::io("make a pipe for the VMM", &folder, &error))?;
    check_descriptors(their_end.as_fd(), 0)?;
    let mut descriptors = Descriptors::new(launcher, their_end);
    let config = write_config(
        paths,
        record,
        plan,
        &shared,
        gate_time,
        hold,
        &mut descriptors,
    )?;
    // After the configuration was written: a new pager reads there which VMs have a disk.
    open_to_monitor(paths, record, plan, user)?;
    let config_fd = descriptors.config(&config)?;
    let log = open_log(&folder.join("vmm.log"))
        .map_err(|error| Error::io("open the VMM's log", &folder.join("vmm.log"), &error))?;
    let before = monotonic_ns();
    let passed = descriptors.passed();
    let limits = MonitorLimits {
        share: share_of(record, plan.low_priority, plan.wakes()),
        file_size: descriptors
            .largest_disk()
            .map(|disk| file_size_limit(record, disk)),
    };
    let had = spare.and_then(|spare| {
        let had = spare.become_vmm(&limits, &config, config_fd, log.as_fd(), &passed);
        had.inspect_err(|error| debug!(%error, "a spare VMM can't be used: a VMM is spawned"))
            .ok()
    });
    let was_spare = had.is_some();
    let process = match had {
        Some(process) => process,
        None => {
            if identity.is_none() {
                identity = launcher.identity()?;
                open_to_monitor(paths, record, plan, identity.as_ref().map(Identity::id))?;
            }
            let run = paths.vm_run(&record.id);
            let config = (config.as_path(), config_fd);
            spawn_vmm(launcher, config, &run, &log, &passed, identity, limits)?
        }
    };
    drop(passed);
    for channel in descriptors.channels.drain(..) {
        channel.serve(paths, &record.id, process.pid);
    }
    let first = descriptors.supervisor.take().map(StdStream::from);
    let first = first.and_then(|first| UnixStream::from_std(first).ok());
    drop(descriptors);
    if let Err(error) = folders::serve(paths, launcher, shared, &process, &record.name, log.as_fd())
    {
        process.end();
        return Err(error);
    }
    let after = monotonic_ns();
    if plan.low_priority {
        // Set before the process has threads, which inherit it.
        let pid = Pid::from_raw(process.pid as i32);
        let _ = rustix::process::setpriority_process(pid, BACKGROUND);
    }
    Ok(Spawned {
        process,
        events,
        listener,
        first,
        spawn_ns: (before, after),
        was_standby: false,
        was_spare,
    })
}

/// Checks that the daemon can open the files that it needs for this many more VMs.
///
/// # Errors
///
/// If it can't.
pub fn check_descriptors_for(vms: u64) -> Result<()> {
    let newest = File::open("/dev/null")
        .map_err(|error| Error::internal(format!("jiffyd can't open files: {error}.")))?;
    check_descriptors(newest.as_fd(), vms)
}

/// Refuses this many VMs early enough to keep the descriptors needed to end others.
fn check_descriptors(newest: BorrowedFd<'_>, more: u64) -> Result<()> {
    let needed = KEPT_DESCRIPTORS + more * DESCRIPTORS_OF_A_VM;
    let Some(limit) = jiffy_sys::descriptors::are_short(newest, needed) else {
        return Ok(());
    };
    let refused = match more {
        0 => "no further VM can be started".to_owned(),
        more => format!("{more} further VMs can't be started"),
    };
    Err(Error::no_room(format!(
        "jiffyd may open {limit} files, and its VMs use nearly all of them: {refused}."
    ))
    .hint("End VMs, or start jiffyd with a higher limit (`ulimit -n`, LimitNOFILE= in its unit)."))
}

fn spawn_vmm(
    launcher: &Launcher,
    (config, config_fd): (&Path, Option<i32>),
    run: &Path,
    log: &File,
    descriptors: &[BorrowedFd<'_>],
    identity: Option<Identity>,
    limits: MonitorLimits,
) -> Result<VmmProcess> {
    let mut arguments = jails::arguments(config, "--events-fd");
    let handed = config_fd.map(|number| {
        let mut handed = config.as_os_str().to_owned();
        handed.push(format!("={number}"));
        handed
    });
    if let Some(handed) = &handed {
        arguments.extend([OsStr::new("--fd"), handed]);
    }
    launcher.start(Monitor {
        arguments: &arguments,
        directory: config.parent().unwrap_or(Path::new("/")),
        run,
        output: log.as_fd(),
        descriptors,
        identity,
        limits: Some(limits),
    })
}

/// Lets only the VM's monitor connect to the pager's sockets in its run folder, which exist by now.
fn open_to_monitor(paths: &Paths, record: &VmRecord, plan: &Plan, user: Option<u32>) -> Result<()> {
    let run = paths.vm_run(&record.id);
    let failed = |error| Error::io("open sockets to the VMM in", &run, &error);
    open_folder(&run, user).map_err(failed)?;
    if let Beginning::Restore(restoring) = &plan.beginning
        && let SavedRam::Paged { serving, .. } = &restoring.memory
    {
        open_socket(&serving.socket, &run).map_err(failed)?;
        links::link_memory(paths, &record.id).map_err(failed)?;
    }
    if let Some(disk) = &plan.root.lazy {
        links::link_disk(paths, disk, &paths.vm_disk_socket(&record.id)).map_err(failed)?;
    }
    Ok(())
}

fn open_log(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    regular::make_with(options.create(true).append(true).mode(0o600), path)
}
