//! The registry of devices: all kinds.

use super::balloon::{BalloonKind, WithholdingKind};
use super::block::BlockKind;
use super::entropy::EntropyKind;
use super::fs::FsKind;
use super::fw_cfg::FwCfgKind;
use super::kind::{AnyKind, DevicesState};
use super::net::NetKind;
use super::power::PowerKind;
use super::rtc::RtcKind;
use super::serial::SerialKind;
use super::trace::TraceKind;
use super::virtio::Virtio;
use super::vsock::VsockKind;
use crate::sections::{Release, SectionError, Sections};
use jiffy_devices::virtio::device::WorkerRole;
use jiffy_wire::vmm::VmmConfig;

/// All kinds of devices. Virtio devices get their windows and interrupts in this order. A saved
/// guest expects its devices at the same addresses, so a new one comes after the other virtio
/// devices.
pub const REGISTRY: &[&dyn AnyKind] = &[
    &Virtio(BlockKind),
    &Virtio(VsockKind),
    &Virtio(EntropyKind),
    &Virtio(BalloonKind),
    &Virtio(NetKind),
    &Virtio(FsKind),
    &Virtio(WithholdingKind),
    &SerialKind,
    &FwCfgKind,
    &PowerKind,
    &RtcKind,
    &TraceKind,
];

/// Reads the states that [`DevicesState::write`] wrote.
///
/// # Errors
///
/// As for [`AnyKind::read`].
pub fn read(
    sections: &mut Sections<'_>,
    release: Release<'_>,
) -> Result<DevicesState, SectionError> {
    let mut state = DevicesState::default();
    for kind in REGISTRY {
        kind.read(sections, release, &mut state)?;
    }
    Ok(state)
}

/// The threads that the devices of this configuration need.
pub fn workers(config: &VmmConfig) -> Vec<WorkerRole> {
    let each = REGISTRY.iter().map(|kind| kind.workers(config));
    each.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::VmState;
    use std::collections::BTreeSet;

    #[test]
    fn each_kind_has_a_section_of_its_own() {
        let tags = REGISTRY.iter().map(|kind| kind.section().tag());
        let other = VmState::SECTIONS.iter().map(|section| section.tag());
        let all: BTreeSet<&str> = tags.chain(other).collect();
        assert_eq!(all.len(), REGISTRY.len() + VmState::SECTIONS.len());
    }
}
