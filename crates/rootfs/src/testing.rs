//! Imports in memory, and seed inputs, for fuzzing.

use crate::apply::Whiteouts;
use crate::erofs::{self, Inputs, Plan, ReadAt, Readable};
use crate::error::ImportError;
use crate::import::read_source;
use crate::layer::{Blob, Expected};
use crate::limits::Limits;
use crate::scratch::Scratch;
use crate::source::{Contents, LayerInput};
use crate::tree::Tree;
use rustix::fs::MemfdFlags;
use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Small limits, so that the fuzzer reaches them.
const LIMITS: Limits = Limits {
    image_bytes: 16 << 20,
    entries: 5_000,
    metadata_bytes: 8 << 20,
    unpacked_bytes: 8 << 20,
    ratio: 200,
};

fn memory(bytes: &[u8]) -> File {
    let file = rustix::fs::memfd_create("rootfs", MemfdFlags::CLOEXEC).expect("a memfd");
    let file = File::from(file);
    file.write_all_at(bytes, 0).expect("memory");
    file
}

/// Makes an image of layers, the lowest first.
///
/// # Errors
///
/// As for [`import`](crate::import()), with small limits.
pub fn flatten(layers: &[&[u8]], overlay: bool) -> Result<Vec<u8>, ImportError> {
    let mut tree = Tree::new(LIMITS.entries, LIMITS.metadata_bytes);
    let mut inputs = Inputs::default();
    let layers = layers.iter().map(|bytes| LayerInput {
        blob: Blob::whole(memory(bytes)).expect("memory"),
        name: "layer".into(),
        expected: Expected::default(),
    });
    let whiteouts = if overlay {
        Whiteouts::OciOrOverlay
    } else {
        Whiteouts::Oci
    };
    read_source(
        Contents::Layers(layers.collect()),
        whiteouts,
        &mut tree,
        &mut inputs,
        &Scratch::Folder("/tmp".into()),
        &LIMITS,
        &mut |_| ControlFlow::Continue(()),
    )?;
    write(&tree, &inputs)
}

/// Reads an image and writes it again.
///
/// # Errors
///
/// If it is not an image of Jiffy, or exceeds small limits.
pub fn rewrite(image: &[u8]) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
    let file: Arc<dyn ReadAt> = Arc::new(memory(image));
    let readable = Readable::open(Arc::clone(&file))?;
    let tree = readable.tree(LIMITS.entries, LIMITS.metadata_bytes)?;
    let inputs = Inputs {
        parent: Some(file),
        ..Inputs::default()
    };
    Ok(write(&tree, &inputs)?)
}

fn write(tree: &Tree, inputs: &Inputs) -> Result<Vec<u8>, ImportError> {
    let plan = Plan::new(tree, None, LIMITS.image_bytes)?;
    let out = memory(b"");
    let mut watch = |_| ControlFlow::Continue(());
    erofs::write(&plan, inputs, &out, true, &mut watch)?;
    let mut bytes = vec![0; plan.size() as usize];
    FileExt::read_exact_at(&out, &mut bytes, 0).expect("what was written");
    Ok(bytes)
}

/// Corrects the superblock's checksum.
pub fn reseal_image(image: &mut [u8]) {
    if image.len() >= 4096 {
        image[1028..1032].fill(0);
        let sum = !crc_fast::crc32_iscsi(&image[1024..4096]);
        image[1028..1032].copy_from_slice(&sum.to_le_bytes());
    }
}

/// Corrects the checksums of a tar's headers.
pub fn reseal_tar(tar: &mut [u8]) {
    let mut at = 0_usize;
    while let Some(block) = tar.get_mut(at..at.saturating_add(512)) {
        if block.iter().all(|byte| *byte == 0) {
            return;
        }
        let mut bytes = [0; 512];
        bytes.copy_from_slice(block);
        let mut header = tar::Header::from_byte_slice(&bytes).clone();
        header.set_cksum();
        block.copy_from_slice(header.as_bytes());
        let size = header.entry_size().unwrap_or(0);
        let Some(next) = usize::try_from(size)
            .ok()
            .and_then(|size| size.checked_next_multiple_of(512))
            .and_then(|size| size.checked_add(at + 512))
        else {
            return;
        };
        at = next;
    }
}

/// Small tars that together have every kind of entry.
pub fn tars() -> Vec<Vec<u8>> {
    let header = |kind: tar::EntryType, size: usize| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_size(size as u64);
        header
    };
    let new = || tar::Builder::new(Vec::new());
    let file = |tar: &mut tar::Builder<Vec<u8>>, path: &str, bytes: &[u8]| {
        let mut header = header(tar::EntryType::Regular, bytes.len());
        tar.append_data(&mut header, path, bytes).expect("memory");
    };
    let mut plain = new();
    file(&mut plain, "d/file", b"bytes");
    let mut link = header(tar::EntryType::Link, 0);
    plain
        .append_link(&mut link, "hard", "d/file")
        .expect("memory");
    let mut link = header(tar::EntryType::Symlink, 0);
    plain.append_link(&mut link, "soft", "/d").expect("memory");
    let mut pax = new();
    let records = [
        ("SCHILY.xattr.user.a", &b"b"[..]),
        ("path", b"long"),
        ("mtime", b"1.5"),
    ];
    pax.append_pax_extensions(records).expect("memory");
    file(&mut pax, "short", b"");
    let mut sparse = new();
    let records = [
        ("GNU.sparse.major", &b"1"[..]),
        ("GNU.sparse.minor", b"0"),
        ("GNU.sparse.realsize", b"9000"),
        ("GNU.sparse.name", b"holes"),
    ];
    sparse.append_pax_extensions(records).expect("memory");
    let mut map = b"1\n4096\n3\n".to_vec();
    map.resize(512, 0);
    map.extend_from_slice(b"abc");
    file(&mut sparse, "x", &map);
    let mut map = new();
    let records = [
        ("GNU.sparse.size", &b"2000000"[..]),
        ("GNU.sparse.map", b"8192,3"),
    ];
    map.append_pax_extensions(records).expect("memory");
    file(&mut map, "x", b"abc");
    let mut whiteouts = new();
    file(&mut whiteouts, "d/.wh.file", b"");
    file(&mut whiteouts, "e/.wh..wh..opq", b"");
    let mut device = header(tar::EntryType::Char, 0);
    device.set_device_major(0).expect("a number");
    device.set_device_minor(0).expect("a number");
    whiteouts
        .append_data(&mut device, "hard", &b""[..])
        .expect("memory");
    [plain, pax, sparse, map, whiteouts]
        .into_iter()
        .map(|tar| tar.into_inner().expect("memory"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn damaged_layers_are_refused_or_read_back(
            lower in 0usize..5, upper in 0usize..5, overlay: bool,
            damage in proptest::collection::vec((0usize..4096, any::<u8>(), 1usize..12), 1..4)
        ) {
            let tars = tars();
            let mut layers = [tars[lower].clone(), tars[upper].clone()];
            for (at, byte, count) in damage {
                let layer = &mut layers[at % 2];
                let at = at / 2 % layer.len();
                let end = (at + count).min(layer.len());
                layer[at..end].fill(byte);
            }
            layers.iter_mut().for_each(|layer| reseal_tar(layer));
            if let Ok(image) = flatten(&[&layers[0], &layers[1]], overlay) {
                prop_assert!(rewrite(&image).expect("an image written by Jiffy can be read") == image);
            }
        }

        #[test]
        fn damaged_images_are_refused_or_understood(
            tar in 0usize..5,
            damage in proptest::collection::vec((1024usize..8192, any::<u8>(), 1usize..12), 1..4)
        ) {
            let mut image = flatten(&[&tars()[tar]], false).unwrap();
            for (at, byte, count) in damage {
                let at = at % image.len();
                let end = (at + count).min(image.len());
                image[at..end].fill(byte);
            }
            reseal_image(&mut image);
            if let Ok(written) = rewrite(&image) {
                prop_assert!(rewrite(&written).expect("an image written by Jiffy can be read") == written);
            }
        }
    }

    #[test]
    fn samples_are_imported_and_read_back() {
        let tars = tars();
        for tar in &tars {
            let image = flatten(&[tar], false).unwrap();
            assert!(rewrite(&image).unwrap() == image);
        }
        let all: Vec<&[u8]> = tars.iter().map(Vec::as_slice).collect();
        let image = flatten(&all, true).unwrap();
        assert!(rewrite(&image).unwrap() == image);
    }
}
