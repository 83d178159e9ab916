//! Tests of the saved types against a golden file of each version.

use super::*;
use crate::digests::Known;
use crate::durable::LoadError;
use crate::model::artifact::ImageArtifact;
use crate::model::artifact::SnapshotArtifact;
use crate::model::artifact::VolumeArtifact;
use crate::model::image::BootSet;
use crate::model::image::ImageRecord;
use crate::model::image::LazyDisk;
use crate::model::network::Networks;
use crate::model::snapshot::Manifest;
use crate::model::vm::{
    Failure, FromSnapshot, Kept, MainEnd, MainState, Paged, Root, Spec, VmRecord,
};
use jiffy_sys::stamp::Stamp;
use jiffy_wire::agent::{Command, ExitStatus, StartError, StartFailure, WindowSize};
use jiffy_wire::api::{self, ImageConfig, ImageSource, MemoryForm, RootDisk, VmState, VolumeUse};
use jiffy_wire::cpu::testing::processor;
use jiffy_wire::cpu::{ARCH_CAPABILITIES, Profile, Wanted};
use jiffy_wire::pager::{Origin, RegistryOrigin};
use jiffy_wire::timeline::{Counter, Span, Timeline, Track};
use jiffy_wire::vmm::{DiskLimit, Extent, NetLimit, PageSize, ReadUnits};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fs;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("golden")
        .join(name)
}

/// Checks that `live` is written as the golden file's bytes, and that reading those gives `live`.
/// Every field of `live` must have a value that is written.
///
/// If this fails, files of another release are not read as they were meant:
/// raise the version, keep the types of the one before, add a golden file and a
/// line in docs/upgrades.md.
fn does_not_drift<T: PartialEq + Debug + Clone>(
    golden_file: &str,
    file: &str,
    live: &T,
    save: impl Fn(&Path, T),
    load: impl Fn(&Path) -> Result<T, LoadError>,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(file);
    save(&path, live.clone());
    let written = fs::read_to_string(&path).unwrap();
    let golden = fs::read_to_string(golden(golden_file)).unwrap_or_default();
    assert_eq!(written, golden.trim_end(), "{golden_file}");
    fs::write(&path, golden).unwrap();
    assert_eq!(&load(&path).unwrap(), live, "{golden_file} is read");
}

fn text(text: &str) -> String {
    text.to_owned()
}

fn config() -> ImageConfig {
    ImageConfig {
        entrypoint: vec![text("/entry")],
        cmd: vec![text("serve")],
        env: vec![text("A=1")],
        workdir: Some(text("/srv")),
        user: Some(text("1:2")),
        stop_signal: Some(text("SIGINT")),
        exposed_ports: vec![text("80/tcp")],
        labels: BTreeMap::from([(text("l"), text("v"))]),
    }
}

fn limit() -> DiskLimit {
    DiskLimit {
        bytes_per_second: NonZeroU64::new(1 << 20),
        operations_per_second: NonZeroU64::new(100),
    }
}

fn spec() -> Spec {
    Spec {
        image: text("registry.example/team/app:1"),
        config: config(),
        kernel: text("base"),
        cpus: 2,
        max_cpus: None,
        memory_mib: 128,
        max_memory_mib: None,
        pages: PageSize::Huge2M,
        disks: vec![VolumeUse {
            name: text("data"),
            size_mib: Some(16),
            read_only: true,
            mount: Some(text("/data")),
            limit: limit(),
        }],
        command: Some(Command {
            argv: vec![text("run"), text("it")],
            env: vec![text("B=2")],
            cwd: Some(text("/")),
            user: Some(text("nobody")),
            tty: Some(WindowSize {
                rows: 24,
                columns: 80,
            }),
            stdin: true,
        }),
        init: Some(vec![text("/sbin/init")]),
        console: true,
        remove: true,
        hostname: Some(text("host")),
        kernel_args: Some(text("quiet")),
        cpu_profile: None,
        timeline: true,
        deep: false,
        from: Some(FromSnapshot {
            name: text("warm"),
            start_main: true,
        }),
        cold: true,
        hidden: true,
        preload: vec![text("sh")],
        root_disk: Some(RootDisk::Layer { size_mib: 64 }),
        root_limit: limit(),
        own_volumes: true,
        folders: Vec::new(),
        network: None,
        idle: None,
        owner: None,
        priority: api::Priority::Normal,
    }
}

/// A VM with an owner and a priority in the queue.
fn with_a_priority() -> VmRecord {
    let mut vm = vm();
    spec_of(&mut vm).owner = Some(text("team-a"));
    spec_of(&mut vm).priority = api::Priority::High;
    vm
}

/// A VM whose limits were changed.
fn with_limits() -> VmRecord {
    let mut vm = on_a_network();
    let network = NetLimit {
        bytes_per_second: NonZeroU64::new(1 << 20),
        packets_per_second: NonZeroU64::new(1000),
        bytes_burst: NonZeroU64::new(1 << 16),
        packets_burst: NonZeroU64::new(10),
    };
    spec_of(&mut vm).network.as_mut().unwrap().limit = network;
    vm.limits = api::Limits {
        root: Some(limit()),
        volumes: BTreeMap::from([(text("data"), DiskLimit::default())]),
        network: Some(network),
        cpus: None,
        memory_mib: None,
    };
    vm
}

/// A VM whose number of vCPUs was changed.
fn with_other_cpus() -> VmRecord {
    let mut vm = vm();
    spec_of(&mut vm).max_cpus = Some(8);
    vm.limits.cpus = Some(4);
    vm
}

/// A VM whose activity is recorded.
fn with_a_deep_timeline() -> VmRecord {
    let mut vm = vm();
    spec_of(&mut vm).deep = true;
    vm
}

/// A VM that shares folders of the host.
fn with_folders() -> VmRecord {
    let mut vm = vm();
    let folder = |source, mount, read_only| api::FolderUse {
        source: text(source),
        mount: text(mount),
        read_only,
        capture: false,
    };
    spec_of(&mut vm).folders = vec![folder("/a", "/b", false), folder("/home/me/c", "/d", true)];
    vm
}

/// A VM that shares a folder of the host and may be captured.
fn with_a_captured_folder() -> VmRecord {
    let mut vm = with_folders();
    spec_of(&mut vm).folders[1].capture = true;
    vm
}

/// A VM whose memory was changed.
fn with_other_memory() -> VmRecord {
    let mut vm = vm();
    spec_of(&mut vm).max_memory_mib = Some(1024);
    vm.limits.memory_mib = Some(512);
    vm
}

/// A VM that sleeps when it is idle.
fn with_an_idle_time() -> VmRecord {
    let mut vm = vm();
    spec_of(&mut vm).idle = Some(api::IdlePolicy {
        after_s: 300,
        action: api::IdleAction::Stop,
    });
    vm
}

/// A VM with an interface: of release 0.2 and later.
fn on_a_network() -> VmRecord {
    let policy = |allow: &str| api::NetworkPolicy {
        allow: vec![text(allow)],
        deny: vec![text("all")],
    };
    let mut vm = vm();
    spec_of(&mut vm).network = Some(api::NetworkUse {
        name: Some(text("default")),
        ports: vec![text("127.0.0.1:8080:80/tcp")],
        publish_all: true,
        policy: policy("example.org:443/tcp"),
        dns: vec![text("192.0.2.53")],
        search: vec![text("example.org")],
        hosts: vec![text("db:192.0.2.7")],
        proxy_ports: None,
        limit: NetLimit::default(),
    });
    vm.addresses = vec![[10, 118, 0, 2].into(), "fd00::2".parse().unwrap()];
    vm.policy = Some(policy("192.0.2.0/24"));
    vm
}

/// One that the proxy reaches at a few ports: of release 0.2 and later.
fn with_ports_for_the_proxy() -> VmRecord {
    let mut vm = on_a_network();
    let network = spec_of(&mut vm).network.as_mut().unwrap();
    network.proxy_ports = Some(vec![text("3000"), text("8000-8100")]);
    vm
}

/// Less than a host has, with each part that a profile may have.
fn profile() -> Profile {
    let leaves = [(1, 0, [0, 0, 1 << 31, 1 << 26]), (4, 3, [1, 2, 3, 4])];
    Profile {
        msrs: BTreeMap::from([(ARCH_CAPABILITIES, 5)]),
        tsc_khz: Some(2_000_000),
        tsc_scaling: true,
        ..processor("GenuineIntel", 7, &leaves)
    }
}

/// A VM with a CPU profile, as 0.2 and later know it.
fn with_a_profile() -> VmRecord {
    let mut vm = vm();
    spec_of(&mut vm).cpu_profile = Some(Wanted::Named(text("x86-64-v2")));
    vm
}

/// A snapshot of one that was given a file's profile.
fn manifest_with_a_profile() -> Manifest {
    let mut manifest = manifest();
    manifest.spec.cpu_profile = Some(Wanted::Given(Box::new(profile())));
    manifest.cpu = Some(profile());
    manifest
}

fn lazy() -> LazyDisk {
    LazyDisk {
        chunks: vec![text("00112233445566778899aabbccddeeff")],
        ext4: true,
    }
}

fn failure() -> Failure {
    Failure {
        message: text("It broke."),
        hint: Some(text("Mend it.")),
    }
}

fn kept(record: VmRecord) -> Kept {
    Kept {
        record,
        powering_off: true,
    }
}

fn spec_of(vm: &mut VmRecord) -> &mut Spec {
    Arc::make_mut(&mut vm.spec)
}

fn vm() -> VmRecord {
    VmRecord {
        id: text("0123456789ab"),
        name: text("web"),
        spec: spec().into(),
        cid: 3,
        created: 1,
        state: VmState::Exited,
        started: Some(2),
        ended: Some(3),
        pid: Some(4),
        main: MainState::Ended(MainEnd::Lost(failure())),
        main_pid: Some(5),
        failure: Some(failure()),
        warnings: vec![text("mounts: no /data")],
        log_start: 6,
        origin: Some(api::Origin::From(text("warm"))),
        root: Some(Root {
            path: PathBuf::from("/d/images/app/image.erofs"),
            digest: "ab".repeat(32),
            lazy: Some(lazy()),
        }),
        paged: Some(Paged {
            image: PathBuf::from("/d/snapshots/warm/ram.image"),
            record: Some(PathBuf::from("/d/snapshots/warm/recording")),
            prefetch: true,
        }),
        addresses: Vec::new(),
        policy: None,
        limits: api::Limits::default(),
    }
}

fn manifest() -> Manifest {
    Manifest {
        created: 1,
        jiffy: text("0.1.0"),
        vm: text("web"),
        parent: Some(text("warm")),
        spec: spec(),
        main: MainState::Started,
        image_digest: "ab".repeat(32),
        kernel_digest: "cd".repeat(32),
        initramfs_digest: "ef".repeat(32),
        vmm_digest: "01".repeat(32),
        cpu_features: vec![text("avx"), text("sse2")],
        cpu: None,
        memory: MemoryForm::Image,
        memory_bytes: 2,
        shared_bytes: 3,
        other_bytes: 4,
        optimised: true,
        lazy_root: Some(lazy()),
        source: Some(source()),
        files: vec![Known {
            path: PathBuf::from("/share/kernels/base/vmlinux"),
            stamp: Stamp {
                device: 1,
                inode: 2,
                size: 3,
                times: [4, 5, 6, 7],
            },
            digest: "cd".repeat(32),
        }],
    }
}

fn source() -> ImageSource {
    ImageSource {
        reference: text("registry.example/team/app:1"),
        manifest: Some(text("sha256:00")),
        signed_by: Vec::new(),
    }
}

fn image() -> ImageRecord {
    ImageRecord {
        digest: "ab".repeat(32),
        size: 4096,
        entries: 7,
        created: 1,
        built_in: Some((8, -9)),
        ext4: true,
        config: config(),
        source: Some(source()),
        chunks: vec![text("00112233445566778899aabbccddeeff")],
        parent: Some("cd".repeat(32)),
    }
}

#[test]
fn records_of_vms_do_not_drift() {
    let save = |path: &Path, vm| super::vm::save(path.parent().unwrap(), kept(vm), false).unwrap();
    let load = |path: &Path| {
        super::vm::load(path.parent().unwrap()).map(|read| {
            assert!(read.powering_off);
            read.record
        })
    };
    does_not_drift("vm-1.json", "vm.json", &vm(), save, load);
    does_not_drift("vm-1-network.json", "vm.json", &on_a_network(), save, load);
    does_not_drift("vm-1-cpu.json", "vm.json", &with_a_profile(), save, load);
    does_not_drift(
        "vm-1-idle.json",
        "vm.json",
        &with_an_idle_time(),
        save,
        load,
    );
    does_not_drift(
        "vm-1-proxy-ports.json",
        "vm.json",
        &with_ports_for_the_proxy(),
        save,
        load,
    );
    does_not_drift("vm-1-limits.json", "vm.json", &with_limits(), save, load);
    does_not_drift("vm-1-cpus.json", "vm.json", &with_other_cpus(), save, load);
    does_not_drift(
        "vm-1-memory.json",
        "vm.json",
        &with_other_memory(),
        save,
        load,
    );
    does_not_drift("vm-1-folders.json", "vm.json", &with_folders(), save, load);
    does_not_drift(
        "vm-1-captured-folder.json",
        "vm.json",
        &with_a_captured_folder(),
        save,
        load,
    );
    does_not_drift(
        "vm-1-deep.json",
        "vm.json",
        &with_a_deep_timeline(),
        save,
        load,
    );
    does_not_drift(
        "vm-1-priority.json",
        "vm.json",
        &with_a_priority(),
        save,
        load,
    );
}

#[test]
fn every_vm_state_survives_a_round_trip() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let states = [
        "Created",
        "Starting",
        "Running",
        "Paused",
        "Stopping",
        "Hibernated",
        "Exited",
    ];
    let failed = |kind| {
        let message = text("no");
        MainState::Ended(MainEnd::Failed(StartError { kind, message }))
    };
    let mains = [
        MainState::Pending,
        MainState::Started,
        MainState::Ended(MainEnd::Exited(ExitStatus::Code(3))),
        MainState::Ended(MainEnd::Exited(ExitStatus::Signal(9))),
        failed(StartFailure::NotFound),
        failed(StartFailure::NotExecutable),
        failed(StartFailure::NoSuchUser),
        failed(StartFailure::NoSuchDirectory),
        failed(StartFailure::Invalid),
        failed(StartFailure::Other),
    ];
    let origins = [
        None,
        Some(api::Origin::Golden),
        Some(api::Origin::ForkedFrom(text("web"))),
    ];
    let disks = [
        None,
        Some(RootDisk::Copy { plainly: true }),
        Some(RootDisk::Copy { plainly: false }),
    ];
    let pages = [PageSize::Small, PageSize::Huge1G, PageSize::Huge2M];
    for (at, main) in mains.into_iter().enumerate() {
        // Files of 0.1 have the states in lower case.
        let state: VmState =
            serde_json::from_str(&format!("\"{}\"", states[at % states.len()].to_lowercase()))
                .unwrap();
        let mut vm = vm();
        vm.state = state;
        vm.main = main;
        vm.origin = origins[at % origins.len()].clone();
        spec_of(&mut vm).root_disk = disks[at % disks.len()].clone();
        spec_of(&mut vm).pages = pages[at % pages.len()];
        for kept in [kept(vm.clone()), vm.into()] {
            super::vm::save(folder, kept.clone(), false).unwrap();
            assert_eq!(super::vm::load(folder).unwrap(), kept);
        }
    }
}

#[test]
fn an_unknown_field_is_ignored_and_an_unknown_version_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm.json");
    let golden = fs::read_to_string(golden("vm-1.json")).unwrap();
    let content = golden.trim_end().split_once(r#""content":"#).unwrap().1;
    let content = content.strip_suffix('}').unwrap();
    let write = |version: u32, content: &str| {
        let sum = crc_fast::crc32_iscsi(content.as_bytes());
        let text = format!(
            r#"{{"format":"jiffy-vm","version":{version},"crc32c":"{sum:08x}","content":{content}}}"#
        );
        fs::write(&path, text).unwrap();
        super::vm::load(folder.path())
    };
    assert_eq!(write(1, content).unwrap(), kept(vm()));
    let novel = content.replacen('{', r#"{"novelty":[1],"#, 1);
    let novel = novel.replacen(r#""read_only""#, r#""novelty":1,"read_only""#, 1);
    assert_eq!(write(1, &novel).unwrap(), kept(vm()));
    for content in [content, &novel, r#"{"name":"web","else":{}}"#] {
        let refused = write(2, content).unwrap_err();
        assert!(refused.is_newer(), "{refused}");
        assert_eq!(
            super::vm::name_in_any(folder.path()).as_deref(),
            Some("web")
        );
    }
    assert!(!write(0, content).unwrap_err().is_newer());
    for hostile in [r#"{"name":"../web"}"#, r#"{"name":3}"#, "[]"] {
        write(2, hostile).unwrap_err();
        assert_eq!(super::vm::name_in_any(folder.path()), None);
    }
}

#[test]
fn records_of_snapshots_do_not_drift() {
    let save = |path: &Path, it| super::snapshot::save(path.parent().unwrap(), it).unwrap();
    let load = |path: &Path| super::snapshot::load(path.parent().unwrap());
    does_not_drift("snapshot-1.json", "snapshot.json", &manifest(), save, load);
    does_not_drift(
        "snapshot-1-cpu.json",
        "snapshot.json",
        &manifest_with_a_profile(),
        save,
        load,
    );
}

#[test]
fn records_of_images_do_not_drift_and_version_1_is_read() {
    let save = |path: &Path, it| super::image::save(path, it).unwrap();
    does_not_drift(
        "image-2.json",
        "image.json",
        &image(),
        save,
        super::image::load,
    );
    let source = ImageSource {
        signed_by: vec![text("sha256:01")],
        ..source()
    };
    let signed = ImageRecord {
        source: Some(source),
        ..image()
    };
    does_not_drift(
        "image-2-signed.json",
        "image.json",
        &signed,
        |path: &Path, live| super::image::save(path, live).unwrap(),
        super::image::load,
    );
    let first = super::image::load(&golden("image-1.json")).unwrap();
    let known = ImageRecord {
        digest: "ab".repeat(32),
        size: 4096,
        entries: 7,
        created: 1,
        built_in: Some((8, -9)),
        ..ImageRecord::default()
    };
    assert_eq!(first, known);
}

#[test]
fn origins_do_not_drift() {
    let origins = vec![
        Origin::Folder {
            folder: PathBuf::from("/peer/chunks"),
        },
        Origin::Registry(RegistryOrigin {
            reference: text("registry.example/team/app@sha256:00"),
            file: text("00112233445566778899aabbccddeeff.jimg"),
            docker_config: Some(PathBuf::from("/d/chunks/00.auth.json")),
            plain_http: true,
            authorities: vec![PathBuf::from("/d/chunks/00.ca.pem")],
        }),
    ];
    let save = |path: &Path, it: Vec<Origin>| super::origins::save(path, &it).unwrap();
    does_not_drift(
        "origins-1.json",
        "origins.json",
        &origins,
        save,
        super::origins::load,
    );
}

#[test]
fn boot_sets_do_not_drift() {
    let set = BootSet {
        digest: "ab".repeat(32),
        reads: ReadUnits {
            unit: 16 << 10,
            rows: vec![(7, 2), (0, 1)],
        },
    };
    let save = |path: &Path, it| super::boot_set::save(path, it).unwrap();
    does_not_drift(
        "boot-1.json",
        "boot.json",
        &set,
        save,
        super::boot_set::load,
    );
}

#[test]
fn lists_of_pages_do_not_drift() {
    let ranges = vec![
        Extent {
            offset: 8192,
            length: 4096,
        },
        Extent {
            offset: 1 << 20,
            length: 65536,
        },
    ];
    let save = |path: &Path, it: Vec<Extent>| super::prefault::save(path, &it).unwrap();
    does_not_drift(
        "prefault-1.json",
        "prefault.json",
        &ranges,
        save,
        super::prefault::load,
    );
}

#[test]
fn networks_do_not_drift() {
    let networks = Networks {
        v4: text("10.118.0.0/16"),
        v6: text("fd12:3456:789a::/64"),
        names: [text("lab"), text("web")].into(),
    };
    let save = |path: &Path, it| super::networks::save(path, it).unwrap();
    let load = super::networks::load;
    does_not_drift("networks-1.json", "networks.json", &networks, save, load);
}

#[test]
fn timelines_do_not_drift() {
    let all = [
        Track::Cli,
        Track::Node,
        Track::Vmm,
        Track::Kernel,
        Track::Init,
        Track::Guest,
    ];
    let timeline = Timeline {
        clock: text("0f8fad5b-d9cb-469f-a165-70867728950e"),
        spans: all
            .into_iter()
            .map(|track| Span::new(track, "kernel", 1, 2).with_detail("detail"))
            .collect(),
        counters: Vec::new(),
    };
    let mut exit = Span::new(Track::Vmm, "exit: MMIO write", 1, 2);
    exit.thread = Some(text("vcpu 0"));
    let deep = Timeline {
        clock: timeline.clock.clone(),
        spans: vec![exit],
        counters: vec![Counter {
            track: Track::Vmm,
            thread: text("vcpu 0"),
            name: text("exits"),
            points: vec![(3, 4)],
        }],
    };
    for (file, timeline) in [
        ("timeline-1.json", timeline),
        ("timeline-1-deep.json", deep),
    ] {
        let save = |path: &Path, it| super::timeline::save(path, it).unwrap();
        let load = super::timeline::load;
        does_not_drift(file, "timeline.json", &timeline, save, load);
    }
}

#[test]
fn configurations_of_artifacts_do_not_drift() {
    let image = ImageArtifact {
        os: text("linux"),
        architecture: text("amd64"),
        digest: "ab".repeat(32),
        size: 4096,
        entries: 7,
        created: 1,
        ext4: true,
        config: config(),
        chunks: vec![text("00112233445566778899aabbccddeeff")],
    };
    let saved = artifact::ImageArtifact::from(image.clone());
    let golden_text = fs::read_to_string(golden("image-artifact-1.json")).unwrap_or_default();
    assert_eq!(
        serde_json::to_string(&saved).unwrap(),
        golden_text.trim_end()
    );
    let read: artifact::ImageArtifact = serde_json::from_str(&golden_text).unwrap();
    assert_eq!(ImageArtifact::from(read), image);

    let snapshot = SnapshotArtifact {
        manifest: manifest(),
        memory: "1".repeat(32),
        chunks: vec!["2".repeat(32)],
        root_disk: Some("3".repeat(32)),
        volumes: vec![VolumeArtifact {
            name: text("data"),
            size: 1 << 20,
            image: "4".repeat(32),
        }],
    };
    let saved = artifact::SnapshotArtifact::from(snapshot.clone());
    let golden_text = fs::read_to_string(golden("snapshot-artifact-1.json")).unwrap_or_default();
    assert_eq!(
        serde_json::to_string(&saved).unwrap(),
        golden_text.trim_end()
    );
    let read: artifact::SnapshotArtifact = serde_json::from_str(&golden_text).unwrap();
    assert_eq!(SnapshotArtifact::from(read), snapshot);
}

/// Files of release 0.1 are still written in the same way, so that a downgrade is possible.
#[test]
fn files_of_release_0_1_are_rewritten_unchanged() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../jiffyd/tests/fixtures/release-0.1/data.tar.zst");
    let unpacked = zstd::Decoder::new(fs::File::open(fixture).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut seen = BTreeMap::<String, u32>::new();
    for entry in tar::Archive::new(unpacked).entries().unwrap() {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().into_owned();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let name = match name.ends_with(".origins.json") {
            true => text("origins.json"),
            false => name,
        };
        let again = folder.path().join(&name);
        let folder = folder.path();
        let save: &dyn Fn() = match name.as_str() {
            "vm.json" => {
                &|| super::vm::save(folder, super::vm::load(folder).unwrap(), true).unwrap()
            }
            "snapshot.json" => {
                &|| super::snapshot::save(folder, super::snapshot::load(folder).unwrap()).unwrap()
            }
            "image.json" => {
                &|| super::image::save(&again, super::image::load(&again).unwrap()).unwrap()
            }
            "origins.json" => {
                &|| super::origins::save(&again, &super::origins::load(&again).unwrap()).unwrap()
            }
            "boot.json" => {
                &|| super::boot_set::save(&again, super::boot_set::load(&again).unwrap()).unwrap()
            }
            "prefault.json" => {
                &|| super::prefault::save(&again, &super::prefault::load(&again).unwrap()).unwrap()
            }
            "timeline.json" => {
                &|| super::timeline::save(&again, super::timeline::load(&again).unwrap()).unwrap()
            }
            _ => continue,
        };
        entry.unpack(&again).unwrap();
        let before = fs::read_to_string(&again).unwrap();
        save();
        assert_eq!(
            fs::read_to_string(&again).unwrap(),
            before,
            "{}",
            path.display()
        );
        *seen.entry(name).or_default() += 1;
    }
    let expected = [
        ("boot.json", 1),
        ("image.json", 2),
        ("origins.json", 2),
        ("prefault.json", 1),
        ("snapshot.json", 5),
        ("timeline.json", 3),
        ("vm.json", 6),
    ];
    assert_eq!(
        seen,
        expected.map(|(name, count)| (text(name), count)).into()
    );
}
