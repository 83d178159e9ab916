use super::*;
use crate::devices::balloon::BalloonKind;
use crate::devices::block::BlockKind;
use crate::devices::entropy::EntropyKind;
use crate::devices::fw_cfg::FwCfgKind;
use crate::devices::rtc::RtcKind;
use crate::devices::virtio::Virtio;
use crate::devices::vsock::VsockKind;
use jiffy_wire::state::HEADER;

const V1: &[u8] = include_bytes!("../../golden/state-1");
const V2: &[u8] = include_bytes!("../../golden/state-2");
const V3: &[u8] = include_bytes!("../../golden/state-3");
/// Where the body of versions 2 and 3 begins.
const BODY: usize = Envelope::BYTES;

/// Checks the state of all golden files: a guest of one vCPU with every device.
fn is_the_golden_vm(state: &VmState) {
    assert_eq!(state.memory_size, 128 << 20);
    assert_eq!(state.vcpus.len(), 1);
    let vcpu = &state.vcpus[0];
    // In the kernel: upper half, long mode, paging.
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
    assert_eq!(devices.of::<Virtio<BlockKind>>().count(), 1);
    assert!(
        devices
            .of::<Virtio<BlockKind>>()
            .all(|disk| disk.1.read_only)
    );
    assert_eq!(devices.of::<Virtio<VsockKind>>().count(), 1);
    assert!(
        devices
            .of::<Virtio<VsockKind>>()
            .all(|vsock| vsock.1.cid >= 3)
    );
    assert_eq!(devices.of::<Virtio<EntropyKind>>().count(), 1);
    assert_eq!(devices.of::<Virtio<BalloonKind>>().count(), 1);
    let names: Vec<&str> = devices
        .of::<FwCfgKind>()
        .flat_map(|fw_cfg| &fw_cfg.files)
        .map(|file| file.name.as_str())
        .collect();
    assert_eq!(names, ["opt/jiffy/config"]);
}

/// If one of these fails, states that were written before can't be read, or mean something else:
/// see the module's documentation.
#[test]
fn the_format_of_versions_1_and_2_does_not_drift() {
    for golden in [V1, V2] {
        let state = VmState::decode(golden).expect("the golden state is read");
        is_the_golden_vm(&state);
    }
}

#[test]
fn the_format_of_version_3_does_not_drift() {
    let state = VmState::decode(V3).expect("the golden state is read");
    is_the_golden_vm(&state);
    let again = state.encode();
    assert_eq!(again[8..12], V3[8..12]);
    assert_eq!(again[BODY..], V3[BODY..]);
    // Version 2 holds the same VM, part by part.
    let before = VmState::decode(V2).unwrap();
    assert_eq!(format!("{before:?}"), format!("{state:?}"));
}

#[test]
fn an_unknown_newer_missing_or_duplicate_section_is_named() {
    let refused = |body: &[u8]| {
        VmState::decode(&seal("0.1.0", body))
            .unwrap_err()
            .to_string()
    };
    let body = &V3[BODY..];
    assert!(VmState::decode(&seal("0.1.0", body)).is_ok());
    let with = |tag: &str, version: u32, bytes: &[u8]| {
        let mut more = body.to_vec();
        more.extend(format!("{tag:\0<16}").into_bytes());
        more.extend(version.to_le_bytes());
        more.extend((bytes.len() as u64).to_le_bytes());
        more.extend(bytes);
        refused(&more)
    };
    assert_eq!(
        with("tpm", 1, b"what it needs"),
        "the VM was saved by jiffy 0.1.0 with a part that this jiffy does not know: tpm"
    );
    assert_eq!(
        with("disk", 7, b"x"),
        "the VM was saved by jiffy 0.1.0 with version 7 of its disk, this jiffy reads versions up to 1"
    );
    let damaged = "the saved VM state is damaged: ";
    let twice = format!("{damaged}it has 2 sections rtc, at most one is allowed");
    let golden = VmState::decode(V3).unwrap();
    let rtc = postcard::to_allocvec(golden.devices.of::<RtcKind>().next().unwrap()).unwrap();
    assert_eq!(with("rtc", 1, &rtc), twice);
    let odd = format!("{damaged}a section of it is cut short or has no name");
    for tag in ["", "\u{7}", "a b"] {
        assert_eq!(with(tag, 1, b""), odd);
    }
    // The last section is the trace port's.
    let trace = body.windows(5).rposition(|tag| tag == b"trace").unwrap();
    assert_eq!(
        refused(&body[..trace]),
        format!("{damaged}it has no section trace")
    );
    assert_eq!(refused(&body[..body.len() - 1]), odd);
    assert!(with("vcpu", 1, b"").starts_with(&format!("{damaged}section vcpu: ")));
}

#[test]
fn more_msrs_than_kvm_can_have_are_refused() {
    let mut state = VmState::decode(V3).unwrap();
    let msr = state.vcpus[0].msrs[0];
    state.vcpus[0].msrs = vec![msr; MAX_MSRS + 1];
    let error = VmState::decode(&state.encode()).unwrap_err();
    assert!(matches!(error, StateError::Contents(_)), "{error}");
}

#[test]
fn a_later_version_is_refused_with_its_release() {
    let refused = |bytes: &[u8]| VmState::decode(bytes).unwrap_err().to_string();
    let mut later = V3.to_vec();
    later[8] = 9;
    later[HEADER..BODY].copy_from_slice(b"7.1.0-rc.2\0\0\0\0\0\0");
    assert_eq!(
        refused(&later),
        "the VM was saved in format 9 by jiffy 7.1.0-rc.2, this jiffy reads formats 1 to 3"
    );
    // A later version may have something else there, so the release is checked.
    later[HEADER] = 0x1b;
    assert_eq!(
        refused(&later),
        "the VM was saved in format 9, this jiffy reads formats 1 to 3"
    );
    assert_eq!(
        refused(&later[..HEADER]),
        "the VM was saved in format 9, this jiffy reads formats 1 to 3"
    );
    later[8] = 0;
    assert!(refused(&later).contains("format 0"));
}

#[test]
fn each_flipped_bit_and_each_truncation_is_detected() {
    for golden in [V1, V2, V3] {
        for at in (0..golden.len()).step_by(7) {
            let mut bytes = golden.to_vec();
            bytes[at] ^= 1 << (at % 8);
            assert!(VmState::decode(&bytes).is_err(), "byte {at}");
            assert!(VmState::decode(&golden[..at]).is_err(), "cut at {at}");
        }
    }
}
