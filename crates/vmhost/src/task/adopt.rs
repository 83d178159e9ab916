//! VMs that outlived the daemon that started them.
//!
//! A VMM is known by its command line: it names a configuration in our data
//! folder. That holds whether its sockets answer or not, and before they exist.

use super::unreadable;
use crate::control;
use crate::folders::{self, hibernated_in, is_asleep};
use crate::handle::is_active;
use crate::host::Host;
use crate::log::{self, Writer};
use crate::network;
use crate::process::VmmProcess;
use crate::registry::Registry;
use crate::spares::NO_ID;
use crate::supervisor::{self, Supervisor};
use crate::task::actor::{self, Actor, Running};
use crate::task::phase::{Gate, Phase};
use crate::task::stop::DEFAULT_GRACE;
use jiffy_content::clock::unix_seconds;
use jiffy_content::durable::{LoadError, is_taken};
use jiffy_content::error::Error;
use jiffy_content::model::vm::{Failure, MainState, VmRecord};
use jiffy_content::names;
use jiffy_content::paths::Paths;
use jiffy_content::roots;
use jiffy_content::snapshots::remove_behind;
use jiffy_content::snapshots::saved::Saved;
use jiffy_content::volumes::{Lease, Volumes};
use jiffy_jail::access::open_folder;
use jiffy_wire::api::VmState;
use jiffy_wire::vmm::{ControlRequest, ControlResponse};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

/// What the VMM of an unknown VM has to stop by itself.
const STOP_TIME: Duration = Duration::from_secs(2);
/// How often a spare VMM is looked at that must become a VM's or end.
const LOOK: Duration = Duration::from_millis(2);

/// Registers every VM on disk, adopts those whose VMM lives, and ends VMMs
/// that belong to none. Whatever is wrong with a VM is that VM's failure.
pub async fn all(host: &Arc<Host>, registry: &Arc<Registry>, volumes: &Arc<Volumes>) {
    let paths = &host.paths;
    let run_folders = ids_in(&paths.run.join("vms"));
    let ids = ids_in(&paths.vms());
    // Looking through /proc is only worth it if something may run. Run folders
    // alone do not tell: they go when their user logs out.
    let mut alive = if run_folders.is_empty() && ids.is_empty() {
        HashMap::new()
    } else {
        settle_spares(&paths.vms()).await;
        let (own, others) = vmms(host);
        for (id, pid) in others {
            end_impostor(host, &id, pid).await;
        }
        own
    };
    for id in ids {
        let folder = paths.vm(&id);
        let record = match VmRecord::load(&folder) {
            Ok(record) if record.id == id => record,
            // A VM to be removed at its end, or one just being created, when
            // the host or the daemon stopped: there is nothing to show.
            Err(LoadError::Empty) if !has_lived(&folder) && !alive.contains_key(&id) => {
                discard(host, &id, "its record is empty");
                continue;
            }
            Err(LoadError::Io(error))
                if error.kind() == std::io::ErrorKind::NotFound
                    && !has_lived(&folder)
                    && !(alive.contains_key(&id) && had_record(host, &folder)) =>
            {
                discard(host, &id, "it has no record");
                continue;
            }
            Ok(_) => {
                let pid = alive.remove(&id);
                unreadable(host, registry, volumes, &id, pid, &LoadError::Checksum);
                continue;
            }
            Err(error) => {
                let pid = alive.remove(&id);
                unreadable(host, registry, volumes, &id, pid, &error);
                continue;
            }
        };
        remove_temporaries(&folder);
        match alive.remove(&id) {
            // Made to be captured by the daemon before this one.
            Some(pid) if record.spec.hidden => end_orphan(host, &id, pid).await,
            // All of it is on disk: its VMM was about to end.
            Some(pid) if record.state == VmState::Hibernated => {
                end_sleeper(pid, &id, host).await;
                settle(host, registry, volumes, record);
            }
            Some(pid) => adopt(host, registry, volumes, record, pid),
            None if record.spec.hidden => discard(host, &id, "nobody waits for it"),
            None => settle(host, registry, volumes, record),
        }
    }
    for (id, pid) in alive {
        end_orphan(host, &id, pid).await;
    }
    host.launcher.all_adopted();
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
    for id in run_folders {
        let runs = registry
            .get(&id)
            .is_some_and(|vm| vm.view.borrow().is_active());
        if !runs {
            let _ = jiffy_sys::durable::remove_any(&paths.vm_run(&id));
        }
    }
}

/// A VM whose VMM is not there: it ended while no daemon looked, or sleeps.
fn settle(
    host: &Arc<Host>,
    registry: &Arc<Registry>,
    volumes: &Arc<Volumes>,
    mut record: VmRecord,
) {
    with_its_own_name(registry, &mut record);
    let was_active = is_active(record.state);
    let (mut actor, handle) = actor::new(Arc::clone(host), Arc::clone(registry), record);
    if was_active {
        actor.vmm_is_gone();
    }
    if !was_active && let Some(failure) = what_lacks(&paths_of(&actor), &actor.record) {
        warn!(vm = %actor.record.name, error = failure.message, "a VM can't go on");
        actor.record.failure = Some(failure);
        actor.publish();
    }
    if actor.record.state == VmState::Hibernated {
        actor.phase = Phase::Asleep(hold_volumes(volumes, &actor.record));
        host.network.keep_asleep(&actor.record);
        let end = log::end_of(&paths_of(&actor)).unwrap_or(0);
        actor.log_end.send_replace(end);
    }
    let _ = registry.insert(handle);
    tokio::spawn(actor.run());
}

/// What a VM would need to go on and does not have any more.
fn what_lacks(folder: &Path, record: &VmRecord) -> Option<Failure> {
    let name = &record.name;
    if record.state != VmState::Hibernated {
        let lost = roots::check_own(folder, name, &record.spec).err()?.0;
        return Some(Failure {
            message: lost.message,
            hint: lost.hint,
        });
    }
    let saved = Saved::open(hibernated_in(folder));
    let why = saved.and_then(|saved| saved.check()).err()?;
    Some(Failure {
        message: format!("The memory of the VM {name} can't be read: {why}."),
        hint: Some(format!("Remove the VM with `jiffy rm --force {name}`.")),
    })
}

/// Has there been a VM in this folder whose record was written? One that the daemon before
/// this one was about to make has neither of these.
fn has_lived(folder: &Path) -> bool {
    ["timeline.json", "hibernated"]
        .iter()
        .any(|name| is_taken(&folder.join(name)))
}

/// Must there have been a record of the VM in this folder, whose VMM runs? It is written
/// while the VM starts, and a start takes no longer than the start timeout; nobody has heard
/// of a VM that was just about to start. One that is held ahead has none, and no log of a
/// command.
fn had_record(host: &Host, folder: &Path) -> bool {
    let began = fs::metadata(folder.join("vmm.json")).and_then(|data| data.modified());
    let age = began.ok().and_then(|began| began.elapsed().ok());
    age.is_some_and(|age| age > host.start_timeout) && is_taken(&folder.join("command.log"))
}

/// A VM of which this daemon doesn't know what it is made of.
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
    info!(id, why, "removing what is left of a VM");
    if let Err(error) = folders::remove(&host.paths, id) {
        warn!(id, %error, "a VM's files could not be removed");
    }
}

fn adopt(
    host: &Arc<Host>,
    registry: &Arc<Registry>,
    volumes: &Arc<Volumes>,
    mut record: VmRecord,
    pid: u32,
) {
    let paths = &host.paths;
    let process = match VmmProcess::adopted(pid) {
        Ok(process) if vmm_id(pid, host).as_deref() == Some(&record.id) => {
            host.launcher.adopt(process)
        }
        // It ended between the two looks.
        _ => {
            settle(host, registry, volumes, record);
            return;
        }
    };
    record.failure = None;
    if record.addresses.is_empty() && record.spec.network.is_some() {
        record.addresses = network::recovered(&paths.vm(&record.id));
    }
    with_its_own_name(registry, &mut record);
    let supervisor = listen(paths, &mut record, process.user());
    look_for_agent(paths, &mut record);
    let log = open_log(&paths.vm(&record.id), &mut record);
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
    running.room = Some(host.room.adopt(record.spec.memory_mib.into()));
    let (mut actor, handle) = actor::new(Arc::clone(host), Arc::clone(registry), record);
    info!(vm = %actor.record.name, pid, "VM adopted");
    actor.take_over(running, pid);
    let _ = registry.insert(handle);
    tokio::spawn(actor.run());
}

/// Where the guest's init connects. If that can't be had now it is tried again
/// later: the VM goes on.
fn listen(paths: &Paths, record: &mut VmRecord, user: Option<u32>) -> Supervisor {
    let run = paths.vm_run(&record.id);
    if fs::DirBuilder::new().mode(0o700).create(&run).is_ok() {
        let _ = open_folder(&run, user);
        let message = format!(
            "The run folder {} of the VM {} was removed while it ran: it can't be reached any more, only its command goes on.",
            run.display(),
            record.name
        );
        in_trouble(record, message);
    }
    let socket = paths.supervisor_socket(&record.id);
    match supervisor::bind(&socket) {
        Ok(listener) => Supervisor::new(listener, &record.id),
        Err(error) => {
            let message = format!(
                "The guest of the VM {} can't be heard: listening on {} failed: {error}.",
                record.name,
                socket.display()
            );
            in_trouble(record, message);
            Supervisor::when_it_can_listen(socket, &record.id)
        }
    }
}

/// Is there the socket by which the guest's agent is asked?
pub(super) fn is_reachable(paths: &Paths, id: &str) -> bool {
    let data = fs::metadata(paths.vsock_socket(id));
    data.is_ok_and(|data| data.file_type().is_socket())
}

/// Where the guest's agent is asked: its VMM makes that once, before the VM runs.
fn look_for_agent(paths: &Paths, record: &mut VmRecord) {
    let is_up = matches!(record.state, VmState::Running | VmState::Paused);
    if is_up && !is_reachable(paths, &record.id) {
        let message = format!(
            "The VM {} can't be reached any more, only its command goes on: {} is no socket.",
            record.name,
            paths.vsock_socket(&record.id).display()
        );
        in_trouble(record, message);
    }
}

/// The command's log. If it can't be had now it is tried again when the guest
/// connects.
fn open_log(folder: &Path, record: &mut VmRecord) -> Writer {
    Writer::open(folder).unwrap_or_else(|error| {
        let message = format!(
            "The command's log of the VM {} in {} can't be opened: {error}.",
            record.name,
            folder.display()
        );
        in_trouble(record, message);
        Writer::unopened(folder)
    })
}

/// Of two VMs with one name the second is known by its id.
fn with_its_own_name(registry: &Registry, record: &mut VmRecord) {
    if let Some(holder) = registry.named(&record.name) {
        let message = format!(
            "The name {} is also that of the VM {}: this one is called by its id.",
            record.name, holder.id
        );
        record.name = record.id.clone();
        in_trouble(record, message);
    }
}

/// The first that goes wrong with a VM is shown; all of it is logged.
fn in_trouble(record: &mut VmRecord, message: String) {
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
        warn!(vm = %record.name, %error, "a VM's volumes are not all its own");
        Vec::new()
    })
}

fn paths_of(actor: &Actor) -> std::path::PathBuf {
    actor.host.paths.vm(&actor.record.id)
}

/// Ends the VMM of a VM whose memory is on disk.
async fn end_sleeper(pid: u32, id: &str, host: &Host) {
    let Ok(process) = VmmProcess::adopted(pid) else {
        return;
    };
    if vmm_id(pid, host).as_deref() == Some(id) {
        process.kill();
        let _ = timeout(STOP_TIME, process.ended()).await;
    }
}

async fn end_orphan(host: &Host, id: &str, pid: u32) {
    warn!(id, pid, "ending the VMM of a VM that is not known");
    if end_vmm(host, id, pid).await {
        discard(host, id, "its VMM was unknown");
    }
}

/// Ends a VMM whose command line names another VM than the one it was started for.
async fn end_impostor(host: &Host, id: &str, pid: u32) {
    let Ok(process) = VmmProcess::adopted(pid) else {
        return;
    };
    if folder_of(pid, &host.paths.vms()).as_deref() == Some(id) && !is_of(pid, id, host) {
        warn!(
            id,
            pid, "ending a VMM that says it is the VM's, and runs as another user"
        );
        process.kill();
        let _ = timeout(STOP_TIME, process.ended()).await;
    }
}

/// Ends a VMM; false if this process is none of this VM's any more.
pub(super) async fn end_vmm(host: &Host, id: &str, pid: u32) -> bool {
    let Ok(process) = VmmProcess::adopted(pid) else {
        return false;
    };
    if vmm_id(pid, host).as_deref() != Some(id) {
        return false;
    }
    let socket = host.paths.control_socket(id);
    let stopped = async {
        control::request(&socket, ControlRequest::Stop).await.ok()?;
        Some(process.ended().await)
    };
    if !matches!(timeout(STOP_TIME, stopped).await, Ok(Some(_))) {
        process.kill();
        let _ = timeout(STOP_TIME, process.ended()).await;
    }
    true
}

impl Actor {
    fn take_over(&mut self, mut running: Running, pid: u32) {
        self.record.pid = Some(pid);
        if self.record.state != VmState::Starting {
            running.deadline = None;
        }
        if !is_active(self.record.state) {
            // The daemon died between spawning it and writing that down.
            self.record.state = VmState::Starting;
            self.record.started = Some(unix_seconds());
            self.record.main = MainState::Pending;
        }
        if self.record.state == VmState::Starting && is_asleep(&self.folder()) {
            running.gate = Gate::Waking;
        } else if self.record.paged.is_none() {
            // It was to sleep, and does not.
            let _ = remove_behind(&hibernated_in(&self.folder()));
        }
        self.log_end.send_replace(running.log.end());
        self.phase = Phase::Active(Box::new(running));
        self.let_go_on();
        if let Some(kept) = self.kept_timeline() {
            self.recorder.keep(kept);
        }
        if self.record.state == VmState::Stopping
            && !matches!(self.record.main, MainState::Ended(_))
        {
            // The daemon before this one was to end it. A guest whose command has ended
            // powers off by itself.
            let _ = self.stop(DEFAULT_GRACE);
        }
        self.changed();
    }
}

impl Actor {
    /// There is no VMM where the record says that one was.
    fn vmm_is_gone(&mut self) {
        let folder = self.folder();
        if self.record.state == VmState::Starting && is_asleep(&folder) {
            // It was to wake and never went on.
            self.record.state = VmState::Hibernated;
            self.record.pid = None;
            self.record.paged = None;
            self.changed();
        } else {
            self.ended_without_process();
        }
    }

    /// A VM that the daemon before this one paused to capture it goes on, with
    /// all of its memory if it was to hibernate; one that its user paused stays
    /// so.
    fn let_go_on(&self) {
        if self.record.state == VmState::Paused {
            return;
        }
        let socket = self.host.paths.control_socket(&self.record.id);
        let name = self.record.name.clone();
        tokio::spawn(async move {
            let status = control::request(&socket, ControlRequest::Status).await;
            if matches!(status, Ok(ControlResponse::Status { paused: true, .. })) {
                info!(vm = %name, "a VM that was being captured goes on");
                if let Err(why) = control::order(&socket, ControlRequest::Resume).await {
                    warn!(vm = %name, why, "a VM stays paused");
                }
            }
            let balloon = control::request(&socket, ControlRequest::Balloon).await;
            if matches!(balloon, Ok(ControlResponse::Balloon(status)) if status.target_mib > 0) {
                info!(vm = %name, "a VM that was to hibernate gets its memory back");
                let deflate = ControlRequest::SetBalloon { target_mib: 0 };
                if let Err(why) = control::order(&socket, deflate).await {
                    warn!(vm = %name, why, "a VM keeps its balloon");
                }
            }
        });
    }
}

/// What an earlier daemon was writing when it was killed.
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

fn ids_in(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| names::is_id(name))
        .collect()
}

/// A spare of the daemon before this one ends with it, but if it was told just
/// before that which VM it is, it becomes that one: waits until it is one or
/// the other.
async fn settle_spares(vms: &Path) {
    let deadline = Instant::now() + STOP_TIME;
    let undecided = || -> Vec<u32> {
        let spares = vmms_of(vms, |id| id == NO_ID);
        spares.map(|(_, pid)| pid).collect()
    };
    let mut left = undecided();
    while !left.is_empty() && Instant::now() < deadline {
        tokio::time::sleep(LOOK).await;
        left = undecided();
    }
    for pid in left {
        let Ok(process) = VmmProcess::adopted(pid) else {
            continue;
        };
        if undecided().contains(&pid) {
            warn!(pid, "ending a spare VMM that did not end by itself");
            process.kill();
            let _ = timeout(STOP_TIME, process.ended()).await;
        }
    }
}

/// All VMMs whose configuration is in this node's folder, as VM's id and process id; and
/// processes that only say so.
fn vmms(host: &Host) -> (HashMap<String, u32>, Vec<(String, u32)>) {
    let vms = host.paths.vms();
    let all = vmms_of(&vms, names::is_id);
    let (own, others) = all.partition::<Vec<_>, _>(|(id, pid)| is_of(*pid, id, host));
    (own.into_iter().collect(), others)
}

/// Was this process started for this VM, as far as its user tells?
fn is_of(pid: u32, id: &str, host: &Host) -> bool {
    host.launcher.is_user_of(pid, &host.paths.vm_run(id))
}

/// VM's id and process id, of VMMs with these ids.
fn vmms_of(vms: &Path, which: impl Fn(&str) -> bool) -> impl Iterator<Item = (String, u32)> {
    let entries = fs::read_dir("/proc").into_iter().flatten();
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter_map(move |pid| Some((folder_of(pid, vms)?, pid)))
        .filter(move |(id, _)| which(id))
}

/// The id of the VM whose VMM this process is.
fn vmm_id(pid: u32, host: &Host) -> Option<String> {
    folder_of(pid, &host.paths.vms()).filter(|id| names::is_id(id) && is_of(pid, id, host))
}

/// What stands in a VM's id's place in the command line of this process.
fn folder_of(pid: u32, vms: &Path) -> Option<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    vmm_of(&line, vms)
}

/// The VM's id (or [`NO_ID`]) in the command line `jiffy-vmm run --config VMS/ID/vmm.json …`.
fn vmm_of(command_line: &[u8], vms: &Path) -> Option<String> {
    let mut words = command_line.split(|byte| *byte == 0).skip(1);
    if words.next()? != b"run" || words.next()? != b"--config" {
        return None;
    }
    let config = Path::new(OsStr::from_bytes(words.next()?));
    let folder = config.strip_prefix(vms).ok()?.parent()?;
    let id = folder.to_str()?;
    let known = names::is_id(id) || id == NO_ID;
    (known && config.file_name()? == "vmm.json").then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_vmm_of_this_data_folder_is_ours() {
        let of = |line: &str| vmm_of(line.replace(' ', "\0").as_bytes(), Path::new("/d/vms"));
        assert_eq!(
            of("/lib/jiffy-vmm run --config /d/vms/0123456789ab/vmm.json --events-fd 3").as_deref(),
            Some("0123456789ab")
        );
        assert_eq!(
            of("jiffy-vmm run --config /d/vms/------------/vmm.json --spare-fd 3").as_deref(),
            Some(NO_ID)
        );
        assert_eq!(
            NO_ID.len(),
            names::new_id().len(),
            "one takes the other's place"
        );
        assert!(!names::is_id(NO_ID));
        for other in [
            "jiffy-vmm run --config /e/vms/0123456789ab/vmm.json",
            "jiffy-vmm run --config /d/vms/short/vmm.json",
            "jiffy-vmm run --config /d/vms/0123456789ab/other.json",
            "jiffy-vmm probe --config /d/vms/0123456789ab/vmm.json",
            "cat /d/vms/0123456789ab/vmm.json",
            "",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
