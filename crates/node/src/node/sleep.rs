//! Hibernate and wake: a VM's memory is on disk instead of in a VMM.

use super::limits::current_spec;
use super::operation::{Caller, Stopwatch, for_clients};
use super::queue::another_waits;
use super::snapshot::write;
use super::{Node, balloon, is_paused};
use jiffy_content::clock::monotonic_ns;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::Root;
use jiffy_content::room::memory::Amount;
use jiffy_content::snapshots::draft::Draft;
use jiffy_content::snapshots::saved::Saved;
use jiffy_sys::page_cache;
use jiffy_sys::priority::AWAITED;
use jiffy_vmhost::folders;
use jiffy_vmhost::handle::{Command, HibernationMark, Operation, VmHandle};
use jiffy_vmhost::launch::{Beginning, Handle, Plan, Restoring, volume_disk};
use jiffy_vmhost::network::Network;
use jiffy_wire::api::{ErrorKind, Hibernated, Purpose, Vm, VmState};
use jiffy_wire::timeline::names;
use std::fs::File;
use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

/// MiB that the balloon leaves to the guest, whose init has to run until the capture.
const LEFT_FREE: u64 = 8;
/// How long the balloon of a woken guest waits for its first answer.
const ANSWER_TIME: Duration = Duration::from_millis(50);
/// Time limit of the balloon.
const SQUEEZE_TIME: Duration = Duration::from_secs(30);

/// A hibernation in progress. Dropping it releases those who wait for its end and, unless the VM is
/// hibernated, directs the VM's ports to it again.
pub(super) struct Hibernating<'a> {
    network: &'a Network,
    vm: &'a VmHandle,
    sleeps: bool,
    _marked: HibernationMark<'a>,
}

impl Drop for Hibernating<'_> {
    fn drop(&mut self) {
        if !self.sleeps {
            self.network.restore_ports(&self.vm.id);
        }
    }
}

impl Node {
    /// Writes a VM's memory to disk and ends its VMM.
    ///
    /// # Errors
    ///
    /// If the VM can't be captured now, or its memory can't be written. It runs on then.
    pub async fn hibernate(self: Arc<Self>, vm: Arc<VmHandle>) -> Result<Hibernated> {
        let watch = Stopwatch::start(&self.host.clock);
        let one = self.operate_for_client(&vm).await?;
        let socket = self.capturable(&vm).await?;
        let hibernating = self.begin_hibernation(&vm, &one);
        self.hibernate_now(&vm, &socket, hibernating, AWAITED, watch)
            .await
    }

    /// Marks a VM as being hibernated, and makes new connections to its ports wait.
    pub(super) fn begin_hibernation<'a>(
        &'a self,
        vm: &'a VmHandle,
        one: &'a Operation<'_>,
    ) -> Hibernating<'a> {
        let marked = vm.begin_hibernation(one);
        let network = &self.host.network;
        network.divert_ports(&vm.id);
        Hibernating {
            network,
            vm,
            sleeps: false,
            _marked: marked,
        }
    }

    /// Hibernates a VM that was checked and marked. Its memory is compressed with a nice value that is
    /// higher by `nice`: not in the background, because a request for this VM waits until it sleeps.
    pub(super) async fn hibernate_now(
        &self,
        vm: &VmHandle,
        socket: &Path,
        mut hibernating: Hibernating<'_>,
        nice: i32,
        mut watch: Stopwatch,
    ) -> Result<Hibernated> {
        vm.waking.forget();
        vm.memory_check.mark_good();
        let root = self.root_of(vm).await?;
        let _whole = self.complete_root(&root).await?;
        let folder = self.host.paths.vm(&vm.id);
        let mut manifest = self.manifest_of(vm, &root).await?;
        let mut draft = Draft::new(&folder, &self.disk_room)?;
        draft.set_nice(nice);
        // A file that is mapped is much faster to wake from than one that a pager decompresses.
        draft.keep_raw(self.hibernate_raw);
        let room = self.reserve_missing_memory(vm).await?;
        // Before the freeze: a frozen guest answers no other requests.
        let spare = balloon::spare(socket, LEFT_FREE).await;
        let frozen = self.quiesce(vm, socket, true, &mut watch).await?;
        watch
            .step(names::BALLOON, self.squeeze(vm, spare, SQUEEZE_TIME))
            .await;
        let slept = async {
            self.complete(vm).await?;
            drop(room);
            let captured = self.capture(vm, false, &mut watch).await?;
            manifest.note_processor(self.processor_of(vm).await);
            // The files of an earlier wake can be replaced: all of their contents are in memory
            // now.
            let to = folders::hibernated_in(&folder);
            let saved = write(draft, captured, root, manifest, to, true, &mut watch).await?;
            vm.ask(Command::Hibernate).await??;
            Ok(saved)
        }
        .await;
        match slept {
            Ok(saved) => {
                hibernating.sleeps = true;
                drop(frozen);
                Ok(Hibernated {
                    vm: vm.vm(),
                    bytes: saved.manifest.memory_bytes + saved.manifest.other_bytes,
                    timeline: watch.stop(),
                })
            }
            Err(error) => {
                let _ = self.resume_vcpus(vm).await;
                self.deflate(vm).await;
                drop(frozen);
                let view = vm.view.borrow();
                if view.paged.is_none() {
                    folders::remove_hibernated_memory(&folder, view.root.as_ref());
                }
                Err(error)
            }
        }
    }

    /// Wakes a hibernated VM; returns when its VMM is spawned.
    pub(super) async fn wake(
        self: &Arc<Self>,
        vm: &Arc<VmHandle>,
        _one: &Operation<'_>,
        received_ns: u64,
    ) -> Result<()> {
        let lookup_ns = monotonic_ns();
        let folder = folders::hibernated_in(&self.host.paths.vm(&vm.id));
        let readable = |saved: Saved| saved.check().map(|()| saved);
        let saved = Saved::open(folder).and_then(readable).map_err(|why| {
            Error::internal(format!(
                "The memory of the VM {} can't be read: {why}.",
                vm.name
            ))
        })?;
        vm.memory_check.mark_good();
        let what = format!("The VM {}", vm.name);
        let processor = &self.processor;
        processor.check(&what, saved.manifest.cpu.as_ref()).await?;
        let room = self.reserve(vm, Purpose::Wake, Amount::of(&current_spec(vm)), 1);
        let room = room.await?;
        let volume_disks = if vm.spec.own_volumes {
            self.volume_disks(vm, &[])
        } else {
            // The VM's task has held the leases all the time.
            let of = |disk: &jiffy_wire::api::VolumeUse| {
                volume_disk(disk, self.volumes.file(&disk.name))
            };
            vm.spec.disks.iter().map(of).collect()
        };
        let disks = self.disks(vm, saved.root(), volume_disks);
        let memory = self.memory_of(vm, &saved, false).await?;
        let kernel = self.kernel_file(&vm.spec.kernel);
        let root = Root {
            path: saved.root(),
            digest: saved.manifest.image_digest.clone(),
            lazy: None,
        };
        let restoring = Restoring {
            no_readahead: saved.is_mapped() && is_cached(&saved).await,
            ..Restoring::new(None, Handle::Path(saved.state()), memory)
        };
        let beginning = Beginning::Restore(Box::new(restoring));
        let mut plan = Plan::new(kernel, root, disks, beginning, (received_ns, lookup_ns));
        plan.room = Some(room);
        self.hand_over(vm, plan).await?;
        tokio::spawn(Arc::clone(self).deflate_woken(Arc::clone(vm)));
        Ok(())
    }

    /// Gives a woken guest its memory back, after it has answered the request that woke it: that takes
    /// more processor time than the rest of the wake. A guest that needs memory earlier takes it (Virtio
    /// 1.3 §5.5.6.1, VIRTIO_BALLOON_F_DEFLATE_ON_OOM).
    async fn deflate_woken(self: Arc<Self>, vm: Arc<VmHandle>) {
        vm.when(|view| view.vm.state != VmState::Starting).await;
        tokio::time::sleep(ANSWER_TIME).await;
        let one = vm.operate().await;
        if matches!(one.state, VmState::Running | VmState::Paused) {
            self.deflate(&vm).await;
        }
    }

    /// Wakes a hibernated or hibernating VM, once for all concurrent requests. Each waits for memory and
    /// vCPUs as its caller wants: one that waits for less time than the request that began the wake
    /// gives up earlier, and one that explicitly waits for longer tries again.
    ///
    /// # Errors
    ///
    /// If there is no room in time, or the VM can't be restored or does not become ready.
    pub async fn wake_if_asleep(self: &Arc<Self>, vm: &Arc<VmHandle>) -> Result<()> {
        self.wake_unless_failed_since(vm, Instant::now()).await
    }

    /// Like [`Node::wake_if_asleep`], but the error of a wake that failed after `since` is returned
    /// instead of another attempt.
    pub(super) async fn wake_unless_failed_since(
        self: &Arc<Self>,
        vm: &Arc<VmHandle>,
        since: Instant,
    ) -> Result<()> {
        vm.hibernation_settled().await;
        // A request that comes during a wake gets the same result as the others.
        let sleeps = vm.view.borrow().vm.state == VmState::Hibernated;
        if !sleeps && !vm.waking.is_in_progress() {
            return Ok(());
        }
        let wait = Caller::current().wait;
        let until = Instant::now() + self.host.room.wait_limit(wait);
        let is_short = |error: &Error| error.0.kind == ErrorKind::NoRoom;
        // Who says how long it waits for room does not get the answer to another wait.
        let is_answer = |error: &Error| wait.is_none() || !is_short(error);
        loop {
            let waking = vm.waking.join(
                |at, woken| at >= since && woken.as_ref().is_err_and(is_answer),
                |clients| self.wake_for(vm, clients),
            );
            // A wake that this request began waits for room as this request wants.
            if waking.began {
                return finished(waking.result().await);
            }
            let too_long = async {
                sleep_until(until).await;
                self.host.room.when_queued_for(&vm.id).await;
            };
            let woken = tokio::select! {
                woken = waking.result() => finished(woken),
                () = too_long => return Err(another_waits(vm)),
            };
            let may_wait = wait.is_some() && Instant::now() < until;
            if !may_wait || !woken.as_ref().is_err_and(is_short) {
                return woken;
            }
        }
    }

    fn wake_for(
        self: &Arc<Self>,
        vm: &Arc<VmHandle>,
        clients: watch::Receiver<()>,
    ) -> impl Future<Output = Result<()>> + use<> {
        let (node, vm) = (Arc::clone(self), Arc::clone(vm));
        for_clients(clients.clone(), async move {
            let woken = node.wake_and_wait(Arc::clone(&vm)).await;
            if let (Err(error), true) = (&woken, clients.has_changed().is_ok()) {
                warn!(vm = %vm.name, %error, "a VM can't be woken for a request");
            }
            woken.map(drop)
        })
    }

    /// Wakes a hibernated VM; returns when it is ready.
    ///
    /// # Errors
    ///
    /// If the VM is paused or not hibernated, or as in [`Node::wake_if_asleep`].
    pub async fn wake_and_wait(self: Arc<Self>, vm: Arc<VmHandle>) -> Result<Vm> {
        let received_ns = monotonic_ns();
        let one = self.operate_for_client(&vm).await?;
        match one.state {
            VmState::Hibernated => self.wake(&vm, &one, received_ns).await?,
            // As with `start`, waking a running VM is no error.
            VmState::Starting | VmState::Running => {}
            VmState::Paused => return Err(is_paused(&vm)),
            _ => {
                return Err(Error::wrong_state(format!(
                    "The VM {} is not hibernated.",
                    vm.name
                )));
            }
        }
        drop(one);
        let vm = self.started(&vm).await?;
        info!(vm = %vm.name, "VM woken");
        Ok(vm)
    }
}

/// Whether a hibernated VM's memory is in the page cache. Then readahead only makes pages for the holes
/// of its file, which the guest does not use: a fifth of the instructions of a wake.
async fn is_cached(saved: &Saved) -> bool {
    let memory = saved.memory();
    let look = move || File::open(memory).and_then(|file| page_cache::is_mostly_cached(&file));
    matches!(tokio::task::spawn_blocking(look).await, Ok(Ok(true)))
}

/// The result of a wake; an error if its task panicked.
fn finished(woken: Option<Result<()>>) -> Result<()> {
    woken.unwrap_or_else(|| Err(Error::internal("A task of jiffyd did not finish.")))
}
