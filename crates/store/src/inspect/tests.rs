use super::*;
use crate::codec::Codec;
use crate::format::Kind;
use crate::samples::{CHUNK, Folder, contents, small};
use crate::writer::WriteOptions;
use std::sync::Arc;

#[test]
fn a_summary_has_the_figures_of_the_image() {
    let folder = Folder::new();
    let base = Arc::new(folder.image("base", &contents("ttt"), &small()));
    let options = WriteOptions {
        parent: Some(base),
        working_set: Some(vec![4, 3]),
        ..small()
    };
    let image = folder.image("a", &contents("tt..nXX"), &options);
    let summary = Summary::of(&image).unwrap();
    let counts: Vec<(Kind, u32)> = summary
        .kinds
        .iter()
        .map(|kind| (kind.kind, kind.chunks))
        .collect();
    assert_eq!(
        counts,
        [
            (Kind::Zero, 2),
            (Kind::Raw, 1),
            (Kind::Lz4, 2),
            (Kind::Zstd, 0),
            (Kind::ZstdDictionary, 0),
            (Kind::Parent, 2),
            (Kind::Backing, 0),
        ]
    );
    assert_eq!(
        (summary.chunks, summary.duplicates, summary.ranges),
        (7, 1, 4)
    );
    assert_eq!((summary.working_set, summary.hot_bytes), (2, CHUNK as u64));
    let raw = summary.kinds[1];
    assert_eq!(
        (raw.bytes, raw.stored, raw.ratio()),
        (4096, 4096, Some(1.0))
    );
    let stored: u64 = summary.kinds.iter().map(|kind| kind.stored).sum();
    assert_eq!(stored + summary.metadata_bytes, summary.file_bytes);
    assert_eq!(summary.parent.unwrap().name, "base");
    assert_eq!(
        summary::ranges(&image).unwrap(),
        [
            (0..2, Kind::Parent),
            (2..4, Kind::Zero),
            (4..5, Kind::Raw),
            (5..7, Kind::Lz4),
        ]
    );
}

#[test]
fn a_map_shows_kinds_by_address() {
    let folder = Folder::new();
    let options = WriteOptions {
        codec: Codec::Zstd(1),
        ..small()
    };
    let image = folder.image("a", &contents("t..nXX"), &options);
    assert_eq!(
        map(&image, 4).unwrap(),
        "000000000000 Z..R\n\
         000000004000 ZZ\n\
         one character is 4 KiB: . zero, r raw, l lz4, z zstd, d zstd with dictionary, p in \
         parent, b in backing file; a capital if at least half is not zero\n"
    );
    let letters = format!("{}t.......", "........tttn....".repeat(20));
    let image = folder.image("b", &contents(&letters), &options);
    let text = map(&image, 2).unwrap();
    assert!(
        text.starts_with("000000000000 .Z\n000000010000 .Z\n"),
        "{text}"
    );
    assert!(
        text.contains("\n000000140000 z\none character is 32 KiB"),
        "{text}"
    );
    let empty = folder.image("c", &[], &small());
    assert!(map(&empty, 0).unwrap().starts_with("one character"));
}

#[test]
fn a_picture_has_a_square_for_every_chunk() {
    let folder = Folder::new();
    let image = folder.image("a", &contents("t.n"), &small());
    let bytes = png(&image).unwrap();
    let decoder = ::png::Decoder::new(std::io::Cursor::new(bytes));
    let mut reader = decoder.read_info().unwrap();
    assert_eq!((reader.info().width, reader.info().height), (512, 16));
    let palette = reader.info().palette.clone().unwrap().into_owned();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut pixels).unwrap();
    let colour = |x: usize, y: usize| {
        let index = usize::from(pixels[y * 512 + x]) * 3;
        [palette[index], palette[index + 1], palette[index + 2]]
    };
    for (chunk, kind) in [Kind::Lz4, Kind::Zero, Kind::Raw].into_iter().enumerate() {
        for (x, y) in [(0, 0), (15, 15)] {
            assert_eq!(colour(chunk * 16 + x, y), picture::colour(kind));
        }
    }
    assert_eq!(colour(48, 0), [0xff; 3], "there are three chunks");
    let empty = folder.image("c", &[], &small());
    png(&empty).unwrap();
}
