//! What of the node's things can't be used, told once.

use super::Node;
use std::sync::Arc;
use tracing::warn;

impl Node {
    /// Says in the log which images, snapshots, volumes and kernels can't be used, and
    /// why: nobody may ask for their list for long. VMs are told of when they are read.
    pub(super) async fn tell_damage(self: Arc<Self>) {
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
        });
        if let Err(error) = told.await {
            warn!(%error, "what is kept could not be looked through");
        }
    }
}
