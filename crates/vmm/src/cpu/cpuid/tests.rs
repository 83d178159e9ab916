use super::*;
use jiffy_wire::cpu::Leaf;

const HTT: u32 = 1 << 28;

fn entry(function: u32, index: u32) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 {
        function,
        index,
        ..Default::default()
    }
}

/// CPUID of a processor that has every feature.
fn everything(vendor: &[u8; 12]) -> CpuId {
    let leaves = [
        (0, 0),
        (1, 0),
        (4, 0),
        (4, 1),
        (5, 0),
        (7, 0),
        (7, 1),
        (0xa, 0),
        (0xb, 0),
        (0xd, 0),
        (0xd, 1),
        (0xd, 2),
        (0xd, 11),
        (0xd, 17),
        (0xd, 18),
        (0x12, 0),
        (0x14, 0),
        (0x1d, 0),
        (0x1e, 0),
        (0x1f, 0),
        (0x8000_0001, 0),
        (0x8000_0002, 0),
        (0x8000_0003, 0),
        (0x8000_0004, 0),
        (0x8000_0008, 0),
        (0x8000_000a, 0),
        (0x8000_001d, 0),
        (0x8000_001e, 0),
        (0x8000_001f, 0),
        (0x8000_0022, 0),
    ];
    let mut entries = leaves.map(|(function, index)| kvm_cpuid_entry2 {
        eax: u32::MAX,
        ebx: u32::MAX,
        ecx: u32::MAX,
        edx: u32::MAX,
        ..entry(function, index)
    });
    for leaf in &mut entries {
        let set = |leaf: &mut kvm_cpuid_entry2, [eax, ebx, ecx]: [u32; 3]| {
            (leaf.eax, leaf.ebx, leaf.ecx) = (eax, ebx, ecx);
        };
        match (leaf.function, leaf.index) {
            (0, 0) => {
                let word = |at: usize| u32::from_le_bytes(vendor[at..at + 4].try_into().unwrap());
                (leaf.eax, leaf.ebx, leaf.edx, leaf.ecx) = (0x24, word(0), word(4), word(8));
            }
            (4 | 0x8000_001d, 0) => leaf.eax = 3 << 5 | 3,
            (4, 1) => set(leaf, [0, 0, 0]),
            // AVX, then CET's supervisor state, then AMX's states.
            (0xd, 2) => set(leaf, [256, 576, 0]),
            (0xd, 11) => set(leaf, [16, 0, 1]),
            (0xd, 17) => set(leaf, [64, 2752, 2]),
            (0xd, 18) => set(leaf, [8192, 2816, 6]),
            _ => {}
        }
    }
    CpuId::from_entries(&entries).unwrap()
}

const HOST: Host = Host {
    tsc_deadline: true,
    leaf_7_ebx: 0,
};

fn intel(vcpus: u8) -> CpuId {
    for_vm(&everything(b"GenuineIntel"), vcpus, HOST, None)
}

fn amd(vcpus: u8) -> CpuId {
    for_vm(&everything(b"AuthenticAMD"), vcpus, HOST, None)
}

fn find(cpuid: &CpuId, function: u32, index: u32) -> Option<kvm_cpuid_entry2> {
    let entries = cpuid.as_slice().iter();
    let mut found = entries.filter(|entry| entry.function == function && entry.index == index);
    found.next().copied()
}

fn of(cpuid: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
    find(cpuid, function, index).unwrap()
}

#[test]
fn each_vcpu_has_its_own_ids() {
    for mut cpuid in [intel(6), amd(6)] {
        for index in [0, 5] {
            specialise(&mut cpuid, index, 6);
            let id = u32::from(index);
            assert_eq!(of(&cpuid, 1, 0).ebx, id << 24 | 8 << 16 | 0xffff);
            assert_eq!(of(&cpuid, 0xb, 0).edx, id);
            assert_eq!(of(&cpuid, 0xb, 1).edx, id);
            assert_eq!(of(&cpuid, 0x8000_001e, 0).eax, id);
        }
        assert_eq!(of(&cpuid, 0xb, 1).eax, 3, "six ids need three bits");
        assert_eq!(of(&cpuid, 0xb, 1).ebx, 6);
        assert_eq!(of(&cpuid, 4, 0).eax >> 26, 5);
        assert_eq!(of(&cpuid, 4, 0).eax >> 14 & 0xfff, 5);
        assert_eq!(
            of(&cpuid, 4, 1).eax,
            0,
            "the entry that ends the list is unchanged"
        );
    }
    assert_eq!(of(&amd(6), 0x8000_0008, 0).ecx, 3 << 12 | 5);
    assert_eq!(of(&amd(6), 0x8000_001d, 0).eax >> 14 & 0xfff, 5);
    assert_eq!(of(&amd(1), 0x8000_0001, 0).ecx & 2, 0);
    assert_eq!(of(&amd(2), 0x8000_0001, 0).ecx & 2, 2);
}

#[test]
fn a_guest_sees_hypervisor_and_timer_but_no_performance_counters() {
    for cpuid in [intel(1), amd(1)] {
        let leaf = of(&cpuid, 1, 0);
        assert_eq!(leaf.ecx, !(1 << 3 | 1 << 5 | 1 << 15));
        assert_eq!(leaf.edx & HTT, 0);
        for gone in [
            0x5,
            0xa,
            0x12,
            0x14,
            0x1d,
            0x1e,
            0x1f,
            0x8000_000a,
            0x8000_001f,
            0x8000_0022,
        ] {
            assert_eq!(find(&cpuid, gone, 0), None, "{gone:#x}");
        }
        assert_eq!(of(&cpuid, 0x8000_0001, 0).ecx & (1 << 2 | 1 << 23), 0);
    }
    assert_eq!(of(&intel(2), 1, 0).edx & HTT, HTT);
    let without = Host {
        tsc_deadline: false,
        ..HOST
    };
    let mut kvm = everything(b"GenuineIntel");
    kvm.as_mut_slice()[1].ecx = 0;
    assert_eq!(
        of(&for_vm(&kvm, 1, without, None), 1, 0).ecx,
        ECX_HYPERVISOR
    );
}

#[test]
fn features_that_a_snapshot_cannot_save_are_hidden() {
    for (cpuid, arch_capabilities) in [(intel(1), 1 << 29), (amd(1), 0)] {
        let leaf = of(&cpuid, 7, 0);
        assert_eq!(leaf.ebx & (1 << 2 | 1 << 25), 0, "SGX, trace");
        assert_eq!(leaf.ecx & (1 << 5 | 1 << 7 | 1 << 30), 0, "WAITPKG, SHSTK");
        assert_eq!(leaf.edx & (1 << 20 | 7 << 22 & !(1 << 23)), 0, "IBT, AMX");
        assert_eq!(leaf.edx & 1 << 29, arch_capabilities);
        assert_eq!(of(&cpuid, 7, 1).eax & (1 << 17 | 1 << 21), 0, "FRED, AMX");
        let first = of(&cpuid, 0xd, 0);
        assert_eq!(first.eax & (3 << 17), 0);
        assert_eq!(first.ecx, 832, "up to AVX's state");
        let second = of(&cpuid, 0xd, 1);
        assert_eq!((second.eax & 1 << 4, second.ecx, second.edx), (0, 0, 0));
        assert!(find(&cpuid, 0xd, 2).is_some());
        for gone in [11, 17, 18] {
            assert_eq!(find(&cpuid, 0xd, gone), None);
        }
    }
}

#[test]
fn features_that_kvm_cannot_disable_are_shown() {
    let mut kvm = everything(b"GenuineIntel");
    for leaf in kvm.as_mut_slice() {
        leaf.ebx = 0;
    }
    let host = Host {
        leaf_7_ebx: u32::MAX,
        ..HOST
    };
    assert_eq!(of(&for_vm(&kvm, 1, host, None), 7, 0).ebx, 1 << 6 | 1 << 13);
    assert_eq!(of(&for_vm(&kvm, 1, HOST, None), 7, 0).ebx, 0);
}

#[test]
fn the_hosts_processor_name_is_hidden() {
    for (cpuid, brand) in [
        (intel(1), "Intel Processor (Jiffy)"),
        (amd(1), "AMD Processor (Jiffy)"),
    ] {
        let leaves = (0x8000_0002..=0x8000_0004).map(|function| of(&cpuid, function, 0));
        let words = leaves.flat_map(|leaf| [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx]);
        let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
        assert_eq!(bytes.len(), 48);
        assert_eq!(bytes.last(), Some(&0));
        assert_eq!(
            String::from_utf8(bytes).unwrap().trim_end_matches('\0'),
            brand
        );
    }
}

#[test]
fn cpuid_leaf_order_is_kept() {
    for cpuid in [intel(2), amd(2)] {
        let functions: Vec<u32> = cpuid.as_slice().iter().map(|e| e.function).collect();
        assert!(functions.is_sorted(), "{functions:x?}");
    }
}

#[test]
fn a_profile_limits_features_states_and_addresses() {
    let mut kvm = everything(b"GenuineIntel");
    for leaf in kvm.as_mut_slice() {
        if leaf.function == 0x8000_0008 {
            leaf.eax = 46;
        }
    }
    let leaf = |leaf, index, registers| Leaf {
        leaf,
        index,
        registers,
    };
    let profile = Profile::new(vec![
        leaf(1, 0, [0, 0, 1 << 31 | 1, 1]),
        leaf(7, 0, [0, 0, 0, 1 << 10]),
        leaf(0xd, 0, [3, 0, 0, 0]),
        leaf(0x8000_0008, 0, [39, 0, 0, 0]),
    ]);
    let limited = for_vm(&kvm, 1, HOST, Some(&profile));
    let first = of(&limited, 1, 0);
    assert_eq!((first.ecx & !(1 << 27), first.edx), (1 << 31 | 1, 1));
    let seventh = of(&limited, 7, 0);
    assert_eq!(seventh.edx, 1 << 10);
    assert_eq!(seventh.ebx, 1 << 6 | 1 << 13, "what the x87 does anyway");
    assert_eq!(supported_states(&limited), 3);
    assert_eq!(find(&limited, 0xd, 2), None, "AVX's state is not there");
    assert_eq!(of(&limited, 0xd, 0).ecx, 576);
    assert_eq!(physical_address_bits(&limited), 39);
    assert_eq!(of(&limited, 0x8000_0001, 0).edx & 1 << 29, 0);
}
