//! `jiffy cp`, with a guest that may be hostile.

mod support;

use jiffy_wire::agent::{CopyDone, CopyEntry, CopyFrame, CopyKind};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Output, Stdio};
use std::sync::{Arc, Mutex};
use support::{FakeNode, eventually, stderr};

fn entry(path: &str, kind: CopyKind, mode: u32) -> CopyFrame {
    CopyFrame::Entry(CopyEntry {
        path: path.into(),
        kind,
        mode,
        uid: 1234,
        gid: 1234,
        mtime: 1_000_000_000,
    })
}

fn folder(path: &str) -> CopyFrame {
    entry(path, CopyKind::Folder, 0o755)
}

fn file(path: &str, size: u64) -> CopyFrame {
    entry(path, CopyKind::File(size), 0o640)
}

fn link(path: &str, target: &str) -> CopyFrame {
    entry(path, CopyKind::Symlink(target.into()), 0o777)
}

fn data(bytes: &[u8]) -> CopyFrame {
    CopyFrame::Data(bytes.to_vec())
}

/// A node whose VM sends these frames for every copy out.
fn node_sending(frames: Vec<CopyFrame>) -> FakeNode {
    FakeNode::new(move |_, peer| {
        peer.upgrade();
        for frame in &frames {
            peer.send(frame);
        }
    })
}

fn copy_out(
    frames: Vec<CopyFrame>,
    source: &str,
    prepare: impl Fn(&Path),
    to: &str,
) -> (FakeNode, Output) {
    let node = node_sending(frames);
    let out = node.folder.path().join("out");
    fs::create_dir(&out).unwrap();
    prepare(&out);
    let output = node
        .jiffy()
        .current_dir(&out)
        .args(["cp", source, to])
        .output()
        .unwrap();
    (node, output)
}

fn tree() -> Vec<CopyFrame> {
    vec![
        entry("", CopyKind::Folder, 0o750),
        folder("a"),
        file("a/one", 3),
        data(b"on"),
        data(b"e"),
        link("a/link", "/etc/passwd"),
        entry("read-only", CopyKind::Folder, 0o555),
        entry("read-only/suid", CopyKind::File(0), 0o6755),
        file("z", 0),
        CopyFrame::End,
    ]
}

#[test]
fn a_tree_is_copied_out_with_modes_times_and_links() {
    let (node, output) = copy_out(tree(), "web:/srv/tree", |_| {}, "new");
    assert_eq!(stderr(&output), "");
    assert_eq!(output.status.code(), Some(0));
    let new = node.folder.path().join("out/new");
    assert_eq!(fs::read(new.join("a/one")).unwrap(), b"one");
    let facts = fs::metadata(new.join("a/one")).unwrap();
    assert_eq!(facts.mode() & 0o7777, 0o640);
    assert_eq!(facts.mtime(), 1_000_000_000);
    assert_eq!(facts.uid(), rustix::process::geteuid().as_raw());
    assert_eq!(
        fs::read_link(new.join("a/link")).unwrap(),
        Path::new("/etc/passwd")
    );
    assert_eq!(fs::metadata(&new).unwrap().mode() & 0o7777, 0o750);
    assert_eq!(
        fs::metadata(new.join("read-only")).unwrap().mode() & 0o7777,
        0o555
    );
    let suid = fs::metadata(new.join("read-only/suid")).unwrap();
    assert_eq!(suid.mode() & 0o7777, 0o755, "no set-user-ID from a guest");
    assert_eq!(
        node.lines(),
        ["POST /v1/vms/web/copy-out?path=%2Fsrv%2Ftree"]
    );
    let litter = fs::read_dir(new.join("a")).unwrap().count();
    assert_eq!(litter, 2, "no temporary files");
}

#[test]
fn destinations_follow_the_rules_of_cp() {
    let one = || vec![file("", 1), data(b"1"), CopyFrame::End];
    // Into a folder, under its own name.
    let (node, output) = copy_out(one(), "web:/etc/motd", |_| {}, ".");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(node.folder.path().join("out/motd").is_file());
    // A new name; an old file is replaced.
    let (node, _) = copy_out(
        one(),
        "web:/etc/motd",
        |out| fs::write(out.join("x"), "old").unwrap(),
        "x",
    );
    assert_eq!(fs::read(node.folder.path().join("out/x")).unwrap(), b"1");
    // Through a link that the user named.
    let (node, _) = copy_out(
        one(),
        "web:/etc/motd",
        |out| {
            fs::write(out.join("real"), "old").unwrap();
            symlink("real", out.join("x")).unwrap();
        },
        "x",
    );
    assert_eq!(fs::read(node.folder.path().join("out/real")).unwrap(), b"1");
    assert!(node.folder.path().join("out/x").is_symlink());
    // A folder that must exist.
    let (_, output) = copy_out(one(), "web:/etc/motd", |_| {}, "missing/");
    assert_eq!(stderr(&output), "jiffy: there is no folder missing/\n");
    let (_, output) = copy_out(one(), "web:/etc/motd", |_| {}, "missing/x");
    assert_eq!(stderr(&output), "jiffy: there is no folder missing\n");
    // A device is written to, not replaced.
    let (_, output) = copy_out(one(), "web:/etc/motd", |_| {}, "/dev/stdout");
    assert_eq!(output.stdout, b"1", "{}", stderr(&output));
    // A folder under its name, or its contents.
    let make = |out: &Path| fs::create_dir(out.join("d")).unwrap();
    let (node, _) = copy_out(tree(), "web:/srv/tree", make, "d");
    assert!(node.folder.path().join("out/d/tree/a/one").is_file());
    let before = 0o700;
    let make = |out: &Path| {
        fs::create_dir(out.join("d")).unwrap();
        fs::set_permissions(out.join("d"), fs::Permissions::from_mode(before)).unwrap();
    };
    let (node, _) = copy_out(tree(), "web:/srv/tree/.", make, "d");
    let d = node.folder.path().join("out/d");
    assert!(d.join("a/one").is_file());
    assert_eq!(
        fs::metadata(&d).unwrap().mode() & 0o777,
        before,
        "an existing folder keeps its mode"
    );
    // A folder in place of a file.
    let (_, output) = copy_out(
        tree(),
        "web:/srv/tree",
        |out| fs::write(out.join("f"), "").unwrap(),
        "f",
    );
    assert_eq!(stderr(&output), "jiffy: ./f exists and is not a folder\n");
}

#[test]
fn hostile_entries_never_leave_the_destination() {
    let outside = |node: &FakeNode| {
        let root = node.folder.path();
        let mut names: Vec<_> = fs::read_dir(root)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["out", "run"], "something was written outside");
    };
    let bad_paths = [
        "../evil",
        "/etc/evil",
        "a/../../evil",
        "..",
        ".",
        "a//b",
        "a/",
        "a/./b",
        "nul\0byte",
        &"n".repeat(256),
        &"d/".repeat(2100),
    ];
    for path in bad_paths {
        let frames = vec![
            folder(""),
            folder("a"),
            file(path, 1),
            data(b"!"),
            CopyFrame::End,
        ];
        let (node, output) = copy_out(frames, "web:/x", |_| {}, "new");
        assert_eq!(output.status.code(), Some(125), "{path:?}");
        assert!(
            stderr(&output).starts_with("jiffy: the VM sent an entry"),
            "{}",
            stderr(&output)
        );
        outside(&node);
    }
    // Through a link that was just sent.
    for target in ["..", "/tmp", "/"] {
        let frames = vec![
            folder(""),
            link("out", target),
            folder("out"),
            file("out/evil", 1),
            data(b"!"),
            CopyFrame::End,
        ];
        let (node, output) = copy_out(frames, "web:/x", |_| {}, "new");
        assert_eq!(output.status.code(), Some(125), "{target}");
        outside(&node);
        assert!(!Path::new("/tmp/evil").exists() && !Path::new("/evil").exists());
    }
    // A link in place of a folder's parent.
    let frames = vec![
        folder(""),
        link("a", ".."),
        file("a/evil", 1),
        data(b"!"),
        CopyFrame::End,
    ];
    let (node, output) = copy_out(frames, "web:/x", |_| {}, "new");
    assert_eq!(output.status.code(), Some(125));
    outside(&node);
}

#[test]
fn invalid_copy_streams_leave_no_partial_files() {
    let streams: Vec<(Vec<CopyFrame>, &str)> = vec![
        (vec![CopyFrame::End], "empty copy"),
        (vec![data(b"x")], "belong to no file"),
        (vec![file("", 1), data(b"xy")], "more bytes"),
        (
            vec![file("", 3), data(b"xy"), CopyFrame::End],
            "fewer bytes",
        ),
        (
            vec![file("", u64::MAX), data(b"xy")],
            "lost before the copy was complete",
        ),
        (vec![file("x", 0)], "out of order"),
        (vec![folder(""), folder("")], "out of order"),
        (vec![folder(""), file("never/sent", 0)], "out of order"),
        (vec![folder(""), data(b"x")], "belong to no file"),
        (vec![link("", ""), CopyFrame::End], "can't be written"),
        (vec![], "lost before the copy was complete"),
        (
            vec![CopyFrame::Failed {
                message: "/x: no such file".into(),
            }],
            "jiffy: /x: no such file",
        ),
    ];
    for (frames, said) in streams {
        let shown = format!("{frames:?}");
        let (node, output) = copy_out(frames, "web:/x", |_| {}, "new");
        assert_eq!(output.status.code(), Some(125), "{shown}");
        assert!(
            stderr(&output).contains(said),
            "{shown}: {}",
            stderr(&output)
        );
        let out = node.folder.path().join("out");
        let files = fs::read_dir(out)
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().file_type().unwrap().is_file());
        assert_eq!(files.count(), 0, "{shown}");
    }
}

#[test]
fn an_interrupted_copy_leaves_no_partial_file() {
    for signal in [Signal::INT, Signal::TERM] {
        let node = FakeNode::new(|_, peer| {
            peer.upgrade();
            peer.send(&file("", 9));
            peer.send(&data(b"part"));
            // Nothing more comes until jiffy has gone.
            peer.receive::<CopyFrame>();
        });
        let out = node.folder.path().join("out");
        fs::create_dir(&out).unwrap();
        let mut child = node
            .jiffy()
            .current_dir(&out)
            .args(["cp", "web:/x", "new"])
            .spawn()
            .unwrap();
        let files = || fs::read_dir(&out).unwrap().count();
        eventually("the copy has begun", || files() == 1);
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(128 + signal.as_raw()));
        assert_eq!(files(), 0);
    }
}

#[test]
fn a_tree_is_copied_out_as_a_tar() {
    let node = node_sending(tree());
    let output = node
        .jiffy()
        .args(["cp", "web:/srv/tree", "-"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let mut archive = tar::Archive::new(&output.stdout[..]);
    let mut paths = Vec::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let mut contents = Vec::new();
        std::io::Read::read_to_end(&mut entry, &mut contents).unwrap();
        paths.push(entry.path().unwrap().display().to_string());
        if paths.last().unwrap() == "tree/a/one" {
            assert_eq!(contents, b"one");
        }
    }
    assert_eq!(
        paths,
        [
            "tree/",
            "tree/a/",
            "tree/a/one",
            "tree/a/link",
            "tree/read-only/",
            "tree/read-only/suid",
            "tree/z"
        ]
    );
}

/// A VM with one folder, `/root`; keeps what is copied in.
fn node_receiving(error: Option<&str>) -> (FakeNode, Arc<Mutex<Vec<CopyFrame>>>) {
    let kept = Arc::new(Mutex::new(Vec::new()));
    let (keep, error) = (kept.clone(), error.map(str::to_owned));
    let node = FakeNode::new(move |request, peer| {
        peer.upgrade();
        if request.line.contains("copy-out") {
            let frame = match request.line.contains("path=%2Froot%2F.") {
                true => entry("", CopyKind::Folder, 0o711),
                false => CopyFrame::Failed {
                    message: "not found".into(),
                },
            };
            return peer.send(&frame);
        }
        if let Some(error) = &error {
            return peer.send(&CopyDone {
                entries: 0,
                error: Some(error.clone()),
            });
        }
        let mut entries = 0;
        while let Some(frame) = peer.receive::<CopyFrame>() {
            let last = frame == CopyFrame::End;
            entries += u64::from(matches!(frame, CopyFrame::Entry(_)));
            keep.lock().unwrap().push(frame);
            if last {
                return peer.send(&CopyDone {
                    entries,
                    error: None,
                });
            }
        }
    });
    (node, kept)
}

fn shown(frames: &[CopyFrame]) -> Vec<String> {
    frames
        .iter()
        .map(|frame| match frame {
            CopyFrame::Entry(entry) => format!(
                "{} {:?} {:o} {}",
                entry.path, entry.kind, entry.mode, entry.uid
            ),
            CopyFrame::Data(data) => format!("+{}", data.len()),
            other => format!("{other:?}"),
        })
        .collect()
}

#[test]
fn a_tree_is_copied_in() {
    let (node, kept) = node_receiving(None);
    let tree = node.folder.path().join("tree");
    fs::create_dir_all(tree.join("b")).unwrap();
    fs::set_permissions(&tree, fs::Permissions::from_mode(0o750)).unwrap();
    fs::set_permissions(tree.join("b"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(tree.join("b/big"), vec![1; 100_000]).unwrap();
    fs::set_permissions(tree.join("b/big"), fs::Permissions::from_mode(0o600)).unwrap();
    symlink("nowhere", tree.join("a-link")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, tree.join("pipe"), 0o600.into()).unwrap();
    let output = node
        .jiffy()
        .arg("cp")
        .arg(&tree)
        .arg("web:/root")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(125), "something was left out");
    assert!(stderr(&output).contains("a named pipe can't be copied"));
    assert_eq!(
        shown(&kept.lock().unwrap()),
        [
            "tree Folder 750 0",
            "a-link Symlink(\"nowhere\") 777 0",
            "b Folder 755 0",
            "b/big File(100000) 600 0",
            "+65536",
            "+34464",
            "End"
        ]
    );
    assert_eq!(
        node.lines(),
        [
            "POST /v1/vms/web/copy-out?path=%2Froot%2F.",
            "POST /v1/vms/web/copy-in?path=%2Froot"
        ]
    );
}

#[test]
fn copy_in_drops_owner_and_special_bits_unless_archive_is_given() {
    let modes = [(0o4755, "suid"), (0o2755, "sgid"), (0o1644, "sticky")];
    let owned_by = |path: &std::path::Path| fs::metadata(path).unwrap().uid();
    for archive in [false, true] {
        let (node, kept) = node_receiving(None);
        let tree = node.folder.path().join("tree");
        fs::create_dir(&tree).unwrap();
        let mut tar = tar::Builder::new(Vec::new());
        for (mode, name) in modes {
            let path = tree.join(name);
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let mut header = tar::Header::new_gnu();
            header.set_size(0);
            header.set_mode(mode);
            header.set_uid(1000);
            header.set_gid(1000);
            tar.append_data(&mut header, format!("in/{name}"), &b""[..])
                .unwrap();
        }
        let options = if archive { &["-a"][..] } else { &[] };
        let mut from_files = node.jiffy();
        from_files
            .arg("cp")
            .args(options)
            .arg(&tree)
            .arg("web:/root");
        assert!(from_files.output().unwrap().status.success());
        let mut from_tar = node.jiffy();
        let mut from_tar = from_tar
            .arg("cp")
            .args(options)
            .args(["-", "web:/root"])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let tar = tar.into_inner().unwrap();
        from_tar.stdin.take().unwrap().write_all(&tar).unwrap();
        assert!(from_tar.wait().unwrap().success());
        let kept = kept.lock().unwrap();
        let entry = |path: &str| {
            let entries = kept.iter().filter_map(|frame| match frame {
                CopyFrame::Entry(entry) => Some(entry),
                _ => None,
            });
            let found = entries.into_iter().find(|entry| entry.path == path);
            let found = found.unwrap_or_else(|| panic!("{path}"));
            (found.mode, found.uid, found.gid)
        };
        for (mode, name) in modes {
            let mode = if archive { mode } else { mode & 0o1777 };
            let (uid, gid) = if archive { (1000, 1000) } else { (0, 0) };
            assert_eq!(entry(&format!("in/{name}")), (mode, uid, gid), "{archive}");
            let uid = if archive { owned_by(&tree) } else { 0 };
            let (there, owner, _) = entry(name);
            assert_eq!((there, owner), (mode, uid), "{archive}");
        }
        // A folder that the tar did not name.
        let folder = if archive { 1234 } else { 0 };
        assert_eq!(entry("in").1, folder);
    }
}

#[test]
fn the_target_in_the_vm_is_chosen_as_cp_does() {
    let case = |source: &str, to: &str| {
        let (node, kept) = node_receiving(None);
        let dir = node.folder.path().join("d");
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("f"), "1").unwrap();
        let output = node
            .jiffy()
            .current_dir(&dir)
            .args(["cp", source, to])
            .output()
            .unwrap();
        let first = shown(&kept.lock().unwrap()).first().cloned();
        (
            node.lines().last().cloned().unwrap_or_default(),
            first,
            stderr(&output),
        )
    };
    let (line, first, said) = case("f", "web:/root/");
    assert_eq!(said, "");
    // The name is sent separately, so that a link of that name inside the folder is not followed.
    assert_eq!(line, "POST /v1/vms/web/copy-in?path=%2Froot%2F");
    assert!(first.unwrap().starts_with("f File(1)"));
    let (line, first, _) = case("f", "web:/new");
    assert_eq!(line, "POST /v1/vms/web/copy-in?path=%2Fnew");
    assert!(first.unwrap().starts_with(" File(1)"));
    let (line, first, said) = case(".", "web:/root");
    assert_eq!(said, "");
    assert_eq!(line, "POST /v1/vms/web/copy-in?path=%2Froot");
    assert_eq!(
        first.unwrap(),
        " Folder 711 1234",
        "the existing folder keeps its mode"
    );
    assert_eq!(
        case("../d", "web:/new").0,
        "POST /v1/vms/web/copy-in?path=%2Fnew"
    );
    assert_eq!(
        case("f", "web:/none/").2,
        "jiffy: there is no folder /none/ in web\n"
    );
    assert!(
        case("missing", "web:/root")
            .2
            .contains("missing can't be read")
    );
    assert!(
        case("f", "./g")
            .2
            .contains("one side of a copy must be in a VM")
    );
}

#[test]
fn a_full_disk_in_the_vm_is_reported() {
    let (node, _) = node_receiving(Some("/root/big: no space left"));
    let big = node.folder.path().join("big");
    fs::File::create(&big).unwrap().set_len(50_000_000).unwrap();
    let output = node
        .jiffy()
        .arg("cp")
        .arg(&big)
        .arg("web:/root")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert_eq!(stderr(&output), "jiffy: /root/big: no space left\n");
}

#[test]
fn a_tar_is_copied_in_whatever_its_order() {
    let (node, kept) = node_receiving(None);
    let mut tar = tar::Builder::new(Vec::new());
    let mut add = |path: &str, contents: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_size(contents.len() as u64);
        header.set_mode(0o600);
        tar.append_data(&mut header, path, contents).unwrap();
    };
    add("a/b/one", b"1");
    add("c/two", b"22");
    add("a/three", b"333");
    let tar = tar.into_inner().unwrap();
    let mut child = node
        .jiffy()
        .args(["cp", "-", "web:/root"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&tar).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let order: Vec<String> = kept
        .lock()
        .unwrap()
        .iter()
        .filter_map(|frame| match frame {
            CopyFrame::Entry(entry) => Some(entry.path.clone()),
            _ => None,
        })
        .collect();
    assert_eq!(
        order,
        ["", "a", "a/b", "a/b/one", "c", "c/two", "a", "a/three"]
    );
}

#[test]
fn a_tar_with_dot_dot_paths_is_refused() {
    let (node, _) = node_receiving(None);
    let mut header = tar::Header::new_gnu();
    header.as_gnu_mut().unwrap().name[..7].copy_from_slice(b"../evil");
    header.set_size(0);
    header.set_cksum();
    let mut child = node
        .jiffy()
        .args(["cp", "-", "web:/root"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut tar = header.as_bytes().to_vec();
    tar.extend([0; 1024]);
    child.stdin.take().unwrap().write_all(&tar).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(
        stderr(&output).contains("outside itself"),
        "{}",
        stderr(&output)
    );
}
