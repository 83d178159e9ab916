//! A VM that is restored ahead, and held before its guest's first instruction.

use super::plan::Plan;
use super::spawn::{self, Spawned};
use crate::folders;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::VmRecord;
use jiffy_content::paths::Paths;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::time::Duration;
use tracing::debug;

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

impl Standby {
    /// Restores a VM, and holds it: it has a folder, and no record. After an error nothing
    /// of it is left.
    pub fn hold(
        paths: &Paths,
        record: &VmRecord,
        plan: &Plan,
        gate_time: Duration,
    ) -> Result<Standby> {
        let folder = paths.vm(&record.id);
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&folder)
            .map_err(|error| Error::io("make a VM's folder", &folder, &error))?;
        let held = spawn::hold(paths, record, plan, gate_time);
        let spawned = held.inspect_err(|_| remove(paths, &record.id))?;
        Ok(Standby {
            id: record.id.clone(),
            cid: record.cid,
            paths: paths.clone(),
            spawned: Some(spawned),
        })
    }

    /// Its process, until somebody takes it over.
    pub fn pid(&self) -> Option<u32> {
        self.spawned.as_ref().map(|spawned| spawned.process.pid)
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
    if let Err(error) = folders::remove(paths, id) {
        debug!(id, %error, "what a standby had could not be removed");
    }
}
