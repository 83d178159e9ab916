//! The features that KVM lists and that are hidden from guests.

use super::Vendor;
use jiffy_wire::cpu::Profile;
use jiffy_wire::cpu::features::FEATURES;
use kvm_bindings::kvm_cpuid_entry2;

/// Bits of the four registers of a leaf.
#[derive(Clone, Copy, Default)]
struct Bits {
    eax: u32,
    ebx: u32,
    ecx: u32,
    edx: u32,
}

const NONE: Bits = Bits {
    eax: 0,
    ebx: 0,
    ecx: 0,
    edx: 0,
};

/// MONITOR: KVM executes it as a no-op. VMX: no nested guests. PDCM announces
/// IA32_PERF_CAPABILITIES, which describes performance counters, and those are hidden.
const LEAF_1: Bits = Bits {
    ecx: 1 << 3 | 1 << 5 | 1 << 15,
    ..NONE
};

/// SGX and its launch control: the contents of an enclave can't be saved. Processor trace: its
/// registers are not kept. WAITPKG puts the host's processor to sleep. Shadow stacks and indirect
/// branch tracking: KVM lists no register for the shadow stack's pointer. Bus lock detection: only
/// late kernels list its control register, and bus locks concern the host. AMX: its state is larger
/// than the 4 KiB that KVM saves for a process that did not ask for more.
const LEAF_7: Bits = Bits {
    ebx: 1 << 2 | 1 << 25,
    ecx: 1 << 5 | 1 << 7 | 1 << 24 | 1 << 30,
    edx: 1 << 20 | 1 << 22 | 1 << 24 | 1 << 25,
    ..NONE
};

/// IA32_ARCH_CAPABILITIES is Intel's: on AMD's processors KVM emulates one.
const LEAF_7_AMD: Bits = Bits {
    edx: LEAF_7.edx | 1 << 29,
    ..LEAF_7
};

/// FRED, whose registers are not kept; the rest of AMX and of shadow stacks.
const LEAF_7_1: Bits = Bits {
    eax: 1 << 17 | 1 << 21,
    edx: 1 << 8 | 1 << 18,
    ..NONE
};

/// SVM; AMD's performance counters (core, north bridge, last-level cache), which
/// would not survive a move; instruction-based sampling; MONITORX.
const LEAF_8000_0001: Bits = Bits {
    ecx: 1 << 2 | 1 << 10 | 1 << 23 | 1 << 24 | 1 << 28 | 1 << 29,
    ..NONE
};

/// AMX's two states in XCR0.
const TILES: u32 = 1 << 17 | 1 << 18;
/// XFD, which is for AMX only.
const XFD: u32 = 1 << 4;
/// In ECX of leaf 0xd from index 2 on: the state belongs to IA32_XSS.
const SUPERVISOR: u32 = 1;
/// Bytes before the first state that has a subleaf of its own: x87, SSE, the header.
const LEGACY_AREA: u32 = 576;

/// Leaves that no VM shows: MWAIT; performance counters; SGX; processor trace; AMX; SVM; memory
/// encryption; and topology, which is generated.
pub fn is_dropped(entry: &kvm_cpuid_entry2) -> bool {
    match entry.function {
        0x5 | 0xa | 0xb | 0x12 | 0x14 | 0x1d | 0x1e | 0x1f => true,
        0x8000_000a | 0x8000_001f | 0x8000_0022 | 0x8000_0026 => true,
        // The states of AMX, and supervisor states, which only CET has.
        0xd if entry.index >= 2 => {
            entry.index >= 17 && entry.index <= 18 || entry.ecx & SUPERVISOR != 0
        }
        _ => false,
    }
}

/// Clears the hidden features of a leaf.
pub fn hide(entry: &mut kvm_cpuid_entry2, vendor: Vendor) {
    let hidden = match (entry.function, entry.index) {
        (0x1, _) => LEAF_1,
        (0x7, 0) if vendor == Vendor::Amd => LEAF_7_AMD,
        (0x7, 0) => LEAF_7,
        (0x7, 1) => LEAF_7_1,
        (0x8000_0001, _) => LEAF_8000_0001,
        (0xd, 0) => Bits { eax: TILES, ..NONE },
        (0xd, 1) => Bits {
            eax: XFD,
            ecx: u32::MAX,
            edx: u32::MAX,
            ..NONE
        },
        _ => NONE,
    };
    entry.eax &= !hidden.eax;
    entry.ebx &= !hidden.ebx;
    entry.ecx &= !hidden.ecx;
    entry.edx &= !hidden.edx;
}

/// Clears the features that a profile does not have.
pub fn limit(entries: &mut Vec<kvm_cpuid_entry2>, profile: &Profile) {
    let mut states = 0;
    for entry in entries.iter_mut() {
        let here = (entry.function, entry.index);
        for group in FEATURES {
            if (group.register.leaf, group.register.index) != here {
                continue;
            }
            let mut registers = [
                &mut entry.eax,
                &mut entry.ebx,
                &mut entry.ecx,
                &mut entry.edx,
            ];
            let bits = &mut registers[group.register.register];
            **bits &= profile.register(group.register) | group.ignored;
        }
        match here {
            (0xd, 0) => states = u64::from(entry.edx) << 32 | u64::from(entry.eax),
            (0x8000_0008, _) => {
                let most = profile.physical_address_bits();
                entry.eax = entry.eax & !0xff | (entry.eax & 0xff).min(most);
            }
            _ => {}
        }
    }
    entries.retain(|entry| {
        entry.function != 0xd || entry.index < 2 || states >> entry.index.min(63) & 1 == 1
    });
}

/// Sets the size that XSAVE needs for the remaining states. The size for the enabled states
/// is filled in by KVM.
pub fn size_xsave(entries: &mut [kvm_cpuid_entry2]) {
    let of_xsave = |entry: &&kvm_cpuid_entry2| entry.function == 0xd;
    let states = entries
        .iter()
        .filter(of_xsave)
        .filter(|entry| entry.index >= 2);
    let size = states
        .map(|state| state.ebx.saturating_add(state.eax))
        .fold(LEGACY_AREA, u32::max);
    let first = entries
        .iter_mut()
        .find(|entry| entry.function == 0xd && entry.index == 0);
    if let Some(first) = first.filter(|first| first.eax != 0) {
        first.ecx = size;
    }
}
