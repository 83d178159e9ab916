//! Work that goes on beside requests, from the node's start to its end.

use super::{Node, idle, inbound, lazy, make_golden, pressure, standbys};
use crate::golden::{SnapshotRequests, StandbyRequests};
use jiffy_content::images::base::BASE;
use jiffy_vmhost::{network, spares};
use std::fs::File;
use std::sync::Arc;

/// Starts all of it.
pub(super) fn start(node: &Arc<Node>, snapshots: SnapshotRequests, standbys: StandbyRequests) {
    node.trim.notify_one();
    tokio::spawn(lazy::keep_caches_small(Arc::clone(node)));
    tokio::spawn(make_golden::make_requested(Arc::clone(node), snapshots));
    tokio::spawn(standbys::keep(Arc::clone(node), standbys));
    tokio::spawn(keep_spares(Arc::clone(node)));
    tokio::spawn(Arc::clone(node).log_damage());
    tokio::spawn(network::clean_up(Arc::clone(&node.host.network)));
    tokio::spawn(standbys::keep_links(Arc::clone(node)));
    tokio::spawn(idle::watch_vms(Arc::clone(node)));
    tokio::spawn(pressure::watch_memory(Arc::clone(node)));
    tokio::spawn(inbound::forward_connections(Arc::clone(node)));
}

async fn keep_spares(node: Arc<Node>) {
    let host = &node.host;
    let kernel = || File::open(node.kernel_file(BASE)).ok();
    let starts = || {
        let node = Arc::clone(&node);
        async move {
            let any = node.is_starting();
            node.wait_until_none_starting().await;
            any
        }
    };
    let (spares, launcher) = (Arc::clone(&host.spares), Arc::clone(&host.launcher));
    spares::keep(spares, host.paths.clone(), launcher, kernel, starts).await;
}
