//! A balloon whose driver does anything, on any of its queues.

use crate::Target;
use crate::queue::{CONTENTS, MEMORY_BYTES, Script};
use jiffy_devices::virtio::balloon::{Balloon, BalloonArgs, PAGE, Reclaim};
use jiffy_devices::virtio::device::VirtioDevice;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use vm_memory::GuestAddress;

/// Which queue, in the lowest bits of the switches.
const QUEUE: u8 = 3;
const POISON: u8 = 4;
/// The host refuses every release.
const BROKEN: u8 = 8;

const FEATURES: u64 = 1 << 1 | 1 << 2 | 1 << 5;
const FEATURE_POISON: u64 = 1 << 4;
const RAM: u64 = MEMORY_BYTES as u64;
const FREE: u64 = 0x10000;

#[derive(Default)]
struct Host {
    bytes: AtomicU64,
    broken: bool,
}

impl Reclaim for Host {
    fn release(&self, start: GuestAddress, length: u64) -> io::Result<()> {
        assert!(length > 0 && start.0.is_multiple_of(PAGE) && length.is_multiple_of(PAGE));
        assert!(start.0.checked_add(length).is_some_and(|end| end <= RAM));
        self.bytes.fetch_add(length, Ordering::Relaxed);
        match self.broken {
            true => Err(io::ErrorKind::OutOfMemory.into()),
            false => Ok(()),
        }
    }
}

/// This target.
pub const TARGET: Target = Target {
    name: "balloon_queues",
    covers: &["crates/devices/src/virtio/balloon"],
    seeds: all_seeds,
    run,
};

fn run(data: &[u8]) {
    let script = Script::read(data);
    let poison = script.switches & POISON != 0;
    let host = Arc::new(Host {
        broken: script.switches & BROKEN != 0,
        ..Host::default()
    });
    let args = BalloonArgs {
        ram_bytes: RAM,
        reclaim: host.clone(),
    };
    let mut balloon = Balloon::new(args.clone());
    // The driver first writes the configuration space.
    balloon.write_config(script.contents.len() as u64 % 20, &script.contents);
    let sizes = balloon.queue_max_sizes().to_vec();
    let features = if poison {
        FEATURES | FEATURE_POISON
    } else {
        FEATURES
    };
    let queue = u16::from(script.switches & QUEUE);
    let balloon = script.play_on(balloon, &sizes, queue, features, false, |balloon| {
        balloon.request_statistics();
        balloon
            .set_target(1)
            .expect_err("the guest has less memory");
    });
    let (inflated, reported) = (balloon.inflated_bytes(), balloon.reported_bytes());
    let taken = host.bytes.load(Ordering::Relaxed);
    assert!(taken <= RAM, "at most all RAM, each page counted once");
    assert_eq!(inflated + reported, if host.broken { 0 } else { taken });
    assert!(balloon.statistics().latest().by_name().len() <= 16);
    let state = balloon.save();
    let restored = Balloon::restore(args.clone(), &state).expect("what was saved is restored");
    assert_eq!(restored.save(), state);
    let given = balloon.save_withholding();
    assert!(u64::from(given.given_pages) <= RAM / PAGE);
    let restored = Balloon::restore_withholding(args, &given).expect("what was saved is restored");
    assert_eq!(restored.save_withholding(), given);
}

fn all_seeds() -> Vec<Vec<u8>> {
    let pages: Vec<u8> = [16u32, 18, 17, 100, 1 << 20]
        .iter()
        .flat_map(|page| page.to_le_bytes())
        .collect();
    let mut figures = vec![4, 0, 0, 0, 16, 0, 0, 0, 0, 0];
    figures.extend([5, 0, 0, 0, 32, 0, 0, 0, 0, 0]);
    let mut seeds = Vec::new();
    for switches in [0, POISON, BROKEN] {
        for queue in 0..=QUEUE {
            let mut script = Script {
                switches: switches | queue,
                contents: if queue == 2 {
                    figures.clone()
                } else {
                    pages.clone()
                },
                ..Script::default()
            };
            let length = script.contents.len() as u32;
            match queue {
                3 => script.chain(&[(FREE, 0x10000, true), (FREE + 0x20000, 0x3000, true)]),
                _ => script.chain(&[(CONTENTS, 6, false), (CONTENTS + 6, length - 6, false)]),
            }
            script.chain(&[(CONTENTS, length, false)]);
            seeds.push(script.write());
        }
    }
    seeds
}
