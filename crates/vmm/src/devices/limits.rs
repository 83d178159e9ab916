//! Rate limits of disks and network interfaces, changed while the guest runs.

use super::Devices;
use super::block::{self, BlockKind};
use super::net::{self, NetKind};
use super::virtio::Virtio;
use jiffy_sys::mutex::lock;
use jiffy_wire::vmm::{DiskLimit, NetLimit, VmmConfig};
use thiserror::Error;

/// The limits name devices that the VM does not have.
#[derive(Debug, Error)]
#[error("the VM has {has} {what}, but limits for {given} were given")]
pub struct LimitsError {
    what: &'static str,
    has: usize,
    given: usize,
}

impl Devices {
    /// Replaces the limits of all disks, and of all network interfaces in both directions.
    ///
    /// # Errors
    ///
    /// If there are more or fewer limits than disks or interfaces. Nothing is changed then.
    pub fn set_limits(&self, disks: &[DiskLimit], nets: &[NetLimit]) -> Result<(), LimitsError> {
        check(
            "disks",
            self.all::<Virtio<BlockKind>>().count(),
            disks.len(),
        )?;
        check(
            "network interfaces",
            self.all::<Virtio<NetKind>>().count(),
            nets.len(),
        )?;
        self.apply(disks.iter(), nets.iter().map(|limit| (limit, limit)));
        Ok(())
    }

    /// Gives devices that have no limits those of a configuration of the same devices.
    pub fn begin_limits(&self, config: &VmmConfig) {
        let disks = config.disks.iter().map(|disk| &disk.limit);
        let nets = config.nets.iter();
        let nets = nets.map(|net| (&net.receive_limit, &net.send_limit));
        let is_limited =
            |(receive, send): (&NetLimit, &NetLimit)| !receive.is_none() || !send.is_none();
        // Setting a limit wakes the device's thread.
        if disks.clone().any(|limit| !limit.is_none()) || nets.clone().any(is_limited) {
            self.apply(disks, nets);
        }
    }

    /// Sets the limit of each disk, and those of what each network interface receives and sends.
    fn apply<'a>(
        &self,
        disks: impl Iterator<Item = &'a DiskLimit>,
        nets: impl Iterator<Item = (&'a NetLimit, &'a NetLimit)>,
    ) {
        for (disk, limit) in self.all::<Virtio<BlockKind>>().zip(disks) {
            lock(disk).device().set_limit(block::rate(limit));
        }
        for (net, (receive, send)) in self.all::<Virtio<NetKind>>().zip(nets) {
            let (receive, send) = (net::rate(receive), net::rate(send));
            lock(net).device().set_limits(receive, send);
        }
    }
}

fn check(what: &'static str, has: usize, given: usize) -> Result<(), LimitsError> {
    match has == given {
        true => Ok(()),
        false => Err(LimitsError { what, has, given }),
    }
}
