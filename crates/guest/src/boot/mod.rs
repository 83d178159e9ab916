//! Boot: the steps that PID 1 runs once before its event loop.
//!
//! Each step has its own file and may fail: the failure is reported and the guest continues.
//! `docs/guest.md` has the order with its reasons.

mod cgroup;
pub mod configuration;
mod disks;
mod folders;
mod identity;
mod memory;
mod modules;
mod mounts;
mod network;
pub mod preload;
mod root;

use crate::fw_cfg::FwCfg;
use crate::report::Report;
use alloc::vec::Vec;
pub use identity::machine_id;
use jiffy_wire::guest::{DiskMount, GuestConfig};
pub use mounts::{Teardown, open_console, writable_disks};
pub use root::upper_layer;

/// Reads the configuration.
///
/// Everything here runs before [`finish`] and needs only the initramfs.
pub fn read_configuration(report: &mut Report) -> (GuestConfig, FwCfg) {
    report.step("mounts", |_| mounts::mount_kernel_file_systems());
    if crate::files::exists(modules::LIST) {
        report.step("modules", |_| modules::load());
    }
    let source = FwCfg::open();
    let config = report
        .step("configuration", |_| configuration::read(&source))
        .unwrap_or_default();
    (config, source)
}

/// All other steps: root, mounts, disks, network, identity. After them programs find the guest as
/// configured.
pub fn finish(config: &GuestConfig, report: &mut Report) -> Teardown {
    let mut teardown = Teardown::default();
    // Before the root: the size of a tmpfs follows that of memory.
    if let Some(mib) = config.memory_mib {
        report.step("memory", |_| memory::wait_for_balloon(mib));
    }
    root::enter(&config.root, &mut teardown, report);
    report.step("root mounts", |_| mounts::mount_in_root());
    report.step("cgroups", |_| cgroup::mount_hierarchy());
    let late = disks::mount_present(&config.disks, &mut teardown, report);
    report.step("network", |report| {
        network::configure(&config.interfaces, report)
    });
    identity::set(config, report);
    disks::mount_late(late, &mut teardown, report);
    for folder in &config.folders {
        folders::mount_folder(folder, report);
    }
    for path in &config.swap {
        report.step("swap", |_| disks::swap_on(path));
    }
    if !config.preload.is_empty() {
        report.step("preload", |_| preload::read_all(&config.preload));
    }
    teardown
}

/// Applies a restored guest's new configuration, as far as it differs from the old one. Root and
/// init stay the same.
pub fn reconfigure(
    old: &GuestConfig,
    new: &GuestConfig,
    teardown: &mut Teardown,
    report: &mut Report,
) {
    let disks: Vec<DiskMount> = added(&old.disks, &new.disks);
    let late = disks::mount_present(&disks, teardown, report);
    if old.interfaces != new.interfaces {
        report.step("network", |report| {
            network::reconfigure(&old.interfaces, &new.interfaces, report)
        });
    }
    identity::reconfigure(old, new, report);
    disks::mount_late(late, teardown, report);
    for path in &added(&old.swap, &new.swap) {
        report.step("swap", |_| disks::swap_on(path));
    }
}

fn added<T: Clone + PartialEq>(old: &[T], new: &[T]) -> Vec<T> {
    let new = new.iter().filter(|item| !old.contains(item));
    new.cloned().collect()
}

/// Raises the hard limit of open files for programs, as other inits do. The soft limit stays the
/// kernel's.
pub fn raise_limits() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    const MOST_OPEN_FILES: u64 = 524_288;
    let current = getrlimit(Resource::Nofile).current;
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current,
            maximum: Some(MOST_OPEN_FILES),
        },
    );
}
