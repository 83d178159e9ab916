//! What this host offers, and what to do about the rest.

mod checks;
mod report;

use report::Report;

use crate::place::Folders;

/// Looks at everything; starts nothing but the tiny guest of the KVM probe. `network` is what
/// the node says of its network, if one runs.
pub fn examine(folders: &Folders, network: Option<&str>) -> Report {
    let began = jiffy_sys::clock::monotonic_ns();
    // The probe runs beside the other checks.
    let (kvm, others) = std::thread::scope(|scope| {
        let kvm = scope.spawn(|| checks::kvm(folders));
        let others = vec![
            checks::programs(folders),
            checks::guest_kernel(folders),
            checks::userfaultfd(),
            checks::huge_pages(),
            checks::transparent_huge_pages(),
            checks::priorities(),
            checks::network(network),
            checks::cgroups(),
            checks::reflink(folders),
            checks::space(folders),
            checks::qemu(),
            checks::mkfs(folders),
            checks::machine_image(folders),
        ];
        let kvm = kvm.join().unwrap_or_else(|_| checks::no_probe("it failed"));
        (kvm, others)
    });
    Report::new(
        kvm,
        others,
        (jiffy_sys::clock::monotonic_ns() - began) / 1000,
    )
}
