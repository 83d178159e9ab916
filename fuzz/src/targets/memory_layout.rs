//! Where the RAM of a captured VM is: layers of files, as its VMM describes them.

use crate::Target;
use crate::input::Input;
use jiffy_store::{ChunkSource, LayeredFile};
use jiffy_sys::memfd::{self, Pages};
use jiffy_vmm::memory::layers;
use jiffy_wire::vmm::MemoryLayout;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// This target.
pub const TARGET: Target = Target {
    name: "memory_layout",
    covers: &[
        "crates/content/src/snapshots/captured.rs",
        "crates/store/src/source",
        "crates/vmm/src/memory/layers.rs",
        "crates/vmm/src/restore.rs",
    ],
    seeds: all_seeds,
    run,
};

/// Bytes that are looked at.
const LOOKED_AT: u64 = 16 * 4096;

fn run(data: &[u8]) {
    let mut input = Input(data);
    let count = usize::from(input.u8() % 6);
    let Ok(layout) = serde_json::from_slice::<MemoryLayout>(input.rest()) else {
        return;
    };
    let files = || (0..count).map(file).collect::<Vec<File>>();
    let stored = LayeredFile::new(files(), &layout);
    if let Ok(layered) = &stored {
        let end = layout.size.min(LOOKED_AT) as usize;
        let mut bytes = vec![0xee; end];
        layered.read_at(0, &mut bytes).expect("memfds are read");
        for (at, byte) in bytes.iter().enumerate() {
            assert_eq!(*byte, topmost(&layout, at as u64), "byte {at}");
        }
    }
    // What the monitor would map is the same.
    let Ok(layers) = layers::assemble(files(), Some(layout.clone()), layout.size) else {
        return;
    };
    let mut end = 0;
    for segment in layers::visible(&layers) {
        assert_eq!(segment.extent.offset, end, "no gaps");
        end += segment.extent.length;
        assert_eq!(
            segment.layer as u8 + 1,
            topmost(&layout, segment.extent.offset)
        );
    }
    assert_eq!(end, layout.size);
    assert!(stored.is_ok(), "what is mapped can be stored");
}

/// The number of the topmost layer that covers a byte, from 1.
fn topmost(layout: &MemoryLayout, at: u64) -> u8 {
    let covers = |extents: &Vec<_>| {
        extents.iter().any(|extent: &jiffy_wire::vmm::Extent| {
            extent.offset <= at && at - extent.offset < extent.length
        })
    };
    let above = layout.covers.iter().rposition(covers);
    above.map_or(1, |above| above as u8 + 2)
}

/// Its bytes are its number, from 1.
fn file(number: usize) -> File {
    let file = memfd::create("layer", LOOKED_AT, Pages::Small).expect("a memfd");
    let bytes = vec![number as u8 + 1; LOOKED_AT as usize];
    file.write_all_at(&bytes, 0).expect("memory");
    file
}

fn all_seeds() -> Vec<Vec<u8>> {
    let of = |count: u8, text: &str| [&[count], text.as_bytes()].concat();
    vec![
        of(1, r#"{"size":65536,"covers":[]}"#),
        of(2, r#"{"size":65536,"covers":[[[0,4096],[8192,8192]]]}"#),
        of(
            3,
            r#"{"size":65536,"covers":[[[4096,16384]],[[0,8192],[12288,4096]]]}"#,
        ),
        of(3, r#"{"size":65536,"covers":[[],[[0,65536]]]}"#),
    ]
}
