//! FUSE requests of a guest to the server of a shared folder, and sessions of captured guests: each
//! that has an answer gets one well-formed answer, and nothing beside the folder changes. What the
//! guest knows at the end is saved and restored.

use crate::Target;
use crate::input::Input;
use crate::scratch;
use jiffy_files::folder::{Folder, Sharing};
use jiffy_files::identity::Identity;
use jiffy_files::protocol::{Answer, Header, opcode};
use jiffy_wire::files::{MESSAGE_MAX, OWN, RESTORE, SAVE};
use rustix::fs::{Mode, OFlags};
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// This target.
pub const TARGET: Target = Target {
    name: "files_requests",
    covers: &["crates/files/src"],
    seeds: all_seeds,
    run,
};

static RUNS: AtomicU64 = AtomicU64::new(0);

const READ_ONLY: u8 = 1;
/// The message is given byte by byte, and not only its parts.
const RAW: u8 = 0x80;
/// The VMM saves or restores a session.
const SAVED: u8 = 0x7e;
const RESTORED: u8 = 0x7f;
/// Most descriptors of a guest.
const DESCRIPTORS: usize = 32;
/// Most bytes that are allocated at once: a fuzzer must not fill the disk.
const ALLOCATED: u64 = 1 << 20;

fn run(data: &[u8]) {
    let mut input = Input(data);
    let how = input.u8();
    let above = scratch::folder().join("files");
    // An input may take away the rights to remove what it made.
    let number = RUNS.fetch_add(1, Ordering::Relaxed);
    let shared = above.join(format!("shared-{number}"));
    make(&above, &shared);
    let before = outside(&above);
    let serve = || {
        Folder::new(
            open(&shared),
            open(Path::new("/proc/self/fd")),
            Sharing {
                read_only: how & READ_ONLY != 0,
                identity: Identity::own(),
                descriptors: DESCRIPTORS,
            },
        )
    };
    let folder = serve();
    let mut answer = Answer::default();
    while !input.is_empty() {
        let message = message(&mut input);
        check(&folder, &message, &mut answer);
    }
    // What has no way to it any more is lost once.
    let second = serve();
    restore(&second, &session(&folder, &mut answer), &mut answer);
    let third = serve();
    let saved = session(&second, &mut answer);
    restore(&third, &saved, &mut answer);
    assert_eq!(session(&third, &mut answer), saved);
    drop((folder, second, third));
    let _ = fs::remove_dir_all(&shared);
    assert_eq!(
        outside(&above),
        before,
        "something beside the folder changed"
    );
}

fn make(above: &Path, shared: &Path) {
    fs::create_dir_all(shared.join("folder")).expect("a folder");
    fs::write(shared.join("file"), "data").expect("a file");
    fs::write(shared.join("folder/inner"), "inner").expect("a file");
    symlink("../../secret", shared.join("folder/link")).expect("a link");
    if !above.join("secret").exists() {
        fs::write(above.join("secret"), "secret").expect("a file");
    }
}

fn open(folder: &Path) -> std::os::fd::OwnedFd {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(folder, flags, Mode::empty()).expect("a folder")
}

/// Everything about the file beside the folder, and the names there.
fn outside(above: &Path) -> impl PartialEq + std::fmt::Debug + use<> {
    let secret = fs::metadata(above.join("secret")).expect("it is there");
    let others = fs::read_dir(above).expect("a folder").flatten();
    let others = others.filter(|it| !it.file_name().as_encoded_bytes().starts_with(b"shared-"));
    let facts = (secret.mode(), secret.uid(), secret.gid(), secret.nlink());
    (
        facts,
        secret.mtime(),
        secret.ctime(),
        secret.len(),
        others.count(),
    )
}

/// A message: a header whose length is right, or any bytes.
fn message(input: &mut Input<'_>) -> Vec<u8> {
    let kind = input.u8();
    if kind & RAW != 0 {
        let length = usize::from(input.u16());
        return input.bytes(length).to_vec();
    }
    let (node, length) = (input.u8(), usize::from(input.u8()));
    let arguments = input.bytes(length);
    if kind == SAVED {
        return own(SAVE, &[0; 16]);
    }
    if kind == RESTORED {
        return own(RESTORE, &whole(arguments));
    }
    request(u32::from(kind), u64::from(node), arguments)
}

fn request(kind: u32, node: u64, arguments: &[u8]) -> Vec<u8> {
    let length = 40 + arguments.len() as u32;
    let mut message = Vec::new();
    message.extend(length.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(0x1234_5678_u64.to_ne_bytes());
    message.extend(node.to_ne_bytes());
    message.extend([0; 16]);
    message.extend(arguments);
    message
}

/// A message of the VMM itself.
fn own(kind: u32, arguments: &[u8]) -> Vec<u8> {
    let mut message = request(kind, 0, arguments);
    message[8..16].copy_from_slice(&OWN.to_ne_bytes());
    message
}

/// A session in one part.
fn whole(session: &[u8]) -> Vec<u8> {
    let length = (session.len() as u64).to_ne_bytes();
    [&length[..], &[0; 8], session].concat()
}

fn session(folder: &Folder, answer: &mut Answer) -> Vec<u8> {
    let message = own(SAVE, &[0; 16]);
    let answered = folder.serve(&message, message.len(), answer);
    // After its header and the session's length.
    answered
        .and_then(|it| it.get(24..))
        .expect("it is saved")
        .to_vec()
}

fn restore(folder: &Folder, session: &[u8], answer: &mut Answer) {
    let message = own(RESTORE, &whole(session));
    let answered = folder.serve(&message, message.len(), answer);
    let error = answered.and_then(|it| it.get(4..8)).expect("an answer");
    assert_eq!(error, [0; 4], "what was saved is restored");
}

fn check(folder: &Folder, message: &[u8], answer: &mut Answer) {
    let header = Header::of(message);
    if header.is_some_and(|header| header.opcode == opcode::FALLOCATE) && allocates_much(message) {
        return;
    }
    if header.is_some_and(|header| header.opcode == SAVE) && message != own(SAVE, &[0; 16]) {
        // It may wait for messages that do not come.
        return;
    }
    let answered = folder.serve(message, message.len(), answer);
    let (Some(header), Some(answered)) = (header, answered) else {
        let expected = header.is_some_and(|header| header.is_answered());
        assert!(answered.is_none() && !expected, "exactly one answer");
        return;
    };
    assert!(header.is_answered() && answered.len() <= MESSAGE_MAX);
    let number =
        |at: usize| u32::from_ne_bytes(answered[at..at + 4].try_into().expect("four bytes"));
    assert_eq!(number(0) as usize, answered.len());
    let error = number(4) as i32;
    assert!((-511..=0).contains(&error), "{error}");
    assert!(error == 0 || answered.len() == 16);
    assert_eq!(answered[8..16], header.unique.to_ne_bytes());
}

fn allocates_much(message: &[u8]) -> bool {
    let number = |at: usize| {
        let bytes = message.get(at..at + 8)?;
        Some(u64::from_ne_bytes(bytes.try_into().ok()?))
    };
    [48, 56]
        .into_iter()
        .any(|at| number(at).is_some_and(|it| it > ALLOCATED))
}

fn all_seeds() -> Vec<Vec<u8>> {
    let one = |kind: u32, node: u8, arguments: &[u8]| {
        [&[kind as u8, node, arguments.len() as u8], arguments].concat()
    };
    let numbers = |fields: &[u32]| {
        fields
            .iter()
            .flat_map(|it| it.to_ne_bytes())
            .collect::<Vec<u8>>()
    };
    let handle =
        |handle: u64, fields: &[u32]| [&handle.to_ne_bytes()[..], &numbers(fields)].concat();
    let named = |fields: &[u32], names: &[u8]| [&numbers(fields), names].concat();
    use opcode::*;
    let begin = [
        one(INIT, 0, &numbers(&[7, 41, 1 << 20, u32::MAX, 0, 0])),
        one(LOOKUP, 1, b"file\0"),
        one(LOOKUP, 1, b"folder\0"),
        one(OPEN, 2, &numbers(&[2, 0])),
        one(OPENDIR, 3, &[0; 8]),
    ]
    .concat();
    let rest: [Vec<Vec<u8>>; 6] = [
        vec![
            one(
                WRITE,
                2,
                &[&handle(1, &[0, 0, 3, 0, 0, 0, 0, 0]), &b"abc"[..]].concat(),
            ),
            one(READ, 2, &handle(1, &[0, 0, 4096, 0, 0, 0, 0, 0])),
            one(FSYNC, 2, &handle(1, &[1, 0])),
            one(LSEEK, 2, &handle(1, &[0, 0, 3, 0])),
            one(FALLOCATE, 2, &handle(1, &[0, 0, 4096, 0, 1, 0])),
            one(FLUSH, 2, &handle(1, &[0; 4])),
            one(RELEASE, 2, &handle(1, &[0; 4])),
        ],
        vec![
            one(READDIR, 3, &handle(2, &[0, 0, 4096, 0, 0, 0, 0, 0])),
            one(READDIRPLUS, 3, &handle(2, &[0, 0, 4096, 0, 0, 0, 0, 0])),
            one(FSYNCDIR, 3, &handle(2, &[0, 0])),
            one(RELEASEDIR, 3, &handle(2, &[0; 4])),
            one(BATCH_FORGET, 0, &numbers(&[1, 0, 2, 0, 1, 0])),
            one(FORGET, 3, &numbers(&[1, 0])),
        ],
        vec![
            one(CREATE, 3, &named(&[0o102, 0o100_644, 0, 0], b"new\0")),
            one(MKDIR, 3, &named(&[0o755, 0], b"deep\0")),
            one(MKNOD, 3, &named(&[0o010_644, 0, 0, 0], b"fifo\0")),
            one(SYMLINK, 3, b"way\0../../secret\0"),
            one(LOOKUP, 3, b"link\0"),
            one(READLINK, 6, b""),
            one(TMPFILE, 3, &named(&[2, 0o100_600, 0, 0], b"/\0")),
        ],
        vec![
            one(RENAME, 1, &named(&[3, 0], b"file\0moved\0")),
            one(RENAME2, 3, &named(&[1, 0, 2, 0], b"moved\0folder\0")),
            one(LINK, 1, &named(&[2, 0], b"hard\0")),
            one(UNLINK, 1, b"hard\0"),
            one(RMDIR, 1, b"folder\0"),
        ],
        vec![
            one(SETXATTR, 2, &named(&[1, 0], b"user.a\0b")),
            one(GETXATTR, 2, &named(&[64, 0], b"user.a\0")),
            one(LISTXATTR, 2, &numbers(&[64, 0])),
            one(REMOVEXATTR, 2, b"user.a\0"),
            one(GETATTR, 2, &[0; 16]),
            one(
                SETATTR,
                2,
                &numbers(&[
                    0x1bf, 0, 0, 0, 9, 0, 0, 0, 5, 0, 6, 0, 0, 0, 1, 2, 0, 0o600, 0, 0, 0, 0,
                ]),
            ),
            one(STATFS, 1, b""),
            one(ACCESS, 2, &numbers(&[4, 0])),
        ],
        vec![
            [&[RAW, 40, 0][..], &request(DESTROY, 0, b"")].concat(),
            one(INTERRUPT, 0, &[0; 8]),
            one(DESTROY, 0, b""),
            [&[RAW, 3, 0][..], b"abc"].concat(),
        ],
    ];
    let mut seeds: Vec<Vec<u8>> = rest
        .iter()
        .map(|rest| [&[0], &begin[..], &rest.concat()].concat())
        .collect();
    let table = jiffy_files::saved::Session {
        next_node: 20,
        last_handle: 9,
        lost: vec![3, 9],
        entries: Vec::new(),
    };
    let table = table.encode().expect("a short one");
    let restored = [
        one(SAVED.into(), 0, b""),
        one(RESTORED.into(), 0, &table),
        one(READ, 2, &handle(3, &[0, 0, 4096, 0, 0, 0, 0, 0])),
        one(RELEASE, 2, &handle(3, &[0; 4])),
        one(LOOKUP, 1, b"file\0"),
    ];
    seeds.push([&[0], &begin[..], &restored.concat()].concat());
    seeds.push([&[READ_ONLY], &begin[..], &rest.concat().concat()].concat());
    seeds
}
