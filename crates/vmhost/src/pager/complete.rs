//! Has all missing chunks of a disk, an image or a VM's memory fetched.

use super::ask::done;
use super::process::{MAX_DEATHS, POLL_INTERVAL};
use super::{ANSWER_TIME, Pager};
use crate::process::is_alive;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::image::LazyDisk;
use jiffy_content::room::disk::{Missing, Reserved, Unwritten};
use jiffy_store::partial::{is_partial, map_path};
use jiffy_sys::locked::Locked;
use jiffy_sys::regular;
use jiffy_wire::pager::PagerRequest;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// How long the pager has to fill a VM's whole memory.
const COMPLETE_TIME: Duration = Duration::from_secs(600);
/// How long a request waits until the next pager knows its VM or disk.
const NEXT_PAGER_TIME: Duration = Duration::from_secs(15);

impl Pager {
    /// Fetches all missing chunks of a disk. Nothing of it is evicted while the result is held,
    /// even if its VMs end.
    ///
    /// # Errors
    ///
    /// If [`Pager::open_disk`] fails, there is no disk space, or a chunk can't be fetched.
    pub async fn complete_disk(&self, disk: &LazyDisk) -> Result<Locked> {
        let held = {
            // Opened and locked in one turn, so that it can't be closed in between.
            let _turn = self.orders.turn(&disk.name()).await;
            self.open_in_turn(disk).await?;
            hold(disk.contents(&self.paths)).await?
        };
        let _room = self.reserve(vec![disk.present(&self.paths)]).await?;
        self.complete(&disk.name()).await.map_err(|why| {
            Error::registry(format!(
                "The missing chunks of the VM's root file system can't be fetched: {why}."
            ))
        })?;
        Ok(held)
    }

    /// Fetches all missing chunks of a disk's image, so that a child can be made. Otherwise as
    /// [`Pager::complete_disk`].
    ///
    /// # Errors
    ///
    /// As in [`Pager::complete_disk`].
    pub async fn complete_image(&self, disk: &LazyDisk) -> Result<Locked> {
        let held = self.complete_disk(disk).await?;
        let images = disk.images(&self.paths);
        let maps = images.iter().map(|image| map_path(image)).collect();
        let _room = self.reserve(maps).await?;
        for image in images {
            let request = PagerRequest::CompleteImage { image };
            done(self.ask(&request, COMPLETE_TIME).await).map_err(|why| {
                Error::registry(format!(
                    "The missing chunks of the VM's image can't be fetched: {why}."
                ))
            })?;
        }
        Ok(held)
    }

    /// Fetches all missing chunks of a snapshot's memory that no VM is served from, so that it
    /// can be rewritten.
    ///
    /// # Errors
    ///
    /// If no pager can be started, there is no disk space, or a chunk can't be fetched.
    pub async fn complete_memory(&self, image: &Path) -> Result<()> {
        if !is_partial(image) {
            return Ok(());
        }
        let _room = self.reserve(vec![map_path(image)]).await?;
        self.run().await?;
        let origins = PagerRequest::Origins {
            image: image.to_owned(),
            origins: jiffy_content::snapshots::remote::origins(image, &self.paths),
        };
        let complete = PagerRequest::CompleteImage {
            image: image.to_owned(),
        };
        for (request, within) in [(origins, ANSWER_TIME), (complete, COMPLETE_TIME)] {
            done(self.ask(&request, within).await).map_err(|why| {
                Error::registry(format!(
                    "The missing chunks of the snapshot's memory can't be fetched: {why}."
                ))
            })?;
        }
        Ok(())
    }

    /// Reserves room for what is missing in files, by their maps, or refuses. `None` if nothing is
    /// missing.
    async fn reserve(&self, maps: Vec<PathBuf>) -> Result<Option<Arc<Reserved>>> {
        let room = Arc::clone(&self.room);
        let work = tokio::task::spawn_blocking(move || {
            let Some(beside) = maps.first().cloned() else {
                return Ok(None);
            };
            let missing = Missing(maps);
            if missing.unwritten() == 0 {
                return Ok(None);
            }
            let what = "Fetching what is missing of the image needs up to";
            room.reserve(&beside, what, Arc::new(missing)).map(Some)
        });
        work.await.map_err(|error| {
            Error::internal(format!("Looking for disk space was cut short: {error}."))
        })?
    }

    /// Fills all missing memory of a VM, or all of a disk. If the pager dies, the next one does
    /// it.
    ///
    /// # Errors
    ///
    /// If the pager does not know it, or can't fill it: a sentence without its full stop.
    pub async fn complete(&self, id: &str) -> std::result::Result<(), String> {
        let request = PagerRequest::Complete { name: id.into() };
        let mut pagers = 1;
        loop {
            let asked = self.when_told(id).await;
            let Err(why) = done(self.ask(&request, COMPLETE_TIME).await) else {
                return Ok(());
            };
            let died = asked.is_some_and(|pid| !is_alive(pid));
            if !died || pagers == MAX_DEATHS {
                return Err(why);
            }
            pagers += 1;
        }
    }

    /// Waits for a pager that knows this VM's memory or disk; `None` after [`NEXT_PAGER_TIME`].
    async fn when_told(&self, name: &str) -> Option<u32> {
        let until = Instant::now() + NEXT_PAGER_TIME;
        loop {
            {
                let state = self.state();
                let told = state.served.get(name).map(|served| served.told);
                let told = told.or_else(|| state.disks.get(name).map(|open| open.told));
                let runs = state.pid.filter(|pid| is_alive(*pid));
                if runs.is_some() && told.is_none_or(|told| told == runs) {
                    return runs;
                }
            }
            if Instant::now() >= until {
                return None;
            }
            sleep(POLL_INTERVAL).await;
        }
    }
}

/// Locks a cache's file in the way of a VMM that reads it.
async fn hold(contents: PathBuf) -> Result<Locked> {
    let work = tokio::task::spawn_blocking(move || {
        regular::open(&contents)
            .and_then(Locked::shared)
            .map_err(|error| Error::io("lock a VM's root file system", &contents, &error))
    });
    work.await
        .map_err(|error| Error::internal(format!("A task was cut short: {error}.")))?
}
