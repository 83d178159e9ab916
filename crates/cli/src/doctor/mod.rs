//! Checks what this host offers, and suggests what to do about the rest.

mod checks;
mod report;

use report::Report;

use crate::place::Folders;
use jiffy_wire::api::{Containment, Network};

/// What a running node reports; all `None` if none runs.
#[derive(Debug, Default)]
pub struct Reported {
    /// How it contains VMMs.
    pub containment: Option<Containment>,
    /// Its default network.
    pub network: Option<Network>,
}

/// Runs all checks; starts only the tiny guest of the KVM probe.
pub fn examine(folders: &Folders, node: &Reported) -> Report {
    let began = jiffy_sys::clock::monotonic_ns();
    // The probe runs at the same time as the other checks.
    let (kvm, others) = std::thread::scope(|scope| {
        let kvm = scope.spawn(|| checks::kvm(folders));
        let others = vec![
            checks::programs(folders),
            checks::guest_kernel(folders),
            checks::userfaultfd(),
            checks::huge_pages(),
            checks::transparent_huge_pages(),
            checks::priorities(),
            checks::scheduler(folders),
            checks::network(node.network.as_ref()),
            checks::cgroups(),
            checks::containment(node.containment.as_ref()),
            checks::reflink(folders),
            checks::space(folders),
            checks::qemu(),
            checks::mkfs(folders),
            checks::machine_image(folders),
        ];
        let kvm = kvm
            .join()
            .unwrap_or_else(|_| checks::no_probe("its thread panicked"));
        (kvm, others)
    });
    Report::new(
        kvm,
        others,
        (jiffy_sys::clock::monotonic_ns() - began) / 1000,
    )
}
