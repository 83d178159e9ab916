//! Makes golden snapshots: boots a guest, warms it up, captures it and tries the snapshot. See
//! [`crate::golden`].

use super::Node;
use super::accessed::Uncached;
use super::limits::current_spec;
use super::operation::Stopwatch;
use super::snapshot::write;
use crate::golden::{self, SnapshotRequests};
use crate::spec;
use jiffy_content::clock::monotonic_ns;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::{MainState, Root, Spec};
use jiffy_content::names as rules;
use jiffy_content::room::memory::{self as room, Amount, Background};
use jiffy_content::snapshots::draft::Draft;
use jiffy_content::snapshots::remove_in_background;
use jiffy_content::snapshots::saved::Saved;
use jiffy_sys::priority::BACKGROUND;
use jiffy_vmhost::agent;
use jiffy_vmhost::control;
use jiffy_vmhost::frames::FrameReader;
use jiffy_vmhost::handle::{Command, VmHandle};
use jiffy_vmhost::launch::{Beginning, Restoring};
use jiffy_vmhost::proxy::ToClient;
use jiffy_wire::agent::{Command as AgentCommand, ExecOutput, OLDEST, Request};
use jiffy_wire::api::VmState;
use jiffy_wire::vmm::{ControlRequest, ControlResponse, Extent};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use tracing::{debug, info};

/// A golden snapshot is made when no run has begun for this long.
const QUIET_TIME: Duration = Duration::from_secs(1);
/// Time limit of the warm-up program, which does nothing.
const WARM_UP_TIME: Duration = Duration::from_secs(20);

/// Processes the requests one after the other, while no VM starts.
pub async fn make_requested(node: Arc<Node>, mut wanted: SnapshotRequests) {
    while let Some(wish) = wanted.recv().await {
        let Some(vm) = wish.upgrade() else { continue };
        // A kind that fails to boot gets no snapshot.
        let view = vm.when(|view| view.vm.state != VmState::Starting).await;
        if view.failure.is_some() {
            continue;
        }
        let Some(shape) = spec::golden(&current_spec(&vm)) else {
            continue;
        };
        drop(vm);
        if let Err(error) = make(&node, shape).await {
            info!(%error, "no golden snapshot was made");
        }
    }
}

async fn make(node: &Node, shape: Spec) -> Result<()> {
    let goldens = node.goldens();
    let Some(key) = node.golden_key(&shape).await? else {
        return Ok(());
    };
    if goldens.is_settled(&key) {
        return Ok(());
    }
    wait_until_quiet(node).await;
    // The next run that boots asks for a snapshot again.
    let Some(mut room) = node.room().reserve_background(Amount::of(&shape)) else {
        return Err(room::memory_needed());
    };
    match node.make_golden(shape.clone(), &key, &mut room).await {
        Ok(saved) => {
            let same_kind = |old: &Saved| golden::is_same_kind(&old.manifest.spec, &shape);
            for (_, old) in goldens.take(same_kind) {
                goldens.discard(&old.folder, "a newer one of its kind was made");
            }
            info!(
                golden = golden::name_of(&saved),
                image = shape.image,
                bytes = saved.manifest.memory_bytes,
                "golden snapshot made"
            );
            // A snapshot must not outlive an image that was removed meanwhile.
            goldens.add(key, saved);
            if node.golden_image_is_gone(&shape).await {
                goldens.forget_image(&shape.image);
            }
            Ok(())
        }
        Err(error) if room.was_claimed() => Err(error),
        Err(error) => {
            // A failure of a lazy image may be a failed fetch, so it is tried again at the next
            // run.
            let root = node.image_root(&shape.image).await;
            if !root.is_ok_and(|root| root.lazy.is_some()) {
                goldens.mark_failed(key);
            }
            Err(error)
        }
    }
}

/// Waits until no VM starts and the last run is some time ago.
async fn wait_until_quiet(node: &Node) {
    loop {
        node.wait_until_none_starting().await;
        let wait = QUIET_TIME.saturating_sub(node.goldens().since_last_run());
        if wait.is_zero() {
            return;
        }
        tokio::time::sleep(wait).await;
    }
}

impl Node {
    /// Makes a golden snapshot of a new hidden VM, within the reserved memory.
    async fn make_golden(&self, shape: Spec, key: &str, room: &mut Background) -> Result<Saved> {
        let name = || Some(format!("golden-{}", rules::new_id()));
        let vm = self.make_vm(name(), shape.clone(), None).await?;
        let made = run_until_preempted(&vm, room, self.capture_golden(&vm, key)).await;
        self.discard(&vm).await;
        let mut saved = made?;
        let trial = Spec {
            command: Some(no_op_program()),
            ..shape
        };
        let vm = self.make_vm(name(), trial, None).await?;
        let ranges = run_until_preempted(&vm, room, self.trial_run(&vm, &saved)).await;
        self.discard(&vm).await;
        // Later runs read the memory in huge pages, where the trial has left none.
        Uncached::drop_pages(&saved).await;
        if room.was_claimed() {
            let _ = remove_in_background(&saved.folder);
            return Err(room::memory_needed());
        }
        let (written, accessed) = ranges.unwrap_or_else(|error| {
            debug!(%error, "the pages that a golden run uses first are not known");
            Default::default()
        });
        saved
            .save_first_ranges(written, accessed)
            .map_err(|error| {
                Error::io(
                    "store the lists of pages that a guest uses first",
                    &saved.folder,
                    &error,
                )
            })?;
        Ok(saved)
    }

    /// Restores a golden snapshot for a trial; returns the ranges of RAM that its guest has written
    /// and those that it has accessed by the end of a command that does nothing.
    async fn trial_run(
        &self,
        vm: &Arc<VmHandle>,
        saved: &Saved,
    ) -> Result<(Vec<Extent>, Vec<Extent>)> {
        let memory = Uncached::drop_pages(saved).await;
        {
            let _begins = self.hold_disks().await;
            let mut plan = self.prepare(vm, monotonic_ns()).await?;
            plan.beginning = Beginning::Restore(Box::new(Restoring {
                no_readahead: memory.is_some(),
                ..golden::restoring(saved, true)
            }));
            vm.ask(|reply| Command::Start(Box::new(plan), reply))
                .await??;
        }
        let over = vm.when(|view| matches!(view.main, MainState::Ended(_)) || !view.is_active());
        let view = timeout(WARM_UP_TIME, over)
            .await
            .map_err(|_| Error::vm_failed("The guest did not end its command in time."))?;
        if let Some(failure) = view.failure {
            return Err(Error::vm_failed(failure.message));
        }
        let socket = self.host.paths.control_socket(&vm.id);
        let written = match control::request(&socket, ControlRequest::Written).await {
            Ok(ControlResponse::Written(written)) => Ok(written),
            Ok(ControlResponse::Error(why)) => Err(Error::vm_failed(why)),
            Ok(_) => Err(Error::vm_failed("The VMM gave an unexpected answer.")),
            Err(error) => Err(Error::vm_failed(format!(
                "The VMM gave no answer: {error}."
            ))),
        }?;
        let accessed = match memory {
            Some(memory) => memory.accessed().await,
            None => Vec::new(),
        };
        Ok((written, accessed))
    }

    async fn capture_golden(&self, vm: &Arc<VmHandle>, key: &str) -> Result<Saved> {
        let mut watch = Stopwatch::start(&self.host.clock);
        let one = vm.operate().await;
        self.begin(vm, &one, None, monotonic_ns()).await?;
        let view = vm.when(|view| view.vm.state != VmState::Starting).await;
        if view.vm.state != VmState::Running {
            let why = view.failure.map(|failure| failure.message);
            return Err(Error::vm_failed(
                why.unwrap_or_else(|| "The VM ended before it was ready.".to_owned()),
            ));
        }
        self.warm_up(vm).await;
        let root = self.root_of(vm).await?;
        if root.lazy.is_none() {
            self.save_boot_set(vm, &root).await;
        }
        let mut manifest = self.manifest_of(vm, &root).await?;
        manifest.main = MainState::Pending;
        manifest.lazy_root = root.lazy.clone();
        let folder = self.host.paths.golden();
        let mut draft = Draft::new(&folder, &self.disk_room)?;
        draft.set_nice(BACKGROUND);
        draft.keep_raw(u64::MAX);
        let taken = self.quiesce_and_capture(vm, false, &mut watch).await?;
        manifest.note_processor(self.processor_of(vm).await);
        let to = folder.join(key);
        write(draft, taken.captured, root, manifest, to, true, &mut watch).await
    }

    /// Runs a program that does nothing, so that what every command needs is in the guest's
    /// memory when it is captured. Fails silently if the image has no such program.
    async fn warm_up(&self, vm: &VmHandle) {
        let socket = self.host.paths.vsock_socket(&vm.id);
        let request = Request::Exec {
            version: OLDEST,
            command: no_op_program(),
        };
        let run = async {
            let mut answers = FrameReader::new(agent::ask(&socket, &request).await.ok()?);
            while let Ok(Some(message)) = answers.next::<ExecOutput>().await {
                if message.is_last() {
                    return Some(());
                }
            }
            None
        };
        if !matches!(timeout(WARM_UP_TIME, run).await, Ok(Some(()))) {
            debug!(vm = %vm.name, "the guest was not warmed up");
        }
    }

    /// Saves what a guest has read so far as its image's boot set, which is fetched first when
    /// the image is started from a registry.
    async fn save_boot_set(&self, vm: &VmHandle, root: &Root) {
        let socket = self.host.paths.control_socket(&vm.id);
        let kept = match control::request(&socket, ControlRequest::Reads).await {
            Ok(ControlResponse::Reads(reads)) => {
                self.images
                    .save_boot_set(&vm.spec.image, &root.digest, &reads)
            }
            answer => {
                debug!(vm = %vm.name, ?answer, "the boot set is not known");
                return;
            }
        };
        if let Err(error) = kept {
            debug!(vm = %vm.name, %error, "the boot set was not saved");
        }
    }
}

/// Runs `work` on a VM. The VM is ended if a run claims its memory.
async fn run_until_preempted<T>(
    vm: &VmHandle,
    room: &mut Background,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    let end = async {
        room.claimed().await;
        debug!(vm = %vm.name, "ended, because a run needs its memory");
        let _ = vm.ask(|reply| Command::Remove(true, reply)).await;
        std::future::pending().await
    };
    // The work is not cancelled: without its VM it fails and cleans up.
    tokio::select! {
        done = work => done,
        never = end => never,
    }
}

/// A program that does nothing.
fn no_op_program() -> AgentCommand {
    AgentCommand {
        argv: vec!["true".to_owned()],
        ..AgentCommand::default()
    }
}
