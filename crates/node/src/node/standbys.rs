//! Standbys: VMs restored ahead of time.
//!
//! Restoring a golden snapshot takes most of the time of a run from it, and does not depend on
//! the run. So for the kinds that were run last, a VM is restored up to its guest's first
//! instruction and held there. The next run of that kind takes it over: the VM gets its
//! configuration and begins.
//!
//! A standby has an id, a folder and a process, but no record and no name. A daemon ends standbys
//! of an earlier daemon, like every VMM that belongs to no VM.

use super::Node;
use crate::golden::{StandbyRequests, name_of, restoring};
use jiffy_content::clock::monotonic_ns;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::VmRecord;
use jiffy_content::names;
use jiffy_content::room::memory::{self as room, Amount};
use jiffy_content::roots;
use jiffy_content::snapshots::saved::Saved;
use jiffy_vmhost::launch::{self, Beginning, Plan, Standby};
use jiffy_vmhost::process::on_exit;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::block_in_place;
use tracing::debug;

/// Shortest time from the start of a run to the making of a standby: the run has priority.
const AFTER_A_RUN: Duration = Duration::from_millis(4);
/// Shortest time after the last VM became ready: its client has priority.
const AFTER_A_START: Duration = Duration::from_millis(1);

/// Further delay until a link is prepared: the answer of a short command has priority, too.
const AFTER_AN_ANSWER: Duration = Duration::from_millis(5);

/// Makes a standby from this snapshot.
async fn make(node: &Node, saved: &Saved) -> Result<Standby> {
    let spec = &saved.manifest.spec;
    let _room = node
        .room()
        .reserve_background(Amount::of(spec))
        .ok_or_else(room::memory_needed)?;
    let paths = node.paths();
    let id = names::new_id();
    let record = VmRecord::new(id.clone(), id.clone(), spec.clone(), node.new_cid());
    let root = node.image_root(&spec.image).await?;
    let manifest = &saved.manifest;
    if (&root.digest, &root.lazy) != (&manifest.image_digest, &manifest.lazy_root) {
        return Err(Error::conflict("The image of the snapshot was replaced."));
    }
    // While this is held, the disk is not closed as unused; afterwards the VMM has it open.
    let _begins = node.hold_disks().await;
    node.provide_disk(&root).await?;
    let now = monotonic_ns();
    let kernel = node.kernel_file(&spec.kernel);
    let disks = roots::disks(&paths.vm(&id), spec, root.path.clone(), Vec::new());
    let beginning = Beginning::Restore(Box::new(restoring(saved, true)));
    let mut plan = Plan::new(kernel, root, disks, beginning, (now, now));
    node.goldens().note_standby_begun(&id);
    block_in_place(|| {
        plan.network = node.network().attach(&record)?;
        launch::hold(paths, node.launcher(), &record, plan, node.start_timeout())
    })
}

/// Prepares a link whenever the last one was taken, while no VM starts.
pub async fn keep_links(node: Arc<Node>) {
    loop {
        node.network().prepared_link_taken().await;
        node.wait_until_none_starting().await;
        tokio::time::sleep(AFTER_AN_ANSWER).await;
        node.network().prepare_link().await;
    }
}

/// Makes standbys that are wanted, one after the other, while no VM starts.
pub async fn keep(node: Arc<Node>, mut wanted: StandbyRequests) {
    while let Some(key) = wanted.recv().await {
        let goldens = node.goldens();
        tokio::time::sleep(AFTER_A_RUN).await;
        // Waiting runs reserve their memory first; otherwise this reservation would fail, and the
        // next run would have no standby.
        node.room().wait_until_idle().await;
        while node.is_starting() {
            node.wait_until_none_starting().await;
            tokio::time::sleep(AFTER_A_START).await;
        }
        let Some(saved) = goldens.snapshot_for_standby(&key) else {
            continue;
        };
        match make(&node, &saved).await {
            Ok(standby) => {
                // A killed standby is removed at once, so that it does not stay a zombie until the
                // next run of its kind. Does nothing if it has become a VM.
                if let Some(pid) = standby.pid() {
                    let reap = |node: &Node| node.goldens().reap_standbys();
                    on_exit(pid, &node, reap);
                }
                let id = standby.id.clone();
                goldens.keep_standby(key, &saved, standby);
                debug!(%id, "a standby can be taken");
            }
            Err(error) => {
                goldens.note_standby_failed();
                debug!(golden = name_of(&saved), %error, "no standby was made");
            }
        }
    }
}
