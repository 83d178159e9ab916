//! Fork: live clones that share the parent's memory until one of them writes.

use super::Node;
use super::limits::current_spec;
use super::operation::{Stopwatch, join_result};
use crate::spec;
use futures_util::{StreamExt, TryStreamExt, stream};
use jiffy_content::clock::monotonic_ns;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::{MainState, Root, Spec};
use jiffy_content::names as rules;
use jiffy_content::room::memory::{Amount, Reserved};
use jiffy_content::snapshots::captured::Captured;
use jiffy_content::snapshots::draft::clone_volumes;
use jiffy_vmhost::handle::{Command, VmHandle};
use jiffy_vmhost::launch::{Beginning, Handle, Plan, Restoring, SavedRam, check_descriptors_for};
use jiffy_wire::api::{ForkVm, Forked, Origin, Purpose, Vm};
use jiffy_wire::timeline::{Track, names as spans};
use std::path::PathBuf;
use std::sync::Arc;
use tracing::info;

/// Most children of one request.
const MAX_CHILDREN: u32 = 1000;
/// Most children that start at the same time. Each must become ready within a time limit, and
/// they share the host's processors meanwhile.
const STARTING_AT_ONCE: usize = 64;

impl Node {
    /// Makes live clones of a running VM.
    ///
    /// # Errors
    ///
    /// If the names are not valid or taken, the VM can't be captured now, there is no room for all,
    /// or one does not become ready. None is left then.
    pub async fn fork(self: Arc<Self>, vm: Arc<VmHandle>, wanted: ForkVm) -> Result<Forked> {
        let mut watch = Stopwatch::start(&self.host.clock);
        let names = names_of(&wanted)?;
        let _one = self.operate_for_client(&vm).await?;
        self.capturable(&vm).await?;
        // Checked before the pause: one child without descriptors would end all others.
        check_descriptors_for(names.len() as u64)?;
        let root = self.root_of(&vm).await?;
        // The parent may be removed before the children's records name it.
        let _root = self.images.hold(&root);
        // Before the children's memory is reserved: no request holds one and waits for the other.
        self.fill_memory(&vm).await?;
        // Reserved for all children at once: two forks that each wait for the rest of their
        // memory would deadlock.
        let each = Amount::of_child(&current_spec(&vm));
        let room = self.reserve(&vm, Purpose::Fork, each, names.len() as u32);
        let room = room.await?;
        if let Some((start_ns, end_ns)) = room.waited_ns {
            watch.span(Track::Node, spans::ROOM_WAITED, start_ns, end_ns);
        }
        let children = self.make_children(&vm, names).await?;
        let forked = self.fork_into(&vm, root, &children, room, &mut watch);
        let forked = forked.await;
        match forked {
            Ok((vms, pause_ns)) => {
                info!(vm = %vm.name, children = vms.len(), "VM forked");
                Ok(Forked {
                    vms,
                    pause_ns,
                    timeline: watch.stop(),
                })
            }
            Err(error) => {
                for child in &children {
                    self.discard(child).await;
                }
                Err(error)
            }
        }
    }

    /// Makes the children's records, before the parent is paused.
    async fn make_children(
        &self,
        parent: &VmHandle,
        names: Vec<Option<String>>,
    ) -> Result<Vec<Arc<VmHandle>>> {
        // The child inherits the parent's command only if that is still running.
        let runs = parent.view.borrow().main == MainState::Started;
        let current = current_spec(parent);
        let spec = Spec {
            own_volumes: !current.disks.is_empty() || current.root_disk.is_some(),
            command: current.command.clone().filter(|_| runs),
            from: None,
            // As in a VM from a snapshot, its name is its host name.
            hostname: None,
            network: spec::inherited(&current),
            ..current
        };
        let mut children = Vec::with_capacity(names.len());
        for name in names {
            match self.make_child(name, spec.clone()).await {
                Ok(child) => children.push(child),
                Err(error) => {
                    for child in &children {
                        self.discard(child).await;
                    }
                    return Err(error);
                }
            }
        }
        Ok(children)
    }

    async fn fork_into(
        &self,
        vm: &Arc<VmHandle>,
        root: Root,
        children: &[Arc<VmHandle>],
        room: Reserved,
        watch: &mut Stopwatch,
    ) -> Result<(Vec<Vm>, u64)> {
        let received_ns = monotonic_ns();
        let volumes = self.volume_files(vm);
        let resume = volumes.is_empty();
        let taken = self.quiesce_and_capture(vm, resume, watch).await?;
        if !resume {
            let start = monotonic_ns();
            let cloned = self.clone_for(children, volumes).await;
            watch.span(Track::Node, spans::VOLUMES_CLONED, start, monotonic_ns());
            self.resume_vcpus(vm).await?;
            cloned?;
        }
        // The capture never changes, so the parent can continue.
        drop(taken.frozen);
        let captured = taken.captured;
        let pause_ns = captured.pause_ns;
        let start = monotonic_ns();
        let (root, captured) = (&root, &captured);
        let starts = children.iter().cloned().zip(room.split());
        let starts = starts.map(|(child, room)| async move {
            let one = child.operate().await;
            let mut plan = self.prepare_child(vm, &child, root, captured, received_ns);
            plan.room = Some(room);
            child
                .ask(|reply| Command::Start(Box::new(plan), reply))
                .await??;
            drop(one);
            let spawned = monotonic_ns();
            Ok((self.started(&child).await?, spawned))
        });
        let started: Vec<(Vm, u64)> = stream::iter(starts)
            .buffered(STARTING_AT_ONCE)
            .try_collect()
            .await?;
        let spawned = started.iter().map(|(_, spawned)| *spawned).max();
        watch.span(
            Track::Node,
            spans::CHILDREN_SPAWNED,
            start,
            spawned.unwrap_or(start),
        );
        watch.span(Track::Node, spans::CHILDREN_READY, start, monotonic_ns());
        let vms = started.into_iter().map(|(vm, _)| vm).collect();
        Ok((vms, pause_ns))
    }

    fn prepare_child(
        &self,
        parent: &VmHandle,
        child: &VmHandle,
        root: &Root,
        captured: &Captured,
        received_ns: u64,
    ) -> Plan {
        let volume_disks = self.volume_disks(child, &[]);
        let disks = self.disks(child, root.path.clone(), volume_disks);
        let layers = captured.layers.iter();
        let memory = SavedRam::Mapped {
            layers: layers
                .map(|layer| Handle::Open(Arc::clone(layer)))
                .collect(),
            layout: Some(Handle::Open(Arc::clone(&captured.layout))),
        };
        let origin = Origin::ForkedFrom(parent.name.clone());
        let state = Handle::Open(Arc::clone(&captured.state));
        let beginning = Beginning::Restore(Box::new(Restoring::new(Some(origin), state, memory)));
        let kernel = self.kernel_file(&child.spec.kernel);
        let times = (received_ns, monotonic_ns());
        Plan::new(kernel, root.clone(), disks, beginning, times)
    }

    /// Clones the parent's volumes for each child; the parent is paused meanwhile.
    async fn clone_for(
        &self,
        children: &[Arc<VmHandle>],
        volumes: Vec<(String, PathBuf)>,
    ) -> Result<()> {
        let folders: Vec<PathBuf> = children
            .iter()
            .map(|child| self.host.paths.vm(&child.id))
            .collect();
        let work = tokio::task::spawn_blocking(move || {
            for folder in folders {
                let volumes = volumes
                    .iter()
                    .map(|(name, path)| (name.as_str(), path.as_path()));
                clone_volumes(&folder, volumes)?;
            }
            Ok(())
        });
        join_result(work.await)
    }
}

/// The children's names: given, numbered, or `None` to generate one.
fn names_of(wanted: &ForkVm) -> Result<Vec<Option<String>>> {
    let count = wanted.count.unwrap_or(1);
    if !(1..=MAX_CHILDREN).contains(&count) {
        return Err(Error::invalid(format!(
            "A VM can't be forked into {count} children at once; choose 1 to {MAX_CHILDREN}."
        )));
    }
    let Some(name) = &wanted.name else {
        return Ok(vec![None; count as usize]);
    };
    let names: Vec<String> = match count {
        1 => vec![name.clone()],
        _ => (1..=count)
            .map(|number| format!("{name}-{number}"))
            .collect(),
    };
    for name in &names {
        rules::check_vm(name)?;
    }
    Ok(names.into_iter().map(Some).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fork(count: Option<u32>, name: Option<&str>) -> Result<Vec<Option<String>>> {
        names_of(&ForkVm {
            count,
            name: name.map(str::to_owned),
            ..ForkVm::default()
        })
    }

    #[test]
    fn children_are_named_as_asked() {
        assert_eq!(fork(None, None).unwrap(), [None]);
        assert_eq!(fork(Some(1), Some("a")).unwrap(), [Some("a".into())]);
        let two = fork(Some(2), Some("a")).unwrap();
        assert_eq!(two, [Some("a-1".into()), Some("a-2".into())]);
        assert!(fork(Some(0), None).is_err());
        assert!(fork(None, Some("0123456789ab")).is_err());
        assert!(fork(Some(1001), None).is_err());
        assert!(fork(Some(2), Some(&"x".repeat(63))).is_err());
    }
}
