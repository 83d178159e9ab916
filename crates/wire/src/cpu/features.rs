//! Feature bits of CPUID and of IA32_ARCH_CAPABILITIES, and their names.
//!
//! Names are those of Linux (`arch/x86/include/asm/cpufeatures.h`), if it has one. A name never
//! changes, because messages and profiles contain it.
//!
//! Sources: Intel SDM volume 2, CPUID; AMD APM volume 3, appendix E; Linux
//! `Documentation/virt/kvm/x86/cpuid.rst`.

/// EAX, as an index into a leaf's registers.
const EAX: usize = 0;
const EBX: usize = 1;
const ECX: usize = 2;
const EDX: usize = 3;

/// A register of a CPUID leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Register {
    /// The leaf.
    pub leaf: u32,
    /// Its index (ECX of the CPUID instruction).
    pub index: u32,
    /// 0 to 3: EAX, EBX, ECX, EDX.
    pub register: usize,
}

impl Register {
    /// A register.
    pub const fn new(leaf: u32, index: u32, register: usize) -> Register {
        Register {
            leaf,
            index,
            register,
        }
    }
}

/// A register whose bits are features.
#[derive(Debug)]
pub struct Group {
    /// The register.
    pub register: Register,
    /// Bits that are not compared: they depend on the guest's own settings (OSXSAVE) or the VM's
    /// topology (HT), repeat another register's, or report a flaw on which no guest relies.
    pub ignored: u32,
    names: &'static [(u32, &'static str)],
}

impl Group {
    /// The names of these bits. A bit without a name gets its position as its name.
    pub fn names_of(&self, bits: u32) -> Vec<String> {
        let bits = bits & !self.ignored;
        if bits == 0 {
            return Vec::new();
        }
        let set = (0..32).filter(|bit| bits >> bit & 1 == 1);
        set.map(|bit| match self.names.iter().find(|(of, _)| *of == bit) {
            Some((_, name)) => (*name).to_owned(),
            None => {
                let Register {
                    leaf,
                    index,
                    register,
                } = self.register;
                let register = ["eax", "ebx", "ecx", "edx"][register];
                format!("cpuid_{leaf:x}_{index}_{register}_{bit}")
            }
        })
        .collect()
    }
}

const fn group(
    leaf: u32,
    index: u32,
    register: usize,
    ignored: u32,
    names: &'static [(u32, &'static str)],
) -> Group {
    Group {
        register: Register::new(leaf, index, register),
        ignored,
        names,
    }
}

/// All feature registers, by leaf.
pub const FEATURES: &[Group] = &[
    group(
        0x1,
        0,
        ECX,
        0x8000000,
        &[
            (0, "sse3"),
            (1, "pclmulqdq"),
            (2, "dtes64"),
            (3, "monitor"),
            (4, "ds_cpl"),
            (5, "vmx"),
            (6, "smx"),
            (7, "est"),
            (8, "tm2"),
            (9, "ssse3"),
            (12, "fma"),
            (13, "cx16"),
            (14, "xtpr"),
            (15, "pdcm"),
            (17, "pcid"),
            (18, "dca"),
            (19, "sse4_1"),
            (20, "sse4_2"),
            (21, "x2apic"),
            (22, "movbe"),
            (23, "popcnt"),
            (24, "tsc_deadline_timer"),
            (25, "aes"),
            (26, "xsave"),
            (27, "osxsave"),
            (28, "avx"),
            (29, "f16c"),
            (30, "rdrand"),
            (31, "hypervisor"),
        ],
    ),
    group(
        0x1,
        0,
        EDX,
        0x10000000,
        &[
            (0, "fpu"),
            (1, "vme"),
            (2, "de"),
            (3, "pse"),
            (4, "tsc"),
            (5, "msr"),
            (6, "pae"),
            (7, "mce"),
            (8, "cx8"),
            (9, "apic"),
            (11, "sep"),
            (12, "mtrr"),
            (13, "pge"),
            (14, "mca"),
            (15, "cmov"),
            (16, "pat"),
            (17, "pse36"),
            (18, "pn"),
            (19, "clflush"),
            (21, "dts"),
            (22, "acpi"),
            (23, "mmx"),
            (24, "fxsr"),
            (25, "sse"),
            (26, "sse2"),
            (27, "ss"),
            (28, "ht"),
            (29, "tm"),
            (31, "pbe"),
        ],
    ),
    group(
        0x7,
        0,
        EBX,
        0x2040,
        &[
            (0, "fsgsbase"),
            (1, "tsc_adjust"),
            (2, "sgx"),
            (3, "bmi1"),
            (4, "hle"),
            (5, "avx2"),
            (6, "fdp_excptn_only"),
            (7, "smep"),
            (8, "bmi2"),
            (9, "erms"),
            (10, "invpcid"),
            (11, "rtm"),
            (12, "cqm"),
            (13, "zero_fcs_fds"),
            (14, "mpx"),
            (15, "rdt_a"),
            (16, "avx512f"),
            (17, "avx512dq"),
            (18, "rdseed"),
            (19, "adx"),
            (20, "smap"),
            (21, "avx512ifma"),
            (23, "clflushopt"),
            (24, "clwb"),
            (25, "intel_pt"),
            (26, "avx512pf"),
            (27, "avx512er"),
            (28, "avx512cd"),
            (29, "sha_ni"),
            (30, "avx512bw"),
            (31, "avx512vl"),
        ],
    ),
    group(
        0x7,
        0,
        ECX,
        0x10,
        &[
            (0, "prefetchwt1"),
            (1, "avx512vbmi"),
            (2, "umip"),
            (3, "pku"),
            (4, "ospke"),
            (5, "waitpkg"),
            (6, "avx512_vbmi2"),
            (7, "shstk"),
            (8, "gfni"),
            (9, "vaes"),
            (10, "vpclmulqdq"),
            (11, "avx512_vnni"),
            (12, "avx512_bitalg"),
            (13, "tme"),
            (14, "avx512_vpopcntdq"),
            (16, "la57"),
            (22, "rdpid"),
            (23, "kl"),
            (24, "bus_lock_detect"),
            (25, "cldemote"),
            (27, "movdiri"),
            (28, "movdir64b"),
            (29, "enqcmd"),
            (30, "sgx_lc"),
            (31, "pks"),
        ],
    ),
    group(
        0x7,
        0,
        EDX,
        0x0,
        &[
            (2, "avx512_4vnniw"),
            (3, "avx512_4fmaps"),
            (4, "fsrm"),
            (5, "uintr"),
            (8, "avx512_vp2intersect"),
            (9, "srbds_ctrl"),
            (10, "md_clear"),
            (11, "rtm_always_abort"),
            (13, "tsx_force_abort"),
            (14, "serialize"),
            (15, "hybrid"),
            (16, "tsxldtrk"),
            (18, "pconfig"),
            (19, "arch_lbr"),
            (20, "ibt"),
            (22, "amx_bf16"),
            (23, "avx512_fp16"),
            (24, "amx_tile"),
            (25, "amx_int8"),
            (26, "spec_ctrl"),
            (27, "intel_stibp"),
            (28, "flush_l1d"),
            (29, "arch_capabilities"),
            (30, "core_capabilities"),
            (31, "spec_ctrl_ssbd"),
        ],
    ),
    group(
        0x7,
        1,
        EAX,
        0x0,
        &[
            (0, "sha512"),
            (1, "sm3"),
            (2, "sm4"),
            (4, "avx_vnni"),
            (5, "avx512_bf16"),
            (6, "lass"),
            (7, "cmpccxadd"),
            (10, "fzrm"),
            (11, "fsrs"),
            (12, "fsrc"),
            (17, "fred"),
            (18, "lkgs"),
            (19, "wrmsrns"),
            (21, "amx_fp16"),
            (22, "hreset"),
            (23, "avx_ifma"),
            (26, "lam"),
            (27, "msrlist"),
        ],
    ),
    group(
        0x7,
        1,
        EDX,
        0x0,
        &[
            (4, "avx_vnni_int8"),
            (5, "avx_ne_convert"),
            (8, "amx_complex"),
            (10, "avx_vnni_int16"),
            (14, "prefetchiti"),
            (15, "user_msr"),
            (18, "cet_sss"),
            (19, "avx10"),
            (21, "apx_f"),
        ],
    ),
    group(
        0x7,
        2,
        EDX,
        0x0,
        &[
            (0, "intel_psfd"),
            (1, "ipred_ctrl"),
            (2, "rrsba_ctrl"),
            (3, "ddpd_u"),
            (4, "bhi_ctrl"),
            (5, "mcdt_no"),
        ],
    ),
    group(
        0xd,
        0,
        EAX,
        0x0,
        &[
            (0, "xcr0_x87"),
            (1, "xcr0_sse"),
            (2, "xcr0_avx"),
            (3, "xcr0_bndregs"),
            (4, "xcr0_bndcsr"),
            (5, "xcr0_opmask"),
            (6, "xcr0_zmm_hi256"),
            (7, "xcr0_hi16_zmm"),
            (9, "xcr0_pkru"),
            (17, "xcr0_xtilecfg"),
            (18, "xcr0_xtiledata"),
        ],
    ),
    group(0xd, 0, EDX, 0x0, &[]),
    group(
        0xd,
        1,
        EAX,
        0x0,
        &[
            (0, "xsaveopt"),
            (1, "xsavec"),
            (2, "xgetbv1"),
            (3, "xsaves"),
            (4, "xfd"),
        ],
    ),
    group(
        0xd,
        1,
        ECX,
        0x0,
        &[(8, "xss_pt"), (11, "xss_cet_u"), (12, "xss_cet_s")],
    ),
    group(
        0x24,
        0,
        EBX,
        0x0,
        &[(16, "avx10_128"), (17, "avx10_256"), (18, "avx10_512")],
    ),
    group(
        0x40000001,
        0,
        EAX,
        0x0,
        &[
            (0, "kvm_clocksource"),
            (1, "kvm_nop_io_delay"),
            (2, "kvm_mmu_op"),
            (3, "kvm_clocksource2"),
            (4, "kvm_async_pf"),
            (5, "kvm_steal_time"),
            (6, "kvm_pv_eoi"),
            (7, "kvm_pv_unhalt"),
            (9, "kvm_pv_tlb_flush"),
            (10, "kvm_async_pf_vmexit"),
            (11, "kvm_pv_send_ipi"),
            (12, "kvm_poll_control"),
            (13, "kvm_pv_sched_yield"),
            (14, "kvm_async_pf_int"),
            (15, "kvm_msi_ext_dest_id"),
            (16, "kvm_hc_map_gpa_range"),
            (17, "kvm_migration_control"),
            (24, "kvm_clocksource_stable"),
        ],
    ),
    group(
        0x80000001,
        0,
        ECX,
        0x2,
        &[
            (0, "lahf_lm"),
            (1, "cmp_legacy"),
            (2, "svm"),
            (3, "extapic"),
            (4, "cr8_legacy"),
            (5, "abm"),
            (6, "sse4a"),
            (7, "misalignsse"),
            (8, "3dnowprefetch"),
            (9, "osvw"),
            (10, "ibs"),
            (11, "xop"),
            (12, "skinit"),
            (13, "wdt"),
            (15, "lwp"),
            (16, "fma4"),
            (17, "tce"),
            (19, "nodeid_msr"),
            (21, "tbm"),
            (22, "topoext"),
            (23, "perfctr_core"),
            (24, "perfctr_nb"),
            (26, "bpext"),
            (27, "ptsc"),
            (28, "perfctr_llc"),
            (29, "mwaitx"),
        ],
    ),
    group(
        0x80000001,
        0,
        EDX,
        0x183f3ff,
        &[
            (11, "syscall"),
            (19, "mp"),
            (20, "nx"),
            (22, "mmxext"),
            (25, "fxsr_opt"),
            (26, "pdpe1gb"),
            (27, "rdtscp"),
            (29, "lm"),
            (30, "3dnowext"),
            (31, "3dnow"),
        ],
    ),
    group(0x80000007, 0, EDX, 0x0, &[(8, "constant_tsc")]),
    group(
        0x80000008,
        0,
        EBX,
        0x0,
        &[
            (0, "clzero"),
            (1, "irperf"),
            (2, "xsaveerptr"),
            (4, "rdpru"),
            (9, "wbnoinvd"),
            (12, "amd_ibpb"),
            (14, "amd_ibrs"),
            (15, "amd_stibp"),
            (17, "amd_stibp_always_on"),
            (23, "amd_ppin"),
            (24, "amd_ssbd"),
            (25, "virt_ssbd"),
            (26, "amd_ssb_no"),
            (28, "amd_psfd"),
        ],
    ),
    group(
        0x80000021,
        0,
        EAX,
        0x0,
        &[
            (0, "no_nested_data_bp"),
            (1, "wrmsr_xx_base_ns"),
            (2, "lfence_rdtsc"),
            (5, "verw_clear"),
            (6, "null_sel_clr_base"),
            (8, "autoibrs"),
            (9, "no_smm_ctl_msr"),
            (27, "sbpb"),
            (28, "ibpb_brtype"),
            (29, "srso_no"),
            (30, "srso_user_kernel_no"),
        ],
    ),
    group(
        0x80000021,
        0,
        ECX,
        0x0,
        &[(1, "tsa_sq_no"), (2, "tsa_l1_no")],
    ),
];

/// The register and bit of a feature.
pub fn find(name: &str) -> Option<(Register, u32)> {
    FEATURES.iter().find_map(|group| {
        let (bit, _) = group.names.iter().find(|(_, of)| *of == name)?;
        Some((group.register, 1 << bit))
    })
}

/// IA32_ARCH_CAPABILITIES (Intel's guidance on speculative execution). A set bit promises the guest
/// something that the host must keep.
const CAPABILITIES: &[(u32, &str)] = &[
    (0, "rdcl_no"),
    (1, "ibrs_all"),
    (4, "ssb_no"),
    (5, "mds_no"),
    (6, "pschange_mc_no"),
    (7, "tsx_ctrl"),
    (8, "taa_no"),
    (10, "misc_package_ctrls"),
    (11, "energy_filtering_ctl"),
    (12, "doitm"),
    (13, "sbdr_ssdp_no"),
    (14, "fbsdp_no"),
    (15, "psdp_no"),
    (17, "fb_clear"),
    (18, "fb_clear_ctrl"),
    (20, "bhi_no"),
    (21, "xapic_disable_status"),
    (23, "overclocking_status"),
    (24, "pbrsb_no"),
    (25, "gds_ctrl"),
    (26, "gds_no"),
    (27, "rfds_no"),
    (28, "rfds_clear"),
    (62, "its_no"),
];
/// A set bit of these is a warning: a guest without it relies on its absence.
const WARNINGS: &[(u32, &str)] = &[(2, "rsba"), (19, "rrsba")];
/// A bit that advises hypervisors and promises nothing to guests.
const SKIP_L1DFL_VMENTRY: u64 = 1 << 3;

const fn warnings() -> u64 {
    let (mut mask, mut at) = (0, 0);
    while at < WARNINGS.len() {
        mask |= 1 << WARNINGS[at].0;
        at += 1;
    }
    mask
}

/// Names of the capabilities that a guest with `ours` lacks on a host that offers at most `theirs`.
pub fn capabilities_lacking(ours: u64, theirs: u64) -> Vec<String> {
    let missing = ours & !theirs & !warnings() & !SKIP_L1DFL_VMENTRY;
    let missing_warnings = theirs & !ours & warnings();
    let name = |bit: u32, names: &[(u32, &str)]| match names.iter().find(|(of, _)| *of == bit) {
        Some((_, name)) => format!("arch_capabilities_{name}"),
        None => format!("arch_capabilities_{bit}"),
    };
    (0..64)
        .filter_map(|bit| match 1 << bit {
            one if missing & one != 0 => Some(name(bit, CAPABILITIES)),
            one if missing_warnings & one != 0 => Some(format!("no_{}", name(bit, WARNINGS))),
            _ => None,
        })
        .collect()
}

/// Capabilities promised by both processors, and warnings of either.
pub fn common_capabilities(one: u64, two: u64) -> u64 {
    one & two & !warnings() | (one | two) & warnings()
}
