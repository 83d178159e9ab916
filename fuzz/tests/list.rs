//! Every device, and every file that parses bytes, has a target or a reason to have
//! none; every target has a corpus.

use jiffy_fuzz::TARGETS;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Each file that parses bytes or text contains one of these. A call of `parse` is none: what it
/// calls is the standard library's, or is marked where it is defined.
const MARKS: &[&str] = &[
    "serde_json::from_",
    "postcard::from_bytes",
    "postcard::take_from_bytes",
    "from_le_bytes",
    "from_be_bytes",
    "from_ne_bytes",
    "from_str_radix",
    "FromStr for",
    "fn parse",
    "fn decode",
    ".decode(",
];

/// Bytes of all inputs that are kept.
const MOST_BYTES: u64 = 1 << 20;

/// Crates that are not shipped: test harness, benchmark.
const NOT_SHIPPED: &[&str] = &["bench", "testkit"];

/// Files with a mark whose bytes are trusted, each with the origin of the bytes.
const TRUSTED: &[(&str, &str)] = &[
    (
        "crates/cli/src/client/lines.rs",
        "the user's own daemon answers",
    ),
    (
        "crates/cli/src/client/mod.rs",
        "the user's own daemon answers",
    ),
    (
        "crates/cli/src/doctor/checks.rs",
        "the kernel's files of this host",
    ),
    (
        "crates/cli/src/place/kvm.rs",
        "our own `jiffy-vmm` prints it",
    ),
    (
        "crates/guest/src/agent/stat.rs",
        "the guest's kernel writes it",
    ),
    (
        "crates/guest/src/boot/disks.rs",
        "fixed fields of a disk that the guest's kernel has mounted",
    ),
    (
        "crates/guest/src/boot/mounts.rs",
        "the guest's kernel writes it",
    ),
    (
        "crates/guest/src/boot/network/mod.rs",
        "in a configuration that the host's daemon made",
    ),
    (
        "crates/guest/src/boot/network/netlink.rs",
        "the guest's kernel writes it",
    ),
    ("crates/guest/src/fw_cfg.rs", "the host gives it"),
    ("crates/guest/src/kmsg.rs", "the guest's kernel writes it"),
    (
        "crates/guest/src/syscalls/raw.rs",
        "the guest's kernel writes it",
    ),
    ("crates/kernel/src/build.rs", "our own build prints it"),
    (
        "crates/kernel/src/list.rs",
        "beside kernels that the user installed",
    ),
    (
        "crates/machine/src/agent/shares.rs",
        "a length, which is checked, of an answer of the host's `jiffy-files`",
    ),
    (
        "crates/machine/src/image/bzimage.rs",
        "the kernel of this host's Debian",
    ),
    (
        "crates/machine/src/image/module.rs",
        "modules of this host's Debian",
    ),
    (
        "crates/machine/src/instance.rs",
        "our own record of the machine",
    ),
    (
        "crates/machine/src/machine.rs",
        "our own record of the machine",
    ),
    (
        "crates/machine/src/options.rs",
        "the options that the machine was started with",
    ),
    ("crates/machine/src/qmp.rs", "the QEMU that we started"),
    (
        "crates/machine/src/shares.rs",
        "the user's own options, passed to the machine",
    ),
    (
        "crates/net/src/cidr.rs",
        "the operator and the user write it",
    ),
    ("crates/net/src/conntrack.rs", "the host's kernel writes it"),
    ("crates/net/src/identity.rs", "the daemon makes ids"),
    (
        "crates/net/src/links/found.rs",
        "the host's kernel writes it",
    ),
    (
        "crates/net/src/netlink/channel.rs",
        "the host's kernel writes it",
    ),
    ("crates/net/src/nft/read.rs", "the host's kernel writes it"),
    (
        "crates/net/src/policy/publish.rs",
        "the user writes it; property tests in `policy::tests`",
    ),
    (
        "crates/net/src/policy/target.rs",
        "the user writes it; property tests in `policy::tests`",
    ),
    ("crates/net/src/rules/mod.rs", "the host's kernel writes it"),
    ("crates/node/src/cpu.rs", "our own `jiffy-vmm` prints it"),
    (
        "crates/content/src/images/policy.rs",
        "an option of the daemon",
    ),
    (
        "crates/content/src/transfer/keep.rs",
        "our own file of credentials",
    ),
    (
        "crates/content/src/room/limit.rs",
        "an option of the daemon",
    ),
    ("crates/jiffyd/src/options.rs", "an option of the daemon"),
    (
        "crates/vmhost/src/network/passt/host.rs",
        "the host's kernel writes it",
    ),
    (
        "crates/vmhost/src/network/recovered.rs",
        "an earlier daemon wrote it; invalid parts are ignored",
    ),
    (
        "crates/vmhost/src/network/traffic.rs",
        "the host's kernel writes it",
    ),
    (
        "crates/vmhost/src/pager/links.rs",
        "a VMM's configuration, which the daemon writes",
    ),
    (
        "crates/vmhost/src/sched_trace/pages.rs",
        "the host's kernel writes it",
    ),
    (
        "crates/vmhost/src/sched_trace/runs.rs",
        "the host's kernel writes it",
    ),
    (
        "crates/vmhost/src/scheduler.rs",
        "jiffy-sched, which the daemon started and which nothing else talks to",
    ),
    (
        "crates/vmhost/src/task/unreadable.rs",
        "an earlier daemon wrote it; invalid parts are ignored",
    ),
    (
        "crates/pager/src/origins/service.rs",
        "our own `jiffy-pager` asks",
    ),
    (
        "crates/pager/src/bitmap.rs",
        "words of a length that was checked",
    ),
    (
        "crates/registry/src/credentials/docker.rs",
        "the user's own logins",
    ),
    (
        "crates/registry/src/credentials/helper.rs",
        "a program that the user chose",
    ),
    ("crates/sched/src/main.rs", "the daemon, which started it"),
    ("crates/ssh/src/keys.rs", "the user's own file"),
    (
        "crates/ssh-guest/src/sftp/files.rs",
        "a client that has the rights of this process already",
    ),
    (
        "crates/ssh-guest/src/sftp/mod.rs",
        "a client that has the rights of this process already",
    ),
    (
        "crates/ssh-guest/src/sftp/packet.rs",
        "a client that has the rights of this process already",
    ),
    ("crates/store/src/temporary.rs", "random bytes, for a name"),
    (
        "crates/sys/src/spare.rs",
        "the kernel's map of this process",
    ),
    (
        "crates/sys/src/pagemap.rs",
        "the kernel's map of this process",
    ),
    ("crates/sys/src/userfaultfd/mod.rs", "the kernel's messages"),
    ("crates/vmm/src/arguments.rs", "the daemon starts it"),
    (
        "crates/vmm/src/cpu/cpuid/mod.rs",
        "the processor reports it",
    ),
    ("crates/vmm/src/cpu/quirks.rs", "the processor reports it"),
    (
        "crates/vmm/src/devices/folder_session.rs",
        "a length, which is checked, before bytes that only jiffy-files reads",
    ),
    ("crates/vmm/src/spare.rs", "the daemon, which started it"),
    ("crates/vmm/src/stats.rs", "KVM writes it"),
    ("crates/wire/src/text/mod.rs", "sizes that the user writes"),
];

#[test]
fn every_device_has_a_target() {
    // The disk, which has a crate of its own, and all devices of crates/devices.
    let mut devices = vec!["crates/disk/src/device.rs".to_owned()];
    for folder in ["crates/devices/src", "crates/devices/src/virtio"] {
        for entry in entries(&root().join(folder)) {
            let path = below_root(&entry);
            if entry.is_dir() && path != "crates/devices/src/virtio" {
                devices.push(path);
            }
        }
    }
    let covered = |path: &str| TARGETS.iter().any(|target| target.covers.contains(&path));
    let without: Vec<_> = devices.iter().filter(|path| !covered(path)).collect();
    assert!(
        without.is_empty(),
        "no target covers {without:?}: write one in fuzz/src/targets"
    );
}

#[test]
fn every_file_that_parses_bytes_has_a_target_or_a_reason() {
    let mut marked = BTreeSet::new();
    for crate_folder in entries(&root().join("crates")) {
        let name = crate_folder.file_name().and_then(|name| name.to_str());
        if !NOT_SHIPPED.contains(&name.expect("a name")) {
            sources(&crate_folder.join("src"), &mut marked);
        }
    }
    let covered = |path: &str| {
        let covers = TARGETS.iter().flat_map(|target| target.covers);
        covers
            .into_iter()
            .any(|cover| Path::new(path).starts_with(cover))
    };
    let trusted: BTreeSet<String> = TRUSTED.iter().map(|(path, _)| (*path).into()).collect();
    let without: Vec<_> = marked
        .iter()
        .filter(|path| !covered(path) && !trusted.contains(*path))
        .collect();
    assert!(
        without.is_empty(),
        "{without:?} parse bytes and no target covers them: write one in \
         fuzz/src/targets, or name the bytes' origin in TRUSTED"
    );
    let idle: Vec<_> = trusted
        .iter()
        .filter(|path| covered(path) || !marked.contains(*path))
        .collect();
    assert!(
        idle.is_empty(),
        "TRUSTED names {idle:?}, which need no reason"
    );
}

#[test]
fn targets_have_unique_names_and_existing_files() {
    let mut names = BTreeSet::new();
    for target in TARGETS {
        let module = format!("fuzz/src/targets/{}.rs", target.name);
        assert!(root().join(&module).is_file(), "there is no {module}");
        assert!(
            names.insert(target.name),
            "two targets are named {}",
            target.name
        );
        for path in target.covers {
            assert!(
                root().join(path).exists(),
                "{}: there is no {path}",
                target.name
            );
        }
    }
}

#[test]
fn kept_inputs_are_small_and_belong_to_a_target() {
    let mut bytes = 0;
    for kind in ["corpus", "regressions"] {
        let folder = root().join("fuzz").join(kind);
        if !folder.exists() {
            continue;
        }
        for folder in entries(&folder) {
            let name = folder.file_name().and_then(|name| name.to_str());
            let known = name.is_some_and(|name| jiffy_fuzz::find(name).is_some());
            assert!(known, "{} belongs to no target", folder.display());
            for input in entries(&folder) {
                bytes += fs::metadata(input).expect("an input").len();
            }
        }
    }
    for target in TARGETS {
        let corpus = root().join("fuzz/corpus").join(target.name);
        assert!(
            corpus.is_dir(),
            "{} has no corpus: run fuzz/run keep",
            target.name
        );
    }
    assert!(
        bytes <= MOST_BYTES,
        "{bytes} bytes are kept: run fuzz/run keep"
    );
}

/// Files with a mark outside of tests.
fn sources(folder: &Path, marked: &mut BTreeSet<String>) {
    for path in entries(folder) {
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.expect("a name");
        if path.is_dir() {
            if !["tests", "testing"].contains(&name) {
                sources(&path, marked);
            }
        } else if name.ends_with(".rs")
            && !["tests.rs", "testing.rs", "transcripts.rs"].contains(&name)
        {
            let text = fs::read_to_string(&path).expect("a source is read");
            let code = text.split("#[cfg(test)]\nmod tests {").next();
            if MARKS
                .iter()
                .any(|mark| code.is_some_and(|code| code.contains(mark)))
            {
                marked.insert(below_root(&path));
            }
        }
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn below_root(path: &Path) -> String {
    let path = path.strip_prefix(root()).expect("below the root");
    path.to_str().expect("a plain name").to_owned()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder is read");
    let mut paths: Vec<_> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    paths
}
