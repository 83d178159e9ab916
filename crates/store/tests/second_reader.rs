//! A second reader, written from `docs/image-format.md` alone. It shares no code with the crate,
//! and reads the golden files and a new image.

use jiffy_store::{Codec, ImageReader, Kind, WriteOptions, write_image};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// Reads a number at an offset that the document gives.
fn number(bytes: &[u8], at: usize, length: usize) -> u64 {
    bytes[at..at + length]
        .iter()
        .rev()
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn crc(bytes: &[u8]) -> u64 {
    u64::from(crc_fast::crc32_iscsi(bytes))
}

fn hash(bytes: &[u8]) -> [u8; 16] {
    blake3::hash(bytes).as_bytes()[..16].try_into().unwrap()
}

/// All contents of an image; checks everything that can be checked.
fn read(path: &Path) -> Vec<u8> {
    let file = fs::read(path).unwrap();
    let header = &file[..64];
    assert_eq!(header[..8], *b"\x89JIFFY\r\n");
    assert_eq!(number(header, 8, 4), 1);
    assert_eq!(number(header, 60, 4), crc(&header[..60]));
    let chunk_size = number(header, 12, 4) as usize;
    let size = number(header, 16, 8) as usize;

    let footer = &file[file.len() - 256..];
    assert_eq!(footer[..8], *b"JIFFYEND");
    assert_eq!(number(footer, 252, 4), crc(&footer[..252]));
    assert_eq!(footer[12..24], header[12..24]);
    let sections: Vec<&[u8]> = (0..if number(footer, 8, 4) == 2 { 7 } else { 6 })
        .map(|section| {
            let at = 56 + 24 * section;
            let offset = number(footer, at, 8) as usize;
            let section = &file[offset..offset + number(footer, at + 8, 8) as usize];
            let checksum = number(footer, at + 16, 4);
            assert!(checksum == 0 || checksum == crc(section));
            section
        })
        .collect();
    let [
        dictionary,
        parent,
        working_set,
        groups,
        entries,
        hashes,
        ref more @ ..,
    ] = sections[..]
    else {
        unreachable!("six sections")
    };
    let backing = more.first().map(|backing| {
        let name = std::str::from_utf8(&backing[40..]).unwrap();
        let bytes = fs::read(path.with_file_name(name)).unwrap();
        assert_eq!(bytes.len() as u64, number(backing, 32, 8));
        assert_eq!(blake3::hash(&bytes).as_bytes()[..], backing[..32]);
        bytes
    });

    let parent = (!parent.is_empty()).then(|| {
        let name = std::str::from_utf8(&parent[16..]).unwrap();
        let path = path.with_file_name(name);
        let file = fs::read(&path).unwrap();
        assert_eq!(file[file.len() - 256 + 24..][..16], parent[..16]);
        read(&path)
    });

    let chunks = size.div_ceil(chunk_size);
    assert_eq!(groups.len(), chunks.div_ceil(64) * 16);
    let mut id = b"jiffy image 1\0\0\0".to_vec();
    id.extend((size as u64).to_le_bytes());
    id.extend((chunk_size as u64).to_le_bytes());
    groups.chunks(16).for_each(|group| id.extend(&group[..8]));
    id.extend(hashes);
    assert_eq!(hash(&id), footer[24..40]);

    let mut contents = vec![0; chunks * chunk_size];
    let mut places = Vec::new();
    for (index, chunk) in contents.chunks_mut(chunk_size).enumerate() {
        let group = &groups[index / 64 * 16..][..16];
        let bitmap = number(group, 0, 8);
        let first = number(group, 8, 4) as usize;
        let mut checked = (index as u32 / 64).to_le_bytes().to_vec();
        checked.extend(&group[..12]);
        checked.extend(&entries[first * 16..][..bitmap.count_ones() as usize * 16]);
        assert_eq!(number(group, 12, 4), crc(&checked));
        places.push(0..0);
        if bitmap >> (index % 64) & 1 == 0 {
            continue;
        }
        let below = bitmap & ((1 << (index % 64)) - 1);
        let ordinal = first + below.count_ones() as usize;
        let entry = &entries[ordinal * 16..][..16];
        let offset = number(entry, 8, 6) as usize;
        let range = offset..offset + number(entry, 4, 4) as usize;
        let stored = match entry[14] {
            6 => &backing.as_ref().unwrap()[offset..offset + chunk_size],
            _ => &file[range.clone()],
        };
        places[index] = range;
        let unpacked = match entry[14] {
            1 | 6 => stored.to_vec(),
            2 => lz4::block::decompress(stored, Some(chunk_size as i32)).unwrap(),
            3 => zstd::bulk::decompress(stored, chunk_size).unwrap(),
            4 => zstd::bulk::Decompressor::with_dictionary(dictionary)
                .unwrap()
                .decompress(stored, chunk_size)
                .unwrap(),
            5 => parent.as_ref().unwrap()[index * chunk_size..][..chunk_size].to_vec(),
            other => panic!("kind {other}"),
        };
        chunk.copy_from_slice(&unpacked);
        assert_eq!(number(entry, 0, 4), crc(chunk));
        assert_eq!(hashes[ordinal * 16..][..16], hash(chunk));
    }

    // The working set's bytes are where the footer says, and first.
    let mut next = number(footer, 40, 8) as usize;
    for pair in working_set.chunks(8) {
        let first = number(pair, 0, 4) as usize;
        for place in &places[first..first + number(pair, 4, 4) as usize] {
            if !place.is_empty() && place.start >= next {
                assert_eq!(place.start, next);
                next = place.end;
            }
        }
    }
    assert_eq!(next, number(footer, 48, 8) as usize);
    contents.truncate(size);
    contents
}

#[test]
fn the_document_is_enough_to_read_the_golden_files() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    for (name, chunks) in [
        ("base-v1.image", 6),
        ("child-v1.image", 7),
        ("ram-v2.image", 7),
    ] {
        let path = golden.join(name);
        let contents = read(&path);
        assert_eq!(contents.len(), chunks * 4096);
        let image = ImageReader::open(&path).unwrap();
        for (index, chunk) in (0..).zip(contents.chunks(4096)) {
            let mut other = vec![0; 4096];
            image.read_chunk(index, &mut other).unwrap();
            assert!(chunk == other, "{name}, chunk {index}");
        }
    }
}

#[test]
fn the_document_is_enough_to_read_a_large_image_with_everything() {
    let folder = tempfile::tempdir().unwrap();
    let chunk = |seed: u32| -> Vec<u8> {
        (0..4096_u32)
            .flat_map(|n| {
                match seed % 7 {
                    0 => 0,
                    // Does not compress.
                    1 => (n ^ seed << 16)
                        .wrapping_mul(0x9e37_79b9)
                        .rotate_left(n % 32),
                    _ => n / 16 * seed,
                }
                .to_le_bytes()
            })
            .take(4096)
            .collect()
    };
    let base: Vec<u8> = (0..500).flat_map(chunk).collect();
    let mut bytes = base.clone();
    bytes.extend((600..900).flat_map(chunk));
    bytes.truncate(bytes.len() - 1000);
    let small = WriteOptions {
        chunk_size: 4096,
        ..WriteOptions::default()
    };
    write_image(&folder.path().join("base"), &base, &small).unwrap();
    let parent = ImageReader::open(&folder.path().join("base")).unwrap();
    let options = WriteOptions {
        codec: Codec::Zstd(3),
        dictionary: true,
        parent: Some(Arc::new(parent)),
        working_set: Some((300..400).chain([700, 0, 7, 1]).collect()),
        ..small
    };
    write_image(&folder.path().join("child"), &bytes, &options).unwrap();
    let child = ImageReader::open(&folder.path().join("child")).unwrap();
    let kinds: BTreeSet<Kind> = (0..child.chunks())
        .map(|index| child.kind(index).unwrap())
        .collect();
    let expected = [Kind::Zero, Kind::Raw, Kind::ZstdDictionary, Kind::Parent];
    assert_eq!(kinds, BTreeSet::from(expected));
    assert!(read(&folder.path().join("base")) == base);
    assert!(read(&folder.path().join("child")) == bytes);
}
