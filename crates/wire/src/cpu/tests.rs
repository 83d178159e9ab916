use super::*;

/// An Intel processor with these features.
fn processor(features: &[&str]) -> Profile {
    let mut profile = testing::processor(
        "GenuineIntel",
        0x16,
        &[(0xd, 2, [256, 576, 0, 0]), (0x8000_0008, 0, [46, 0, 0, 0])],
    );
    for name in features {
        let (register, bit) = features::find(name).unwrap_or_else(|| panic!("{name}"));
        add(&mut profile, register, bit);
    }
    profile
}

fn add(profile: &mut Profile, register: Register, bit: u32) {
    let mut registers = profile
        .leaf(register.leaf, register.index)
        .unwrap_or_default();
    registers[register.register] |= bit;
    set(profile, register.leaf, register.index, registers);
}

/// Sets a leaf and keeps the leaves sorted, as a parsed profile has them.
fn set(profile: &mut Profile, leaf: u32, index: u32, registers: [u32; 4]) {
    let same = |entry: &Leaf| (entry.leaf, entry.index) == (leaf, index);
    profile.cpuid.retain(|entry| !same(entry));
    profile.cpuid.push(Leaf {
        leaf,
        index,
        registers,
    });
    profile.cpuid.sort_by_key(|entry| (entry.leaf, entry.index));
}

#[test]
fn each_feature_name_and_bit_is_listed_once() {
    let mut names = Vec::new();
    let mut places = Vec::new();
    for group in FEATURES {
        places.push(group.register);
        let all = group.names_of(u32::MAX);
        assert_eq!(all.len() as u32, 32 - group.ignored.count_ones());
        names.extend(all);
    }
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
    assert!(places.is_sorted());
    places.dedup();
    assert_eq!(places.len(), FEATURES.len());
}

#[test]
fn features_lacking_on_a_host_are_named() {
    let guest = processor(&["sse2", "avx2", "md_clear"]);
    assert_eq!(guest.lacking(&guest), [""; 0]);
    assert_eq!(guest.features(), ["sse2", "avx2", "md_clear"]);
    let richer = processor(&["sse2", "avx2", "md_clear", "avx512f"]);
    assert_eq!(guest.lacking(&richer), [""; 0]);
    assert_eq!(richer.lacking(&guest), ["avx512f"]);
    // Bits that depend on the guest's own settings, or on the x87, are not compared.
    let running = processor(&[
        "sse2",
        "avx2",
        "md_clear",
        "osxsave",
        "ospke",
        "zero_fcs_fds",
    ]);
    assert_eq!(running.lacking(&guest), [""; 0]);
    // A bit without a name.
    let mut newer = guest.clone();
    add(&mut newer, Register::new(7, 1, 1), 1 << 30);
    assert_eq!(newer.lacking(&guest), [""; 0], "EBX of that leaf has none");
    add(&mut newer, Register::new(7, 1, 0), 1 << 30);
    assert_eq!(newer.lacking(&guest), ["cpuid_7_1_eax_30"]);
}

#[test]
fn vendor_address_bits_xsave_and_tsc_are_compared() {
    let guest = processor(&["sse2"]);
    let mut host = guest.clone();
    host.vendor = "AuthenticAMD".into();
    assert_eq!(
        guest.lacking(&host),
        ["a processor of GenuineIntel (this is one of AuthenticAMD)"]
    );
    let mut host = guest.clone();
    set(&mut host, 0x8000_0008, 0, [39, 0, 0, 0]);
    assert_eq!(
        guest.lacking(&host),
        ["46 bits of physical addresses (it has 39)"]
    );
    assert_eq!(host.lacking(&guest), [""; 0]);
    let mut host = guest.clone();
    set(&mut host, 0xd, 2, [256, 832, 0, 0]);
    assert_eq!(
        guest.lacking(&host),
        ["the offset and size of XSAVE state 2"]
    );

    let counting = |khz| Profile {
        tsc_khz: Some(khz),
        ..guest.clone()
    };
    let (slow, fast) = (counting(2_000_000), counting(2_400_000));
    assert_eq!(slow.lacking(&counting(2_000_500)), [""; 0]);
    assert_eq!(fast.lacking(&slow), [""; 0], "KVM makes it catch up");
    assert_eq!(
        slow.lacking(&fast),
        ["a time stamp counter of 2000000 kHz (it has 2400000 kHz and can't scale it)"]
    );
    let scaling = Profile {
        tsc_scaling: true,
        ..fast
    };
    assert_eq!(slow.lacking(&scaling), [""; 0]);
}

#[test]
fn arch_capabilities_are_compared_by_meaning() {
    let with = |capabilities: u64| Profile {
        msrs: BTreeMap::from([(ARCH_CAPABILITIES, capabilities)]),
        ..processor(&["arch_capabilities"])
    };
    let (rdcl_no, rsba, skip) = (1, 1 << 2, 1 << 3);
    assert_eq!(with(rdcl_no).lacking(&with(rdcl_no)), [""; 0]);
    assert_eq!(
        with(rdcl_no | skip).lacking(&with(rsba)),
        ["arch_capabilities_rdcl_no", "no_arch_capabilities_rsba"]
    );
    assert_eq!(with(rsba).lacking(&with(0)), [""; 0]);
    assert_eq!(
        with(rdcl_no).lacking(&processor(&["arch_capabilities"])),
        ["arch_capabilities_rdcl_no"]
    );
    assert_eq!(with(1 << 40).lacking(&with(0)), ["arch_capabilities_40"]);
    let both = with(rdcl_no | 1 << 5)
        .common(&with(rdcl_no | rsba))
        .unwrap();
    assert_eq!(both.msrs[&ARCH_CAPABILITIES], rdcl_no | rsba);
}

#[test]
fn a_common_profile_fits_both_hosts() {
    let mut one = processor(&["sse2", "avx2", "erms", "avx", "ht"]);
    let two = processor(&["sse2", "avx2", "avx512f", "avx"]);
    set(&mut one, 0x8000_0008, 0, [39, 0, 0, 0]);
    let common = one.common(&two).unwrap();
    assert_eq!(common.features(), ["avx", "sse2", "avx2"]);
    assert_eq!(common.physical_address_bits(), 39);
    for host in [&one, &two] {
        assert_eq!(common.lacking(host), [""; 0]);
        let wanted = Wanted::Given(Box::new(common.clone()));
        assert_eq!(wanted.of(host).unwrap().features(), common.features());
    }
    assert_eq!(
        Wanted::Given(Box::new(two)).of(&one).unwrap_err(),
        "this host can't give a VM the CPU profile that was given: it lacks avx512f, 46 bits of physical addresses (it has 39)"
    );
    let mut other = common.clone();
    other.vendor = "AuthenticAMD".into();
    assert_eq!(one.common(&other), None);
}

#[test]
fn a_level_has_its_features_and_the_hosts_mitigations() {
    for level in &levels::LEVELS {
        // Each name of the level is a feature.
        let all: Vec<String> = level.lacking(&processor(&[]));
        let names: Vec<&str> = all.iter().map(String::as_str).collect();
        let exactly = processor(&names);
        assert_eq!(level.lacking(&exactly), [""; 0]);
        let mut more = names.clone();
        more.extend(["md_clear", "bhi_ctrl", "amd_ibpb", "kvm_clocksource"]);
        more.extend(["clzero", "avx512_vnni", "umip", "sha_ni"]);
        let more = processor(&more);
        let profile = Wanted::Named(level.name.into()).of(&more).unwrap();
        let mitigated = ["md_clear", "bhi_ctrl", "amd_ibpb", "kvm_clocksource"];
        assert!(
            mitigated
                .iter()
                .all(|name| profile.features().contains(&(*name).to_owned()))
        );
        assert_eq!(profile.features().len(), names.len() + mitigated.len());
    }
    let old = processor(&["sse2"]);
    let refused = Wanted::Named("x86-64-v2".into()).of(&old).unwrap_err();
    let begin = "this host can't give a VM the CPU profile x86-64-v2: it lacks fpu, de, ";
    assert!(refused.starts_with(begin), "{refused}");
    assert!(refused.ends_with(", popcnt, lahf_lm"), "{refused}");
    assert_eq!(
        Wanted::Named("i486".into()).of(&old).unwrap_err(),
        "there is no CPU profile \"i486\"; the named profiles are x86-64-v2, x86-64-v3, x86-64-v4"
    );
}

#[test]
fn a_written_profile_is_read_back() {
    let mut profile = processor(&["sse2", "md_clear"]);
    profile.msrs.insert(ARCH_CAPABILITIES, 1 << 62 | 1);
    profile.tsc_khz = Some(2_100_000);
    let text = serde_json::to_string(&profile).unwrap();
    assert!(
        text.contains(r#""00000007.0":"00000000 00000000 00000000 00000400""#),
        "{text}"
    );
    assert!(
        text.contains(r#""msrs":{"10a":"4000000000000001"}"#),
        "{text}"
    );
    assert_eq!(serde_json::from_str::<Profile>(&text).unwrap(), profile);
    profile.check().unwrap();
    for (from, to) in [
        ("00000007.0", "7"),
        ("00000000 00000400", "00000400"),
        ("00000000 00000400", "00000000 00000000 00000400"),
        ("00000000 00000400", "00000000 x"),
        ("10a", "0x10a"),
        ("tsc_khz", "tsc_mhz"),
        // The same leaf in another notation.
        (
            r#""00000007.0":"#,
            r#""7.00":"00000000 00000000 00000000 00000000","00000007.0":"#,
        ),
    ] {
        assert!(text.contains(from));
        let damaged = text.replacen(from, to, 1);
        assert!(
            serde_json::from_str::<Profile>(&damaged).is_err(),
            "{damaged}"
        );
    }
    // Leaves are sorted by number, not by text.
    let many = r#"{"version":1,"vendor":"","cpuid":{"d.2":"0 0 0 0","d.11":"1 1 1 1"}}"#;
    let many: Profile = serde_json::from_str(many).unwrap();
    let indices: Vec<u32> = many.cpuid.iter().map(|leaf| leaf.index).collect();
    assert_eq!(indices, [2, 11]);
    let wanted = |text: &str| serde_json::from_str::<Wanted>(text).unwrap();
    assert_eq!(wanted(&text), Wanted::Given(Box::new(profile.clone())));
    assert_eq!(wanted(r#""x86-64-v3""#), Wanted::Named("x86-64-v3".into()));

    let refused = |change: &dyn Fn(&mut Profile)| {
        let mut profile = profile.clone();
        change(&mut profile);
        profile.check().unwrap_err()
    };
    assert!(refused(&|profile| profile.version = 2).contains("version 2"));
    assert!(refused(&|profile| profile.vendor = "x".into()).contains("vendor"));
    assert!(refused(&|profile| profile.vendor = "AuthenticAMD".into()).contains("CPUID"));
    assert!(refused(&|profile| profile.cpuid.clear()).contains("CPUID"));
    assert!(
        refused(&|profile| {
            for leaf in 1..300 {
                set(profile, leaf, 9, [0; 4]);
            }
        })
        .contains("CPUID")
    );
}
