//! Copies into and out of the guest.

mod harness;

use harness::{Agent, Connection, wait_until};
use jiffy_wire::agent::{CopyDone, CopyEntry, CopyFrame, CopyKind, Request, VERSION};
use jiffy_wire::frame::MAX_DATA;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

fn copy_in(agent: &Agent, path: &Path) -> Connection {
    let mut connection = agent.connect();
    let path = path.to_str().unwrap().to_owned();
    connection.send(&Request::CopyIn {
        version: VERSION,
        path,
    });
    connection
}

fn entry(path: &str, kind: CopyKind) -> CopyFrame {
    let (uid, gid) = (
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
    );
    let mode = if kind == CopyKind::Folder {
        0o750
    } else {
        0o640
    };
    CopyFrame::Entry(CopyEntry {
        path: path.into(),
        kind,
        mode,
        uid,
        gid,
        mtime: 1_000_000_000,
    })
}

fn file(path: &str, content: &[u8]) -> Vec<CopyFrame> {
    let mut frames = vec![entry(path, CopyKind::File(content.len() as u64))];
    frames.extend(
        content
            .chunks(MAX_DATA)
            .map(|piece| CopyFrame::Data(piece.to_vec())),
    );
    frames
}

fn send(agent: &Agent, path: &Path, frames: Vec<CopyFrame>) -> CopyDone {
    let mut connection = copy_in(agent, path);
    for frame in frames.iter().chain([&CopyFrame::End]) {
        let bytes = jiffy_wire::frame::to_vec(frame).unwrap();
        // The agent closes a refused copy early; its answer can still be read.
        if std::io::Write::write_all(&mut connection.stream, &bytes).is_err() {
            break;
        }
    }
    connection.next().expect("an answer")
}

fn refused(agent: &Agent, path: &Path, frames: Vec<CopyFrame>) -> String {
    send(agent, path, frames).error.expect("a refusal")
}

fn fetch(agent: &Agent, path: &str) -> Result<Vec<(CopyEntry, Vec<u8>)>, String> {
    let mut connection = agent.connect();
    connection.send(&Request::CopyOut {
        version: VERSION,
        path: path.into(),
    });
    let mut entries: Vec<(CopyEntry, Vec<u8>)> = Vec::new();
    loop {
        match connection.next().expect("an end") {
            CopyFrame::Entry(entry) => entries.push((entry, Vec::new())),
            CopyFrame::Data(data) => entries.last_mut().unwrap().1.extend(data),
            CopyFrame::End => return Ok(entries),
            CopyFrame::Failed { message } => return Err(message),
        }
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_file_arrives_with_mode_and_time() {
    let agent = Agent::start();
    let target = agent.path("new");
    let content = vec![7; 200_000];
    let done = send(&agent, &target, file("", &content));
    assert_eq!(
        done,
        CopyDone {
            entries: 1,
            error: None
        }
    );
    let facts = fs::metadata(&target).unwrap();
    assert!(fs::read(&target).unwrap() == content);
    assert_eq!(
        (facts.mode() & 0o7777, facts.mtime()),
        (0o640, 1_000_000_000)
    );
}

#[test]
fn an_existing_file_is_replaced_whole() {
    let agent = Agent::start();
    let target = agent.path("old");
    fs::write(&target, "a longer content than the new one").unwrap();
    assert_eq!(send(&agent, &target, file("", b"new")).error, None);
    assert_eq!(fs::read(&target).unwrap(), b"new");
}

#[test]
fn a_tree_is_copied_in_whole() {
    let agent = Agent::start();
    let target = agent.path("tree");
    let mut frames = vec![entry("", CopyKind::Folder)];
    frames.extend(file("a", b"1"));
    frames.push(entry("sub", CopyKind::Folder));
    frames.extend(file("sub/b", b"22"));
    frames.push(entry("sub/deep", CopyKind::Folder));
    frames.push(entry("sub/link", CopyKind::Symlink("../a".into())));
    frames.extend(file("z", b""));
    assert_eq!(
        send(&agent, &target, frames),
        CopyDone {
            entries: 7,
            error: None
        }
    );
    assert_eq!(names(&target), ["a", "sub", "z"]);
    assert_eq!(names(&target.join("sub")), ["b", "deep", "link"]);
    assert_eq!(fs::read(target.join("sub/b")).unwrap(), b"22");
    assert_eq!(fs::read(target.join("sub/link")).unwrap(), b"1");
    let facts = fs::metadata(target.join("sub")).unwrap();
    // Entries that were added later did not change its time.
    assert_eq!(
        (facts.mode() & 0o7777, facts.mtime()),
        (0o750, 1_000_000_000)
    );
    let link = fs::symlink_metadata(target.join("sub/link")).unwrap();
    assert_eq!(link.mtime(), 1_000_000_000);
}

#[test]
fn a_copy_into_an_existing_folder_keeps_its_content() {
    let agent = Agent::start();
    let target = agent.path("there");
    fs::create_dir(&target).unwrap();
    fs::write(target.join("kept"), "").unwrap();
    // With a name the file goes into the folder; without one the folder gets the content.
    assert_eq!(send(&agent, &target, file("named", b"x")).error, None);
    let mut frames = vec![entry("", CopyKind::Folder)];
    frames.extend(file("inner", b"y"));
    assert_eq!(send(&agent, &target, frames).error, None);
    assert_eq!(names(&target), ["inner", "kept", "named"]);
    let message = refused(&agent, &target, file("", b"x"));
    assert!(message.contains("is a folder"), "{message}");
    let message = refused(&agent, &agent.path("none/"), file("", b"x"));
    assert!(message.contains("there is no folder"), "{message}");
}

#[test]
fn paths_outside_the_target_are_refused() {
    let agent = Agent::start();
    let outside = agent.path("outside");
    fs::create_dir(&outside).unwrap();
    for bad in [
        "../outside/x",
        "/etc/x",
        "a/../../outside/x",
        "",
        ".",
        "a//b",
        "x\0y",
    ] {
        let mut frames = vec![entry("", CopyKind::Folder), entry("a", CopyKind::Folder)];
        frames.extend(file(bad, b"!"));
        refused(&agent, &agent.path("target"), frames);
    }
    assert!(names(&outside).is_empty());
}

#[test]
fn symlinks_sent_in_the_copy_are_not_followed() {
    let agent = Agent::start();
    let outside = agent.path("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("file"), "safe").unwrap();
    let place = outside.to_str().unwrap();
    // A folder reached through a link.
    let mut frames = vec![
        entry("", CopyKind::Folder),
        entry("way", CopyKind::Symlink(place.into())),
    ];
    frames.push(entry("way", CopyKind::Folder));
    frames.extend(file("way/x", b"!"));
    let message = refused(&agent, &agent.path("one"), frames);
    assert!(message.contains("not a folder"), "{message}");
    // A file reached through a link: the link is replaced, not followed.
    let link = CopyKind::Symlink(format!("{place}/file"));
    let mut frames = vec![entry("", CopyKind::Folder), entry("f", link)];
    frames.extend(file("f", b"!"));
    assert_eq!(send(&agent, &agent.path("two"), frames).error, None);
    assert_eq!(names(&outside), ["file"]);
    assert_eq!(fs::read(outside.join("file")).unwrap(), b"safe");
}

#[test]
fn an_existing_symlink_below_the_target_is_not_followed() {
    let agent = Agent::start();
    let (outside, target) = (agent.path("outside"), agent.path("target"));
    fs::create_dir(&outside).unwrap();
    fs::create_dir(&target).unwrap();
    symlink(&outside, target.join("sub")).unwrap();
    let mut frames = vec![entry("", CopyKind::Folder), entry("sub", CopyKind::Folder)];
    frames.extend(file("sub/x", b"!"));
    refused(&agent, &target, frames);
    assert!(names(&outside).is_empty());
}

#[test]
fn an_existing_symlink_in_the_target_is_not_followed() {
    let agent = Agent::start();
    let (outside, target) = (agent.path("outside"), agent.path("target"));
    fs::create_dir(&outside).unwrap();
    fs::create_dir(&target).unwrap();
    symlink(&outside, target.join("site")).unwrap();
    let mut frames = vec![entry("site", CopyKind::Folder)];
    frames.extend(file("x", b"!"));
    let message = refused(&agent, &target, frames);
    assert!(
        message.contains("target/site: a part of the path is not a folder"),
        "{message}"
    );
    assert!(names(&outside).is_empty());
    // A file or link replaces it.
    assert_eq!(send(&agent, &target, file("site", b"new")).error, None);
    assert_eq!(fs::read(target.join("site")).unwrap(), b"new");
    // The folder itself may be a link, because the user named it.
    let way = agent.path("way");
    symlink(&target, &way).unwrap();
    let mut frames = vec![entry("other", CopyKind::Folder)];
    frames.extend(file("x", b"1"));
    assert_eq!(send(&agent, &way, frames).error, None);
    assert_eq!(fs::read(target.join("other/x")).unwrap(), b"1");
}

#[test]
fn an_aborted_copy_leaves_no_partial_file() {
    let agent = Agent::start();
    let folder = agent.path("f");
    fs::create_dir(&folder).unwrap();
    let target = folder.join("file");
    fs::write(&target, "old").unwrap();
    let short = vec![entry("", CopyKind::File(10)), CopyFrame::Data(vec![1; 9])];
    assert!(refused(&agent, &target, short).contains("shorter"));
    let long = vec![entry("", CopyKind::File(10)), CopyFrame::Data(vec![1; 11])];
    assert!(refused(&agent, &target, long).contains("longer"));
    let stray = vec![
        entry("", CopyKind::Symlink("x".into())),
        CopyFrame::Data(vec![1]),
    ];
    assert!(refused(&agent, &folder.join("stray"), stray).contains("belong"));
    assert!(refused(&agent, &target, vec![]).contains("empty"));
    let failed = vec![CopyFrame::Failed {
        message: "the disk here is broken".into(),
    }];
    assert_eq!(refused(&agent, &target, failed), "the disk here is broken");
    // The host disconnects in the middle.
    let mut connection = copy_in(&agent, &target);
    connection.send(&entry("", CopyKind::File(1_000_000)));
    connection.send(&CopyFrame::Data(vec![1; 1000]));
    wait_until("the copy has begun", || names(&folder).len() > 2);
    drop(connection);
    wait_until("nothing is left of it", || {
        names(&folder) == ["file", "stray"]
    });
    assert_eq!(fs::read(&target).unwrap(), b"old");
    wait_until("its process is gone", || agent.children().is_empty());
}

#[test]
fn a_tree_is_copied_out_unchanged() {
    let agent = Agent::start();
    let tree = agent.path("tree");
    fs::create_dir_all(tree.join("sub")).unwrap();
    fs::write(tree.join("sub/data"), vec![9; 150_000]).unwrap();
    fs::set_permissions(tree.join("sub/data"), fs::Permissions::from_mode(0o4711)).unwrap();
    symlink("sub/data", tree.join("link")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        tree.join("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    let entries = fetch(&agent, tree.to_str().unwrap()).unwrap();
    let (root, rest) = entries.split_first().unwrap();
    assert_eq!(
        (root.0.path.as_str(), &root.0.kind),
        ("", &CopyKind::Folder)
    );
    let by_path: BTreeMap<&str, &(CopyEntry, Vec<u8>)> = rest
        .iter()
        .map(|entry| (entry.0.path.as_str(), entry))
        .collect();
    assert_eq!(
        by_path.keys().copied().collect::<Vec<_>>(),
        ["link", "sub", "sub/data"]
    );
    assert_eq!(by_path["link"].0.kind, CopyKind::Symlink("sub/data".into()));
    let data = by_path["sub/data"];
    assert_eq!((data.0.mode, data.1.len()), (0o4711, 150_000));
    let order = |path: &str| rest.iter().position(|entry| entry.0.path == path).unwrap();
    assert!(order("sub") < order("sub/data"));
}

#[test]
fn a_failed_copy_out_names_the_path_and_reason() {
    let agent = Agent::start();
    for (path, words) in [
        ("/no/such/file", "no such file"),
        ("relative", "absolute"),
        ("/dev/null", "neither"),
        ("/etc/passwd/.", "not a directory"),
    ] {
        let message = fetch(&agent, path).unwrap_err();
        assert!(
            message.contains(words) && message.contains(path),
            "{message}"
        );
    }
}

#[test]
fn proc_files_are_copied_out_with_their_content() {
    let agent = Agent::start();
    let entries = fetch(&agent, "/proc/version").unwrap();
    assert_eq!(entries[0].1, fs::read("/proc/version").unwrap());
    assert_eq!(entries[0].0.kind, CopyKind::File(entries[0].1.len() as u64));
}

#[test]
fn sysfs_attributes_are_copied_with_their_real_length() {
    let agent = Agent::start();
    // Its size is reported as a page.
    let attribute = "/sys/class/net/lo/address";
    let entries = fetch(&agent, attribute).unwrap();
    assert_eq!(entries[0].1, fs::read(attribute).unwrap());
    assert_eq!(entries[0].0.kind, CopyKind::File(entries[0].1.len() as u64));
}

#[test]
fn unreadable_proc_files_are_errors_and_not_copied_as_empty() {
    let agent = Agent::start();
    // Its size is reported as 0, and it has eight bytes per page of address space.
    let message = fetch(&agent, "/proc/self/pagemap").unwrap_err();
    assert!(message.contains("more than"), "{message}");
    // The first page is never mapped.
    let message = fetch(&agent, "/proc/self/mem").unwrap_err();
    assert!(message.starts_with("/proc/self/mem: "), "{message}");
    // Such files in a tree do not stop the copy.
    let entries = fetch(&agent, "/proc/self/attr").unwrap();
    assert!(entries.len() > 1);
}

#[test]
fn a_trailing_dot_copies_a_folder_and_no_symlink() {
    let agent = Agent::start();
    let folder = format!("{}/.", agent.folder.path().display());
    assert_eq!(fetch(&agent, &folder).unwrap()[0].0.kind, CopyKind::Folder);
    let link = agent.path("link");
    symlink(agent.folder.path(), &link).unwrap();
    assert_eq!(
        fetch(&agent, link.to_str().unwrap()).unwrap()[0].0.kind,
        CopyKind::Symlink(agent.folder.path().to_str().unwrap().into())
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// A tree that is copied in and out again is unchanged.
    #[test]
    fn any_tree_survives_copy_in_and_copy_out(
        tree in proptest::collection::btree_map("[a-d]{1,2}(/[a-d]{1,2}){0,2}", proptest::collection::vec(any::<u8>(), 0..70_000), 0..8)
    ) {
        // A name can't be both file and folder, so files with entries below are left out.
        let files: BTreeMap<&String, &Vec<u8>> = tree
            .iter()
            .filter(|(path, _)| !tree.keys().any(|other| other.starts_with(&format!("{path}/"))))
            .collect();
        let mut sent: BTreeMap<String, Option<Vec<u8>>> = BTreeMap::new();
        for (path, content) in files {
            let mut above = path.as_str();
            while let Some((folder, _)) = above.rsplit_once('/') {
                sent.insert(folder.to_owned(), None);
                above = folder;
            }
            sent.insert(path.clone(), Some(content.clone()));
        }
        // Depth-first: order by components.
        let mut order: Vec<&String> = sent.keys().collect();
        order.sort_by_key(|path| path.split('/').map(str::to_owned).collect::<Vec<_>>());
        let mut frames = vec![entry("", CopyKind::Folder)];
        for path in order {
            match &sent[path] {
                None => frames.push(entry(path, CopyKind::Folder)),
                Some(content) => frames.extend(file(path, content)),
            }
        }
        let agent = Agent::start();
        let target = agent.path("tree");
        prop_assert_eq!(send(&agent, &target, frames).error, None);
        let back = fetch(&agent, target.to_str().unwrap()).unwrap();
        let got: BTreeMap<String, Option<Vec<u8>>> = back
            .into_iter()
            .skip(1)
            .map(|(entry, data)| {
                let content = (entry.kind != CopyKind::Folder).then_some(data);
                (entry.path, content)
            })
            .collect();
        prop_assert!(got == sent);
    }
}
