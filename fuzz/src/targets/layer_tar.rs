//! Layers of an image with any bytes, and images of which children are made.

use crate::Target;
use crate::input::Input;
use jiffy_rootfs::testing::{flatten, reseal_image, reseal_tar, rewrite, tars};

const AS_IT_IS: u8 = 0;
const RESEALED: u8 = 1;
const OVERLAY: u8 = 2;
const IMAGE: u8 = 3;

/// Where an image begins to mean something.
const SUPERBLOCK: usize = 1024;

/// This target.
pub const TARGET: Target = Target {
    name: "layer_tar",
    covers: &[
        "crates/rootfs/src/archive",
        "crates/rootfs/src/erofs",
        "crates/rootfs/src/layer",
    ],
    seeds: all_seeds,
    run,
};

fn run(data: &[u8]) {
    let mut input = Input(data);
    match input.u8() % 4 {
        IMAGE => image(input.rest()),
        kind => {
            let count = usize::from(input.u16());
            let mut lower = input.bytes(count).to_vec();
            let mut upper = input.rest().to_vec();
            if kind != AS_IT_IS {
                reseal_tar(&mut lower);
                reseal_tar(&mut upper);
            }
            layers(&lower, &upper, kind == OVERLAY);
        }
    }
}

/// What is imported reads back as the same image.
fn layers(lower: &[u8], upper: &[u8], overlay: bool) {
    if let Ok(image) = flatten(&[lower, upper], overlay) {
        let again = rewrite(&image).expect("an image of ours is read");
        assert!(again == image);
    }
}

/// What is read can be written, and is then as we write it.
fn image(bytes: &[u8]) {
    let mut image = vec![0; (SUPERBLOCK + bytes.len()).next_multiple_of(4096)];
    image[SUPERBLOCK..][..bytes.len()].copy_from_slice(bytes);
    reseal_image(&mut image);
    if let Ok(written) = rewrite(&image) {
        let again = rewrite(&written).expect("an image of ours is read");
        assert!(again == written);
    }
}

fn all_seeds() -> Vec<Vec<u8>> {
    let tars: Vec<Vec<u8>> = tars();
    let mut seeds = Vec::new();
    for lower in &tars {
        // Without the padding at its end.
        let lower = &lower[..lower.len() - 1024];
        for kind in [AS_IT_IS, RESEALED, OVERLAY] {
            let count = (lower.len() as u16).to_le_bytes();
            seeds.push([&[kind], &count[..], lower, &tars[4]].concat());
        }
        let image = flatten(&[lower], false).expect("a seed");
        seeds.push([&[IMAGE], &image[SUPERBLOCK..]].concat());
    }
    seeds
}
