//! Compares a guest's processor with a host's.

use super::features::{self, FEATURES};
use super::{ARCH_CAPABILITIES, Profile};

/// Largest difference between two time stamp counters that KVM treats as the same, parts per
/// million (`kvm.tsc_tolerance_ppm`).
pub const TSC_TOLERANCE_PPM: u64 = 250;

impl Profile {
    /// Names of this guest's features that `host` lacks. Empty if the guest can run there.
    pub fn lacking(&self, host: &Profile) -> Vec<String> {
        if self.vendor != host.vendor {
            let (ours, theirs) = (&self.vendor, &host.vendor);
            return vec![format!("a processor of {ours} (this is one of {theirs})")];
        }
        let mut lacking: Vec<String> = FEATURES
            .iter()
            .flat_map(|group| {
                let missing = self.register(group.register) & !host.register(group.register);
                group.names_of(missing)
            })
            .collect();
        lacking.extend(self.other_xsave_layout(host));
        let bits = self.physical_address_bits();
        let most = host.physical_address_bits();
        if bits > most {
            lacking.push(format!("{bits} bits of physical addresses (it has {most})"));
        }
        if let Some(ours) = self.msrs.get(&ARCH_CAPABILITIES) {
            let theirs = host.msrs.get(&ARCH_CAPABILITIES).copied().unwrap_or(0);
            lacking.extend(features::capabilities_lacking(*ours, theirs));
        }
        lacking.extend(self.counter_too_slow(host));
        lacking
    }

    /// XSAVE states with another offset or size on the host; saved memory contains them at the
    /// guest's offsets.
    fn other_xsave_layout(&self, host: &Profile) -> impl Iterator<Item = String> {
        let leaves = self.cpuid.iter();
        let states = leaves.filter(|entry| entry.leaf == 0xd && entry.index >= 2);
        states.filter_map(|ours| {
            let theirs = host.leaf(ours.leaf, ours.index)?;
            let same = ours.registers[..2] == theirs[..2];
            (!same).then(|| format!("the offset and size of XSAVE state {}", ours.index))
        })
    }

    /// Without hardware support KVM can't slow a counter down.
    fn counter_too_slow(&self, host: &Profile) -> Option<String> {
        let (ours, theirs) = (self.tsc_khz?, host.tsc_khz?);
        let tolerance = u64::from(theirs) * TSC_TOLERANCE_PPM / 1_000_000;
        let slower = u64::from(ours) + tolerance < u64::from(theirs);
        (slower && !host.tsc_scaling).then(|| {
            format!("a time stamp counter of {ours} kHz (it has {theirs} kHz and can't scale it)")
        })
    }
}
