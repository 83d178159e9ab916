//! Whose files they are.

use crate::client::{Bytes, Change, Place, ROOT, as_user, entry, is_root, serve, serve_by};
use jiffy_files::protocol::opcode::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

fn owner(place: &Place, name: &str) -> (u32, u32) {
    let facts = fs::symlink_metadata(place.path(name)).unwrap();
    (facts.uid(), facts.gid())
}

#[test]
fn new_files_belong_to_the_guests_user() {
    if !is_root() {
        crate::client::skip("only root can act as the guest's users");
        return;
    }
    let place = Place::new();
    let (_server, mut client) = serve(&place.shared(), &[]);
    client.user = (1000, 100);
    client.mkdir(ROOT, "folder").unwrap();
    let (file, attributes, _) = client.create(ROOT, "file", libc::O_RDWR).unwrap();
    assert_eq!((attributes.user, attributes.group), (1000, 100));
    client
        .ask(SYMLINK, ROOT, &Bytes::new().name("link").name("x").0)
        .unwrap();
    let fifo = Bytes::new()
        .u32(libc::S_IFIFO | 0o600)
        .zeros(12)
        .name("fifo");
    client.ask(MKNOD, ROOT, &fifo.0).unwrap();
    client.user = (0, 0);
    client.mkdir(ROOT, "of-root").unwrap();
    for name in ["folder", "file", "link", "fifo"] {
        assert_eq!(owner(&place, name), (1000, 100), "{name}");
    }
    assert_eq!(owner(&place, "of-root"), (0, 0), "the thread is root again");
    let give = Change {
        valid: 1 << 1 | 1 << 2,
        user: 7,
        group: 8,
        ..Change::default()
    };
    client.setattr(file, &give).unwrap();
    assert_eq!(owner(&place, "file"), (7, 8));
    // -1 means "no change" to the kernel: the server would stay root.
    for user in [(u32::MAX, 0), (0, u32::MAX)] {
        client.user = user;
        assert_eq!(client.mkdir(ROOT, "nobody").map(drop), Err(libc::EINVAL));
    }
    let nobody = Change {
        valid: 1 << 1,
        user: u32::MAX,
        ..Change::default()
    };
    assert_eq!(client.setattr(file, &nobody), Err(libc::EINVAL));
    assert!(!place.path("nobody").exists());
}

#[test]
fn devices_are_never_made() {
    let place = Place::new();
    let (_server, mut client) = serve(&place.shared(), crate::client::usual());
    for kind in [libc::S_IFCHR, libc::S_IFBLK] {
        let device = Bytes::new()
            .u32(kind | 0o666)
            .u32(0x103)
            .zeros(8)
            .name("device");
        assert_eq!(client.ask(MKNOD, ROOT, &device.0), Err(libc::EPERM));
    }
    for kind in [libc::S_IFDIR, libc::S_IFLNK, 0x3000] {
        let other = Bytes::new().u32(kind | 0o666).zeros(12).name("other");
        assert_eq!(client.ask(MKNOD, ROOT, &other.0), Err(libc::EINVAL));
    }
    assert!(client.names(ROOT).is_empty());
}

/// Serves as a user who is not root, or as the one who runs this test.
fn squashed(place: &Place) -> (crate::client::Server, crate::client::Client, u32) {
    if !is_root() {
        let own = rustix::process::geteuid().as_raw();
        let (server, client) = serve(&place.shared(), &["--squash"]);
        return (server, client, own);
    }
    let own = 1000;
    chown(place.shared(), Some(own), Some(own)).unwrap();
    let command = as_user(place.above.path(), own);
    let (server, client) = serve_by(command, &place.shared(), &["--squash"]);
    (server, client, own)
}

#[test]
fn everyone_is_the_servers_user_when_squashed() {
    let place = Place::new();
    let (_server, mut client, own) = squashed(&place);
    client.init();
    for user in [(0, 0), (1000, 1000), (4711, 4712)] {
        client.user = user;
        let name = format!("of-{}", user.0);
        let (node, attributes, handle) = client.create(ROOT, &name, libc::O_RDWR).unwrap();
        assert_eq!((attributes.user, attributes.group), (0, 0), "shown as root");
        assert_eq!(owner(&place, &name).0, own);
        client.write(node, handle, 0, b"data").unwrap();
        let change = |user| Change {
            valid: 1 << 1 | 1 << 2,
            user,
            group: user,
            ..Change::default()
        };
        assert_eq!(client.setattr(node, &change(0)).unwrap().user, 0);
        assert_eq!(client.setattr(node, &change(1)), Err(libc::EPERM));
        assert_eq!(client.setattr(node, &change(own.max(1))), Err(libc::EPERM));
        let open = client.open(node, libc::O_RDWR | libc::O_APPEND).unwrap();
        client.write(node, open, 0, b"more").unwrap();
        assert_eq!(client.getattr(node).unwrap().size, 8);
        let link = Bytes::new().u64(node).name(&format!("{name}-hard"));
        assert_eq!(entry(&client.ask(LINK, ROOT, &link.0).unwrap()).0, node);
    }
    let set = Bytes::new().u32(1).u32(0).name("user.x").bytes(b"y");
    let (node, _) = client.look_up(ROOT, "of-0").unwrap();
    client.ask(SETXATTR, node, &set.0).unwrap();
}

#[test]
fn a_squashed_server_has_no_more_rights_than_its_user() {
    if !is_root() {
        crate::client::skip("only root can make files of others");
        return;
    }
    let place = Place::new();
    for (name, mode) in [("private", 0o600), ("public", 0o644)] {
        fs::write(place.path(name), name).unwrap();
        fs::set_permissions(place.path(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    let (_server, mut client, _) = squashed(&place);
    let (node, attributes) = client.look_up(ROOT, "private").unwrap();
    assert_eq!(
        (attributes.user, attributes.group),
        (65534, 65534),
        "nobody's"
    );
    assert_eq!(client.open(node, libc::O_RDONLY), Err(libc::EACCES));
    let mode = Change {
        valid: 1,
        mode: 0o666,
        ..Change::default()
    };
    assert_eq!(client.setattr(node, &mode), Err(libc::EPERM));
    let (node, _) = client.look_up(ROOT, "public").unwrap();
    let handle = client.open(node, libc::O_RDONLY).unwrap();
    assert_eq!(client.read(node, handle, 0, 9), Ok(b"public".to_vec()));
    assert_eq!(client.open(node, libc::O_RDWR), Err(libc::EACCES));
}
