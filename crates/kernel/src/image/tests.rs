//! Kernels made byte by byte: valid ones and hostile ones.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;

use super::*;
use crate::config::Value;

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

fn embedded(text: &str) -> Vec<u8> {
    [b"IKCFG_ST".as_slice(), &gzip(text.as_bytes()), b"IKCFG_ED"].concat()
}

fn note(kind: u32, name: &[u8], description: &[u8]) -> Vec<u8> {
    let mut note = Vec::new();
    note.extend((name.len() as u32).to_le_bytes());
    note.extend((description.len() as u32).to_le_bytes());
    note.extend(kind.to_le_bytes());
    for part in [name, description] {
        note.extend(part);
        note.resize(note.len().next_multiple_of(4), 0);
    }
    note
}

/// An ELF executable with one note segment, followed by `rest`.
fn elf(notes: &[u8], rest: &[u8]) -> Vec<u8> {
    let mut file = vec![0; 64 + 56];
    file[..6].copy_from_slice(b"\x7fELF\x02\x01");
    file[16..18].copy_from_slice(&2u16.to_le_bytes());
    file[18..20].copy_from_slice(&62u16.to_le_bytes());
    file[32..40].copy_from_slice(&64u64.to_le_bytes());
    file[54..56].copy_from_slice(&56u16.to_le_bytes());
    file[56..58].copy_from_slice(&1u16.to_le_bytes());
    file[64..68].copy_from_slice(&4u32.to_le_bytes());
    file[72..80].copy_from_slice(&120u64.to_le_bytes());
    file[96..104].copy_from_slice(&(notes.len() as u64).to_le_bytes());
    file.extend(notes);
    file.extend(rest);
    file
}

/// A bzImage of protocol 2.15 with one setup sector and this payload.
fn bzimage(payload: &[u8]) -> Vec<u8> {
    let mut file = vec![0; 1024];
    file[0x1f1] = 1;
    file[0x1fe..0x200].copy_from_slice(&0xaa55u16.to_le_bytes());
    file[0x202..0x206].copy_from_slice(b"HdrS");
    file[0x206..0x208].copy_from_slice(&[15, 2]);
    file[0x236..0x238].copy_from_slice(&1u16.to_le_bytes());
    file[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    file.extend(payload);
    file
}

#[test]
fn pvh_entry_and_configuration_of_an_elf_kernel_are_read() {
    let notes = [
        note(1, b"GNU\0", b"build id"),
        note(18, b"Linux\0", &[1, 2, 3, 4]),
        note(18, b"Xen\0", &0x0100_0123u32.to_le_bytes()),
    ]
    .concat();
    let image = Image::parse(&elf(&notes, &embedded("CONFIG_PVH=y\n")))
        .unwrap()
        .unwrap();
    assert_eq!(
        image.format,
        Format::Elf {
            pvh_entry: Some(0x0100_0123)
        }
    );
    assert_eq!(image.config.unwrap().get("PVH"), Some(&Value::BuiltIn));
}

#[test]
fn an_eight_byte_entry_is_read_too() {
    let notes = note(18, b"Xen\0", &0x20_0000u64.to_le_bytes());
    let image = Image::parse(&elf(&notes, &[])).unwrap().unwrap();
    assert_eq!(
        image.format,
        Format::Elf {
            pvh_entry: Some(0x20_0000)
        }
    );
    assert_eq!(image.config, Err(NoConfig::Absent));
}

#[test]
fn a_kernel_without_the_note_has_no_entry() {
    let image = Image::parse(&elf(&note(1, b"GNU\0", &[0; 20]), &[]))
        .unwrap()
        .unwrap();
    assert_eq!(image.format, Format::Elf { pvh_entry: None });
}

#[test]
fn protocol_and_configuration_of_a_bzimage_are_read() {
    let kernel = [b"vmlinux ".as_slice(), &embedded("CONFIG_SMP=y\n"), b" end"].concat();
    let image = Image::parse(&bzimage(&gzip(&kernel))).unwrap().unwrap();
    assert_eq!(
        image.format,
        Format::BzImage {
            protocol: (2, 15),
            entry_64: true
        }
    );
    assert_eq!(image.config.unwrap().get("SMP"), Some(&Value::BuiltIn));
}

#[test]
fn the_compression_of_a_bzimage_is_named() {
    let image = Image::parse(&bzimage(&[0x28, 0xb5, 0x2f, 0xfd, 0, 0]))
        .unwrap()
        .unwrap();
    assert_eq!(image.config, Err(NoConfig::Compressed("zstd")));
}

#[test]
fn ikconfig_markers_without_gzip_data_are_skipped() {
    let rest = [b"IKCFG_ST IKCFG_ED".to_vec(), embedded("CONFIG_A=y\n")].concat();
    let image = Image::parse(&elf(&[], &rest)).unwrap().unwrap();
    assert!(image.config.is_ok());
    let cut = [
        b"IKCFG_ST".as_slice(),
        &gzip(b"CONFIG_A=y\n")[..12],
        b"IKCFG_ED",
    ]
    .concat();
    assert_eq!(
        Image::parse(&elf(&[], &cut)).unwrap().unwrap().config,
        Err(NoConfig::Damaged)
    );
}

#[test]
fn an_embedded_gzip_bomb_is_not_unpacked() {
    let bomb = "#".repeat(crate::config::MAX_TEXT + 1);
    let image = Image::parse(&elf(&[], &embedded(&bomb))).unwrap().unwrap();
    assert_eq!(image.config, Err(NoConfig::Damaged));
}

#[test]
fn other_machines_and_cut_files_are_refused() {
    let whole = elf(&note(18, b"Xen\0", &[0; 4]), &[]);
    let mut arm = whole.clone();
    arm[18] = 183;
    assert_eq!(Image::parse(&arm).unwrap_err(), Malformed::Machine);
    assert_eq!(
        Image::parse(&whole[..100]).unwrap_err(),
        Malformed::Truncated
    );
    assert_eq!(
        Image::parse(&whole[..whole.len() - 1]).unwrap_err(),
        Malformed::Truncated
    );
    let mut many = whole.clone();
    many[56..58].copy_from_slice(&u16::MAX.to_le_bytes());
    assert_eq!(Image::parse(&many).unwrap_err(), Malformed::ProgramHeaders);
    assert!(Image::parse(b"#!/bin/sh\n").unwrap().is_none());
    let mut sector = vec![0; 512];
    sector[0x1fe..].copy_from_slice(&[0x55, 0xaa]);
    assert_eq!(Image::parse(&sector).unwrap_err(), Malformed::SetupHeader);
}

#[test]
fn errors_name_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kernel");
    let error = Image::open(&path).unwrap_err();
    assert_eq!(error.to_string(), format!("cannot read {}", path.display()));
    std::fs::write(&path, "hello").unwrap();
    let error = Image::open(&path).unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("is neither an ELF kernel (vmlinux) nor a bzImage")
    );
}

proptest! {
    #[test]
    fn damaged_elf_files_never_panic(
        at in 0usize..200, byte: u8, cut in 0usize..400, notes in prop::collection::vec(any::<u8>(), 0..80),
    ) {
        let mut file = elf(&notes, &embedded("CONFIG_A=y\n"));
        let at = at % file.len();
        file[at] = byte;
        file.truncate(cut.max(8));
        let _ = Image::parse(&file);
    }

    #[test]
    fn random_notes_never_panic(notes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Image::parse(&elf(&notes, &[]));
    }

    #[test]
    fn damaged_bzimages_never_panic(
        at in 0x1f0usize..0x260, value: u32, payload in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        let mut file = bzimage(&payload);
        file[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let _ = Image::parse(&file);
        file.truncate(at);
        let _ = Image::parse(&file);
    }

    #[test]
    fn any_bytes_are_read_or_refused(data in prop::collection::vec(any::<u8>(), 0..1000)) {
        let _ = Image::parse(&data);
    }
}
