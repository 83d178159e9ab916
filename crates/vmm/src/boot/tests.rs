use super::preloaded::Preloaded;
use super::*;
use proptest::prelude::*;
use std::io::Write;

const RAM: u64 = 64 << 20;

/// A segment of a synthetic kernel.
struct Load {
    address: u64,
    memory_size: u64,
    file_size: u64,
}

/// An ELF kernel: header, program headers, a PVH note, then 4 KiB of contents
/// shared by all segments.
fn elf(loads: &[Load], entry: Option<u64>) -> Vec<u8> {
    let headers = 64 + 56 * (loads.len() + 1);
    let note = match entry {
        None => Vec::new(),
        Some(entry) => {
            let mut note = Vec::new();
            // Another note comes first; its size is odd.
            for word in [4u32, 5, 1] {
                note.extend(word.to_le_bytes());
            }
            note.extend(b"GNU\0abcde\0\0\0");
            for word in [4u32, 8, 18] {
                note.extend(word.to_le_bytes());
            }
            note.extend(b"Xen\0");
            note.extend(entry.to_le_bytes());
            note
        }
    };
    let contents = (headers + note.len()) as u64;
    let mut file = vec![0; 64];
    file[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    file[16] = 2;
    file[18] = 62;
    file[32..40].copy_from_slice(&64u64.to_le_bytes());
    file[54] = 56;
    file[56] = loads.len() as u8 + 1;
    let mut header = |kind: u32, offset: u64, address: u64, in_file: u64, in_memory: u64| {
        let mut bytes = [0; 56];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        for (at, value) in [(8, offset), (24, address), (32, in_file), (40, in_memory)] {
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        file.extend(bytes);
    };
    for load in loads {
        header(1, contents, load.address, load.file_size, load.memory_size);
    }
    header(4, headers as u64, 0, note.len() as u64, 0);
    file.extend(note);
    file.extend((0..4096u32).map(|at| at as u8));
    file
}

fn one_segment() -> Load {
    Load {
        address: 0x20_0000,
        memory_size: 0x3000,
        file_size: 0x1000,
    }
}

/// A bzImage of this protocol version with `size` bytes of kernel.
fn bzimage(version: u16, size: usize) -> Vec<u8> {
    let mut file = vec![0; 1024 + size];
    file[0x1f1] = 1;
    file[0x1f4..0x1f8].copy_from_slice(&(size.div_ceil(16) as u32).to_le_bytes());
    file[0x200..0x202].copy_from_slice(&[0xeb, 0x66]);
    file[0x202..0x206].copy_from_slice(b"HdrS");
    file[0x206..0x208].copy_from_slice(&version.to_le_bytes());
    file[0x211] = 1;
    file[0x22c..0x230].copy_from_slice(&0x37ff_ffffu32.to_le_bytes());
    file[0x238..0x23c].copy_from_slice(&2047u32.to_le_bytes());
    file[0x258..0x260].copy_from_slice(&0x100_0000u64.to_le_bytes());
    file[0x260..0x264].copy_from_slice(&0x10_0000u32.to_le_bytes());
    file[1024..].fill(0x90);
    file
}

fn refused(file: &[u8]) -> KernelError {
    plan(file, RAM).unwrap_err()
}

#[test]
fn a_pvh_kernels_plan_follows_its_headers() {
    let loads = [
        Load {
            address: 0x40_0000,
            memory_size: 0x1000,
            file_size: 0x800,
        },
        one_segment(),
    ];
    let plan = plan(elf(&loads, Some(0x20_0010)).as_slice(), RAM).unwrap();
    let addresses: Vec<u64> = plan.segments.iter().map(|s| s.address).collect();
    assert_eq!(addresses, [0x20_0000, 0x40_0000]);
    assert_eq!(plan.end, 0x40_1000);
    assert_eq!(plan.protocol, Protocol::Pvh { entry: 0x20_0010 });
}

#[test]
fn an_elf_kernel_without_a_pvh_note_is_refused_with_a_hint() {
    let error = refused(&elf(&[one_segment()], None));
    assert!(matches!(error, KernelError::NoPvhNote), "{error}");
    assert!(error.hint().unwrap().contains("jiffy kernel check"));
}

#[test]
fn hostile_elf_headers_are_refused() {
    let with = |change: fn(&mut Load)| {
        let mut load = one_segment();
        change(&mut load);
        refused(&elf(&[load], Some(0x20_0000)))
    };
    let error = with(|load| load.address = RAM - 0x2000);
    assert!(matches!(error, KernelError::OutsideRam { .. }), "{error}");
    let error = with(|load| load.memory_size = u64::MAX);
    assert!(matches!(error, KernelError::OutsideRam { .. }), "{error}");
    let error = with(|load| load.address = u64::MAX);
    assert!(matches!(error, KernelError::OutsideRam { .. }), "{error}");
    let error = with(|load| load.address = 0x9_f000);
    assert!(matches!(error, KernelError::TooLow(0x9_f000)), "{error}");
    let error = with(|load| load.file_size = 0x1001);
    assert!(matches!(error, KernelError::CutShort { .. }), "{error}");
    let error = with(|load| load.memory_size = 1);
    assert!(matches!(error, KernelError::Damaged(_)), "{error}");
    let error = with(|load| load.memory_size = 0);
    assert!(matches!(error, KernelError::Damaged(_)), "{error}");

    let error = refused(&elf(&[one_segment(), one_segment()], Some(0x20_0000)));
    assert!(matches!(error, KernelError::Overlap { .. }), "{error}");
    let error = refused(&elf(&[one_segment()], Some(0x20_3000)));
    assert!(matches!(error, KernelError::EntryOutside(_)), "{error}");
}

/// A kernel with these bytes as its symbols' names, and symbols: name, kind, address.
fn with_symbols(strings: &[u8], symbols: &[(u32, u8, u64)]) -> Vec<u8> {
    let mut file = elf(&[one_segment()], Some(0x100_0000));
    let mut sections = vec![(0, 0, 0, 0)];
    sections.push((3, 0, file.len() as u64, strings.len() as u64));
    file.extend(strings);
    sections.push((2, 1, file.len() as u64, symbols.len() as u64 * 24));
    for (name, kind, address) in symbols {
        let mut symbol = [0; 24];
        symbol[..4].copy_from_slice(&name.to_le_bytes());
        symbol[4] = *kind;
        symbol[8..16].copy_from_slice(&address.to_le_bytes());
        file.extend(symbol);
    }
    let table = file.len() as u64;
    file[40..48].copy_from_slice(&table.to_le_bytes());
    file[58] = 64;
    file[60] = sections.len() as u8;
    for (kind, link, at, size) in sections {
        let mut section = [0; 64];
        section[4..8].copy_from_slice(&u32::to_le_bytes(kind));
        section[24..32].copy_from_slice(&u64::to_le_bytes(at));
        section[32..40].copy_from_slice(&size.to_le_bytes());
        section[40..44].copy_from_slice(&u32::to_le_bytes(link));
        file.extend(section);
    }
    file
}

#[test]
fn functions_are_named_by_the_symbol_table() {
    let wanted = [10, 20, 30, 40, 50].into();
    let strings = [b"\0inet_init\0", &[b'x'; 300][..]].concat();
    let symbols = [
        (1, 0x12, 10),
        // Data; a name outside; one that does not end; an address that is not wanted.
        (1, 0x11, 20),
        (9999, 2, 30),
        (20, 2, 40),
        (1, 2, 60),
    ];
    let file = with_symbols(&strings, &symbols);
    let names = elf::functions(&file[..], &wanted).unwrap();
    let long = "x".repeat(128);
    let expected = [(10, "inet_init"), (40, &long)];
    assert_eq!(
        names,
        expected.map(|(at, name)| (at, name.to_owned())).into()
    );
    for length in 0..file.len() {
        let _ = elf::functions(&file[..length], &wanted);
    }
    let huge = |at: usize| {
        let mut file = file.clone();
        let table = file.len() - 3 * 64;
        file[table + at..table + at + 8].fill(0xff);
        elf::functions(&file[..], &wanted).is_err()
    };
    assert!(huge(64 + 32) && huge(128 + 24) && huge(128 + 32));
    let stripped = elf(&[one_segment()], Some(0x100_0000));
    assert!(elf::functions(&stripped[..], &wanted).unwrap().is_empty());
}

#[test]
fn the_type_of_a_file_that_is_no_kernel_is_named() {
    let mut arm = elf(&[one_segment()], Some(0x20_0000));
    arm[18] = 183;
    assert_eq!(
        refused(&arm).to_string(),
        "it is an ELF file for arm64, not for x86-64"
    );
    let mut object = elf(&[one_segment()], Some(0x20_0000));
    object[16] = 1;
    assert!(matches!(refused(&object), KernelError::NotExecutable(_)));
    for (bytes, name) in [
        (&b"\x1f\x8b\x08\0\0\0"[..], "gzip"),
        (b"#!/bin/sh\n", "text"),
        (b"\x28\xb5\x2f\xfd\0\0", "zstd"),
        (b"\0\0\0\0", "other data"),
    ] {
        let message = refused(bytes).to_string();
        assert!(message.contains(name), "{message}");
    }
    assert!(matches!(refused(b""), KernelError::Empty));
}

#[test]
fn every_truncation_of_a_kernel_is_refused() {
    // A bzImage gives its size in units of 16 bytes.
    for (kernel, unit) in [
        (elf(&[one_segment()], Some(0x20_0000)), 1),
        (bzimage(0x20f, 4096), 16),
    ] {
        assert!(plan(kernel.as_slice(), RAM).is_ok());
        for length in 0..=kernel.len() - unit {
            assert!(plan(&kernel[..length], RAM).is_err(), "{length} bytes");
        }
    }
}

#[test]
fn a_bzimages_plan_follows_its_setup_header() {
    let plan = plan(bzimage(0x20f, 5000).as_slice(), RAM).unwrap();
    let [segment] = plan.segments[..] else {
        panic!("{plan:?}")
    };
    assert_eq!((segment.address, segment.file_offset), (0x10_0000, 1024));
    assert_eq!(segment.file_size, 5000);
    assert_eq!(plan.end, 0x110_0000, "where it unpacks itself counts");
    assert_eq!(plan.initrd_limit, 0x3800_0000);
}

#[test]
fn old_low_and_huge_bzimages_are_refused() {
    let error = refused(&bzimage(0x0209, 4096));
    assert!(matches!(error, KernelError::OldBzImage(_)), "{error}");
    let mut low = bzimage(0x20f, 4096);
    low[0x211] = 0;
    assert!(matches!(refused(&low), KernelError::OldBzImage(_)));
    let mut huge = bzimage(0x20f, 4096);
    huge[0x260..0x264].fill(0xff);
    assert!(matches!(refused(&huge), KernelError::OutsideRam { .. }));
    let mut far = bzimage(0x20f, 4096);
    far[0x258..0x260].fill(0xff);
    assert!(matches!(refused(&far), KernelError::OutsideRam { .. }));
}

fn file_with(bytes: &[u8]) -> (tempfile::NamedTempFile, OpenFile) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    let open = source::open(file.path()).unwrap();
    (file, open)
}

fn ram() -> GuestMemory {
    GuestMemory::from_ranges(&[(GuestAddress(0), RAM as usize)]).unwrap()
}

#[test]
fn a_pvh_kernel_is_loaded_with_initrd_and_command_line() {
    let (kernel, _) = file_with(&elf(&[one_segment()], Some(0x20_0000)));
    let (initrd, _) = file_with(&[7; 5000]);
    let memory = ram();
    let images = Images {
        kernel: kernel.path(),
        initrd: Some(initrd.path()),
        command_line: "quiet",
        device_parameters: "virtio_mmio.device=4K@0xd0000000:5",
        vcpus: 2,
    };
    let entry = open(images.kernel)
        .and_then(|kernel| load(&kernel, false, &images, &memory, RAM))
        .unwrap();
    assert_eq!((entry.rip, entry.rbx), (0x20_0000, layout::START_INFO));
    let u64_at = |address| memory.read_obj::<u64>(GuestAddress(address)).unwrap();
    assert_eq!(u64_at(layout::START_INFO) as u32, 0x336e_c578);
    let module = u64_at(layout::MODULE_LIST);
    assert_eq!(module, RAM - 0x2000);
    assert_eq!(u64_at(layout::MODULE_LIST + 8), 5000);
    let mut initrd = [0; 5000];
    memory
        .read_slice(&mut initrd, GuestAddress(module))
        .unwrap();
    assert_eq!(initrd, [7; 5000]);
    let mut kernel = [0; 0x1001];
    memory
        .read_slice(&mut kernel, GuestAddress(0x20_0000))
        .unwrap();
    assert_eq!(kernel[0xfff..], [0xff, 0]);
    let mut line = [0; 41];
    memory
        .read_slice(&mut line, GuestAddress(layout::COMMAND_LINE))
        .unwrap();
    assert_eq!(&line, b"quiet virtio_mmio.device=4K@0xd0000000:5\0");
}

/// A kernel whose only segment begins at 2 MiB.
pub(crate) fn small_kernel() -> Vec<u8> {
    elf(&[one_segment()], Some(0x20_0000))
}

#[test]
fn a_preloaded_kernel_is_known_by_its_contents() {
    let bytes = small_kernel();
    let (kernel, _) = file_with(&bytes);
    let images = Images {
        kernel: kernel.path(),
        initrd: None,
        command_line: "quiet",
        device_parameters: "",
        vcpus: 1,
    };
    let [ahead, now] = [ram(), ram()];
    let opened = || open(kernel.path()).unwrap();
    let preloaded = Preloaded::load(&opened(), &ahead, RAM).unwrap().unwrap();
    assert_eq!(preloaded.range(), 0x20_0000..0x20_3000);
    assert!(preloaded.is(&opened()));
    let entries = [(true, &ahead), (false, &now)]
        .map(|(is_preloaded, memory)| load(&opened(), is_preloaded, &images, memory, RAM).unwrap());
    assert_eq!(entries[0], entries[1]);
    let of = |memory: &GuestMemory| {
        let mut all = vec![0; RAM as usize];
        memory.read_slice(&mut all, GuestAddress(0)).unwrap();
        all
    };
    assert!(of(&ahead) == of(&now));
    // The same bytes in another file, or written again.
    let (_copy, copy) = file_with(&bytes);
    assert!(!preloaded.is(&copy));
    std::thread::sleep(std::time::Duration::from_millis(50));
    std::fs::write(kernel.path(), &bytes).unwrap();
    assert!(!preloaded.is(&opened()));
    // One that can't be booted, or has no space, is left to the VM that wants it.
    let nothing = Preloaded::load(&opened(), &ram(), 0x20_2000).unwrap();
    assert!(nothing.is_none());
}

#[test]
fn the_zero_page_is_filled() {
    let (kernel, _) = file_with(&bzimage(0x20f, 5000));
    let (initrd, _) = file_with(&[7; 5000]);
    let memory = ram();
    let images = Images {
        kernel: kernel.path(),
        initrd: Some(initrd.path()),
        command_line: "quiet",
        device_parameters: "",
        vcpus: 1,
    };
    let entry = open(images.kernel)
        .and_then(|kernel| load(&kernel, false, &images, &memory, RAM))
        .unwrap();
    assert_eq!((entry.rip, entry.rsi), (0x10_0000, layout::START_INFO));
    let mut page = vec![0; 4096];
    memory
        .read_slice(&mut page, GuestAddress(layout::START_INFO))
        .unwrap();
    let u32_at = |at: usize| u32::from_le_bytes(page[at..at + 4].try_into().unwrap());
    assert_eq!(&page[0x202..0x206], b"HdrS");
    assert_eq!(page[0x210], 0xff);
    assert_eq!(u64::from(u32_at(0x228)), layout::COMMAND_LINE);
    assert_eq!(u64::from(u32_at(0x218)), RAM - 0x2000);
    assert_eq!(u32_at(0x21c), 5000);
    assert_eq!(page[0x1e8], 3);
    assert_eq!(u64::from(u32_at(0x2d0 + 40)), layout::KERNEL_START);
}

#[test]
fn files_that_do_not_fit_or_open_are_named() {
    let (kernel, _) = file_with(&elf(&[one_segment()], Some(0x20_0000)));
    let (initrd, _) = file_with(&vec![1; RAM as usize - 0x20_0000]);
    let memory = ram();
    let images = Images {
        kernel: kernel.path(),
        initrd: Some(initrd.path()),
        command_line: "",
        device_parameters: "",
        vcpus: 1,
    };
    let error = open(images.kernel)
        .and_then(|kernel| load(&kernel, false, &images, &memory, RAM))
        .unwrap_err();
    assert!(matches!(error, BootError::InitrdTooLarge { .. }), "{error}");
    assert!(error.hint().is_some());
    for path in ["/nonexistent/vmlinux", "/dev", "/dev/null"] {
        let images = Images {
            kernel: Path::new(path),
            ..images
        };
        let error = open(images.kernel)
            .and_then(|kernel| load(&kernel, false, &images, &memory, RAM))
            .unwrap_err();
        assert!(matches!(error, BootError::Open { .. }), "{error}");
        assert!(error.to_string().contains(path), "{error}");
    }
}

proptest! {
    /// For any file, the plan stays within RAM and the file.
    #[test]
    fn any_plan_stays_within_ram_and_the_file(
        bzip in any::<bool>(),
        changes in proptest::collection::vec((0usize..0x300, any::<u8>()), 0..24),
        keep in 0usize..6000,
    ) {
        let mut file = if bzip { bzimage(0x20f, 4096) } else { elf(&[one_segment()], Some(0x20_0000)) };
        for (at, value) in changes {
            let at = at % file.len();
            file[at] = value;
        }
        file.truncate(keep.max(1));
        check_plan(&file);
    }
}

/// Used by the property above; the fuzz target checks the same.
fn check_plan(file: &[u8]) {
    let Ok(plan) = plan(file, RAM) else { return };
    let mut end = layout::KERNEL_START;
    for segment in &plan.segments {
        assert!(segment.address >= end);
        assert!(segment.file_size <= segment.memory_size);
        assert!(segment.file_offset + segment.file_size <= file.len() as u64);
        end = segment.address + segment.memory_size;
        assert!(end <= RAM);
    }
    assert!(plan.end >= end && plan.end <= RAM);
}
