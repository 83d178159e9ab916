//! Rate limits of disks and network interfaces, changed while the guest runs.

use super::Devices;
use super::block::{self, BlockKind};
use super::net::{self, NetKind};
use super::virtio::Virtio;
use jiffy_sys::mutex::lock;
use jiffy_wire::vmm::{DiskLimit, NetLimit};
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
        for (disk, limit) in self.all::<Virtio<BlockKind>>().zip(disks) {
            lock(disk).device().set_limit(block::rate(limit));
        }
        for (net, limit) in self.all::<Virtio<NetKind>>().zip(nets) {
            let rate = net::rate(limit);
            lock(net).device().set_limits(rate, rate);
        }
        Ok(())
    }
}

fn check(what: &'static str, has: usize, given: usize) -> Result<(), LimitsError> {
    match has == given {
        true => Ok(()),
        false => Err(LimitsError { what, has, given }),
    }
}
