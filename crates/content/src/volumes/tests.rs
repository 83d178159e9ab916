use super::*;
use jiffy_wire::api::ErrorKind;

fn volume(name: &str, size_mib: Option<u64>, read_only: bool) -> VolumeUse {
    VolumeUse {
        name: name.into(),
        size_mib,
        read_only,
        ..VolumeUse::default()
    }
}

#[test]
fn one_writer_or_many_readers() {
    let folder = tempfile::tempdir().unwrap();
    let volumes = Arc::new(Volumes::new(folder.path().into(), Arc::default()));
    volumes
        .create_missing(&[volume("data", Some(2), false)])
        .unwrap();
    let read = [volume("data", None, true)];
    let write = [volume("data", None, false)];
    let one = volumes.hold(&read, "one").unwrap();
    let two = volumes.hold(&read, "two").unwrap();
    assert_eq!(volumes.list().unwrap()[0].used_by, ["one", "two"]);
    let refused = volumes.hold(&write, "three").unwrap_err();
    assert_eq!(refused.0.kind, ErrorKind::Conflict);
    drop((one, two));
    let writer = volumes.hold(&write, "three").unwrap();
    assert!(volumes.hold(&read, "one").is_err());
    drop(writer);
    assert!(volumes.list().unwrap()[0].used_by.is_empty());
    // A failed start must not release the leases of the VM that runs.
    let runs = volumes.hold(&read, "one").unwrap();
    drop(volumes.hold(&read, "one").unwrap());
    assert!(volumes.hold(&write, "two").is_err());
    drop(runs);
    volumes.hold(&write, "two").unwrap();
}

#[test]
fn a_failed_request_leaves_no_volume() {
    let folder = tempfile::tempdir().unwrap();
    let volumes = Volumes::new(folder.path().into(), Arc::default());
    for bad in [
        volume("absent", None, false),
        volume("none", Some(0), false),
        volume("../up", Some(1), false),
        volume("huge", Some(u64::MAX), false),
    ] {
        let error = volumes
            .create_missing(&[volume("first", Some(1), false), bad])
            .unwrap_err();
        assert!(error.0.message.len() > 10);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_volume_that_another_vm_holds_is_not_discarded() {
    let folder = tempfile::tempdir().unwrap();
    let volumes = Arc::new(Volumes::new(folder.path().into(), Arc::default()));
    let wanted = [volume("data", Some(1), false)];
    let made = volumes.create_missing(&wanted).unwrap();
    let leases = volumes.hold(&wanted, "other").unwrap();
    volumes.discard(&made);
    assert!(volumes.file("data").exists());
    drop(leases);
    volumes.discard(&made);
    assert!(!volumes.file("data").exists());
}

#[test]
fn a_volume_that_a_vm_holds_or_that_is_being_changed_is_not_removed() {
    let folder = tempfile::tempdir().unwrap();
    let volumes = Arc::new(Volumes::new(folder.path().into(), Arc::default()));
    let wanted = [volume("data", Some(1), false)];
    volumes.create_missing(&wanted).unwrap();
    let leases = volumes.hold(&wanted, "box").unwrap();
    let refused = volumes.remove("data").unwrap_err();
    assert_eq!(refused.0.kind, ErrorKind::Conflict);
    assert!(refused.0.message.contains("box"), "{}", refused.0.message);
    drop(leases);
    let resize = volumes.exclusive("data", "resized").unwrap();
    let refused = volumes.remove("data").unwrap_err();
    assert!(refused.0.message.contains("resized"));
    let refused = volumes.hold(&wanted, "box").unwrap_err();
    assert!(refused.0.message.contains("resized"));
    assert!(volumes.file("data").exists());
    drop(resize);
    volumes.remove("data").unwrap();
    assert!(!volumes.file("data").exists());
    // No lease is held on a volume that is gone.
    let gone = volumes.hold(&wanted, "box").unwrap_err();
    assert_eq!(gone.0.kind, ErrorKind::NotFound);
    assert!(volumes.users(&wanted).is_empty());
}

#[test]
fn an_existing_volume_keeps_its_size() {
    let folder = tempfile::tempdir().unwrap();
    let volumes = Volumes::new(folder.path().into(), Arc::default());
    let make = |size| volumes.create_missing(&[volume("data", size, false)]);
    assert_eq!(make(Some(2)).unwrap(), ["data"]);
    assert!(make(Some(2)).unwrap().is_empty());
    assert!(make(None).unwrap().is_empty());
    assert_eq!(make(Some(3)).unwrap_err().0.kind, ErrorKind::Conflict);
}

#[test]
fn a_new_volume_has_a_file_system_unless_it_is_raw_or_tiny() {
    let folder = tempfile::tempdir().unwrap();
    let volumes = Volumes::new(folder.path().into(), Arc::default());
    volumes.create("ext4", 64, false).unwrap();
    volumes.create("raw", 64, true).unwrap();
    volumes
        .create_missing(&[volume("tiny", Some(1), false)])
        .unwrap();
    let found = |name: &str| {
        let file = File::open(volumes.file(name)).unwrap();
        jiffy_ext4::inspect(&file).unwrap().map(|found| found.bytes)
    };
    assert_eq!(found("ext4"), Some(64 << 20));
    assert_eq!((found("raw"), found("tiny")), (None, None));
    let list = volumes.list().unwrap();
    let sizes: Vec<u64> = list.iter().map(|volume| volume.size_mib).collect();
    assert_eq!(sizes, [64, 64, 1]);
    assert!(list[0].disk_bytes > 0 && list[0].disk_bytes < 1 << 20);
    assert_eq!(list[1].disk_bytes, 0);
    let again = volumes.create("raw", 64, true).unwrap_err();
    assert_eq!(again.0.kind, ErrorKind::Conflict);
    let tiny = volumes.create("other", 1, false).unwrap_err();
    assert!(tiny.0.hint.unwrap().contains("--raw"));
}

#[test]
fn a_volume_grows_and_shrinks_only_over_empty_space() {
    use std::os::unix::fs::FileExt;
    let folder = tempfile::tempdir().unwrap();
    let volumes = Arc::new(Volumes::new(folder.path().into(), Arc::default()));
    volumes.create("ext4", 16, false).unwrap();
    volumes.create("raw", 16, true).unwrap();
    let length = |name: &str| fs::metadata(volumes.file(name)).unwrap().len() >> 20;

    assert!(
        volumes
            .resize("ext4", 64)
            .unwrap()
            .unwrap()
            .contains("mount=")
    );
    assert_eq!(length("ext4"), 64);
    assert_eq!(volumes.resize("ext4", 32).unwrap(), None);
    assert_eq!(length("ext4"), 32);
    let refused = volumes.resize("ext4", 15).unwrap_err();
    assert!(refused.0.message.contains("file system"));
    assert_eq!(length("ext4"), 32);

    assert_eq!(volumes.resize("raw", 64).unwrap(), None);
    let file = OpenOptions::new()
        .write(true)
        .open(volumes.file("raw"))
        .unwrap();
    file.write_all_at(b"data", 40 << 20).unwrap();
    let refused = volumes.resize("raw", 40).unwrap_err();
    assert!(refused.0.message.contains("data"));
    volumes.resize("raw", 41).unwrap();
    assert_eq!(length("raw"), 41);

    assert!(volumes.resize("raw", 0).is_err());
    let missing = volumes.resize("none", 1).unwrap_err();
    assert_eq!(missing.0.kind, ErrorKind::NotFound);
    let leases = volumes.hold(&[volume("raw", None, true)], "box").unwrap();
    let refused = volumes.resize("raw", 64).unwrap_err();
    assert!(refused.0.message.contains("box"));
    drop(leases);
    volumes.resize("raw", 64).unwrap();
}

#[test]
fn a_change_that_panics_does_not_hold_its_volume() {
    let folder = tempfile::tempdir().unwrap();
    let volumes = Volumes::new(folder.path().into(), Arc::default());
    volumes.create("data", 1, true).unwrap();
    let change = || {
        let _lease = volumes.exclusive("data", "resized").unwrap();
        panic!("so")
    };
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(change)).unwrap_err();
    volumes.remove("data").unwrap();
}

#[test]
fn a_failed_volume_creation_reports_the_first_error() {
    // A device in the folder's place: no file can be made in it, and syncing it is another error.
    let volumes = Volumes::new("/dev/null".into(), Arc::default());
    let error = volumes.make("data", 1 << 20, true).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotADirectory);
}
