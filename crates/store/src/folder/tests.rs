use super::*;
use crate::samples::{CHUNK, Folder, contents, read_all, small};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

fn names(store: &Store) -> Vec<String> {
    store
        .list()
        .unwrap()
        .into_iter()
        .map(|listed| listed.unwrap().name)
        .collect()
}

fn child_of(store: &Store, parent: &str) -> WriteOptions {
    WriteOptions {
        parent: Some(Arc::new(store.get(parent).unwrap())),
        ..small()
    }
}

#[test]
fn images_are_put_listed_read_and_removed() {
    let folder = Folder::new();
    let store = Store::open(&folder.file("images")).unwrap();
    let bytes = contents("tn.");
    let written = store.put("one", &bytes, &small()).unwrap();
    store
        .put("two", &bytes[..CHUNK], &child_of(&store, "one"))
        .unwrap();
    assert_eq!(names(&store), ["one", "two"]);
    let listed = store.list().unwrap().remove(1).unwrap();
    assert_eq!(listed.size, CHUNK as u64);
    let parent = listed.parent.unwrap();
    assert_eq!((&*parent.name, parent.id), ("one", written.id));
    assert!(read_all(&store.get("one").unwrap()) == bytes);

    let error = store.put("one", &bytes, &small()).unwrap_err();
    let WriteError::Target { source, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(source.kind(), io::ErrorKind::AlreadyExists);
    for name in ["", "..", ".x", "a/b", &"x".repeat(201)] {
        store.put(name, &bytes, &small()).unwrap_err();
        store.get(name).unwrap_err();
        assert_eq!(
            store.remove(name).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }
    assert_eq!(
        store.remove("none").unwrap_err().kind(),
        io::ErrorKind::NotFound
    );
    store.put(&"x".repeat(200), &bytes, &small()).unwrap();
    assert_eq!(store.remove(&"x".repeat(200)).unwrap().removed, 1);
}

#[test]
fn a_parent_is_kept_while_it_has_children() {
    let folder = Folder::new();
    let store = Store::open(folder.path()).unwrap();
    let bytes = contents("tntn");
    store.put("base", &bytes, &small()).unwrap();
    store
        .put("middle", &bytes, &child_of(&store, "base"))
        .unwrap();
    store
        .put("last", &bytes, &child_of(&store, "middle"))
        .unwrap();
    assert_eq!(store.remove("base").unwrap().kept, 1);
    assert_eq!(store.remove("middle").unwrap().kept, 2);
    assert_eq!(names(&store), ["last"]);
    store.get("base").unwrap_err();
    // Another of that name does not take its place.
    store.put("base", &contents("XX"), &small()).unwrap();
    let last = store.get("last").unwrap();
    assert!(read_all(&last) == bytes);
    drop(last);
    let collected = store.remove("last").unwrap();
    assert_eq!((collected.removed, collected.kept), (3, 0));
    assert_eq!(folder.names(), ["base"]);
}

#[test]
fn an_open_image_is_left_alone_and_goes_later() {
    let folder = Folder::new();
    let store = Store::open(folder.path()).unwrap();
    let bytes = contents("tn.X");
    store.put("a", &bytes, &small()).unwrap();
    let open = store.get("a").unwrap();
    assert_eq!(store.remove("a").unwrap().kept, 1);
    assert_eq!(names(&store), [""; 0]);
    assert!(read_all(&open) == bytes);
    // It may even still become a parent.
    let options = WriteOptions {
        parent: Some(Arc::new(open)),
        ..small()
    };
    let options = WriteOptions {
        parent_name: Some("a".into()),
        ..options
    };
    store.put("child", &bytes, &options).unwrap();
    drop(options);
    assert_eq!(store.collect().unwrap().kept, 1);
    assert!(read_all(&store.get("child").unwrap()) == bytes);
    assert_eq!(store.remove("child").unwrap().removed, 2);
    assert_eq!(folder.names(), [""; 0]);
}

#[test]
fn a_damaged_image_is_listed_as_such_and_can_be_removed() {
    let folder = Folder::new();
    let store = Store::open(folder.path()).unwrap();
    store.put("good", &contents("t"), &small()).unwrap();
    fs::write(folder.file("bad"), b"not an image").unwrap();
    let listed = store.list().unwrap();
    assert!(listed[0].is_err() && listed[1].is_ok());
    store.remove("bad").unwrap();
    assert_eq!(folder.names(), ["good"]);
}

/// What a power cut leaves of a writer: any part of a file under a temporary
/// name; and after the rename, the whole.
#[test]
fn a_power_cut_during_a_write_leaves_no_image_and_nothing_for_ever() {
    let folder = Folder::new();
    let store = Store::open(folder.path()).unwrap();
    store.put("before", &contents("tX"), &small()).unwrap();
    let mut stream = Vec::new();
    let bytes = contents("tn.Xt");
    crate::writer::write_to(&mut stream, &bytes, &small()).unwrap();
    for length in (0..stream.len()).step_by(59).chain([stream.len()]) {
        let name = format!(".new.{length:016x}.tmp");
        fs::write(folder.file(&name), &stream[..length]).unwrap();
        assert_eq!(names(&store), ["before"]);
        store.get("new").unwrap_err();
        assert_eq!(store.collect().unwrap().removed, 1);
        assert_eq!(folder.names(), ["before"]);
    }
}

#[test]
fn collectors_writers_and_readers_do_not_disturb_one_another() {
    let folder = Folder::new();
    let store = Store::open(folder.path()).unwrap();
    let bytes = contents("tn.X");
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    store.collect().unwrap();
                    store.list().unwrap();
                }
            });
        }
        for round in 0..30 {
            let (base, child) = (format!("base-{round}"), format!("child-{round}"));
            store.put(&base, &bytes, &small()).unwrap();
            let options = child_of(&store, &base);
            store.remove(&base).unwrap();
            store.put(&child, &bytes, &options).unwrap();
            drop(options);
            assert!(read_all(&store.get(&child).unwrap()) == bytes);
            store.remove(&child).unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    store.collect().unwrap();
    assert_eq!(folder.names(), [""; 0]);
}

#[test]
fn a_hidden_file_of_somebody_else_is_left_alone() {
    let folder = Folder::new();
    let store = Store::open(folder.path()).unwrap();
    let file = fs::File::create(folder.file(".notes")).unwrap();
    file.write_all_at(b"mine", 0).unwrap();
    fs::create_dir(folder.file(".x.0123456789abcdef.tmp")).unwrap();
    assert_eq!(store.collect().unwrap(), Collected::default());
    assert_eq!(folder.names().len(), 2);
}
