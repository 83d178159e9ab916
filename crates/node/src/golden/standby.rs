//! VMs restored ahead of time.
//!
//! Restoring a golden snapshot is most of what a run from it costs, and says
//! nothing about that run. So for the kinds that were run last a VM is
//! restored up to its guest's first instruction, and held there. The next run
//! of that kind takes it over: it gets its configuration and begins.
//!
//! A standby is no VM yet: it has an id, a folder and a process, but no record
//! and no name. A daemon that finds one of its predecessor's ends it, as it
//! does with every VMM that belongs to no VM.

use super::{beginning, name_of};
use crate::node::Node;
use crate::vm::end::remove_folders;
use crate::vm::process::at_its_end;
use crate::vm::start::{self, Prepared, Spawned};
use jiffy_content::clock::monotonic_ns;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::VmRecord;
use jiffy_content::names;
use jiffy_content::paths::Paths;
use jiffy_content::room::memory::{self as room, Amount};
use jiffy_content::roots;
use jiffy_content::snapshots::saved::Saved;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tracing::debug;

/// How long after a run began the next standby may be made: what was asked for
/// goes first.
const AFTER_A_RUN: Duration = Duration::from_millis(4);
/// How long after the last VM got ready: whoever waits for it goes first.
const AFTER_A_START: Duration = Duration::from_millis(1);

/// A VM that is restored and held.
#[derive(Debug)]
pub struct Standby {
    /// The id of the VM it will be.
    pub id: String,
    /// Its vsock context id.
    pub cid: u32,
    paths: Paths,
    spawned: Option<Spawned>,
}

/// Kinds of which a standby is wanted, by their keys.
pub type Wanted = mpsc::Receiver<String>;

impl Standby {
    /// Restores a VM from this snapshot, and holds it.
    async fn make(node: &Node, saved: &Saved) -> Result<Standby> {
        let spec = &saved.manifest.spec;
        let _room = node
            .room()
            .behind(Amount::of(spec))
            .ok_or_else(room::needed_by_runs)?;
        let paths = node.paths();
        let id = names::new_id();
        let record = VmRecord::new(id.clone(), id.clone(), spec.clone(), node.new_cid());
        let root = node.image_root(&spec.image).await?;
        let manifest = &saved.manifest;
        if (&root.digest, &root.lazy) != (&manifest.image_digest, &manifest.lazy_root) {
            return Err(Error::conflict("Its image was replaced."));
        }
        // As long as this is held nobody takes the disk for one that no VM has;
        // then the VMM has it open.
        let _begins = node.begins().await;
        node.provide_disk(&root).await?;
        let now = monotonic_ns();
        let prepared = Prepared {
            kernel: node.kernel_file(&spec.kernel),
            disks: roots::disks(&paths.vm(&id), spec, root.path.clone(), Vec::new()),
            root,
            volumes: Vec::new(),
            beginning: beginning(saved, true),
            standby: None,
            room: None,
            low_priority: false,
            received_ns: now,
            lookup_ns: now,
            ready_ns: now,
        };
        let mut standby = Standby {
            id,
            cid: record.cid,
            paths: paths.clone(),
            spawned: None,
        };
        node.goldens().comes(&standby.id);
        let folder = paths.vm(&standby.id);
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&folder)
            .map_err(|error| Error::io("make a VM's folder", &folder, &error))?;
        let held = start::hold(paths, &record, &prepared, node.start_timeout());
        standby.spawned = Some(held.inspect_err(|_| remove(paths, &standby.id))?);
        Ok(standby)
    }

    /// Does its process live?
    pub fn lives(&self) -> bool {
        let process = self.spawned.as_ref().map(|spawned| &spawned.process);
        process.is_some_and(|process| process.lives())
    }

    /// Ends it; nothing of it is left when this returns.
    pub async fn end(mut self) {
        if let Some(spawned) = self.spawned.take() {
            end(spawned, self.paths.clone(), std::mem::take(&mut self.id)).await;
        }
    }

    /// Ends it, but for its folder: that is the one of the VM that has its id by
    /// now, and begins in another way.
    pub async fn give_up(mut self) {
        if let Some(spawned) = self.spawned.take() {
            spawned.process.kill();
            spawned.process.ended().await;
            let _ = fs::remove_dir_all(self.paths.vm_run(&self.id));
        }
    }

    /// Its process and sockets, for whoever takes it over.
    pub fn into_spawned(mut self) -> Option<Spawned> {
        self.spawned.take()
    }
}

impl Drop for Standby {
    fn drop(&mut self) {
        let Some(spawned) = self.spawned.take() else {
            return;
        };
        let end = end(spawned, self.paths.clone(), std::mem::take(&mut self.id));
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(end);
        }
    }
}

async fn end(spawned: Spawned, paths: Paths, id: String) {
    spawned.process.kill();
    spawned.process.ended().await;
    let _ = tokio::task::spawn_blocking(move || remove(&paths, &id)).await;
}

fn remove(paths: &Paths, id: &str) {
    if let Err(error) = remove_folders(paths, id) {
        debug!(id, %error, "what a standby had could not be removed");
    }
}

/// Makes standbys that are wanted, one after the other, while no VM starts.
pub async fn keep(node: Arc<Node>, mut wanted: Wanted) {
    while let Some(key) = wanted.recv().await {
        let goldens = node.goldens();
        tokio::time::sleep(AFTER_A_RUN).await;
        // The run that asked takes its own room first: one that is refused for that would
        // be lacking at the next.
        node.room().nobody_waits().await;
        while node.is_starting() {
            node.when_none_starts().await;
            tokio::time::sleep(AFTER_A_START).await;
        }
        let Some(saved) = goldens.lacks_standby(&key) else {
            continue;
        };
        match Standby::make(&node, &saved).await {
            Ok(standby) => {
                // One that somebody kills must not stay as a dead process until
                // the next run of its kind. Of one that became a VM by then
                // nothing is done.
                if let Some(spawned) = &standby.spawned {
                    let bury = |node: &Node| node.goldens().bury_standbys();
                    at_its_end(spawned.process.pid, &node, bury);
                }
                goldens.keep_standby(key, &saved, standby);
            }
            Err(error) => {
                goldens.does_not_come();
                debug!(golden = name_of(&saved), %error, "no VM is kept restored ahead");
            }
        }
    }
}
