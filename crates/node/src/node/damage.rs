//! Logs unusable images, snapshots, volumes and kernels at the start.

use super::Node;
use jiffy_sys::priority::{BACKGROUND, lowered};
use std::sync::Arc;
use tracing::warn;

impl Node {
    /// Logs which images, snapshots, volumes and kernels can't be used, and why, because their
    /// lists may not be requested for a long time. Unusable VMs are logged when they are read, but the
    /// memory of hibernated ones is checked here.
    pub(super) async fn log_damage(self: Arc<Self>) {
        let told = tokio::task::spawn_blocking(move || {
            let images = self.images.list().into_iter().flatten();
            let snapshots = self.list_snapshots(false).into_iter().flatten();
            let volumes = self.volumes.list().into_iter().flatten();
            let kernels = self.kernels.files().into_values();
            let problems = images
                .filter_map(|image| image.error)
                .chain(snapshots.filter_map(|snapshot| snapshot.error))
                .chain(volumes.filter_map(|volume| volume.error))
                .chain(kernels.filter_map(|file| Some(file.err()?.0.message)));
            for problem in problems {
                warn!("{problem}");
            }
            lowered(BACKGROUND, || self.check_all_sleepers());
        });
        if let Err(error) = told.await {
            warn!(%error, "images, snapshots, volumes and kernels could not be checked");
        }
    }
}
