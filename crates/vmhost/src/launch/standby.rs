//! Standbys: VMs restored ahead of time, and held before their guest's first instruction.

use super::spawned::Spawned;
use crate::folders;
use crate::network::Attachment;
use jiffy_content::model::vm::VmRecord;
use jiffy_content::paths::Paths;
use std::fs;
use tracing::debug;

/// A standby: a VM that is restored and held before its guest's first instruction.
#[derive(Debug)]
pub struct Standby {
    /// The id of the VM that it will become.
    pub id: String,
    /// Its vsock context id.
    pub cid: u32,
    paths: Paths,
    spawned: Option<Spawned>,
    network: Option<Attachment>,
}

impl Standby {
    /// A standby of the VM of this record, with this VMM.
    pub(super) fn new(
        paths: &Paths,
        record: &VmRecord,
        spawned: Spawned,
        network: Option<Attachment>,
    ) -> Standby {
        Standby {
            id: record.id.clone(),
            cid: record.cid,
            paths: paths.clone(),
            spawned: Some(spawned),
            network,
        }
    }

    /// Its process id, until a VM takes it over.
    pub fn pid(&self) -> Option<u32> {
        self.spawned.as_ref().map(|spawned| spawned.process.pid)
    }

    /// Does its VMM wait for the VM's configuration? Only then may that replace the one which it was
    /// started with. A VMM sends its first events when it waits.
    pub fn waits(&self) -> bool {
        let spawned = self.spawned.as_ref();
        spawned.is_some_and(|spawned| spawned.events.any())
    }

    /// Is its process alive?
    pub fn lives(&self) -> bool {
        let process = self.spawned.as_ref().map(|spawned| &spawned.process);
        process.is_some_and(|process| process.lives())
    }

    /// Ends it; when this returns, its folder is removed, too.
    pub async fn end(mut self) {
        if let Some(spawned) = self.spawned.take() {
            end(spawned, self.paths.clone(), std::mem::take(&mut self.id)).await;
        }
    }

    /// Ends it, but keeps its folder: a VM has taken its id by now, and starts without it.
    pub async fn give_up(mut self) {
        if let Some(spawned) = self.spawned.take() {
            spawned.process.kill();
            spawned.process.ended().await;
            let _ = fs::remove_dir_all(self.paths.vm_run(&self.id));
        }
    }

    /// Its VMM and its network attachment, for the VM that takes it over.
    pub fn into_parts(mut self) -> Option<(Spawned, Option<Attachment>)> {
        Some((self.spawned.take()?, self.network.take()))
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

/// Removes the folders of a standby.
pub(super) fn remove(paths: &Paths, id: &str) {
    if let Err(error) = folders::remove(paths, id) {
        debug!(id, %error, "a standby's files could not be removed");
    }
}
