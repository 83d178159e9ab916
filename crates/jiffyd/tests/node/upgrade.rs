//! Data of release 0.1 under this daemon (`tests/fixtures/release-0.1/make` says how it was made,
//! from real VMs).

use crate::daemon::{Daemon, bad_vm, command, named, shell, tar_of, vm};
use jiffy_wire::agent::ExitStatus;
use jiffy_wire::api::{CreateVm, ErrorKind, Image, Snapshot, Vm, VmState, Volume};
use jiffy_wire::timeline::Timeline;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// The registry in the fixture's image names.
const REGISTRY: &str = "127.0.0.1:5000/tests";

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/release-0.1/data.tar.zst")
}

/// A daemon on this data that is not started yet.
fn on_old_data() -> Daemon {
    let daemon = Daemon::prepared(&[]);
    fs::create_dir(&daemon.data).unwrap();
    let packed = zstd::Decoder::new(File::open(fixture()).unwrap()).unwrap();
    tar::Archive::new(packed).unpack(&daemon.data).unwrap();
    daemon
}

/// All files below a folder, with their sizes.
fn files(folder: &Path, found: &mut BTreeMap<PathBuf, u64>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files(&path, found),
            false => drop(found.insert(path.clone(), fs::metadata(&path).unwrap().len())),
        }
    }
}

#[test]
fn the_data_of_release_0_1_is_migrated() {
    let mut daemon = on_old_data();
    let kept = ["chunks", "snapshots", "vms", "volumes"];
    let found = |daemon: &Daemon| {
        let mut all = BTreeMap::new();
        for folder in kept {
            files(&daemon.data.join(folder), &mut all);
        }
        all
    };
    let before = found(&daemon);
    daemon.up();

    let vms: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
    let states: BTreeMap<&str, VmState> =
        vms.iter().map(|vm| (vm.name.as_str(), vm.state)).collect();
    let expected = [
        ("created", VmState::Created),
        ("layered", VmState::Exited),
        ("parent", VmState::Exited),
        // It was running when its host stopped.
        ("running", VmState::Exited),
        ("sleeper", VmState::Hibernated),
        ("stopped", VmState::Exited),
    ];
    assert_eq!(states, BTreeMap::from(expected));
    let stopped = daemon.vm("stopped");
    assert_eq!(
        (stopped.exit, stopped.error),
        (Some(ExitStatus::Code(3)), None)
    );
    assert_eq!(stopped.disks[0].mount.as_deref(), Some("/data"));
    assert_eq!(daemon.logs("stopped", ""), ("out\n".into(), "err\n".into()));
    let timeline: Timeline = daemon.get("/v1/vms/stopped/timeline").json();
    assert!(timeline.find("PID 1").is_some() || timeline.find("gate entered").is_some());
    assert!(daemon.vm("running").error.unwrap().contains("VMM"));

    let snapshots: Vec<Snapshot> = daemon.get("/v1/snapshots").json();
    let names: Vec<&str> = snapshots.iter().map(|it| it.name.as_str()).collect();
    let pulled = format!("{REGISTRY}/whole:1");
    assert_eq!(names, [pulled.as_str(), "second", "whole"]);
    let whole = snapshots.iter().find(|it| it.name == "whole").unwrap();
    assert_eq!(whole.children, ["second"]);
    assert_eq!(whole.used_by, ["sleeper"]);

    let images: Vec<Image> = daemon.get("/v1/images").json();
    let mine = images
        .iter()
        .find(|it| it.name == format!("{REGISTRY}/mine:1"))
        .unwrap();
    assert!(mine.source.as_ref().unwrap().manifest.is_some());
    assert!(mine.present < mine.size, "most of it is elsewhere");
    let volumes: Vec<Volume> = daemon.get("/v1/volumes").json();
    assert_eq!(
        (volumes[0].name.as_str(), volumes[0].size_mib),
        ("data", 16)
    );
    assert_eq!(volumes[0].attached_to, ["stopped"]);

    // None of the data was removed, and a VM can be started.
    daemon.post("/v1/vms/created/start", b"").json::<Vm>();
    daemon.when("created", VmState::Exited);
    let after = found(&daemon);
    let gone: Vec<_> = before
        .keys()
        .filter(|path| !after.contains_key(*path))
        .collect();
    assert!(gone.is_empty(), "{gone:?}");
    daemon.killed();
    daemon.up();
    assert_eq!(daemon.vm("sleeper").state, VmState::Hibernated);
}

#[test]
fn a_newer_guest_is_served_in_this_releases_protocol() {
    let mut daemon = Daemon::start();
    daemon
        .run_detached(named("newer", bad_vm("newer", None)))
        .json::<Vm>();
    for _ in 0..2 {
        let finished = daemon
            .exec("newer", &shell("echo understood"))
            .unwrap()
            .finish();
        assert_eq!(finished.text(), "understood\n");
        daemon.killed();
        daemon.up();
        daemon.when("newer", VmState::Running);
    }
    let stopped: Vm = daemon.post("/v1/vms/newer/stop", b"").json();
    assert_eq!((stopped.state, stopped.error), (VmState::Exited, None));
}

/// Increments the version of a record.
fn make_newer(record: &Path) {
    let text = fs::read_to_string(record).unwrap();
    let version = [1, 2]
        .into_iter()
        .find(|it| text.contains(&format!("\"version\":{it},")));
    let version = version.unwrap();
    let newer = text.replace(
        &format!("\"version\":{version},"),
        &format!("\"version\":{},", version + 1),
    );
    fs::write(record, newer).unwrap();
}

#[test]
fn records_of_a_newer_release_are_refused_and_kept() {
    let mut daemon = on_old_data();
    daemon.up();
    let tar = tar_of(&[("mine", b"here")]);
    daemon
        .post("/v1/images/own?kind=root&from=test", &tar)
        .json::<Image>();
    daemon.killed();
    let records = [
        "images/own/image.json",
        "snapshots/second/snapshot.json",
        "vms/45cb419d7d16/vm.json",
        // Belongs to the release that wrote it; this daemon makes its own.
        "images/base/image.json",
    ]
    .map(|name| daemon.data.join(name));
    records.iter().for_each(|record| make_newer(record));
    let before = records.clone().map(|record| fs::read(record).unwrap());
    let mut chunks = BTreeMap::new();
    files(&daemon.data.join("chunks"), &mut chunks);
    daemon.up();

    let own = CreateVm {
        image: Some("own".into()),
        ..vm(command(&["true"]))
    };
    let refused = daemon.run_detached(own).error(ErrorKind::Internal);
    assert!(refused.message.contains("version 3"), "{refused:?}");
    assert!(refused.hint.unwrap().contains("newer release"));
    let from = CreateVm {
        from: Some("second".into()),
        ..CreateVm::default()
    };
    let refused = daemon.run_detached(from).error(ErrorKind::Internal);
    assert!(refused.hint.unwrap().contains("newer release"));
    let sleeper = daemon.vm("sleeper");
    assert_eq!(sleeper.state, VmState::Hibernated);
    assert!(sleeper.error.unwrap().contains("newer release"));

    // Everything else works, and removing an image removes nothing of these.
    daemon
        .run_detached(named("next", vm(command(&["true"]))))
        .json::<Vm>();
    let other = "/v1/images/127.0.0.1%3A5000%2Ftests%2Fmine%3A1";
    assert_eq!(daemon.delete(other).status, 204);
    daemon.shut_down();
    daemon.up();
    let mut kept = BTreeMap::new();
    files(&daemon.data.join("chunks"), &mut kept);
    assert_eq!(
        kept, chunks,
        "chunks that a newer record may need were removed"
    );
    for (record, before) in records.iter().zip(before).take(3) {
        assert_eq!(fs::read(record).unwrap(), before, "{}", record.display());
    }
}

#[test]
fn a_users_base_image_with_a_newer_record_is_kept() {
    let mut daemon = Daemon::start();
    let tar = tar_of(&[("mine", b"here")]);
    daemon
        .post("/v1/images/base?kind=root&from=test", &tar)
        .json::<Image>();
    daemon.killed();
    let record = daemon.data.join("images/base/image.json");
    make_newer(&record);
    let before = fs::read(&record).unwrap();
    daemon.up();
    let refused = daemon.run_detached(vm(command(&["true"])));
    let refused = refused.error(ErrorKind::Internal);
    assert!(refused.message.contains("version 3"), "{refused:?}");
    assert_eq!(fs::read(&record).unwrap(), before);
}
