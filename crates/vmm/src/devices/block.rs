//! Disks.

use super::Devices;
use super::disk_chunks::DiskChunks;
use super::error::DeviceError;
use super::virtio::VirtioKind;
use super::wiring::Wiring;
use crate::sections::{Count, Section};
use jiffy_devices::virtio::block::{Block, BlockOptions, BlockState};
use jiffy_devices::virtio::device::WorkerRole;
use jiffy_devices::virtio::queue::RateLimit;
use jiffy_wire::vmm::{Disk, DiskLimit, ReadUnits, VmmConfig};
use std::sync::Arc;

/// Disks, in the order of the configuration.
#[derive(Debug)]
pub struct BlockKind;

impl VirtioKind for BlockKind {
    type Device = Block;
    type State = BlockState;
    const SECTION: Section = Section::new("disk", 1);
    const NAME: &'static str = "disks";
    const COUNT: Count = Count::Any;

    fn count(config: &VmmConfig) -> usize {
        config.disks.len()
    }

    fn workers(config: &VmmConfig) -> Vec<WorkerRole> {
        let role = |disk: &Disk| match disk.residency.is_some() || disk.note_reads {
            true => WorkerRole::BlockOnDemand,
            false => WorkerRole::Block,
        };
        config.disks.iter().map(role).collect()
    }

    fn create(
        wiring: &Wiring<'_>,
        number: usize,
        state: Option<&BlockState>,
    ) -> Result<Block, DeviceError> {
        let disk = &wiring.args.config.disks[number];
        let options = options(disk);
        let device = match state {
            None => Block::open(&options)?,
            Some(state) => Block::restore(&options, state)?,
        };
        let chunks = DiskChunks::open(disk, device.save().bytes, wiring.args.events)?;
        Ok(match chunks {
            None if disk.note_reads => {
                let notes = wiring.reads.get_or_init(Arc::default);
                device.on_demand(notes.clone())
            }
            None => device,
            Some(chunks) => device.on_demand(Arc::new(chunks)),
        })
    }

    fn save(device: &mut Block) -> Result<BlockState, DeviceError> {
        Ok(device.save())
    }
}

impl Devices {
    /// What the guest has read of the disk whose reads are noted.
    pub fn reads(&self) -> Option<ReadUnits> {
        Some(self.reads.as_ref()?.units())
    }
}

fn options(disk: &Disk) -> BlockOptions {
    BlockOptions {
        path: disk.path.clone(),
        read_only: disk.read_only,
        direct: disk.direct,
        id: disk.serial.clone().unwrap_or_default(),
        limit: rate(&disk.limit),
    }
}

pub(super) fn rate(limit: &DiskLimit) -> RateLimit {
    RateLimit {
        bytes_per_second: limit.bytes_per_second,
        operations_per_second: limit.operations_per_second,
        ..RateLimit::default()
    }
}
