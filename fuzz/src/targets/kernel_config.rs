//! The configuration in a kernel's file, and what is missing in it.

use crate::Target;
use jiffy_kernel::check::{self, Purpose};
use jiffy_kernel::config::Config;

/// This target.
pub const TARGET: Target = Target {
    name: "kernel_config",
    covers: &["crates/kernel/src/config.rs"],
    seeds: all_seeds,
    run,
};

fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(config) = Config::parse(&text) {
        assert!(config.len() <= text.lines().count());
        for purpose in [Purpose::Guest, Purpose::Docker] {
            let _ = check::check(&config, purpose).boots();
        }
    }
}

fn all_seeds() -> Vec<Vec<u8>> {
    vec![
        b"# a comment\nCONFIG_VIRTIO_MMIO=y\nCONFIG_VSOCKETS=m\n# CONFIG_PCI is not set\n".to_vec(),
        b"CONFIG_HZ=100\nCONFIG_CMDLINE=\"a \\\" b\"\nCONFIG_PHYSICAL_START=0x1000000\n".to_vec(),
    ]
}
