//! Debian's QEMU with a disk of `jiffy disk serve`. QEMU emulates a whole computer with Jiffy's
//! kernel and a guest that reads and writes.

use jiffy_machine::image::cpio::Archive;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Time limit for the server, or for a guest's whole run, on a busy host.
const TIMEOUT: Duration = Duration::from_secs(300);

const MIB: usize = 1 << 20;

/// The guest's script: prints the size and checksum of its disk, writes the second mebibyte if the
/// disk is writable, and prints the checksum again.
const INIT: &str = r#"#!/bin/sh
mount -t devtmpfs none /dev
mount -t sysfs none /sys
mount -t proc none /proc
exec > /dev/ttyS0 2>&1
echo "size $(cat /sys/block/vda/size) read-only $(cat /sys/block/vda/ro)"
echo "before $(sha256sum < /dev/vda)"
yes W | tr -d '\n' | dd bs=1M count=1 iflag=fullblock 2> /dev/null > /written
if dd if=/written of=/dev/vda bs=1M seek=1 conv=fsync,notrunc 2> /dev/null; then
    echo "written"
fi
echo 3 > /proc/sys/vm/drop_caches
echo "after $(sha256sum < /dev/vda)"
reboot -f
"#;

fn dist(path: &str) -> PathBuf {
    let dist = std::env::var_os("JIFFY_DIST").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist"),
        PathBuf::from,
    );
    let path = dist.join(path);
    assert!(path.exists(), "{} is missing: make build", path.display());
    path
}

fn initramfs() -> Vec<u8> {
    let busybox = ["/bin/busybox", "/usr/bin/busybox"]
        .into_iter()
        .find(|path| Path::new(path).exists())
        .expect("busybox is installed: make setup");
    let mut archive = Archive::new(Vec::new());
    for folder in ["bin", "dev", "proc", "sys"] {
        archive.folder(folder, 0o755).unwrap();
    }
    archive
        .character_device("dev/console", 0o600, 5, 1)
        .unwrap();
    let program = std::fs::read(busybox).unwrap();
    archive.file("bin/busybox", 0o755, &program).unwrap();
    for name in [
        "sh",
        "mount",
        "cat",
        "sha256sum",
        "yes",
        "tr",
        "dd",
        "reboot",
    ] {
        archive.symlink(&format!("bin/{name}"), "busybox").unwrap();
    }
    archive.file("init", 0o755, INIT.as_bytes()).unwrap();
    archive.finish().unwrap()
}

/// A process that is killed when this is dropped.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A served disk of 8 MiB and its folder.
struct ServedDisk {
    folder: tempfile::TempDir,
    _server: KillOnDrop,
}

impl ServedDisk {
    fn start(arguments: &[&str]) -> ServedDisk {
        let folder = tempfile::tempdir().unwrap();
        let mut file = std::fs::File::create(folder.path().join("disk.img")).unwrap();
        for piece in 0..8 * MIB / 4096 {
            file.write_all(&[(piece * 7 + piece / 256) as u8; 4096])
                .unwrap();
        }
        let server = Command::new(dist("bin/jiffy"))
            .args(["disk", "serve"])
            .arg(folder.path().join("disk.img"))
            .arg("--vhost-user")
            .arg(folder.path().join("disk.sock"))
            .args(arguments)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let served = ServedDisk {
            folder,
            _server: KillOnDrop(server),
        };
        let start = Instant::now();
        while !served.path("disk.sock").exists() {
            assert!(start.elapsed() < TIMEOUT, "nothing is served");
            std::thread::sleep(Duration::from_millis(10));
        }
        served
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn sum(&self) -> String {
        let output = Command::new("sha256sum")
            .arg(self.path("disk.img"))
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.split_whitespace().next().unwrap().to_owned()
    }

    /// Boots a guest in QEMU and returns the lines it prints.
    fn boot(&self) -> Vec<String> {
        let initramfs = self.path("initramfs.cpio");
        std::fs::write(&initramfs, self::initramfs()).unwrap();
        let kernel = dist("share/jiffy/kernels/base/vmlinux");
        let socket = format!("socket,id=disk,path={}", self.path("disk.sock").display());
        let output = Command::new("timeout")
            .arg(TIMEOUT.as_secs().to_string())
            .arg("qemu-system-x86_64")
            .args(["-nodefaults", "-no-user-config", "-no-reboot"])
            .args(["-display", "none", "-accel", "tcg", "-cpu", "max"])
            .args([
                "-machine",
                "microvm,memory-backend=ram,isa-serial=on,acpi=off",
            ])
            .args(["-object", "memory-backend-memfd,id=ram,size=256M,share=on"])
            .args(["-m", "256M", "-smp", "1"])
            .arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(initramfs)
            .args(["-append", "console=ttyS0 quiet panic=-1 reboot=t"])
            .args([
                "-chardev",
                "stdio,id=com1,signal=off",
                "-serial",
                "chardev:com1",
            ])
            .args(["-global", "virtio-mmio.force-legacy=false"])
            .arg("-chardev")
            .arg(socket)
            .args(["-device", "vhost-user-blk,chardev=disk"])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        lines(&output)
    }
}

fn lines(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stdout);
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("before"), "{text}{complaints}");
    text.lines().map(|line| line.trim().to_owned()).collect()
}

fn value<'a>(lines: &'a [String], name: &str) -> &'a str {
    let found = lines.iter().find_map(|line| line.strip_prefix(name));
    let found = found.unwrap_or_else(|| panic!("no {name:?} in {lines:?}"));
    found.split_whitespace().next().unwrap_or_default()
}

#[test]
fn qemu_reads_and_writes_a_served_disk() {
    let served = ServedDisk::start(&["--writable"]);
    let before = served.sum();
    let said = served.boot();
    assert!(
        said.contains(&"size 16384 read-only 0".to_owned()),
        "{said:?}"
    );
    assert_eq!(value(&said, "before "), before);
    assert!(said.contains(&"written".to_owned()), "{said:?}");
    let disk = std::fs::read(served.path("disk.img")).unwrap();
    assert!(disk[MIB..2 * MIB].iter().all(|byte| *byte == b'W'));
    assert_eq!(value(&said, "after "), served.sum());
    assert_ne!(served.sum(), before);

    // A second guest finds what the first one wrote.
    let said = served.boot();
    assert_eq!(value(&said, "before "), served.sum());
}

#[test]
fn qemu_cannot_write_to_a_disk_served_read_only() {
    let served = ServedDisk::start(&[]);
    let before = served.sum();
    let said = served.boot();
    assert!(
        said.contains(&"size 16384 read-only 1".to_owned()),
        "{said:?}"
    );
    assert!(!said.contains(&"written".to_owned()), "{said:?}");
    assert_eq!(value(&said, "after "), before);
    assert_eq!(served.sum(), before);
}
