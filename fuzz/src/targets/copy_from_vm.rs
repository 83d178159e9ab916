//! `jiffy cp` from a VM that sends anything: nothing outside of the copy is touched;
//! and tars that go into one.

use crate::Target;
use crate::input::Input;
use crate::scratch;
use jiffy_cli::testing;
use jiffy_wire::agent::{CopyEntry, CopyFrame, CopyKind};
use std::fs;
use std::path::Path;

/// This target.
pub const TARGET: Target = Target {
    name: "copy_from_vm",
    covers: &["crates/cli/src/copy"],
    seeds: all_seeds,
    run,
};

const TAR: u8 = 1;
const OWNERS: u8 = 2;
const NAMED: u8 = 4;
/// The folder that is copied to is there.
const THERE: u8 = 8;

const FILE: u8 = 0;
const FOLDER: u8 = 1;
const LINK: u8 = 2;
const DATA: u8 = 3;
const END: u8 = 4;
const FAILED: u8 = 5;

/// What paths are made of: they meet.
const NAMES: [&str; 8] = ["a", "b", "link", "..", ".", "", "copy", "outside"];
/// Where links lead.
const LINKS: [&str; 8] = [
    "a",
    "..",
    "../outside",
    "../outside/file",
    "/",
    "link",
    "",
    "b/../..",
];

fn run(data: &[u8]) {
    let mut input = Input(data);
    let how = input.u8();
    if how & TAR != 0 {
        return tar(input.rest(), how & OWNERS != 0);
    }
    let frames = frames(&mut input);
    let folder = scratch::folder().join("copies");
    fs::create_dir_all(folder.join("outside")).expect("a folder");
    fs::write(folder.join("outside/file"), b"mine").expect("a file");
    if how & THERE != 0 {
        fs::create_dir(folder.join("copy")).expect("a folder");
    }
    let name = (how & NAMED != 0).then_some("b");
    let before = facts(&folder.join("outside/file"));
    testing::copy_from_vm(
        frames.clone(),
        &folder.join("copy"),
        name,
        how & OWNERS != 0,
    );
    assert_eq!(
        fs::read(folder.join("outside/file")).ok().as_deref(),
        Some(&b"mine"[..])
    );
    assert_eq!(facts(&folder.join("outside/file")), before);
    assert_eq!(names(&folder.join("outside")), ["file"]);
    let others = names(&folder);
    assert!(
        others
            .iter()
            .all(|name| name == "copy" || name == "outside"),
        "{others:?}"
    );
    open(&folder);
    fs::remove_dir_all(&folder).expect("the folder is removed");
    if let Some(tar) = testing::tar_from_vm(frames) {
        let entries = tar::Archive::new(&tar[..]).entries().map(Iterator::count);
        assert!(
            entries.is_ok_and(|count| count > 0),
            "a whole copy is a tar"
        );
    }
}

/// Whoever calls this may look into all folders: a copy has any modes.
fn open(folder: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let all = fs::Permissions::from_mode(0o700);
    fs::set_permissions(folder, all).expect("our own folder");
    for entry in fs::read_dir(folder).expect("a folder") {
        let entry = entry.expect("an entry");
        if entry.file_type().expect("a type").is_dir() {
            open(&entry.path());
        }
    }
}

fn facts(path: &Path) -> (u32, u32) {
    use std::os::unix::fs::MetadataExt;
    let facts = fs::symlink_metadata(path).expect("it is there");
    (facts.mode(), facts.uid())
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
    let mut names: Vec<_> = entries
        .map(|entry| name(entry).to_string_lossy().into())
        .collect();
    names.sort();
    names
}

fn frames(input: &mut Input<'_>) -> Vec<CopyFrame> {
    let mut frames = Vec::new();
    while !input.is_empty() && frames.len() < 40 {
        let kind = input.u8() % 6;
        frames.push(match kind {
            DATA => {
                let count = usize::from(input.u8());
                CopyFrame::Data(input.bytes(count).to_vec())
            }
            END => CopyFrame::End,
            FAILED => CopyFrame::Failed {
                message: "no".into(),
            },
            kind => CopyFrame::Entry(CopyEntry {
                path: path(input),
                kind: match kind {
                    FILE => CopyKind::File(input.u8().into()),
                    FOLDER => CopyKind::Folder,
                    _ => CopyKind::Symlink(LINKS[usize::from(input.u8()) % LINKS.len()].into()),
                },
                mode: input.u32(),
                uid: input.u8().into(),
                gid: input.u8().into(),
                mtime: i64::from(input.u8()) << (input.u8() % 64),
            }),
        });
    }
    frames
}

/// Up to three names.
fn path(input: &mut Input<'_>) -> String {
    let count = usize::from(input.u8() % 4);
    let names: Vec<&str> = (0..count)
        .map(|_| NAMES[usize::from(input.u8()) % NAMES.len()])
        .collect();
    names.join("/")
}

/// What is made of a tar can be written.
fn tar(bytes: &[u8], keep_owners: bool) {
    let root = CopyEntry {
        path: String::new(),
        kind: CopyKind::Folder,
        mode: 0o755,
        uid: 0,
        gid: 0,
        mtime: 0,
    };
    if let Some(frames) = testing::tar_to_vm(bytes, root, keep_owners) {
        assert!(matches!(frames.last(), Some(CopyFrame::End)));
        let path = |frame: &CopyFrame| match frame {
            CopyFrame::Entry(entry) => entry.path.split('/').any(|name| name == ".."),
            _ => false,
        };
        assert!(!frames.iter().any(path), "no path leaves the folder");
    }
}

fn all_seeds() -> Vec<Vec<u8>> {
    let entry = |kind: u8, path: &[u8], more: &[u8]| {
        let facts = [0xed, 1, 0, 0, 0, 0, 9, 3];
        [&[kind, path.len() as u8], path, more, &facts].concat()
    };
    let root = entry(FOLDER, &[], &[]);
    let folder = entry(FOLDER, &[0], &[]);
    let file = [entry(FILE, &[0, 1], &[3]), vec![DATA, 3, 1, 2, 3]].concat();
    let link = entry(LINK, &[2], &[2]);
    let through = entry(FILE, &[2, 0], &[0]);
    let mut seeds = Vec::new();
    for how in [0, THERE, THERE | NAMED, THERE | OWNERS] {
        seeds.push([&[how][..], &root, &folder, &file, &link, &[END]].concat());
        seeds.push([&[how][..], &root, &link, &through, &[END]].concat());
        seeds.push([&[how][..], &entry(FILE, &[], &[2]), &[DATA, 2, 7, 7, END]].concat());
        seeds.push([&[how][..], &entry(LINK, &[], &[3]), &[END]].concat());
    }
    for tar in jiffy_rootfs::testing::tars() {
        seeds.push([&[TAR], &tar[..tar.len() - 1024]].concat());
    }
    seeds
}
