//! A captured VM continues with another server.

use crate::client::{Bytes, Client, Fields, Place, ROOT, Server, serve, usual};
use jiffy_files::protocol::opcode::*;
use jiffy_files::saved::{Entry, FileId, Known, Session};
use jiffy_wire::files::{DATA_MAX, SAVE};
use rustix::fs::{CWD, Mode, OFlags, StatxFlags};
use std::ffi::CStr;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};

const READ_WRITE: i32 = libc::O_RDWR;

/// Another server of the folder, with the session of this one, which ends.
fn moved(place: &Place, client: &mut Client, arguments: &[&str]) -> (Server, Client) {
    let session = client.save(0).unwrap();
    rustix::net::shutdown(&client.socket, rustix::net::Shutdown::Both).unwrap();
    let (server, mut next) = serve(&place.shared(), arguments);
    assert_eq!(next.restore(&session), Ok(Vec::new()));
    (server, next)
}

fn read(client: &mut Client, node: u64, handle: u64) -> Result<String, i32> {
    let bytes = client.read(node, handle, 0, 4096)?;
    Ok(String::from_utf8(bytes).unwrap())
}

#[test]
fn a_guest_goes_on_with_what_it_knew_and_had_open() {
    let place = Place::new();
    fs::create_dir_all(place.path("a/b")).unwrap();
    fs::write(place.path("a/b/file"), "hello").unwrap();
    symlink("/anywhere", place.path("a/link")).unwrap();
    let (_old, mut client) = serve(&place.shared(), usual());
    client.init();
    let (a, _) = client.look_up(ROOT, "a").unwrap();
    let (b, _) = client.look_up(a, "b").unwrap();
    let (file, _) = client.look_up(b, "file").unwrap();
    assert_eq!(client.look_up(b, "file").unwrap().0, file);
    let (link, _) = client.look_up(a, "link").unwrap();
    let (made, _, log) = client
        .create(b, "log", READ_WRITE | libc::O_APPEND | libc::O_TRUNC)
        .unwrap();
    client.write(made, log, 0, b"one").unwrap();
    let open = client.open(file, libc::O_RDONLY).unwrap();
    let listed = Fields(&client.ask(OPENDIR, ROOT, &[0; 8]).unwrap()).u64();
    // Names are those of the end.
    let to = Bytes::new().u64(a).name("log").name("renamed");
    client.ask(RENAME, b, &to.0).unwrap();
    // The host changes a file, and does not replace it.
    fs::write(place.path("a/b/file"), "changed by the host").unwrap();

    let (_server, mut client) = moved(&place, &mut client, usual());
    assert_eq!(
        read(&mut client, file, open).unwrap(),
        "changed by the host"
    );
    assert_eq!(client.write(file, open, 0, b"x"), Err(libc::EBADF));
    // Appends, and was not truncated again.
    client.write(made, log, 0, b"two").unwrap();
    assert_eq!(read(&mut client, made, log).unwrap(), "onetwo");
    assert_eq!(fs::read(place.path("a/renamed")).unwrap(), b"onetwo");
    let anywhere = client.ask(READLINK, link, &[]);
    assert_eq!(anywhere, Ok(b"/anywhere".to_vec()));
    let arguments = Bytes::new().u64(listed).u64(0).u32(4096).zeros(20);
    let entries = client.ask(READDIR, ROOT, &arguments.0).unwrap();
    assert!(!entries.is_empty());
    // The same file has the same number, a new one has a new number.
    assert_eq!(client.look_up(b, "file").unwrap().0, file);
    fs::write(place.path("new"), "").unwrap();
    let (new, _) = client.look_up(ROOT, "new").unwrap();
    assert!(new > made.max(link), "{new}");
    assert!(client.open(new, libc::O_RDONLY).unwrap() > listed);
    // It was looked up three times.
    let forget = |client: &Client, lookups: u64| {
        client.send(&client.message(FORGET, file, &lookups.to_ne_bytes()));
    };
    forget(&client, 2);
    client.settle();
    client.getattr(file).unwrap();
    forget(&client, 1);
    client.settle();
    assert_eq!(client.getattr(file), Err(libc::ESTALE));
    client.release(file, open).unwrap();
    assert_eq!(client.release(file, open), Err(libc::EBADF));
}

#[test]
fn what_is_gone_or_another_file_by_now_is_stale() {
    let place = Place::new();
    fs::create_dir_all(place.path("folder")).unwrap();
    for name in ["removed", "replaced", "kept", "unlinked", "folder/inner"] {
        fs::write(place.path(name), name).unwrap();
    }
    let (_old, mut client) = serve(&place.shared(), usual());
    client.init();
    let mut known = Vec::new();
    for name in ["removed", "replaced", "kept", "unlinked"] {
        let (node, _) = client.look_up(ROOT, name).unwrap();
        known.push((node, client.open(node, READ_WRITE).unwrap()));
    }
    let (folder, _) = client.look_up(ROOT, "folder").unwrap();
    let (inner, _) = client.look_up(folder, "inner").unwrap();
    let [removed, replaced, kept, unlinked] = known[..] else {
        unreachable!()
    };
    let name = Bytes::new().name("unlinked");
    client.ask(UNLINK, ROOT, &name.0).unwrap();
    assert_eq!(
        read(&mut client, unlinked.0, unlinked.1).unwrap(),
        "unlinked"
    );
    let session = client.save(0).unwrap();

    fs::remove_file(place.path("removed")).unwrap();
    // The old one exists until the new one has its inode.
    fs::write(place.path("other"), "other").unwrap();
    fs::rename(place.path("other"), place.path("replaced")).unwrap();
    // A folder is moved out, and a link leads to it.
    fs::rename(place.path("folder"), place.above.path().join("out")).unwrap();
    symlink("../out", place.path("folder")).unwrap();
    fs::write(place.path("unlinked"), "another").unwrap();

    let (_server, mut client) = serve(&place.shared(), usual());
    client.restore(&session).unwrap();
    assert_eq!(read(&mut client, kept.0, kept.1).unwrap(), "kept");
    for (node, handle) in [removed, replaced, unlinked] {
        assert_eq!(client.getattr(node), Err(libc::ESTALE));
        assert_eq!(client.open(node, libc::O_RDONLY), Err(libc::ESTALE));
        assert_eq!(read(&mut client, node, handle), Err(libc::ESTALE));
        let late = client.write(node, handle, 0, b"must not arrive");
        assert_eq!(late, Err(libc::ESTALE));
    }
    for node in [folder, inner] {
        assert_eq!(client.getattr(node), Err(libc::ESTALE));
    }
    // Looked up again, they are what they are now, under numbers of their own.
    let (now, _) = client.look_up(ROOT, "replaced").unwrap();
    assert_ne!(now, replaced.0);
    let open = client.open(now, libc::O_RDONLY).unwrap();
    assert_eq!(read(&mut client, now, open).unwrap(), "other");
    assert_eq!(client.look_up(ROOT, "removed"), Err(libc::ENOENT));
    // A second capture remembers what was lost.
    let (_third, mut client) = moved(&place, &mut client, usual());
    assert_eq!(read(&mut client, now, open).unwrap(), "other");
    assert_eq!(read(&mut client, removed.0, removed.1), Err(libc::ESTALE));
    client.release(removed.0, removed.1).unwrap();
    assert_eq!(client.release(removed.0, removed.1), Err(libc::EBADF));
}

#[test]
fn a_folder_that_is_read_only_by_now_is_not_written_through_an_old_handle() {
    let place = Place::new();
    let (_old, mut client) = serve(&place.shared(), usual());
    client.init();
    let (node, _, handle) = client.create(ROOT, "file", READ_WRITE).unwrap();
    let reading = client.open(node, libc::O_RDONLY).unwrap();
    let read_only = [usual(), &["--read-only"]].concat();
    let (_server, mut client) = moved(&place, &mut client, &read_only);
    assert_eq!(client.write(node, handle, 0, b"x"), Err(libc::EROFS));
    assert_eq!(read(&mut client, node, handle), Err(libc::ESTALE));
    assert_eq!(read(&mut client, node, reading).unwrap(), "");
    assert_eq!(fs::metadata(place.path("file")).unwrap().size(), 0);
}

#[test]
fn a_session_of_many_files_is_moved_in_parts() {
    let place = Place::new();
    let count = 3000;
    let name = |number: u32| format!("{number:0>100}");
    for number in 0..count {
        fs::write(place.path(&name(number)), number.to_string()).unwrap();
    }
    let (_old, mut client) = serve(&place.shared(), usual());
    client.init();
    let nodes: Vec<u64> = (0..count)
        .map(|number| client.look_up(ROOT, &name(number)).unwrap().0)
        .collect();
    let session = client.save(0).unwrap();
    assert!(session.len() > DATA_MAX, "{} bytes", session.len());
    let (_server, mut client) = moved(&place, &mut client, usual());
    for (number, node) in (0..count).zip(nodes) {
        let (again, attributes) = client.look_up(ROOT, &name(number)).unwrap();
        assert_eq!(again, node);
        assert_eq!(attributes.size, number.to_string().len() as u64);
    }
}

#[test]
fn a_save_waits_for_requests_without_an_answer() {
    let place = Place::new();
    fs::write(place.path("file"), "").unwrap();
    let (_old, mut client) = serve(&place.shared(), usual());
    client.init();
    let (file, _) = client.look_up(ROOT, "file").unwrap();
    let known = client.save(2).unwrap();
    // The parts of saves count, too: this one had one.
    for _ in 0..20 {
        client.look_up(ROOT, "file").unwrap();
    }
    for _ in 0..21 {
        client.send(&client.message(FORGET, file, &1_u64.to_ne_bytes()));
    }
    let forgotten = client.save(2 + 1 + 20 + 21).unwrap();
    assert!(forgotten.len() < known.len());
    assert_eq!(client.getattr(file), Err(libc::ESTALE));
    // A request that never ends.
    assert_eq!(client.save(1000), Err(libc::EBUSY));
}

#[test]
fn a_guest_can_neither_save_nor_restore() {
    let place = Place::new();
    let (_server, mut client) = serve(&place.shared(), usual());
    client.init();
    assert_eq!(client.ask(SAVE, 0, &[0; 16]), Err(libc::ENOSYS));
    let restored = client.ask(jiffy_wire::files::RESTORE, 0, &[0; 64]);
    assert_eq!(restored, Err(libc::ENOSYS));
}

/// A session with one node, which is what this path leads to from the shared folder.
fn forged(place: &Place, path: &CStr, number: u64) -> Vec<u8> {
    let at = rustix::fs::open(place.shared(), OFlags::PATH, Mode::empty()).unwrap();
    let facts = rustix::fs::statx(
        &at,
        path,
        rustix::fs::AtFlags::SYMLINK_NOFOLLOW,
        StatxFlags::BASIC_STATS | StatxFlags::BTIME,
    );
    let facts = facts.or_else(|_| {
        let any = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        rustix::fs::statx(CWD, c"/", rustix::fs::AtFlags::empty(), any)
    });
    let session = Session {
        next_node: 10,
        last_handle: 10,
        lost: Vec::new(),
        entries: vec![Entry {
            path: path.to_owned(),
            file: FileId::of(&facts.unwrap()),
            known: Known::Node { number, lookups: 1 },
        }],
    };
    session.encode().unwrap()
}

#[test]
fn a_forged_session_reaches_nothing_outside_and_is_refused() {
    let place = Place::new();
    fs::create_dir(place.path("sub")).unwrap();
    symlink("..", place.path("up")).unwrap();
    symlink("../secret", place.path("way")).unwrap();
    let (_server, mut client) = serve(&place.shared(), usual());
    client.init();
    let (sub, _) = client.look_up(ROOT, "sub").unwrap();
    let bad = [
        c"../secret",
        c"..",
        c"/etc",
        c"sub/../../secret",
        c"sub//x",
        c"sub/",
        c"./sub",
        c"",
    ];
    for path in bad {
        let session = forged(&place, path, 5);
        assert_eq!(client.restore(&session), Err(libc::EINVAL), "{path:?}");
        // Nothing was changed.
        client.getattr(sub).unwrap();
    }
    for number in [0, ROOT, 10, u64::MAX] {
        let session = forged(&place, c"sub", number);
        assert_eq!(client.restore(&session), Err(libc::EINVAL), "{number}");
    }
    let good = forged(&place, c"sub", 5);
    for length in 1..good.len() {
        assert_eq!(
            client.restore(&good[..length]),
            Err(libc::EINVAL),
            "{length}"
        );
    }
    let longer = [&good[..], &[0]].concat();
    assert_eq!(client.restore(&longer), Err(libc::EINVAL));
    let mut later = good.clone();
    later[0] = 2;
    assert_eq!(client.restore(&later), Err(libc::EPROTONOSUPPORT));
    client.getattr(sub).unwrap();
    // A path through a link of the folder is not followed, whatever it names.
    for path in [c"up/secret", c"up"] {
        client.restore(&forged(&place, path, 5)).unwrap();
        let found = client.getattr(5);
        let is_link = found
            .as_ref()
            .is_ok_and(|it| it.mode & libc::S_IFMT == libc::S_IFLNK);
        assert!(found == Err(libc::ESTALE) || is_link, "{found:?}");
    }
    assert_eq!(client.restore(&good), Ok(Vec::new()));
    assert_eq!(
        client.getattr(5).unwrap().mode & libc::S_IFMT,
        libc::S_IFDIR
    );
    // What it knew before is gone.
    assert_eq!(client.look_up(ROOT, "sub").unwrap().0, 5);
}
