//! Guests that want what is outside of their folder.

use crate::client::{Bytes, Change, Place, ROOT, entry, serve, usual};
use jiffy_files::protocol::opcode::*;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn a_name_is_one_component() {
    let place = Place::new();
    fs::create_dir(place.path("folder")).unwrap();
    let (_server, mut client) = serve(&place.shared(), usual());
    let (folder, _) = client.look_up(ROOT, "folder").unwrap();
    let (file, ..) = client.create(ROOT, "file", libc::O_RDWR).unwrap();
    let long = "a".repeat(256);
    for (name, error) in [
        ("..", libc::EINVAL),
        (".", libc::EINVAL),
        ("", libc::EINVAL),
        ("/", libc::EINVAL),
        ("/etc/passwd", libc::EINVAL),
        ("../secret", libc::EINVAL),
        ("folder/../../secret", libc::EINVAL),
        ("folder/", libc::EINVAL),
        ("./folder", libc::EINVAL),
        ("a\0b", libc::EINVAL),
        (&*long, libc::ENAMETOOLONG),
    ] {
        for parent in [ROOT, folder] {
            let mut refused = |opcode, arguments: Bytes| {
                let answer = client.ask(opcode, parent, &arguments.0);
                // Requests with two names take the second half of `a\0b` as the other.
                let expected = match (name, opcode) {
                    ("a\0b", SYMLINK | RENAME | RENAME2) => vec![libc::EINVAL, libc::ENOENT],
                    _ => vec![error],
                };
                assert!(expected.contains(&answer.unwrap_err()), "{name:?} {opcode}");
            };
            refused(LOOKUP, Bytes::new().name(name));
            refused(MKDIR, Bytes::new().u32(0o755).u32(0).name(name));
            refused(MKNOD, Bytes::new().u32(0o100_644).zeros(12).name(name));
            refused(CREATE, Bytes::new().u32(2).u32(0o644).zeros(8).name(name));
            refused(UNLINK, Bytes::new().name(name));
            refused(RMDIR, Bytes::new().name(name));
            refused(SYMLINK, Bytes::new().name(name).name("target"));
            refused(LINK, Bytes::new().u64(file).name(name));
            refused(RENAME, Bytes::new().u64(ROOT).name(name).name("new"));
            refused(RENAME, Bytes::new().u64(ROOT).name("file").name(name));
            refused(
                RENAME2,
                Bytes::new().u64(ROOT).zeros(8).name("file").name(name),
            );
        }
    }
    assert_eq!(client.names(ROOT), ["file", "folder"]);
    let text = fs::read_to_string(place.above.path().join("secret")).unwrap();
    assert_eq!(text, "secret");
}

#[test]
fn links_are_never_followed() {
    let place = Place::new();
    let secret = place.above.path().join("secret");
    symlink(&secret, place.path("link")).unwrap();
    symlink("..", place.path("up")).unwrap();
    let before = fs::metadata(&secret).unwrap();
    let (_server, mut client) = serve(&place.shared(), usual());
    let (link, attributes) = client.look_up(ROOT, "link").unwrap();
    assert_eq!(attributes.mode & libc::S_IFMT, libc::S_IFLNK);
    for flags in [libc::O_RDONLY, libc::O_RDWR, libc::O_TRUNC | libc::O_WRONLY] {
        assert_eq!(client.open(link, flags), Err(libc::ELOOP));
    }
    assert_eq!(client.ask(OPENDIR, link, &[0; 8]), Err(libc::ENOTDIR));
    assert_eq!(
        client.create(ROOT, "link", libc::O_RDWR).map(drop),
        Err(libc::ESTALE)
    );
    let (up, _) = client.look_up(ROOT, "up").unwrap();
    assert_eq!(client.look_up(up, "secret").map(drop), Err(libc::ENOTDIR));
    assert_eq!(client.ask(OPENDIR, up, &[0; 8]), Err(libc::ENOTDIR));
    // Changes are of the link itself, or refused.
    let _ = client.setattr(
        link,
        &Change {
            valid: 1,
            mode: 0o777,
            ..Change::default()
        },
    );
    let size = client.setattr(
        link,
        &Change {
            valid: 1 << 3,
            size: 0,
            ..Change::default()
        },
    );
    assert_eq!(size, Err(libc::EINVAL));
    let times = Change {
        valid: 1 << 4 | 1 << 5,
        accessed: 1,
        modified: 2,
        ..Change::default()
    };
    assert_eq!(client.setattr(link, &times).unwrap().modified, 2);
    assert_eq!(fs::symlink_metadata(place.path("link")).unwrap().mtime(), 2);
    if crate::client::is_root() {
        let give = Change {
            valid: 1 << 1,
            user: 7,
            ..Change::default()
        };
        client.setattr(link, &give).unwrap();
    }
    let attribute = Bytes::new().u32(1).u32(0).name("user.x").bytes(b"y");
    assert_eq!(client.ask(SETXATTR, link, &attribute.0), Err(libc::EPERM));
    // A hard link to it is one to the link, not to its target.
    let hard = Bytes::new().u64(link).name("hard");
    let (same, attributes) = entry(&client.ask(LINK, ROOT, &hard.0).unwrap());
    assert_eq!(
        (same, attributes.mode & libc::S_IFMT),
        (link, libc::S_IFLNK)
    );
    let after = fs::metadata(&secret).unwrap();
    assert_eq!(
        (before.mode(), before.mtime(), before.uid(), before.nlink()),
        (after.mode(), after.mtime(), after.uid(), after.nlink())
    );
}

#[test]
fn only_files_and_folders_are_opened() {
    let place = Place::new();
    let _listener = UnixListener::bind(place.path("socket")).unwrap();
    let (_server, mut client) = serve(&place.shared(), usual());
    let fifo = Bytes::new()
        .u32(libc::S_IFIFO | 0o666)
        .zeros(12)
        .name("fifo");
    let (fifo, _) = entry(&client.ask(MKNOD, ROOT, &fifo.0).unwrap());
    assert!(
        fs::metadata(place.path("fifo"))
            .unwrap()
            .file_type()
            .is_fifo()
    );
    let (socket, _) = client.look_up(ROOT, "socket").unwrap();
    // Opening a FIFO waits for another process; none of the four threads may.
    for _ in 0..8 {
        for node in [fifo, socket] {
            assert_eq!(client.open(node, libc::O_RDONLY), Err(libc::ENXIO));
            assert_eq!(client.open(node, libc::O_WRONLY), Err(libc::ENXIO));
        }
        for name in ["fifo", "socket"] {
            assert_eq!(
                client.create(ROOT, name, libc::O_RDWR).map(drop),
                Err(libc::ESTALE)
            );
        }
    }
    let size = client.setattr(
        fifo,
        &Change {
            valid: 1 << 3,
            ..Change::default()
        },
    );
    assert_eq!(size, Err(libc::EINVAL));
    let get = Bytes::new().u32(8).u32(0).name("user.x").0;
    assert_eq!(client.ask(GETXATTR, fifo, &get), Err(libc::ENODATA));
    if crate::client::is_root() {
        let device = place.path("device");
        let made = rustix::fs::mknodat(
            rustix::fs::CWD,
            &device,
            rustix::fs::FileType::CharacterDevice,
            rustix::fs::Mode::RUSR,
            rustix::fs::makedev(1, 3),
        );
        made.unwrap();
        let (device, _) = client.look_up(ROOT, "device").unwrap();
        assert_eq!(client.open(device, libc::O_RDONLY), Err(libc::ENXIO));
    }
    assert_eq!(client.open(ROOT, libc::O_RDONLY), Err(libc::EISDIR));
    assert_eq!(client.open(fifo, libc::O_ACCMODE), Err(libc::EINVAL));
}

#[test]
fn no_rename_lets_a_lookup_out() {
    let place = Place::new();
    let outside = place.above.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("inner"), "outside").unwrap();
    fs::create_dir_all(place.path("a/b")).unwrap();
    fs::write(place.path("a/b/inner"), "inside").unwrap();
    let (_server, mut client) = serve(&place.shared(), usual());
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let (shared, out) = (place.shared(), outside.clone());
    // The host exchanges `b` for a link to the outside, and moves folders, all the time.
    let racer = std::thread::spawn(move || {
        let (b, spare) = (shared.join("a/b"), shared.join("a/spare"));
        symlink(&out, &spare).unwrap();
        let at = rustix::fs::CWD;
        let exchange = rustix::fs::RenameFlags::EXCHANGE;
        while !stopped.load(Ordering::Relaxed) {
            rustix::fs::renameat_with(at, &b, at, &spare, exchange).unwrap();
            let moved = shared.join("moved");
            fs::rename(shared.join("a"), &moved).unwrap();
            fs::rename(&moved, shared.join("a")).unwrap();
        }
    });
    let (mut insides, mut links) = (0, 0);
    for _ in 0..5000 {
        let Ok((a, _)) = client.look_up(ROOT, "a") else {
            continue;
        };
        let Ok((b, attributes)) = client.look_up(a, "b") else {
            continue;
        };
        match client.look_up(b, "inner") {
            Ok((inner, _)) => {
                assert_eq!(attributes.mode & libc::S_IFMT, libc::S_IFDIR);
                let handle = client.open(inner, libc::O_RDONLY).unwrap();
                assert_eq!(client.read(inner, handle, 0, 9), Ok(b"inside".to_vec()));
                client.release(inner, handle).unwrap();
                insides += 1;
            }
            Err(error) => {
                assert_eq!(attributes.mode & libc::S_IFMT, libc::S_IFLNK);
                assert_eq!(error, libc::ENOTDIR);
                links += 1;
            }
        }
    }
    stop.store(true, Ordering::Relaxed);
    racer.join().unwrap();
    assert!(insides > 0 && links > 0, "{insides} folders, {links} links");
}

#[test]
fn a_folder_that_the_host_moves_out_leads_nowhere() {
    let place = Place::new();
    fs::create_dir_all(place.path("folder/inner")).unwrap();
    let (_server, mut client) = serve(&place.shared(), usual());
    let (folder, _) = client.look_up(ROOT, "folder").unwrap();
    let (inner, _) = client.look_up(folder, "inner").unwrap();
    fs::rename(place.path("folder"), place.above.path().join("moved")).unwrap();
    // As a bind mount: what the guest holds is still that folder, and nothing above has a name.
    for node in [folder, inner] {
        assert_eq!(client.look_up(node, "..").map(drop), Err(libc::EINVAL));
        assert_eq!(client.look_up(node, "secret").map(drop), Err(libc::ENOENT));
    }
    assert_eq!(client.look_up(ROOT, "folder").map(drop), Err(libc::ENOENT));
    assert_eq!(client.names(ROOT), [""; 0]);
}
