//! CPU profiles, with which a snapshot is compared with a host.
//!
//! A [`Profile`] is CPUID as a guest sees it, without the parts that differ between vCPUs, with the
//! MSRs that identify a processor and the frequency of its time stamp counter. A guest's profile is
//! what it sees; a host's is the most that its KVM can offer. A guest can run on a host if
//! [`Profile::lacking`] is empty.
//!
//! * [`features`]: feature bits and their names.
//! * `compare`: lists the features of a guest that a host lacks.
//! * `testing`: processors for tests.
//! * [`levels`]: named profiles that many kinds of processors share.

mod compare;
pub mod features;
pub mod levels;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use compare::TSC_TOLERANCE_PPM;

use features::{FEATURES, Register};
use serde::de::{Deserializer, Error as _};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version that is written, and the only one that is read.
pub const VERSION: u32 = 1;
/// IA32_ARCH_CAPABILITIES: flaws that a processor does not have (Intel).
pub const ARCH_CAPABILITIES: u32 = 0x10a;
/// Most leaves of a profile, more than any processor has.
const MAX_LEAVES: usize = 256;
/// The register with the number of address bits.
const ADDRESSES: Register = Register::new(0x8000_0008, 0, 0);

/// A processor, as a guest sees it or as a host can show it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// [`VERSION`].
    pub version: u32,
    /// Vendor as in CPUID: `GenuineIntel`, `AuthenticAMD`.
    pub vendor: String,
    /// Leaves by number and index.
    #[serde(serialize_with = "write_leaves", deserialize_with = "read_leaves")]
    pub cpuid: Vec<Leaf>,
    /// MSRs that identify the processor.
    #[serde(
        default,
        serialize_with = "write_msrs",
        deserialize_with = "read_msrs",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub msrs: BTreeMap<u32, u64>,
    /// Frequency of the time stamp counter in kHz, if KVM knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tsc_khz: Option<u32>,
    /// For a host: a guest's counter may have any frequency.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tsc_scaling: bool,
}

/// A CPUID leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leaf {
    /// Its number.
    pub leaf: u32,
    /// Its index (ECX of the CPUID instruction).
    pub index: u32,
    /// EAX, EBX, ECX, EDX.
    pub registers: [u32; 4],
}

/// A host's processor, as `jiffy-vmm cpu` prints it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// The most that a guest that boots here sees.
    pub shown: Profile,
    /// The most that a captured guest may have to be restored here. This is more than `shown`: an
    /// earlier release showed features that are hidden from guests that boot today, and its
    /// captured guests need them.
    pub restorable: Profile,
}

/// The profile that a VM should have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Wanted {
    /// One of [`levels`], by name.
    Named(String),
    /// This profile, without features that VMs never have.
    Given(Box<Profile>),
}

impl Profile {
    /// The profile of a processor with these leaves.
    pub fn new(cpuid: Vec<Leaf>) -> Profile {
        let mut profile = Profile {
            version: VERSION,
            cpuid,
            ..Profile::default()
        };
        profile.vendor = profile.vendor_by_cpuid();
        profile
    }

    fn vendor_by_cpuid(&self) -> String {
        let [_, ebx, ecx, edx] = self.leaf(0, 0).unwrap_or_default();
        let vendor = [ebx, edx, ecx].map(u32::to_le_bytes);
        String::from_utf8_lossy(vendor.as_flattened()).into_owned()
    }

    /// The registers of a leaf, if it exists.
    pub fn leaf(&self, leaf: u32, index: u32) -> Option<[u32; 4]> {
        let mut all = self.cpuid.iter();
        let found = all.find(|entry| entry.leaf == leaf && entry.index == index)?;
        Some(found.registers)
    }

    /// A register; 0 if its leaf does not exist.
    pub fn register(&self, register: Register) -> u32 {
        let leaf = self.leaf(register.leaf, register.index);
        leaf.map_or(0, |registers| registers[register.register])
    }

    fn register_mut(&mut self, register: Register) -> Option<&mut u32> {
        let mut all = self.cpuid.iter_mut();
        let found = all.find(|entry| (entry.leaf, entry.index) == (register.leaf, register.index));
        found.map(|entry| &mut entry.registers[register.register])
    }

    /// Number of physical address bits; 36 if no leaf gives it.
    pub fn physical_address_bits(&self) -> u32 {
        let leaf = self.leaf(ADDRESSES.leaf, ADDRESSES.index);
        leaf.map_or(36, |registers| registers[ADDRESSES.register] & 0xff)
    }

    /// Names of all its features, in the order of their leaves.
    pub fn features(&self) -> Vec<String> {
        FEATURES
            .iter()
            .flat_map(|group| group.names_of(self.register(group.register)))
            .collect()
    }

    /// The profile that both support: common features and capabilities, the smaller number of
    /// physical address bits, and no TSC frequency. `None` if the vendors differ.
    #[must_use]
    pub fn common(&self, other: &Profile) -> Option<Profile> {
        if self.vendor != other.vendor {
            return None;
        }
        let mut common = self.clone();
        for group in FEATURES {
            if let Some(bits) = common.register_mut(group.register) {
                *bits &= other.register(group.register) | group.ignored;
            }
        }
        let most = self
            .physical_address_bits()
            .min(other.physical_address_bits());
        if let Some(bits) = common.register_mut(ADDRESSES) {
            *bits = *bits & !0xff | most;
        }
        common.msrs = match (
            self.msrs.get(&ARCH_CAPABILITIES),
            other.msrs.get(&ARCH_CAPABILITIES),
        ) {
            (Some(one), Some(two)) => {
                let both = features::common_capabilities(*one, *two);
                BTreeMap::from([(ARCH_CAPABILITIES, both)])
            }
            _ => BTreeMap::new(),
        };
        common.tsc_khz = None;
        common.tsc_scaling = false;
        Some(common)
    }

    /// Checks a profile from an untrusted source for consistency.
    ///
    /// # Errors
    ///
    /// If the version is not [`VERSION`], the vendor is not 12 ASCII characters or not that of the
    /// leaves, or there are more than 256 leaves. The error is a sentence.
    pub fn check(&self) -> Result<(), String> {
        if self.version != VERSION {
            let version = self.version;
            return Err(format!(
                "the CPU profile is of version {version}, this jiffy reads version {VERSION}"
            ));
        }
        if self.vendor.len() != 12 || !self.vendor.is_ascii() {
            return Err(
                "the CPU profile's vendor is not one of CPUID, such as GenuineIntel".into(),
            );
        }
        if self.cpuid.len() > MAX_LEAVES || self.vendor_by_cpuid() != self.vendor {
            return Err("the CPU profile's CPUID is not that of one processor".into());
        }
        Ok(())
    }
}

impl Wanted {
    /// The part of `host` that a VM sees.
    ///
    /// # Errors
    ///
    /// If there is no level of that name, the given profile is not valid, or the host lacks
    /// features: a sentence that lists all of them.
    pub fn of(&self, host: &Profile) -> Result<Profile, String> {
        let (what, lacking, profile) = match self {
            Wanted::Named(name) => {
                let level = levels::find(name)?;
                (level.name, level.lacking(host), level.of(host))
            }
            Wanted::Given(given) => {
                given.check()?;
                // The counter of a VM that boots has the host's frequency.
                let mut given = given.clone();
                given.tsc_khz = None;
                let lacking = given.lacking(host);
                let common = given.common(host).unwrap_or_default();
                ("that was given", lacking, common)
            }
        };
        match lacking.is_empty() {
            true => Ok(profile),
            false => Err(format!(
                "this host can't give a VM the CPU profile {what}: it lacks {}",
                lacking.join(", ")
            )),
        }
    }
}

fn write_leaves<S: Serializer>(leaves: &[Leaf], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(leaves.iter().map(|entry| {
        let Leaf { leaf, index, .. } = entry;
        let [eax, ebx, ecx, edx] = entry.registers;
        let key = format!("{leaf:08x}.{index}");
        (key, format!("{eax:08x} {ebx:08x} {ecx:08x} {edx:08x}"))
    }))
}

fn read_leaves<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Leaf>, D::Error> {
    let text = BTreeMap::<String, String>::deserialize(deserializer)?;
    let leaf = |(key, value): (String, String)| {
        let (leaf, index) = key.split_once('.')?;
        let words = value
            .split(' ')
            .map(|word| u32::from_str_radix(word, 16).ok());
        Some(Leaf {
            leaf: u32::from_str_radix(leaf, 16).ok()?,
            index: index.parse().ok()?,
            registers: words.collect::<Option<Vec<u32>>>()?.try_into().ok()?,
        })
    };
    let leaves = text.into_iter().map(leaf).collect::<Option<Vec<_>>>();
    let mut leaves = leaves
        .ok_or_else(|| D::Error::custom("a leaf of CPUID is not `LEAF.INDEX: EAX EBX ECX EDX`"))?;
    let key = |entry: &Leaf| (entry.leaf, entry.index);
    leaves.sort_unstable_by_key(key);
    // `1.0` and `00000001.0` are the same leaf.
    match leaves.is_sorted_by(|one, next| key(one) < key(next)) {
        true => Ok(leaves),
        false => Err(D::Error::custom("a leaf of CPUID is listed twice")),
    }
}

fn write_msrs<S: Serializer>(msrs: &BTreeMap<u32, u64>, serializer: S) -> Result<S::Ok, S::Error> {
    let text = |(index, value): (&u32, &u64)| (format!("{index:x}"), format!("{value:x}"));
    serializer.collect_map(msrs.iter().map(text))
}

fn read_msrs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<u32, u64>, D::Error> {
    let text = BTreeMap::<String, String>::deserialize(deserializer)?;
    let msr = |(index, value): (String, String)| {
        let index = u32::from_str_radix(&index, 16).ok()?;
        Some((index, u64::from_str_radix(&value, 16).ok()?))
    };
    let msrs = text.into_iter().map(msr).collect::<Option<_>>();
    msrs.ok_or_else(|| D::Error::custom("an MSR is not `INDEX: VALUE`, both hexadecimal"))
}

#[cfg(test)]
mod tests;
