//! What users of a shared folder expect.

use crate::client::{Attributes, Bytes, Change, Fields, Place, ROOT, entry, serve, usual};
use jiffy_files::protocol::opcode::*;
use jiffy_wire::files::DATA_MAX;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};

const READ_WRITE: i32 = libc::O_RDWR;

#[test]
fn requests_have_at_most_the_default_number_of_pages() {
    let place = Place::new();
    let (_server, mut client) = serve(&place.shared(), usual());
    let answer = client.init();
    assert_eq!(answer.len(), 64);
    let mut fields = Fields(&answer);
    assert_eq!((fields.u32(), fields.u32()), (7, 41));
    let (_readahead, flags, _background) = (fields.u32(), fields.u32(), fields.u32());
    assert_eq!(fields.u32() as usize, DATA_MAX, "max_write");
    assert_eq!(flags & 1 << 22, 0, "FUSE_MAX_PAGES");
    assert_eq!(flags & (1 << 1 | 1 << 10), 0, "locks stay in the guest");
    let old = Bytes::new().u32(7).u32(30).zeros(8);
    assert_eq!(client.ask(INIT, 0, &old.0), Err(libc::EPROTO));
    let newer = client.ask(INIT, 0, &Bytes::new().u32(8).zeros(12).0);
    assert_eq!(Fields(&newer.unwrap()).u32(), 7);
}

#[test]
fn a_file_is_made_written_read_and_removed() {
    let place = Place::new();
    let (_server, mut client) = serve(&place.shared(), usual());
    client.init();
    let (node, attributes, handle) = client.create(ROOT, "file", READ_WRITE).unwrap();
    assert_eq!((attributes.size, attributes.mode), (0, 0o100_644));
    let data: Vec<u8> = (0..DATA_MAX).map(|at| at as u8).collect();
    assert_eq!(client.write(node, handle, 5, &data), Ok(DATA_MAX as u32));
    let read = client.read(node, handle, 5, DATA_MAX as u32);
    assert_eq!(read.unwrap(), data, "the longest read");
    assert_eq!(client.read(node, handle, 1 << 40, 10), Ok(vec![]));
    assert_eq!(fs::read(place.path("file")).unwrap()[5..], data);
    let sync = Bytes::new().u64(handle).u32(1).u32(0);
    assert_eq!(client.ask(FSYNC, node, &sync.0), Ok(vec![]));
    let flush = Bytes::new().u64(handle).zeros(16);
    assert_eq!(client.ask(FLUSH, node, &flush.0), Ok(vec![]));
    client.release(node, handle).unwrap();
    assert_eq!(client.read(node, handle, 0, 1), Err(libc::EBADF));
    let append = client.open(node, libc::O_WRONLY | libc::O_APPEND).unwrap();
    client.write(node, append, 0, b"end").unwrap();
    assert!(fs::read(place.path("file")).unwrap().ends_with(b"end"));
    let cut = client.open(node, READ_WRITE | libc::O_TRUNC).unwrap();
    assert_eq!(client.getattr(node).unwrap().size, 0);
    client.ask(UNLINK, ROOT, b"file\0").unwrap();
    assert!(!place.path("file").exists());
    assert_eq!(client.write(node, cut, 0, b"gone"), Ok(4), "still open");
    assert_eq!(client.getattr(node).unwrap().links, 0);
    assert_eq!(client.look_up(ROOT, "file"), Err(libc::ENOENT));
}

#[test]
fn create_opens_what_exists_unless_it_is_exclusive() {
    let place = Place::new();
    fs::write(place.path("file"), "old").unwrap();
    let (_server, mut client) = serve(&place.shared(), usual());
    let (node, attributes, handle) = client.create(ROOT, "file", READ_WRITE).unwrap();
    assert_eq!(attributes.size, 3);
    assert_eq!(client.read(node, handle, 0, 10), Ok(b"old".to_vec()));
    let exclusive = client.create(ROOT, "file", READ_WRITE | libc::O_EXCL);
    assert_eq!(exclusive, Err(libc::EEXIST));
    let (node, attributes, _) = client
        .create(ROOT, "file", READ_WRITE | libc::O_TRUNC)
        .unwrap();
    assert_eq!(
        (attributes.size, client.getattr(node).unwrap().size),
        (0, 0)
    );
}

#[test]
fn names_are_made_moved_linked_and_removed() {
    let place = Place::new();
    let (_server, mut client) = serve(&place.shared(), usual());
    let (folder, attributes) = client.mkdir(ROOT, "folder").unwrap();
    assert_eq!(attributes.mode, 0o040_755);
    let (file, ..) = client.create(ROOT, "file", READ_WRITE).unwrap();
    let fifo = Bytes::new()
        .u32(libc::S_IFIFO | 0o600)
        .zeros(12)
        .name("fifo");
    let (_, attributes) = entry(&client.ask(MKNOD, folder, &fifo.0).unwrap());
    assert_eq!(attributes.mode, libc::S_IFIFO | 0o600);
    let found = fs::metadata(place.path("folder/fifo")).unwrap();
    assert!(found.file_type().is_fifo());
    let link = Bytes::new().name("link").name("/where/ever");
    let (link, attributes) = entry(&client.ask(SYMLINK, ROOT, &link.0).unwrap());
    assert_eq!(attributes.mode & libc::S_IFMT, libc::S_IFLNK);
    assert_eq!(client.ask(READLINK, link, &[]), Ok(b"/where/ever".to_vec()));
    assert_eq!(client.ask(READLINK, file, &[]), Err(libc::EINVAL));
    let hard = Bytes::new().u64(file).name("hard");
    let (same, attributes) = entry(&client.ask(LINK, folder, &hard.0).unwrap());
    assert_eq!((same, attributes.links), (file, 2), "the same file");
    let moved = Bytes::new().u64(folder).name("file").name("moved");
    client.ask(RENAME, ROOT, &moved.0).unwrap();
    assert_eq!(client.look_up(folder, "moved").unwrap().0, file);
    let onto = |flags| {
        Bytes::new()
            .u64(folder)
            .u32(flags)
            .u32(0)
            .name("moved")
            .name("hard")
    };
    let refused = client.ask(RENAME2, folder, &onto(libc::RENAME_NOREPLACE).0);
    assert_eq!(refused, Err(libc::EEXIST));
    let whiteout = client.ask(RENAME2, folder, &onto(libc::RENAME_WHITEOUT).0);
    assert_eq!(whiteout, Err(libc::EINVAL));
    let swap = Bytes::new().u64(folder).u32(libc::RENAME_EXCHANGE).u32(0);
    let swap = swap.name("link").name("fifo");
    client.ask(RENAME2, ROOT, &swap.0).unwrap();
    assert!(place.path("folder/fifo").is_symlink());
    assert_eq!(client.ask(RMDIR, ROOT, b"folder\0"), Err(libc::ENOTEMPTY));
    assert_eq!(client.ask(UNLINK, ROOT, b"folder\0"), Err(libc::EISDIR));
    for name in ["moved\0", "hard\0", "fifo\0"] {
        client.ask(UNLINK, folder, name.as_bytes()).unwrap();
    }
    client.ask(RMDIR, ROOT, b"folder\0").unwrap();
    assert_eq!(client.names(ROOT), ["link"]);
}

#[test]
fn attributes_are_changed() {
    let place = Place::new();
    let (_server, mut client) = serve(&place.shared(), usual());
    let (node, ..) = client.create(ROOT, "file", libc::O_WRONLY).unwrap();
    let change = Change {
        valid: 1 | 1 << 3 | 1 << 4 | 1 << 5,
        mode: 0o100_600,
        size: 12345,
        accessed: 1000,
        modified: 2000,
        ..Change::default()
    };
    let attributes = client.setattr(node, &change).unwrap();
    let Attributes {
        size,
        modified,
        mode,
        ..
    } = attributes;
    assert_eq!((size, modified, mode), (12345, 2000, 0o100_600));
    let facts = fs::metadata(place.path("file")).unwrap();
    assert_eq!(
        (facts.len(), facts.atime(), facts.mtime()),
        (12345, 1000, 2000)
    );
    let now = Change {
        valid: 1 << 5 | 1 << 8,
        ..Change::default()
    };
    assert!(client.setattr(node, &now).unwrap().modified > 1_000_000_000);
    let too_long = Change {
        valid: 1 << 3,
        size: u64::MAX,
        ..Change::default()
    };
    assert_eq!(client.setattr(node, &too_long), Err(libc::EINVAL));
    // A file that may not be written any more is shortened by the handle that may.
    let handle = client.open(node, libc::O_WRONLY).unwrap();
    fs::set_permissions(place.path("file"), fs::Permissions::from_mode(0o400)).unwrap();
    let valid = 1 << 3 | 1 << 6;
    let shorter = Change {
        valid,
        handle,
        size: 1,
        ..Change::default()
    };
    assert_eq!(client.setattr(node, &shorter).unwrap().size, 1);
    let statfs = client.ask(STATFS, ROOT, &[]).unwrap();
    assert_eq!(statfs.len(), 80);
    assert!(Fields(&statfs).u64() > 0, "blocks");
    assert_eq!(
        client.ask(ACCESS, node, &[4, 0, 0, 0, 0, 0, 0, 0]),
        Ok(vec![])
    );
}

#[test]
fn users_attributes_are_kept_and_others_are_not_seen() {
    let place = Place::new();
    let (_server, mut client) = serve(&place.shared(), usual());
    let (node, ..) = client.create(ROOT, "file", libc::O_WRONLY).unwrap();
    let set = |name: &str, flags| Bytes::new().u32(5).u32(flags).name(name).bytes(b"value").0;
    let get = |size, name: &str| Bytes::new().u32(size).u32(0).name(name).0;
    client.ask(SETXATTR, node, &set("user.one", 0)).unwrap();
    client
        .ask(SETXATTR, ROOT, &set("user.of.folder", 0))
        .unwrap();
    let again = client.ask(SETXATTR, node, &set("user.one", libc::XATTR_CREATE as u32));
    assert_eq!(again, Err(libc::EEXIST));
    assert_eq!(
        client.ask(GETXATTR, node, &get(64, "user.one")),
        Ok(b"value".to_vec())
    );
    let length = client.ask(GETXATTR, node, &get(0, "user.one")).unwrap();
    assert_eq!(Fields(&length).u32(), 5);
    assert_eq!(
        client.ask(GETXATTR, node, &get(4, "user.one")),
        Err(libc::ERANGE)
    );
    assert_eq!(
        client.ask(GETXATTR, node, &get(4, "user.two")),
        Err(libc::ENODATA)
    );
    for name in [
        "security.capability",
        "trusted.x",
        "system.posix_acl_access",
    ] {
        let refused = client.ask(SETXATTR, node, &set(name, 0));
        assert_eq!(refused, Err(libc::EOPNOTSUPP), "{name}");
        assert_eq!(
            client.ask(GETXATTR, node, &get(64, name)),
            Err(libc::EOPNOTSUPP)
        );
    }
    let list = |size| Bytes::new().u32(size).u32(0).0;
    assert_eq!(
        client.ask(LISTXATTR, node, &list(64)),
        Ok(b"user.one\0".to_vec())
    );
    assert_eq!(client.ask(LISTXATTR, node, &list(3)), Err(libc::ERANGE));
    let length = client.ask(LISTXATTR, node, &list(0)).unwrap();
    assert_eq!(Fields(&length).u32(), 9);
    client.ask(REMOVEXATTR, node, b"user.one\0").unwrap();
    assert_eq!(client.ask(LISTXATTR, node, &list(64)), Ok(vec![]));
}

#[test]
fn holes_are_found_and_made() {
    let place = Place::new();
    let (_server, mut client) = serve(&place.shared(), usual());
    let (node, _, handle) = client.create(ROOT, "file", READ_WRITE).unwrap();
    client.write(node, handle, 1 << 20, b"data").unwrap();
    let seek = |from: u64, whence: i32| {
        Bytes::new()
            .u64(handle)
            .u64(from)
            .u32(whence as u32)
            .u32(0)
            .0
    };
    let data = client.ask(LSEEK, node, &seek(0, libc::SEEK_DATA)).unwrap();
    assert_eq!(Fields(&data).u64(), 1 << 20);
    let hole = client
        .ask(LSEEK, node, &seek(1 << 20, libc::SEEK_HOLE))
        .unwrap();
    assert!(Fields(&hole).u64() > 1 << 20);
    let beyond = client.ask(LSEEK, node, &seek(1 << 40, libc::SEEK_DATA));
    assert_eq!(beyond, Err(libc::ENXIO));
    assert_eq!(
        client.ask(LSEEK, node, &seek(0, libc::SEEK_CUR)),
        Err(libc::EINVAL)
    );
    assert_eq!(
        client.ask(LSEEK, node, &seek(u64::MAX, libc::SEEK_DATA)),
        Err(libc::EINVAL)
    );
    let allocate = |length: u64, mode: i32| {
        Bytes::new()
            .u64(handle)
            .u64(0)
            .u64(length)
            .u32(mode as u32)
            .u32(0)
            .0
    };
    client.ask(FALLOCATE, node, &allocate(2 << 20, 0)).unwrap();
    assert_eq!(client.getattr(node).unwrap().size, 2 << 20);
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    client
        .ask(FALLOCATE, node, &allocate(2 << 20, punch))
        .unwrap();
    assert_eq!(client.read(node, handle, 1 << 20, 4), Ok(vec![0; 4]));
    let other = client.ask(
        FALLOCATE,
        node,
        &allocate(1, libc::FALLOC_FL_COLLAPSE_RANGE),
    );
    assert_eq!(other, Err(libc::EOPNOTSUPP));
}

#[test]
fn folders_are_listed_in_pieces_and_with_attributes() {
    let place = Place::new();
    let mut expected: Vec<String> = (0..300).map(|at| format!("file-{at}")).collect();
    expected.push("n".repeat(255));
    expected
        .iter()
        .for_each(|name| fs::write(place.path(name), name).unwrap());
    expected.sort();
    let (_server, mut client) = serve(&place.shared(), usual());
    assert_eq!(client.names(ROOT), expected);
    let handle = Fields(&client.ask(OPENDIR, ROOT, &[0; 8]).unwrap()).u64();
    // The second is what the longest name needs.
    for size in [4096, 408] {
        let (mut found, mut offset) = (Vec::new(), 0);
        loop {
            let arguments = Bytes::new().u64(handle).u64(offset).u32(size).zeros(20);
            let answer = client.ask(READDIRPLUS, ROOT, &arguments.0).unwrap();
            if answer.is_empty() {
                break;
            }
            assert!(answer.len() <= size as usize);
            let mut fields = Fields(&answer);
            while !fields.0.is_empty() {
                let (node, attributes) = entry(&fields.0[..128]);
                fields.0 = &fields.0[128..];
                let (name, next, inode) = fields.entry();
                offset = next;
                if [".", ".."].contains(&name.as_str()) {
                    assert_eq!((node, inode), (0, 0xffff_ffff));
                    continue;
                }
                assert_eq!(attributes.size, name.len() as u64);
                assert_eq!(
                    (inode, client.look_up(ROOT, &name).unwrap().0),
                    (attributes.inode, node)
                );
                found.push(name);
            }
        }
        found.sort();
        assert_eq!(found, expected);
    }
    assert_eq!(
        client.ask(FSYNCDIR, ROOT, &Bytes::new().u64(handle).zeros(8).0),
        Ok(vec![])
    );
}

#[test]
fn a_file_without_a_name_gets_one() {
    let place = Place::new();
    let (_server, mut client) = serve(&place.shared(), usual());
    let arguments = Bytes::new()
        .u32(READ_WRITE as u32)
        .u32(0o100_600)
        .u32(0)
        .u32(0);
    let answer = client.ask(TMPFILE, ROOT, &arguments.name("/").0).unwrap();
    let (node, attributes) = entry(&answer[..128]);
    assert_eq!(attributes.links, 0);
    let handle = Fields(&answer[128..]).u64();
    client.write(node, handle, 0, b"hidden").unwrap();
    client
        .ask(LINK, ROOT, &Bytes::new().u64(node).name("shown").0)
        .unwrap();
    assert_eq!(fs::read(place.path("shown")).unwrap(), b"hidden");
}

#[test]
fn a_read_only_folder_refuses_every_change() {
    let place = Place::new();
    fs::write(place.path("file"), "data").unwrap();
    let arguments = [usual(), &["--read-only"]].concat();
    let (_server, mut client) = serve(&place.shared(), &arguments);
    let (node, _) = client.look_up(ROOT, "file").unwrap();
    for flags in [libc::O_WRONLY, libc::O_RDWR, libc::O_TRUNC] {
        assert_eq!(client.open(node, flags), Err(libc::EROFS));
    }
    let handle = client.open(node, libc::O_RDONLY).unwrap();
    for opcode in [
        SETATTR,
        SYMLINK,
        MKNOD,
        MKDIR,
        UNLINK,
        RMDIR,
        RENAME,
        RENAME2,
        LINK,
        WRITE,
        SETXATTR,
        REMOVEXATTR,
        CREATE,
        TMPFILE,
        FALLOCATE,
    ] {
        let node = if [UNLINK, CREATE].contains(&opcode) {
            ROOT
        } else {
            node
        };
        let refused = client.ask(opcode, node, &Bytes::new().u64(handle).zeros(80).0);
        assert_eq!(refused, Err(libc::EROFS), "{opcode}");
    }
    assert_eq!(
        client.ask(ACCESS, node, &[2, 0, 0, 0, 0, 0, 0, 0]),
        Err(libc::EROFS)
    );
    assert_eq!(client.read(node, handle, 0, 10), Ok(b"data".to_vec()));
    assert_eq!(client.names(ROOT), ["file"]);
    assert_eq!(
        client.ask(SETLK, node, &[0; 64]),
        Err(libc::ENOSYS),
        "the guest's own"
    );
}

/// `FUSE_SETLK`, which is never negotiated.
const SETLK: u32 = 32;
