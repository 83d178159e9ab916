//! The host's own kernel as the guest's: mounts the folder, and runs ordinary programs on it.

use crate::client::{Client, Place, Server, TIMEOUT, is_root, serve};
use jiffy_wire::files::MESSAGE_MAX;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{RecvFlags, SendFlags};
use std::ffi::CString;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A mount, and the threads between `/dev/fuse` and the socket.
struct Mounted {
    at: PathBuf,
    server: Server,
}

impl Mounted {
    /// `None`, and a loud line, where this test can't mount.
    fn new(place: &Place, arguments: &[&str]) -> Option<Mounted> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let device = rustix::fs::open("/dev/fuse", flags, Mode::empty());
        let (true, Ok(device)) = (is_root(), device) else {
            crate::client::skip("only root with /dev/fuse can mount the folder");
            return None;
        };
        let at = place.above.path().join("mounted");
        fs::create_dir(&at).unwrap();
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions",
            device.as_raw_fd()
        );
        let options = CString::new(options).unwrap();
        let flags = MountFlags::NODEV;
        rustix::mount::mount("jiffy", &at, "fuse", flags, Some(options.as_c_str())).unwrap();
        let (server, client) = serve(&place.shared(), arguments);
        let Client { socket, .. } = client;
        let (device, socket) = (Arc::new(device), Arc::new(socket));
        let (to, from) = (socket.clone(), device.clone());
        // Ends with the mount: then the server does, too.
        std::thread::spawn(move || {
            let mut request = vec![0; MESSAGE_MAX];
            loop {
                match rustix::io::read(&from, &mut request[..]) {
                    Ok(length) => {
                        let sent = rustix::net::send(&to, &request[..length], SendFlags::empty());
                        assert_eq!(sent, Ok(length));
                    }
                    Err(Errno::INTR | Errno::NOENT) => {}
                    Err(_) => break,
                }
            }
            rustix::net::shutdown(&to, rustix::net::Shutdown::Both).unwrap();
        });
        std::thread::spawn(move || {
            let mut answer = vec![0; MESSAGE_MAX];
            while let Ok((length @ 1.., _)) =
                rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty())
            {
                // The kernel refuses answers to requests that it has given up.
                let _ = rustix::io::write(&device, &answer[..length]);
            }
        });
        Some(Mounted { at, server })
    }

    fn unmount(mut self) {
        // A child that another test forks holds the open files of the mount until it executes its
        // program, and a program may have left one behind that still ends.
        let start = Instant::now();
        while let Err(error) = rustix::mount::unmount(&self.at, UnmountFlags::empty()) {
            assert!(error == Errno::BUSY && start.elapsed() < TIMEOUT, "{error}");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(self.server.wait().success());
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.at, UnmountFlags::DETACH);
    }
}

/// Runs a script of bash in the folder; it must succeed.
fn run(folder: &Path, script: &str) -> String {
    let output = Command::new("bash")
        .args(["-euc", script])
        .current_dir(folder)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {said}{complained}");
    said
}

#[test]
fn ordinary_programs_work_on_a_mounted_folder() {
    let place = Place::new();
    let Some(mounted) = Mounted::new(&place, &[]) else {
        return;
    };
    let at = mounted.at.clone();
    run(
        &at,
        "mkdir -p tree/a/b; for i in $(seq 200); do echo $i > tree/a/$i; done
         head -c 3000000 /dev/urandom > tree/big; truncate -s 10M tree/sparse
         ln -s ../big tree/a/link; ln tree/big tree/hard; mkfifo tree/fifo
         chmod 2750 tree/a; chown 1000:1001 tree/a/1; touch -d @1234567890 tree/a/2
         cp -a tree copy; diff -r --no-dereference -x fifo tree copy",
    );
    let same = run(
        &at,
        "for t in tree copy; do (cd $t; find . -printf '%p %y %m %U %G %n %l\\n' | sort | md5sum); done | uniq | wc -l",
    );
    // Names, kinds, modes, owners, links and targets.
    assert_eq!(same.trim(), "1");
    run(
        &at,
        "mv copy moved; mv moved/a/b b; test ! -e copy; cat moved/a/link > /dev/null
         cmp moved/big tree/hard; rm tree/hard; test $(stat -c %h tree/big) = 1
         (echo one; echo two) >> log; echo three >> log; test $(wc -l < log) = 3
         dd if=/dev/zero of=moved/big bs=1M count=2 conv=notrunc,fsync status=none
         (echo hello > moved/fifo) & test \"$(cat moved/fifo)\" = hello; wait
         flock log true; tar cf all.tar tree; mkdir out; tar xf all.tar -C out
         diff -r --no-dereference -x fifo tree out/tree; rm -rf out tree/a; df . > /dev/null",
    );
    let host = place.shared();
    run(
        &host,
        "test $(stat -c %h tree/big) = 1; test -p moved/fifo; test ! -e tree/a",
    );
    let facts = fs::metadata(host.join("moved/a/1")).unwrap();
    assert_eq!((facts.uid(), facts.gid()), (1000, 1001));
    assert_eq!(
        fs::metadata(host.join("moved/a/2")).unwrap().mtime(),
        1_234_567_890
    );
    let holes = fs::metadata(host.join("moved/sparse")).unwrap();
    assert!(holes.blocks() * 512 < holes.len(), "it is still sparse");
    // The host's changes are seen.
    fs::write(host.join("log"), "changed by the host").unwrap();
    fs::write(host.join("new"), "new").unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(fs::read(at.join("log")).unwrap(), b"changed by the host");
    assert_eq!(fs::read(at.join("new")).unwrap(), b"new");
    mounted.unmount();
}

#[test]
fn git_works_on_a_mounted_folder() {
    let place = Place::new();
    let Some(mounted) = Mounted::new(&place, &[]) else {
        return;
    };
    if Command::new("git").arg("--version").output().is_err() {
        crate::client::skip("there is no git");
        return;
    }
    run(
        &mounted.at,
        "git init -q -b main repository; cd repository
         git config user.name x; git config user.email x@example.com
         for i in $(seq 50); do echo $i > file-$i; done; git add .; git commit -qm first
         git checkout -q -b other; git mv file-1 moved; git commit -qm second
         git checkout -q main; git merge -q other; git gc -q; git fsck --strict
         test -z \"$(git status --porcelain)\"",
    );
    run(
        &place.path("repository"),
        "git -c safe.directory=* fsck --strict; test $(git -c safe.directory=* log --oneline | wc -l) = 2",
    );
    mounted.unmount();
}

#[test]
fn users_of_the_guest_have_their_own_rights() {
    let place = Place::new();
    let Some(mounted) = Mounted::new(&place, &[]) else {
        return;
    };
    run(
        &mounted.at,
        "chmod 755 . ..; install -d -m 700 -o 1000 -g 1000 home; echo x > private; chmod 600 private
         install -d -m 2770 -o 0 -g 50 team
         as() { setpriv --reuid 1000 --regid 1000 --groups 50 -- \"$@\"; }
         as touch home/mine; test $(stat -c %u:%g home/mine) = 1000:1000
         as mkdir team/ours; test $(stat -c %u:%g team/ours) = 1000:50
         ! as cat private 2> /dev/null; ! as touch not-here 2> /dev/null
         ! as chown 0 home/mine 2> /dev/null; as chmod 600 home/mine",
    );
    mounted.unmount();
}

#[test]
fn a_mounted_read_only_folder_can_be_read() {
    let place = Place::new();
    fs::write(place.path("file"), "data").unwrap();
    let Some(mounted) = Mounted::new(&place, &["--read-only"]) else {
        return;
    };
    run(
        &mounted.at,
        "test $(cat file) = data; ! touch file 2> /dev/null; ! rm file 2> /dev/null
         ! mkdir x 2> /dev/null; ! (echo > file) 2> /dev/null; ls -la > /dev/null",
    );
    assert_eq!(fs::read(place.path("file")).unwrap(), b"data");
    mounted.unmount();
}
