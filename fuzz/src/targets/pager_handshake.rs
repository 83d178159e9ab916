//! What a VMM sends to a pager when it connects: Firecracker's handshake.

use crate::Target;
use crate::input::Input;
use jiffy_pager::handshake::{self, Layout, Progress};

/// This target.
pub const TARGET: Target = Target {
    name: "pager_handshake",
    covers: &["crates/pager/src/handshake.rs"],
    seeds: all_seeds,
    run,
};

fn run(data: &[u8]) {
    let mut input = Input(data);
    let image_size = u64::from(input.u32()) << 12;
    let text = input.rest();
    let Ok(Progress::Mappings(mappings)) = handshake::parse(text) else {
        return;
    };
    // The result is the same if the bytes arrive in pieces.
    if let Some(end) = text.iter().rposition(|byte| *byte == b']') {
        assert_eq!(handshake::parse(&text[..end]), Ok(Progress::More));
    }
    let Ok(layout) = Layout::new(&mappings, image_size) else {
        return;
    };
    let mut end = 0;
    for region in layout.regions() {
        assert!(region.offset >= end && region.size > 0);
        end = region.offset + region.size;
        assert!(end <= image_size && region.page <= layout.largest_page());
        let last = region.address + region.size - 1;
        assert_eq!(layout.find(last), Some((end - 1, region)));
        assert_eq!(layout.offsets(region.address..last + 1).count(), 1);
    }
    assert_eq!(layout.end(), end);
    let whole: u64 = layout
        .parts(0..image_size)
        .map(|(part, _)| part.end - part.start)
        .sum();
    assert_eq!(
        whole,
        layout
            .regions()
            .iter()
            .map(|region| region.size)
            .sum::<u64>()
    );
}

fn all_seeds() -> Vec<Vec<u8>> {
    let of = |pages: u32, text: &str| [&pages.to_le_bytes()[..], text.as_bytes()].concat();
    let one = r#"{"base_host_virt_addr":139637976727552,"size":134217728,"offset":0,"page_size":4096,"page_size_kib":4096}"#;
    let two = r#"{"base_host_virt_addr":149637976727552,"size":2097152,"offset":134217728,"page_size_kib":2097152}"#;
    vec![
        of(32768, &format!("[{one}]")),
        of(33280, &format!("[{one},{two}]")),
        of(33280, &format!("[{two}, {one} ]")),
        of(1, &format!("[{one}]")),
        of(0, "[]"),
    ]
}
