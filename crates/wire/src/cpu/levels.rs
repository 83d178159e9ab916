//! Named profiles: the micro-architecture levels of the x86-64 psABI, with further features that
//! every processor of the level has.
//!
//! KVM's own features and mitigations stay as on the host, because no VM should lack mitigations.
//! If they differ between hosts, a restore reports it.

use super::Profile;
use super::features::{FEATURES, Register, find as feature};

/// A level.
#[derive(Debug)]
pub struct Level {
    /// Its name, such as `x86-64-v2`.
    pub name: &'static str,
    /// Features in addition to those of the level below.
    adds: &'static [&'static str],
}

/// All levels, the lowest first.
pub const LEVELS: [Level; 3] = [
    Level {
        name: "x86-64-v2",
        adds: &[
            // Features of every 64-bit processor.
            "fpu",
            "de",
            "pse",
            "tsc",
            "msr",
            "pae",
            "mce",
            "cx8",
            "apic",
            "sep",
            "mtrr",
            "pge",
            "mca",
            "cmov",
            "pat",
            "pse36",
            "clflush",
            "mmx",
            "fxsr",
            "sse",
            "sse2",
            "syscall",
            "nx",
            "lm",
            "rdtscp",
            "x2apic",
            "tsc_deadline_timer",
            "hypervisor",
            "tsc_adjust",
            "constant_tsc",
            // Features of the level.
            "sse3",
            "ssse3",
            "cx16",
            "sse4_1",
            "sse4_2",
            "popcnt",
            "lahf_lm",
        ],
    },
    Level {
        name: "x86-64-v3",
        adds: &[
            "avx",
            "avx2",
            "bmi1",
            "bmi2",
            "f16c",
            "fma",
            "abm",
            "movbe",
            "xsave",
            "xcr0_x87",
            "xcr0_sse",
            "xcr0_avx",
            // Features of all such processors: Haswell, Excavator, Zen and later.
            "aes",
            "pclmulqdq",
            "rdrand",
            "fsgsbase",
            "smep",
            "xsaveopt",
        ],
    },
    Level {
        name: "x86-64-v4",
        adds: &[
            "avx512f",
            "avx512bw",
            "avx512cd",
            "avx512dq",
            "avx512vl",
            "xcr0_opmask",
            "xcr0_zmm_hi256",
            "xcr0_hi16_zmm",
            // Features of Skylake's server processors, Zen 4 and later.
            "smap",
            "adx",
            "rdseed",
            "clflushopt",
            "clwb",
            "xsavec",
            "xgetbv1",
        ],
    },
];

/// Registers with KVM's features, and those that a guest kernel needs to isolate processes.
const COPIED_FROM_HOST: [Register; 5] = [
    Register::new(0x7, 2, 3),
    Register::new(0x8000_0008, 0, 1),
    Register::new(0x8000_0021, 0, 0),
    Register::new(0x8000_0021, 0, 2),
    Register::new(0x4000_0001, 0, 0),
];
const MITIGATIONS: [&str; 7] = [
    "md_clear",
    "spec_ctrl",
    "intel_stibp",
    "flush_l1d",
    "arch_capabilities",
    "spec_ctrl_ssbd",
    "srbds_ctrl",
];
/// Intel's processors since Haswell have these; mitigations are slow without them.
const OF_INTEL: [&str; 3] = ["pcid", "invpcid", "erms"];
/// Features that not every host has: KVM offers the first if the host's counter is invariant, and
/// emulates the second since Linux 3.12.
const OPTIONAL: [&str; 2] = ["constant_tsc", "tsc_deadline_timer"];
/// In leaf 0x80000008: bits of instructions, not of mitigations.
const NOT_MITIGATIONS: u32 = 1 | 1 << 1 | 1 << 2 | 1 << 4 | 1 << 9;

/// Finds a level by name.
///
/// # Errors
///
/// If there is no level of this name: a sentence that lists the names.
pub fn find(name: &str) -> Result<&'static Level, String> {
    LEVELS
        .iter()
        .find(|level| level.name == name)
        .ok_or_else(|| {
            let names = LEVELS.map(|level| level.name).join(", ");
            let shown: String = name.chars().take(64).collect();
            format!("there is no CPU profile {shown:?}; the named profiles are {names}")
        })
}

impl Level {
    fn features(&self) -> impl Iterator<Item = &'static str> {
        let own = LEVELS.iter().take_while(|level| level.name <= self.name);
        own.flat_map(|level| level.adds).copied()
    }

    /// Names of the level's features that the host lacks.
    pub fn lacking(&self, host: &Profile) -> Vec<String> {
        self.features()
            .filter(|name| !OPTIONAL.contains(name))
            .filter(|name| {
                feature(name).is_none_or(|(register, bit)| host.register(register) & bit == 0)
            })
            .map(str::to_owned)
            .collect()
    }

    /// The host's profile, without features beyond the level.
    pub fn of(&self, host: &Profile) -> Profile {
        let intel: &[&str] = match &*host.vendor {
            "GenuineIntel" => &OF_INTEL,
            _ => &[],
        };
        let kept = self
            .features()
            .chain(MITIGATIONS)
            .chain(intel.iter().copied());
        let kept: Vec<(Register, u32)> = kept.filter_map(feature).collect();
        let mut profile = host.clone();
        for group in FEATURES {
            let register = group.register;
            let bits = kept.iter().filter(|(of, _)| *of == register);
            let mut allowed = bits.fold(group.ignored, |all, (_, bit)| all | bit);
            if COPIED_FROM_HOST.contains(&register) {
                allowed = u32::MAX;
                if register.leaf == 0x8000_0008 {
                    allowed = !NOT_MITIGATIONS;
                }
            }
            if let Some(bits) = profile.register_mut(register) {
                *bits &= allowed;
            }
        }
        profile
    }
}
