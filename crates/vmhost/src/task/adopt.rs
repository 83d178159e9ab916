//! Adoption of VMs that outlived the daemon that started them.
//!
//! A VMM is recognised by its command line, which names a configuration in the data folder. This
//! works even if its sockets do not exist yet or do not answer.

use super::leftovers::{end_impostor, end_sleeper, end_vmm, vmm_id, vmms, wait_for_spares};
use super::unreadable;
use crate::agent;
use crate::channels;
use crate::control;
use crate::folders::{self, Found, gate_record, ids_in, is_asleep};
use crate::handle::{Command, DeviceLimits, VmHandle, is_active};
use crate::host::Host;
use crate::log::Writer;
use crate::network;
use crate::process::VmmProcess;
use crate::registry::Registry;
use crate::supervisor::{self, Supervisor};
use crate::task::actor::{self, Actor, Running};
use crate::task::phase::{Guest, Phase};
use crate::task::stop::DEFAULT_GRACE;
use jiffy_content::clock::unix_seconds;
use jiffy_content::durable::{LoadError, is_taken};
use jiffy_content::error::Error;
use jiffy_content::model::vm::{Failure, Kept, MainState, Spec, VmRecord};
use jiffy_content::paths::Paths;
use jiffy_content::room::memory::Amount;
use jiffy_content::roots;
use jiffy_content::volumes::{Lease, Volumes};
use jiffy_jail::access::open_folder;
use jiffy_wire::agent::{CPUS, Request};
use jiffy_wire::api::{Limits, Origin, VmState};
use jiffy_wire::vmm::{ControlRequest, ControlResponse};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tracing::{info, warn};

/// How long a guest has to bring its vCPUs on or off line.
const CPUS_TIME: Duration = Duration::from_secs(60);

/// Registers every VM found on disk, adopts those whose VMM lives, and ends VMMs that belong to no
/// VM. An error in one VM fails only that VM.
pub async fn all(
    host: &Arc<Host>,
    registry: &Arc<Registry>,
    volumes: &Arc<Volumes>,
    found: Vec<Found>,
) {
    let paths = &host.paths;
    let run_folders = ids_in(&paths.run.join("vms"));
    // /proc is searched only if a VM may run. The run folders do not tell: logind removes them when
    // their user logs out.
    let mut alive = if run_folders.is_empty() && found.is_empty() {
        HashMap::new()
    } else {
        wait_for_spares(&paths.vms()).await;
        let (own, others) = vmms(host);
        for (id, pid) in others {
            end_impostor(host, &id, pid).await;
        }
        own
    };
    for found in found {
        let Some(kept) = usable_record(host, registry, volumes, found, &mut alive) else {
            continue;
        };
        let record = &kept.record;
        let id = record.id.clone();
        remove_temporaries(&paths.vm(&id));
        match alive.remove(&id) {
            // The earlier daemon made it only for a capture.
            Some(pid) if record.spec.hidden => end_orphan(host, &id, pid).await,
            // Its memory is on disk, so its VMM was about to be killed.
            Some(pid) if record.state == VmState::Hibernated => {
                end_sleeper(pid, &id, host).await;
                register_without_vmm(host, registry, volumes, kept.record);
            }
            Some(pid) => adopt(host, registry, volumes, kept, pid),
            None if record.spec.hidden => {
                discard(host, &id, "the daemon that made it for a capture has ended")
            }
            None => register_without_vmm(host, registry, volumes, kept.record),
        }
    }
    for (id, pid) in alive {
        end_orphan(host, &id, pid).await;
    }
    host.launcher.all_adopted();
    adopt_pager(host, registry).await;
    for id in run_folders {
        let runs = registry
            .get(&id)
            .is_some_and(|vm| vm.view.borrow().is_active());
        if !runs {
            let _ = jiffy_sys::durable::remove_any(&paths.vm_run(&id));
        }
    }
}

/// The record of a VM that is to be registered. A VM that never lived is discarded; one whose
/// record can't be read is registered as it is.
fn usable_record(
    host: &Arc<Host>,
    registry: &Arc<Registry>,
    volumes: &Arc<Volumes>,
    Found { id, record }: Found,
    alive: &mut HashMap<String, u32>,
) -> Option<Kept> {
    let folder = host.paths.vm(&id);
    let why = match record {
        Ok(kept) if kept.record.id == id => return Some(kept),
        // The host or the daemon stopped while the VM had `remove` set or was being created.
        Err(LoadError::Empty) if !has_lived(&folder) && !alive.contains_key(&id) => {
            discard(host, &id, "its record is empty");
            return None;
        }
        Err(LoadError::Io(error))
            if error.kind() == std::io::ErrorKind::NotFound
                && !has_lived(&folder)
                && !(alive.contains_key(&id) && had_record(host, &folder)) =>
        {
            discard(host, &id, "it has no record");
            return None;
        }
        Ok(_) => LoadError::Checksum,
        Err(error) => error,
    };
    let pid = alive.remove(&id);
    unreadable(host, registry, volumes, &id, pid, &why);
    None
}

/// Tells the pager's client which VMs and disks the pager serves.
async fn adopt_pager(host: &Arc<Host>, registry: &Arc<Registry>) {
    let paged = registry.all().into_iter().filter_map(|vm| {
        let paged = vm.view.borrow().paged.clone();
        Some((vm.id.clone(), paged?))
    });
    let disks = registry.all().into_iter().filter_map(|vm| {
        let view = vm.view.borrow();
        let root = view.root.as_ref().filter(|_| view.is_active());
        root?.lazy.clone()
    });
    let unknown =
        registry.any(|vm| vm.view.borrow().refusal.is_some() && vm.view.borrow().is_active());
    let pager = &host.pager;
    pager
        .adopt(paged.collect(), disks.collect(), unknown.is_some())
        .await;
}

/// Registers a VM without a VMM: it is hibernated, or ended while no daemon ran.
fn register_without_vmm(
    host: &Arc<Host>,
    registry: &Arc<Registry>,
    volumes: &Arc<Volumes>,
    mut record: VmRecord,
) {
    make_name_unique(registry, &mut record);
    let was_active = is_active(record.state);
    let (mut actor, handle) = actor::new(Arc::clone(host), Arc::clone(registry), record);
    if was_active {
        actor.vmm_is_gone();
    }
    if !was_active && let Some(failure) = missing_disk(&vm_folder_of(&actor), &actor.record) {
        warn!(vm = %actor.record.name, error = failure.message, "a VM can't be started");
        actor.record.failure = Some(failure);
        actor.publish();
    }
    if actor.record.state == VmState::Hibernated {
        // Its memory is checked later: there may be thousands of such VMs.
        actor.phase = Phase::Asleep(hold_volumes(volumes, &actor.record));
        host.network.keep_asleep(&actor.record);
    }
    if actor.record.state == VmState::Hibernated && actor.saver.is_idle() {
        // There may be thousands of them, and most have nothing to do for long.
        handle.begin_when_asked(|| actor.begin());
        let _ = registry.insert(handle);
    } else {
        let _ = registry.insert(handle);
        actor.begin();
    }
}

/// The root disk that the VM needs to start and that is missing, if any.
fn missing_disk(folder: &Path, record: &VmRecord) -> Option<Failure> {
    if record.state == VmState::Hibernated {
        return None;
    }
    let lost = roots::check_own(folder, &record.name, &record.spec)
        .err()?
        .0;
    Some(Failure {
        message: lost.message,
        hint: lost.hint,
    })
}

/// Was the record of the VM in this folder ever written? A VM that the earlier daemon was about to
/// make has neither of these files.
fn has_lived(folder: &Path) -> bool {
    ["timeline.json", "hibernated"]
        .iter()
        .any(|name| is_taken(&folder.join(name)))
}

/// Must the running VM in this folder have had a record? The record is written during the start,
/// so it must exist after the start timeout. A younger VM was not reported to anybody. A standby
/// has no record, and no log of a command.
fn had_record(host: &Host, folder: &Path) -> bool {
    let began = fs::metadata(folder.join("vmm.json")).and_then(|data| data.modified());
    let age = began.ok().and_then(|began| began.elapsed().ok());
    age.is_some_and(|age| age > host.start_timeout) && is_taken(&folder.join("command.log"))
}

/// Registers a VM whose record can't be read.
fn unreadable(
    host: &Arc<Host>,
    registry: &Arc<Registry>,
    volumes: &Arc<Volumes>,
    id: &str,
    pid: Option<u32>,
    error: &LoadError,
) {
    let is_its = |_: &VmmProcess| pid.and_then(|pid| vmm_id(pid, host)).as_deref() == Some(id);
    let process = pid.and_then(|pid| VmmProcess::adopted(pid).ok());
    let process = process.filter(is_its);
    let process = process.map(|process| host.launcher.adopt(process));
    unreadable::register(host, registry, volumes, id, error, process);
}

fn discard(host: &Host, id: &str, why: &str) {
    info!(id, why, "removing the files of a VM that no longer exists");
    host.network.discard(id);
    if let Err(error) = folders::remove(&host.paths, id) {
        warn!(id, %error, "a VM's files could not be removed");
    }
}

fn adopt(host: &Arc<Host>, registry: &Arc<Registry>, volumes: &Arc<Volumes>, kept: Kept, pid: u32) {
    let paths = &host.paths;
    let Kept {
        mut record,
        powering_off,
    } = kept;
    let process = match VmmProcess::adopted(pid) {
        Ok(process) if vmm_id(pid, host).as_deref() == Some(&record.id) => {
            host.launcher.adopt(process)
        }
        // Its VMM ended between the search and the adoption.
        _ => {
            register_without_vmm(host, registry, volumes, record);
            return;
        }
    };
    record.failure = None;
    if record.addresses.is_empty() && record.spec.network.is_some() {
        record.addresses = network::recovered(&paths.vm(&record.id));
    }
    make_name_unique(registry, &mut record);
    let supervisor = listen(paths, &mut record, process.user());
    look_for_agent(paths, &mut record);
    let log = open_log(&paths.vm(&record.id), &mut record);
    channels::renew(paths, &record, pid);
    let held = hold_volumes(volumes, &record);
    let mut running = Running::new(
        process,
        None,
        supervisor,
        log,
        Instant::now() + host.start_timeout,
        held,
    );
    running.adopted = true;
    if powering_off {
        running.guest = Guest::PowersOff;
    }
    running.room = Some(host.room.adopt(amount_of(&record)));
    let changed = record.limits.clone();
    let (mut actor, handle) = actor::new(Arc::clone(host), Arc::clone(registry), record);
    info!(vm = %actor.record.name, pid, "VM adopted");
    actor.take_over(running, pid);
    let resumes = resume_after_adoption(Arc::clone(host), Arc::clone(&handle), changed);
    tokio::spawn(resumes);
    let _ = registry.insert(handle);
    actor.begin();
}

/// What an adopted VM has reserved. One that is not ready yet may still take all of its memory at once.
fn amount_of(record: &VmRecord) -> Amount {
    let spec = Spec {
        memory_mib: record.memory_mib(),
        cpus: record.cpus(),
        ..(*record.spec).clone()
    };
    match (record.state, &record.origin) {
        (VmState::Running | VmState::Paused | VmState::Stopping, _) => {
            Amount::of_running(spec.memory_mib, spec.cpus)
        }
        (_, Some(Origin::ForkedFrom(_))) => Amount::of_child(&spec),
        _ => Amount::of(&spec),
    }
}

/// Listens for the guest's init. If the socket can't be bound now, retries later; the VM runs on.
fn listen(paths: &Paths, record: &mut VmRecord, user: Option<u32>) -> Supervisor {
    let run = paths.vm_run(&record.id);
    if fs::DirBuilder::new().mode(0o700).create(&run).is_ok() {
        let _ = open_folder(&run, user);
        let message = format!(
            "The run folder {} of the VM {} was removed while it ran: jiffyd cannot reach it any more; its command keeps running.",
            run.display(),
            record.name
        );
        report_failure(record, message);
    }
    let socket = paths.supervisor_socket(&record.id);
    match supervisor::bind(&socket) {
        Ok(listener) => Supervisor::new(listener, None, &record.id),
        Err(error) => {
            let message = format!(
                "jiffyd cannot receive messages of the VM {}'s guest: listening on {} failed: {error}.",
                record.name,
                socket.display()
            );
            report_failure(record, message);
            Supervisor::bind_later(socket, &record.id)
        }
    }
}

/// Does the socket of the guest's agent exist?
pub(super) fn is_reachable(paths: &Paths, id: &str) -> bool {
    let data = fs::metadata(paths.vsock_socket(id));
    data.is_ok_and(|data| data.file_type().is_socket())
}

/// Checks the agent's socket, which the VMM makes once, before the VM runs.
fn look_for_agent(paths: &Paths, record: &mut VmRecord) {
    let is_up = matches!(record.state, VmState::Running | VmState::Paused);
    if is_up && !is_reachable(paths, &record.id) {
        let message = format!(
            "jiffyd cannot reach the VM {} any more; its command keeps running: {} is not a socket.",
            record.name,
            paths.vsock_socket(&record.id).display()
        );
        report_failure(record, message);
    }
}

/// Opens the command's log. If that fails, it is opened again when the guest connects.
fn open_log(folder: &Path, record: &mut VmRecord) -> Writer {
    Writer::open(folder).unwrap_or_else(|error| {
        let message = format!(
            "The command's log of the VM {} in {} can't be opened: {error}.",
            record.name,
            folder.display()
        );
        report_failure(record, message);
        Writer::unopened(folder)
    })
}

/// If two VMs have one name, the second gets its id as its name.
fn make_name_unique(registry: &Registry, record: &mut VmRecord) {
    if let Some(holder) = registry.named(&record.name) {
        let message = format!(
            "The name {} is also the name of the VM {}: this VM is named by its id.",
            record.name, holder.id
        );
        record.name = record.id.clone();
        report_failure(record, message);
    }
}

/// Shows the first failure of a VM to the user; logs all of them.
fn report_failure(record: &mut VmRecord, message: String) {
    warn!(vm = %record.name, id = %record.id, error = %message, "a VM was not adopted in full");
    let hint = format!(
        "End it with `jiffy kill {}` and start it again.",
        record.name
    );
    record.failure.get_or_insert(Failure {
        message,
        hint: Some(hint),
    });
}

fn hold_volumes(volumes: &Arc<Volumes>, record: &VmRecord) -> Vec<Lease> {
    if record.spec.own_volumes {
        return Vec::new();
    }
    let held = volumes.hold(&record.spec.disks, &record.name);
    held.unwrap_or_else(|error: Error| {
        warn!(vm = %record.name, %error, "the volumes of a VM can't be leased");
        Vec::new()
    })
}

fn vm_folder_of(actor: &Actor) -> std::path::PathBuf {
    actor.host.paths.vm(&actor.record.id)
}

async fn end_orphan(host: &Host, id: &str, pid: u32) {
    warn!(id, pid, "ending the VMM of an unknown VM");
    if end_vmm(host, id, pid).await {
        discard(host, id, "its VMM was unknown");
    }
}

impl Actor {
    fn take_over(&mut self, mut running: Running, pid: u32) {
        self.record.pid = Some(pid);
        if self.record.state != VmState::Starting {
            running.deadline = None;
        }
        if !is_active(self.record.state) {
            // The daemon died between the spawn and the write of the record.
            self.record.state = VmState::Starting;
            self.record.started = Some(unix_seconds());
            self.record.main = MainState::Pending;
        }
        if self.record.state == VmState::Starting && is_asleep(&self.folder()) {
            running.guest = Guest::Waking;
        } else if self.record.paged.is_none() {
            // Its hibernation was not finished.
            folders::remove_hibernated_memory(&self.folder(), self.record.root.as_ref());
        }
        self.log_end.send_replace(running.log.end());
        self.phase = Phase::Active(Box::new(running));
        if let Some(kept) = self.kept_timeline() {
            self.recorder.keep(kept);
        }
        if self.record.state == VmState::Stopping
            && !matches!(self.record.main, MainState::Ended(_))
        {
            // The earlier daemon was ending it. A guest whose command has ended powers off by
            // itself.
            let _ = self.stop(DEFAULT_GRACE);
        }
        self.changed();
    }
}

impl Actor {
    /// Handles a VM that has no VMM although its record says so.
    fn vmm_is_gone(&mut self) {
        let folder = self.folder();
        if self.record.state == VmState::Starting && is_asleep(&folder) {
            // Its wake was not finished.
            let _ = fs::remove_file(gate_record(&folder));
            self.record.state = VmState::Hibernated;
            self.record.pid = None;
            self.record.paged = None;
            self.changed();
        } else {
            self.ended_without_process();
        }
    }
}

/// Resumes a VM that the earlier daemon paused for a capture, and deflates its balloon if it was to
/// hibernate. A VM that its user paused stays paused. Its memory, its vCPUs and its limits become those
/// of its record, of which `changed` differ from those that it was made with: the earlier daemon may
/// not have finished a change.
async fn resume_after_adoption(host: Arc<Host>, vm: Arc<VmHandle>, changed: Limits) {
    // Otherwise it would resume a VM that this daemon has just paused, to capture it.
    let operation = vm.operate().await;
    let socket = host.paths.control_socket(&vm.id);
    let name = &vm.name;
    if let Some(limits) = changed_limits(&vm, &changed).await
        && let Err(why) = control::order(&socket, limits).await
    {
        warn!(vm = %name, why, "a VM's limits could not be set");
    }
    if operation.state == VmState::Paused {
        return;
    }
    let status = control::request(&socket, ControlRequest::Status).await;
    if matches!(status, Ok(ControlResponse::Status { paused: true, .. })) {
        info!(vm = %name, "resuming a VM that was being captured");
        if let Err(why) = control::order(&socket, ControlRequest::Resume).await {
            warn!(vm = %name, why, "a VM could not be resumed and stays paused");
        }
    }
    let balloon = control::request(&socket, ControlRequest::Balloon).await;
    if matches!(balloon, Ok(ControlResponse::Balloon(status)) if status.target_mib > 0) {
        info!(vm = %name, "deflating the balloon of a VM that was about to hibernate");
        let deflate = ControlRequest::SetBalloon { target_mib: 0 };
        if let Err(why) = control::order(&socket, deflate).await {
            warn!(vm = %name, why, "a VM's balloon could not be deflated");
        }
    }
    if vm.spec.max_memory_mib.is_some() {
        let usable_mib = vm.view.borrow().vm.memory_mib;
        let memory = ControlRequest::SetMemory { usable_mib };
        if let Err(why) = control::order(&socket, memory).await {
            warn!(vm = %name, why, "a VM's memory could not be set");
        }
    }
    if changed.cpus.is_some() {
        set_cpus(&host, &vm).await;
    }
}

/// The order that sets a VM's current rate limits, if any was changed.
async fn changed_limits(vm: &VmHandle, changed: &Limits) -> Option<ControlRequest> {
    let rates = Limits {
        cpus: None,
        memory_mib: None,
        ..changed.clone()
    };
    if rates.is_default() {
        return None;
    }
    let ask = |reply| Command::Limits(Box::default(), reply);
    let DeviceLimits { disks, nets } = vm.ask(ask).await.ok()?.ok()?;
    Some(ControlRequest::SetLimits { disks, nets })
}

/// Has the guest bring as many vCPUs on line as its VM's record says, once it is ready.
async fn set_cpus(host: &Host, vm: &VmHandle) {
    let view = vm.when(|view| view.vm.state != VmState::Starting).await;
    if view.vm.state != VmState::Running {
        return;
    }
    let request = Request::SetCpus {
        version: CPUS,
        count: view.vm.cpus.into(),
    };
    let socket = host.paths.vsock_socket(&vm.id);
    if let Err(why) = agent::tell(&socket, &request, CPUS_TIME).await {
        warn!(vm = %vm.name, why, "a VM's vCPUs could not be set");
    }
}

/// Removes files that an earlier daemon was writing when it was killed.
fn remove_temporaries(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let half_done = Path::new(&name).extension() == Some(OsStr::new("tmp"))
            || name.as_bytes().starts_with(b".");
        if half_done {
            let path = entry.path();
            let _ = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path));
        }
    }
}
