//! An entropy device whose driver does anything.

use crate::Target;
use crate::queue::Script;
use jiffy_devices::virtio::entropy::Entropy;

/// This target.
pub const TARGET: Target = Target {
    name: "entropy_queue",
    covers: &["crates/devices/src/virtio/entropy"],
    seeds: all_seeds,
    run,
};

fn run(data: &[u8]) {
    Script::read(data).play(Entropy::new(), 8, 0, false)
}

fn all_seeds() -> Vec<Vec<u8>> {
    let mut script = Script::default();
    script.chain(&[(0x10000, 64, true)]);
    script.chain(&[(0x10100, 8, true), (0x10200, 100, true)]);
    script.chain(&[(0x10000, 4, false), (0x10000, 0x20000, true)]);
    vec![script.write()]
}
