//! Escape attempts of a compromised `jiffy-files`, which may have root's rights over files.
#![allow(unsafe_code)] // System calls, whatever they do.

use super::attempts::{Aims, Attempt, Outcome, c_path};
use super::calls::{call, got, reply};
use jiffy_jail::rooted::Rooted;
use libc::{c_int, c_long};
use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::ptr;

/// Confines this process like the real program, squashed as a user who is not root.
pub fn confine(who: &str, own: &Path) -> Rooted {
    let root = rustix::process::geteuid().is_root();
    let squashed = who == "files-squashed";
    if squashed && root {
        // Also of the link that leads there; the program itself stays open.
        let (user, group) = (
            rustix::process::Uid::from_raw(1000),
            rustix::process::Gid::from_raw(1000),
        );
        rustix::thread::set_thread_groups(&[]).unwrap();
        rustix::thread::set_thread_res_gid(group, group, group).unwrap();
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        // Else it could not map its user; a program that is started can.
        let dumpable = rustix::process::DumpableBehavior::Dumpable;
        rustix::process::set_dumpable_behavior(dumpable).unwrap();
    }
    let folder = fs::File::open(own).unwrap();
    let read_only = who == "files-read-only";
    let users = root && !squashed;
    let rooted = jiffy_files::confinement::enter(folder.as_fd(), read_only, users).unwrap();
    if let Some(error) = &rooted.no_own_root {
        // Only where a user can't make namespaces.
        assert!(!root, "{error}");
        println!("held: {who} can make no mount here: {error}");
    }
    rooted
}

/// What it has to do still works.
pub fn work(rooted: &Rooted, read_only: bool) {
    assert_eq!(fs::read("/file").unwrap(), b"own");
    let (folder, flags) = (&rooted.folder, rustix::fs::RenameFlags::NOREPLACE);
    let renamed = rustix::fs::renameat_with(folder, c"file", folder, c"renamed", flags);
    assert_eq!(renamed.is_ok(), !read_only, "{renamed:?}");
    std::thread::spawn(|| ()).join().unwrap();
}

fn rooted(aims: &Aims) -> &Rooted {
    aims.rooted.as_ref().unwrap()
}

fn opened(folder: c_int, path: &CStr, flags: c_int) -> io::Result<c_int> {
    // SAFETY: a string.
    got(unsafe { libc::openat(folder, path.as_ptr(), flags) }.into()).map(|fd| fd as c_int)
}

/// Looks whether something outside of the folder is there.
fn seen(folder: c_int, path: &CStr) -> Outcome {
    // SAFETY: a string, and a structure that outlives the call.
    reply(unsafe {
        let mut facts = std::mem::zeroed();
        libc::fstatat(folder, path.as_ptr(), &mut facts, 0)
    })
}

/// The other folder's file by each way that does not need Landlock's permission.
fn outside(aims: &Aims) -> CString {
    c_path(&aims.other.join("public"))
}

/// Refused because nothing outside has a name.
pub const BEYOND: &[Attempt] = &[
    ("see another file", |aims| {
        seen(libc::AT_FDCWD, &outside(aims))
    }),
    ("see a file above its root", |aims| {
        let path = c_path(Path::new("../other/public"));
        seen(rooted(aims).folder.as_raw_fd(), &path)
    }),
    ("see the host's users by many steps up", |aims| {
        let path = c_path(Path::new(&format!("{}etc/passwd", "../".repeat(40))));
        seen(rooted(aims).folder.as_raw_fd(), &path)
    }),
    ("see another process above its descriptors", |aims| {
        let path = c_path(Path::new("../../1/status"));
        seen(rooted(aims).descriptors.as_raw_fd(), &path)
    }),
    ("see the host's root above its descriptors", |aims| {
        let path = c_path(Path::new("../root/etc/passwd"));
        seen(rooted(aims).descriptors.as_raw_fd(), &path)
    }),
    ("see its environment above its descriptors", |aims| {
        let path = c_path(Path::new("../environ"));
        seen(rooted(aims).descriptors.as_raw_fd(), &path)
    }),
    ("hold another file without reading it", |aims| {
        opened(libc::AT_FDCWD, &outside(aims), libc::O_PATH).map(drop)
    }),
    ("change another file's mode", |aims| {
        // SAFETY: a string.
        reply(unsafe { libc::fchmodat(libc::AT_FDCWD, outside(aims).as_ptr(), 0o600, 0) })
    }),
    ("take another file", |aims| {
        // SAFETY: a string.
        reply(unsafe { libc::fchownat(libc::AT_FDCWD, outside(aims).as_ptr(), 1000, 1000, 0) })
    }),
    ("change another file's times", |aims| {
        let zero = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let times = [zero; 2];
        // SAFETY: a string and two structures.
        reply(unsafe { libc::utimensat(libc::AT_FDCWD, outside(aims).as_ptr(), times.as_ptr(), 0) })
    }),
    ("give another file an attribute", |aims| {
        let (path, name) = (outside(aims), c"user.x");
        // SAFETY: strings, and one byte of a value.
        reply(unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), name.as_ptr().cast(), 1, 0) })
    }),
    ("link another file by its descriptors", |aims| {
        let (folder, path) = (rooted(aims).folder.as_raw_fd(), outside(aims));
        // SAFETY: strings.
        reply(unsafe { libc::linkat(libc::AT_FDCWD, path.as_ptr(), folder, c"x".as_ptr(), 0) })
    }),
    ("follow a link that it made", |aims| {
        let folder = rooted(aims).folder.as_raw_fd();
        // SAFETY: strings.
        reply(unsafe { libc::symlinkat(outside(aims).as_ptr(), folder, c"way".as_ptr()) })?;
        seen(folder, c"way")
    }),
    (
        "leave its root by a folder that it still has open",
        |aims| {
            // SAFETY: a descriptor.
            reply(unsafe { libc::fchdir(rooted(aims).descriptors.as_raw_fd()) })?;
            seen(libc::AT_FDCWD, c"../../../etc/passwd")
        },
    ),
    ("open a file by its handle", |_| {
        let mut handle = [0_u32; 34];
        handle[0] = 128;
        call(
            libc::SYS_open_by_handle_at,
            [libc::AT_FDCWD.into(), handle.as_ptr() as c_long, 0, 0, 0, 0],
        )
    }),
    ("take a descriptor of another process", |aims| {
        let _ = aims;
        call(libc::SYS_pidfd_getfd, [3, 0, 0, 0, 0, 0])
    }),
    ("enter the namespace of another process", |_| {
        call(libc::SYS_setns, [3, 0, 0, 0, 0, 0])
    }),
    ("clone a mount", |_| {
        call(
            libc::SYS_open_tree,
            [libc::AT_FDCWD.into(), c"/".as_ptr() as c_long, 1, 0, 0, 0],
        )
    }),
    ("make a device by its own call", |aims| {
        let folder = rooted(aims).folder.as_raw_fd();
        // SAFETY: a string.
        reply(unsafe {
            libc::mknodat(
                folder,
                c"disk".as_ptr(),
                libc::S_IFBLK | 0o600,
                libc::makedev(8, 0),
            )
        })
    }),
    ("make a terminal by its own call", |aims| {
        let folder = rooted(aims).folder.as_raw_fd();
        // SAFETY: a string.
        reply(unsafe {
            libc::mknodat(
                folder,
                c"tty".as_ptr(),
                libc::S_IFCHR | 0o600,
                libc::makedev(5, 0),
            )
        })
    }),
    ("listen on a socket", |_| {
        call(libc::SYS_socket, [libc::AF_UNIX.into(), 1, 0, 0, 0, 0])
    }),
    ("become another user and signal", |aims| {
        let _ = aims;
        // SAFETY: numbers.
        reply(unsafe { libc::tgkill(1, 1, 0) as c_int })
    }),
];

/// Refused because the mount is read-only, also if the program's own checks are gone.
pub const CHANGES: &[Attempt] = &[
    ("write to a folder that is read-only", |aims| {
        let flags = libc::O_RDWR;
        opened(rooted(aims).folder.as_raw_fd(), c"file", flags).map(drop)
    }),
    ("make a folder where all is read-only", |aims| {
        let folder = rooted(aims).folder.as_raw_fd();
        // SAFETY: a string.
        reply(unsafe { libc::mkdirat(folder, c"new".as_ptr(), 0o700) })
    }),
    ("change a mode where all is read-only", |aims| {
        let folder = rooted(aims).folder.as_raw_fd();
        // SAFETY: a string.
        reply(unsafe { libc::fchmodat(folder, c"file".as_ptr(), 0o777, 0) })
    }),
    ("change times where all is read-only", |aims| {
        let folder = rooted(aims).folder.as_raw_fd();
        // SAFETY: a string, and no times.
        reply(unsafe { libc::utimensat(folder, c"file".as_ptr(), ptr::null(), 0) })
    }),
    ("make the mount writable", |aims| {
        let writable = [0_u64, libc::MOUNT_ATTR_RDONLY, 0, 0];
        let mount = rooted(aims).folder.as_raw_fd().into();
        let (path, flags) = (c"".as_ptr() as c_long, libc::AT_EMPTY_PATH.into());
        let size = size_of_val(&writable) as c_long;
        call(
            libc::SYS_mount_setattr,
            [mount, path, flags, writable.as_ptr() as c_long, size, 0],
        )
    }),
];
