use super::*;

const V1: &[u8] = include_bytes!("../../golden/state-1");
const V2: &[u8] = include_bytes!("../../golden/state-2");

/// What both golden files say: a guest of one vCPU with every device.
fn is_the_golden_vm(state: &VmState) {
    assert_eq!(state.memory_size, 128 << 20);
    assert_eq!(state.vcpus.len(), 1);
    let vcpu = &state.vcpus[0];
    // In the kernel: the upper half, long mode, paging, interrupts as they were.
    assert!(
        vcpu.regs.rip >= 0xffff_ffff_8000_0000,
        "{:#x}",
        vcpu.regs.rip
    );
    assert_eq!(vcpu.sregs.cs.l, 1);
    assert_eq!(vcpu.sregs.efer & 0x500, 0x500, "long mode, active");
    assert!(
        vcpu.msrs.iter().any(|msr| msr.index == 0xc000_0082),
        "LSTAR"
    );
    assert!(vcpu.cpuid.iter().any(|leaf| leaf.function == 0x4000_0000));
    assert!(state.chips.clock_ns > 0);
    let devices = &state.devices;
    assert_eq!(devices.disks.len(), 1);
    assert!(devices.disks[0].1.read_only);
    assert!(devices.vsock.as_ref().is_some_and(|vsock| vsock.1.cid >= 3));
    assert!(devices.entropy.is_some() && devices.balloon.is_some());
    let names: Vec<&str> = devices
        .fw_cfg
        .files
        .iter()
        .map(|file| file.name.as_str())
        .collect();
    assert_eq!(names, ["opt/jiffy/config"]);
}

/// If one of these fails, files written before can't be read, or mean
/// something else: see the head of the module.
#[test]
fn version_1_does_not_drift() {
    let state = VmState::decode(V1).expect("the golden state is read");
    is_the_golden_vm(&state);
    // Its body is still written as it was.
    assert_eq!(state.encode()[HEADER + RELEASE..], V1[HEADER..]);
}

#[test]
fn version_2_does_not_drift() {
    let state = VmState::decode(V2).expect("the golden state is read");
    is_the_golden_vm(&state);
    let again = state.encode();
    assert_eq!(again[HEADER + RELEASE..], V2[HEADER + RELEASE..]);
    assert_eq!(again[8..12], V2[8..12]);
}

#[test]
fn a_later_version_is_refused_and_its_release_named() {
    let refused = |bytes: &[u8]| VmState::decode(bytes).unwrap_err().to_string();
    let mut later = V2.to_vec();
    later[8] = 9;
    later[HEADER..HEADER + RELEASE].copy_from_slice(b"7.1.0-rc.2\0\0\0\0\0\0");
    assert_eq!(
        refused(&later),
        "the VM was saved in format 9 by jiffy 7.1.0-rc.2, this jiffy reads formats 1 and 2"
    );
    // It need not say so there, and nothing is believed of it.
    later[HEADER] = 0x1b;
    assert_eq!(
        refused(&later),
        "the VM was saved in format 9, this jiffy reads formats 1 and 2"
    );
    assert_eq!(
        refused(&later[..HEADER]),
        "the VM was saved in format 9, this jiffy reads formats 1 and 2"
    );
    later[8] = 0;
    assert!(refused(&later).contains("format 0"));
}

#[test]
fn every_flipped_bit_and_every_cut_is_noticed() {
    for golden in [V1, V2] {
        for at in (0..golden.len()).step_by(7) {
            let mut bytes = golden.to_vec();
            bytes[at] ^= 1 << (at % 8);
            assert!(VmState::decode(&bytes).is_err(), "byte {at}");
            assert!(VmState::decode(&golden[..at]).is_err(), "cut at {at}");
        }
    }
}
