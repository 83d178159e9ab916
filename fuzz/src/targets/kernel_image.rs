//! The headers of a kernel file, as `jiffy kernel check` reads them and as the
//! VMM does before it loads one.

use crate::Target;
use jiffy_kernel::image::Image;
use jiffy_vmm::boot;

/// This target.
pub const TARGET: Target = Target {
    name: "kernel_image",
    covers: &["crates/kernel/src/image", "crates/vmm/src/boot"],
    seeds: all_seeds,
    run,
};

fn run(data: &[u8]) {
    let _ = Image::parse(data);
    // Any word may be a function's address.
    let words = data.chunks_exact(8).take(64);
    let words = words.map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes")));
    if let Ok(names) = boot::elf::functions(data, &words.collect()) {
        assert!(names.values().all(|name| name.len() <= 3 * 128));
    }
    let Ok(plan) = boot::plan(data, RAM) else {
        return;
    };
    // What the VMM will write lies in RAM, comes from the file and
    // overlaps nothing.
    let mut end = 0;
    for segment in &plan.segments {
        assert!(segment.address >= end);
        assert!(segment.file_size <= segment.memory_size);
        assert!(segment.file_offset + segment.file_size <= data.len() as u64);
        end = segment.address + segment.memory_size;
    }
    assert!(end <= RAM && plan.end <= RAM);
}

/// Guest RAM, bytes.
const RAM: u64 = 128 << 20;

/// An ELF file with the note that PVH wants, one without, and the headers of a
/// bzImage.
fn all_seeds() -> Vec<Vec<u8>> {
    let mut elf = vec![0; 64 + 56];
    elf[..20].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0");
    elf[20] = 1;
    elf[32] = 64;
    elf[52] = 64;
    elf[54] = 56;
    elf[56] = 1;
    let without = elf.clone();
    // PT_NOTE at the end of the headers: "Xen", type 18, a 32-bit entry point.
    let note = b"\x04\0\0\0\x04\0\0\0\x12\0\0\0Xen\0\x00\x00\x00\x01";
    elf[64] = 4;
    elf[64 + 8] = 120;
    elf[64 + 32] = note.len() as u8;
    elf[64 + 48] = 4;
    elf.extend(note);

    // Two sections at the end: a symbol for the function at this address, and names.
    let mut named = elf.clone();
    let end = named.len() as u64;
    named[40..48].copy_from_slice(&(end + 40).to_le_bytes());
    named[58] = 64;
    named[60] = 2;
    named.extend(b"\x01\0\0\0\x02\0\x01\0\x00\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    named.extend(b"\0start\0\0\0\0\0\0\0\0\0\0");
    for (kind, link, at, size) in [(2u32, 1u32, end, 24u64), (3, 0, end + 24, 16)] {
        let mut section = [0; 64];
        section[4..8].copy_from_slice(&kind.to_le_bytes());
        section[24..32].copy_from_slice(&at.to_le_bytes());
        section[32..40].copy_from_slice(&size.to_le_bytes());
        section[40..44].copy_from_slice(&link.to_le_bytes());
        named.extend(section);
    }

    let mut bz_image = vec![0; 0x1000];
    bz_image[0x1f1] = 4;
    bz_image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    bz_image[0x201] = 0x6a;
    bz_image[0x202..0x206].copy_from_slice(b"HdrS");
    bz_image[0x206..0x208].copy_from_slice(&[0x0f, 0x02]);
    bz_image[0x211] = 1;
    bz_image[0x236] = 1;

    let mut configured = without.clone();
    configured.extend(b"IKCFG_ST\x1f\x8b\x08\0\0\0\0\0\0\x03\x03\0\0\0\0\0\0\0\0\0IKCFG_ED");
    vec![elf, without, named, bz_image, configured]
}
