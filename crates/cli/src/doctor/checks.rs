//! The checks of `jiffy doctor`.

use super::report::{Check, Needed, State};
use crate::failure::reason;
use crate::place::machine::machine;
use crate::place::{Folders, kvm};
use crate::render::size;
use jiffy_machine::MachineError;
use jiffy_machine::disk::find_mkfs;
use jiffy_sys::programs::on_path;
use jiffy_wire::api::{Containment, Network};
use jiffy_wire::vmm::{KvmKind, KvmProbe};
use rustix::fs::{Access, CWD, Mode, OFlags, accessat, ioctl_ficlone, openat, statfs, statvfs};
use rustix::io::Errno;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Less free space than this is reported, bytes.
const LITTLE_SPACE: u64 = 1 << 30;
/// `CGROUP2_SUPER_MAGIC` (linux/magic.h).
const CGROUP2_MAGIC: i64 = 0x6367_7270;
/// `CAP_SYS_PTRACE` (linux/capability.h).
const CAP_SYS_PTRACE: u32 = 19;
/// `CAP_NET_ADMIN` (linux/capability.h).
const CAP_NET_ADMIN: u32 = 12;

/// Checks whether KVM is real, emulated or missing.
pub fn kvm(folders: &Folders) -> (Check, Option<KvmProbe>) {
    let check =
        |state, detail: &str| Check::new("kvm", "KVM", state, detail).needed(Needed::Natively);
    let device = Path::new(kvm::DEVICE);
    if !device.exists() {
        let check = check(State::Bad, "there is no /dev/kvm").hint(
            "load the module (`modprobe kvm-intel` or `kvm-amd`), enable virtualisation in the \
             firmware or, in a VM, nesting; until then VMs run in the machine",
        );
        return (check, Some(no_kvm("there is no /dev/kvm")));
    }
    if !kvm::usable(device) {
        let check = check(State::Bad, "you have no permission to use /dev/kvm").hint(kvm::JOIN);
        return (check, Some(no_kvm("/dev/kvm can't be opened")));
    }
    match kvm::probe(folders) {
        Ok(probe) => {
            let check = match probe.kind {
                KvmKind::Real => check(State::Good, &format!("real: {}", probe.detail)),
                KvmKind::Emulated => check(State::Bad, &format!("emulated: {}", probe.detail))
                    .hint("nothing to do: VMs run in the machine; to run them natively, use a host with hardware virtualisation"),
                KvmKind::None => check(State::Bad, &format!("none: {}", probe.detail)),
            };
            (check, Some(probe))
        }
        Err(failure) => {
            let mut check = check(State::Bad, &failure.message);
            check.hint = failure.hint;
            (check, None)
        }
    }
}

/// The check's result if the probe itself failed.
pub fn no_probe(why: &str) -> (Check, Option<KvmProbe>) {
    let check = Check::new("kvm", "KVM", State::Bad, format!("the KVM probe: {why}"));
    (check.needed(Needed::Natively), None)
}

fn no_kvm(why: &str) -> KvmProbe {
    KvmProbe {
        kind: KvmKind::None,
        detail: why.to_owned(),
        ring0_ps_per_iteration: None,
        syscall_enters_ring0: None,
        took_us: 0,
    }
}

/// Checks jiffyd, jiffy-vmm and jiffy-init.
pub fn programs(folders: &Folders) -> Check {
    let missing: Vec<&str> = ["jiffyd", "jiffy-vmm", "jiffy-init"]
        .into_iter()
        .filter(|program| !folders.lib.join(program).exists())
        .collect();
    let lib = folders.lib.display();
    if missing.is_empty() {
        Check::new("programs", "programs", State::Good, format!("in {lib}"))
    } else {
        let detail = format!("{} missing in {lib}", missing.join(" and "));
        Check::new("programs", "programs", State::Bad, detail)
            .hint("install all of Jiffy (`make install`), or set JIFFY_LIB")
    }
    .needed(Needed::Natively)
}

/// Checks the kernel and initramfs of ordinary guests.
pub fn guest_kernel(folders: &Folders) -> Check {
    let kernel = folders.share.join("kernels/base/vmlinux");
    let initramfs = folders.share.join("initramfs.cpio");
    let missing = [&kernel, &initramfs]
        .into_iter()
        .find(|file| !file.exists());
    match missing {
        None => Check::new(
            "guest_kernel",
            "guest kernel",
            State::Good,
            kernel.display().to_string(),
        ),
        Some(file) => Check::new(
            "guest_kernel",
            "guest kernel",
            State::Bad,
            format!("there is no {}", file.display()),
        )
        .hint("build it with `make build`, or only the kernel with `jiffy kernel build`"),
    }
    .needed(Needed::Natively)
}

/// Checks userfaultfd, also for faults in the kernel (those of vCPUs).
pub fn userfaultfd() -> Check {
    let check = |state, detail: &str| Check::new("userfaultfd", "userfaultfd", state, detail);
    let Ok(setting) = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd") else {
        return check(State::Bad, "this kernel does not support it")
            .hint("use a kernel with CONFIG_USERFAULTFD=y (Linux 5.2 and later); until then restores read all memory before they start");
    };
    let device = Path::new("/dev/userfaultfd");
    if accessible(device) {
        check(State::Good, "by /dev/userfaultfd")
    } else if setting.trim() == "1" || has_capability(CAP_SYS_PTRACE) {
        check(State::Good, "userfaultfd(2) is permitted")
    } else {
        check(State::Bad, "permitted only for root").hint(match device.exists() {
            true => "`chown $USER /dev/userfaultfd`, or `sysctl vm.unprivileged_userfaultfd=1`",
            false => "`sysctl vm.unprivileged_userfaultfd=1`",
        })
    }
}

/// Checks the free huge pages of both sizes.
pub fn huge_pages() -> Check {
    let free = |kib: u64| -> Option<u64> {
        let file = format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/free_hugepages");
        fs::read_to_string(file).ok()?.trim().parse().ok()
    };
    let check = |state, detail: String| Check::new("huge_pages", "huge pages", state, detail);
    match (free(2048), free(1 << 20)) {
        (None, None) => check(State::Neutral, "this kernel has none".to_owned()),
        (small, large) => {
            let count = |pages: Option<u64>, name: &str| match pages {
                Some(pages) => format!("{pages} free of {name}"),
                None => format!("none of {name}"),
            };
            let detail = format!("{}, {}", count(small, "2 MiB"), count(large, "1 GiB"));
            if small.unwrap_or(0) + large.unwrap_or(0) > 0 {
                check(State::Good, detail)
            } else {
                check(State::Neutral, detail)
                    .hint("for `--huge-pages`: `sysctl vm.nr_hugepages=64` sets 128 MiB aside")
            }
        }
    }
}

/// Checks whether the kernel may back VMs' memory (shared memory) with huge pages: a first touch
/// then costs one fault per 2 MiB, not 512.
pub fn transparent_huge_pages() -> Check {
    let check = |state, detail: &str| {
        Check::new(
            "transparent_huge_pages",
            "huge pages, transparent",
            state,
            detail,
        )
    };
    let setting = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    match setting.as_deref().map(selected_value) {
        Err(_) => check(State::Neutral, "this kernel has none"),
        Ok(Some("advise" | "always" | "within_size" | "force")) => {
            check(State::Good, "enabled for VMs' memory")
        }
        Ok(_) => check(State::Neutral, "disabled for VMs' memory").hint(
            "with them, a cold start takes about half the CPU time: \
             `echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`",
        ),
    }
}

/// The selected value, the one in brackets, of `always [advise] never`.
fn selected_value(setting: &str) -> Option<&str> {
    setting
        .split_once('[')?
        .1
        .split_once(']')
        .map(|(word, _)| word)
}

/// Checks whether nice values have an effect between sessions. With autogroups the kernel divides
/// CPU time between sessions (sched(7)), and each VM is one.
pub fn priorities() -> Check {
    let setting = fs::read_to_string("/proc/sys/kernel/sched_autogroup_enabled").ok();
    priorities_with(setting.as_deref())
}

fn priorities_with(autogroup: Option<&str>) -> Check {
    let check = |state, detail: &str| Check::new("priorities", "priorities", state, detail);
    match autogroup.map(str::trim) {
        Some("1") => check(
            State::Bad,
            "no effect between VMs: the kernel gives each session an equal share (autogroup)",
        )
        .hint(
            "`sysctl kernel.sched_autogroup_enabled=0`, or boot with noautogroup; until then \
             work of low priority takes CPU time from other VMs",
        ),
        _ => check(State::Good, "in effect between VMs"),
    }
}

/// Checks whether `jiffy-sched` can schedule this host, or does.
pub fn scheduler(folders: &Folders) -> Check {
    let read = |name: &str| fs::read_to_string(Path::new("/sys/kernel/sched_ext").join(name)).ok();
    let installed = folders.lib.join("jiffy-sched").exists();
    scheduler_with(read("state"), read("root/ops"), installed)
}

/// `state` and `ops`, the name of the loaded policy, as sched_ext has them in sysfs.
fn scheduler_with(state: Option<String>, ops: Option<String>, installed: bool) -> Check {
    let check = |state, detail: &str| Check::new("scheduler", "scheduler", state, detail);
    let ops = ops.as_deref().map(str::trim).unwrap_or_default();
    match state.as_deref().map(str::trim) {
        None => check(State::Neutral, "the kernel's own; it has no sched_ext").hint(
            "for `jiffyd --scheduler sched-ext`: Linux 6.12 with CONFIG_SCHED_CLASS_EXT=y; in the \
             machine `jiffy machine start --kernel sched`",
        ),
        Some("enabled") if ops == "jiffy" => check(State::Good, "jiffy-sched, by sched_ext"),
        Some("enabled") => check(State::Neutral, "another policy of sched_ext is loaded")
            .hint("end it before `jiffyd --scheduler sched-ext`"),
        Some(_) if installed => check(State::Good, "the kernel's own; sched_ext is available")
            .hint("`jiffyd --scheduler sched-ext` lets VMs start sooner on a busy host"),
        Some(_) => check(
            State::Neutral,
            "the kernel's own; sched_ext is available, jiffy-sched is not installed",
        )
        .hint("in a checkout, `scripts/setup sched && make build install`"),
    }
}

/// Checks what the network of VMs needs on this host; `node` is the default network of a running
/// node.
pub fn network(node: Option<&Network>) -> Check {
    let device = Path::new("/dev/net/tun");
    let check = |state, detail: &str| Check::new("tun", "network", state, detail);
    if let Some(node) = node {
        if let Some(why) = &node.error {
            return check(State::Bad, why.trim_end_matches('.'));
        }
        if !node.warnings.is_empty() {
            let all = node.warnings.join(" ");
            return check(State::Bad, all.trim_end_matches('.'));
        }
        if let Some(note) = &node.note {
            return check(State::Good, note.trim_end_matches('.'));
        }
        let ranges = node.ranges.join(", ");
        return check(State::Good, &format!("VMs have addresses of {ranges}"));
    }
    let may_make_links = accessible(device) && has_capability(CAP_NET_ADMIN);
    if !may_make_links && on_path("passt").is_some() {
        check(
            State::Good,
            "by passt: only root may make links and rules for VMs",
        )
    } else if accessible(device) && !may_make_links {
        check(
            State::Bad,
            "VMs on this host have no network: only root may create their links and rules",
        )
        .hint("`apt install passt`, run jiffy as root, or use the machine")
    } else if accessible(device) {
        check(State::Good, "/dev/net/tun")
    } else if device.exists() {
        check(State::Bad, "you have no permission to use /dev/net/tun")
            .hint("`chmod 666 /dev/net/tun`")
    } else {
        check(State::Bad, "there is no /dev/net/tun").hint("`modprobe tun`")
    }
}

/// Checks for the unified hierarchy.
pub fn cgroups() -> Check {
    let check = |state, detail: &str| Check::new("cgroup2", "cgroup v2", state, detail);
    let mounted = |path: &str| statfs(path).is_ok_and(|facts| facts.f_type == CGROUP2_MAGIC);
    if mounted("/sys/fs/cgroup") {
        check(State::Good, "at /sys/fs/cgroup")
    } else if mounted("/sys/fs/cgroup/unified") {
        check(State::Bad, "mounted beside cgroup v1, without controllers")
            .hint("boot the host with systemd.unified_cgroup_hierarchy=1")
    } else {
        check(State::Bad, "not mounted").hint("`mount -t cgroup2 none /sys/fs/cgroup`")
    }
}

/// What isolates the processes of VMs from the host and from one another, as the node has found
/// when it started.
pub fn containment(node: Option<&Containment>) -> Check {
    let check = |state, detail: &str| Check::new("containment", "containment", state, detail);
    let Some(found) = node else {
        return check(State::Neutral, "not known until jiffyd runs");
    };
    let mut parts = Vec::new();
    if found.own_user {
        parts.push("a user");
    }
    if found.jailed {
        parts.push("namespaces");
    }
    if found.cgroups {
        parts.push("a control group");
    }
    let mut detail = match parts.as_slice() {
        [] => "VMMs run as jiffyd's user, with filtered system calls".to_owned(),
        parts => format!("each VMM has {} of its own", parts.join(", ")),
    };
    if found.landlock == Some(false) {
        detail.push_str("; the kernel has no Landlock to bound the files of jiffy-pager");
    }
    if found.lacks.is_empty() {
        return check(State::Good, &detail);
    }
    detail = format!("{detail}; {}", found.lacks.join("; "));
    check(State::Bad, &detail).hint("docs/security.md says what each kind of jail needs")
}

/// Checks for copies that share their blocks, on the data folder's file system.
pub fn reflink(folders: &Folders) -> Check {
    let check = |state, detail: String| Check::new("reflink", "reflink", state, detail);
    let data = match folders.data() {
        Ok(data) => data,
        Err(failure) => return check(State::Bad, failure.message),
    };
    let folder = nearest_existing(data);
    let shown = folder.display();
    match clone_in(&folder) {
        Ok(()) => check(State::Good, format!("on {shown}")),
        Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOTTY | Errno::NOSYS) => {
            check(State::Bad, format!("not on the file system of {shown}"))
                .hint("copies take time and space; set JIFFY_DATA to a folder on XFS or Btrfs, where files can share blocks")
        }
        Err(error) => check(
            State::Neutral,
            format!("could not be checked in {shown}: {}", reason(&error.into())),
        ),
    }
}

/// Clones one unnamed file (O_TMPFILE) into another.
fn clone_in(folder: &Path) -> rustix::io::Result<()> {
    let nameless = || {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        openat(CWD, folder, flags, Mode::RUSR | Mode::WUSR)
    };
    let (from, to) = (nameless()?, nameless()?);
    rustix::io::write(&from, &[1; 4096])?;
    ioctl_ficlone(&to, &from)
}

/// Checks the free space of the data folder.
pub fn space(folders: &Folders) -> Check {
    let check = |state, detail: String| Check::new("space", "disk space", state, detail);
    let data = match folders.data() {
        Ok(data) => data,
        Err(failure) => return check(State::Bad, failure.message),
    };
    let folder = nearest_existing(data);
    match statvfs(&folder) {
        Ok(facts) => {
            let free = facts.f_bavail.saturating_mul(facts.f_frsize);
            let detail = format!("{} free on {}", size(free), folder.display());
            match free < LITTLE_SPACE {
                true => check(State::Bad, detail)
                    .hint("`jiffy rm`, `jiffy image rm` and `jiffy volume rm` free some"),
                false => check(State::Good, detail),
            }
        }
        Err(error) => check(State::Neutral, reason(&io::Error::from(error))),
    }
}

/// Checks for QEMU, which the machine needs.
pub fn qemu() -> Check {
    let name = "qemu-system-x86_64";
    match on_path(name) {
        Some(file) => Check::new("qemu", "QEMU", State::Good, file.display().to_string()),
        None => Check::new(
            "qemu",
            "QEMU",
            State::Bad,
            format!("there is no {name} on PATH"),
        )
        .hint("`apt-get install qemu-system-x86`"),
    }
    .needed(Needed::InMachine)
}

/// Checks for the program that formats the machine's disk before its first start.
pub fn mkfs(folders: &Folders) -> Check {
    let has_disk = machine(folders).is_ok_and(|machine| machine.has_disk());
    mkfs_for(has_disk, find_mkfs())
}

fn mkfs_for(has_disk: bool, mkfs: Result<PathBuf, MachineError>) -> Check {
    let check = |state, detail: String| {
        Check::new("mkfs", "mkfs.xfs", state, detail).needed(Needed::InMachine)
    };
    match mkfs {
        Ok(file) => check(State::Good, file.display().to_string()),
        Err(_) if has_disk => check(
            State::Neutral,
            "not on PATH, and not needed: the machine's disk is formatted".to_owned(),
        ),
        Err(error) => {
            let mut check = check(State::Bad, error.to_string());
            check.hint = error.hint();
            check
        }
    }
}

/// Checks the machine's kernel and initramfs.
pub fn machine_image(folders: &Folders) -> Check {
    let folder = folders.share.join("machine");
    let missing = ["vmlinux", "initramfs.cpio"]
        .into_iter()
        .map(|name| folder.join(name))
        .find(|file| !file.exists());
    match missing {
        None => Check::new(
            "machine",
            "machine",
            State::Good,
            format!("in {}", folder.display()),
        ),
        Some(file) => Check::new(
            "machine",
            "machine",
            State::Bad,
            format!("there is no {}", file.display()),
        )
        .hint("install Jiffy with `make install`, or build it with `make build`"),
    }
    .needed(Needed::InMachine)
}

fn accessible(device: &Path) -> bool {
    let access = Access::READ_OK | Access::WRITE_OK;
    accessat(CWD, device, access, rustix::fs::AtFlags::EACCESS).is_ok()
}

/// Whether this process has a capability.
fn has_capability(number: u32) -> bool {
    let Ok(status) = fs::read_to_string("/proc/self/status") else {
        return false;
    };
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & (1 << number) != 0)
}

/// The folder, or its nearest parent that exists.
fn nearest_existing(folder: &Path) -> PathBuf {
    folder
        .ancestors()
        .find(|above| above.is_dir())
        .unwrap_or(Path::new("/"))
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scheduler_is_named() {
        let said = |state: Option<&str>, ops: Option<&str>, installed| {
            let check = scheduler_with(state.map(str::to_owned), ops.map(str::to_owned), installed);
            check.detail
        };
        assert!(said(None, None, true).contains("no sched_ext"));
        assert!(said(Some("disabled\n"), None, true).contains("is available"));
        assert!(said(Some("disabled\n"), None, false).contains("not installed"));
        assert!(said(Some("enabled\n"), Some("jiffy\n"), true).contains("jiffy-sched,"));
        assert!(said(Some("enabled\n"), Some("lavd\n"), true).contains("another"));
    }

    #[test]
    fn autogroups_are_reported_as_ignoring_priorities() {
        let check = priorities_with(Some("1\n"));
        assert_eq!((check.state, check.needed), (State::Bad, Needed::Never));
        assert!(check.hint.unwrap().contains("sched_autogroup_enabled=0"));
        for without in [Some("0\n"), None] {
            assert_eq!(priorities_with(without).state, State::Good);
        }
    }

    #[test]
    fn containment_of_vmms_is_reported_as_the_node_states_it() {
        assert_eq!(containment(None).state, State::Neutral);
        let whole = Containment {
            jailed: true,
            own_user: true,
            cgroups: true,
            landlock: Some(true),
            lacks: Vec::new(),
        };
        let check = containment(Some(&whole));
        assert_eq!(check.state, State::Good);
        assert_eq!(
            check.detail,
            "each VMM has a user, namespaces, a control group of its own"
        );
        let without = Containment {
            landlock: Some(false),
            ..whole
        };
        let check = containment(Some(&without));
        assert_eq!(check.state, State::Good);
        assert!(check.detail.contains("no Landlock"), "{}", check.detail);
        let off = Containment {
            lacks: vec!["jiffyd was started with --jail off".into()],
            ..Containment::default()
        };
        let check = containment(Some(&off));
        assert_eq!(check.state, State::Bad);
        assert!(check.detail.ends_with("--jail off"), "{}", check.detail);
        assert!(check.hint.is_some());
    }

    #[test]
    fn a_running_node_reports_the_network_of_its_vms() {
        let default = Network {
            ranges: vec!["10.118.0.0/16".into(), "fd00::/96".into()],
            ..Network::default()
        };
        let check = network(Some(&default));
        assert_eq!(check.state, State::Good);
        assert_eq!(
            check.detail,
            "VMs have addresses of 10.118.0.0/16, fd00::/96"
        );
        let by_passt = Network {
            note: Some("VMs have a network by passt: root may make links.".into()),
            ..Network::default()
        };
        let check = network(Some(&by_passt));
        assert_eq!(check.state, State::Good);
        assert_eq!(
            check.detail,
            "VMs have a network by passt: root may make links"
        );
        let blocked = Network {
            warnings: vec!["The firewall chain ip filter FORWARD drops packets.".into()],
            ..default
        };
        let check = network(Some(&blocked));
        assert_eq!(check.state, State::Bad);
        assert_eq!(
            check.detail,
            "The firewall chain ip filter FORWARD drops packets"
        );
        let none = Network {
            error: Some("VMs have no network on this host: another jiffyd has it.".into()),
            ..Network::default()
        };
        let check = network(Some(&none));
        assert_eq!(check.state, State::Bad);
        assert_eq!(
            check.detail,
            "VMs have no network on this host: another jiffyd has it"
        );
    }

    #[test]
    fn mkfs_is_required_until_the_machine_has_a_disk() {
        let there = |has_disk| mkfs_for(has_disk, Ok("/sbin/mkfs.xfs".into())).state;
        assert_eq!([there(false), there(true)], [State::Good; 2]);
        let missing = |has_disk| mkfs_for(has_disk, Err(MachineError::NoMkfs));
        let check = missing(false);
        assert_eq!((check.state, check.needed), (State::Bad, Needed::InMachine));
        assert!(check.hint.unwrap().contains("xfsprogs"));
        assert_eq!(missing(true).state, State::Neutral);
    }
}
