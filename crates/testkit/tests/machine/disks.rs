//! Root disks of VMs, volumes with file systems, limits.

use crate::registry::{HOST, Registry};
use crate::support::{Jiffy, jiffy};
use std::time::{Duration, Instant};

/// Runs a shell script in a VM and returns its output.
fn exec(jiffy: &Jiffy, vm: &str, script: &str) -> String {
    jiffy.ok(&["exec", vm, "sh", "-c", script])
}

#[test]
fn a_root_disk_keeps_changes_across_stop_and_start() {
    let jiffy = jiffy();
    jiffy.ok(&["run", "-d", "--name", "keeper", "--root-disk=1G"]);
    // More data than the guest has memory.
    let script = "dd if=/dev/zero of=/large bs=1M count=200 2>/dev/null && \
                  echo kept > /etc/kept && rm /etc/group /etc/passwd && sync && \
                  df -m / | awk 'NR == 2 { print ($2 > 900) }'";
    assert_eq!(exec(&jiffy, "keeper", script), "1");
    jiffy.ok(&["stop", "keeper"]);
    jiffy.ok(&["start", "keeper"]);
    let script = "cat /etc/kept; stat -c %s /large; ls /etc/group 2>/dev/null || echo gone";
    assert_eq!(exec(&jiffy, "keeper", script), "kept\n209715200\ngone");
    let vm = &jiffy.json(&["inspect", "keeper"])[0];
    assert_eq!(vm["root_disk"]["layer"]["size_mib"], 1024);
    let id = vm["id"].as_str().expect("an id").to_owned();
    // The disk can also be committed as an image. Its whiteouts share an inode.
    exec(&jiffy, "keeper", "rm /large");
    jiffy.ok(&["commit", "keeper", "kept"]);
    jiffy.ok(&["rm", "-f", "keeper"]);
    let script = "cat /etc/kept; ls /etc/group /etc/passwd 2>/dev/null || echo gone";
    let said = jiffy.ok(&["run", "--rm", "--image", "kept", "--", "sh", "-c", script]);
    assert_eq!(said, "kept\ngone");
    jiffy.ok(&["image", "rm", "kept"]);
    let left = jiffy.sh(&format!(
        "ls -d /var/lib/jiffy/vms/{id} 2>/dev/null || echo gone"
    ));
    assert_eq!(left, "gone");
}

#[test]
fn a_root_copy_of_an_image_is_writable() {
    let jiffy = jiffy();
    let image = "/tests/writable.img";
    let written = jiffy.lab.write(image, 0o644, writable_image());
    written.expect("the machine takes a file");
    jiffy.ok(&["image", "import", "writable", image]);
    let image = ["--image", "writable"];
    let run = |name: &str| {
        let own = ["run", "-d", "--name", name, "--root-copy"];
        jiffy.ok(&[&own[..], &image].concat());
    };
    run("copier");
    // There is no layer below: the disk itself is the root.
    let script = "echo mine > /etc/mine; sync; awk '$2 == \"/\" { print $1, $3 }' /proc/mounts";
    assert!(exec(&jiffy, "copier", script).ends_with("/dev/vda ext4"));
    jiffy.ok(&["stop", "copier"]);
    jiffy.ok(&["start", "copier"]);
    assert_eq!(exec(&jiffy, "copier", "cat /etc/mine"), "mine");
    jiffy.ok(&["snapshot", "create", "copier", "copied"]);
    exec(&jiffy, "copier", "echo later > /etc/mine; sync");
    jiffy.ok(&["run", "-d", "--name", "again", "--from", "copied"]);
    assert_eq!(exec(&jiffy, "again", "cat /etc/mine"), "mine");
    let sentence = jiffy.refuses(125, &["commit", "copier", "never"]);
    assert!(sentence.contains("copy of its image"), "{sentence}");
    // The image is unchanged.
    run("other");
    let script = "ls /etc/mine 2>/dev/null || echo none";
    assert_eq!(exec(&jiffy, "other", script), "none");
    for vm in ["copier", "again", "other"] {
        jiffy.ok(&["rm", "-f", vm]);
    }
    jiffy.ok(&["snapshot", "rm", "copied"]);
    // An image in a registry is fetched completely before it is copied.
    let _registry = Registry::start(&jiffy);
    let remote = format!("{HOST}/tests/writable:1");
    jiffy.ok(&["push", "writable", &remote]);
    jiffy.ok(&["image", "rm", "writable"]);
    let own = ["run", "-d", "--name", "far", "--root-copy", "--image"];
    jiffy.ok(&[&own[..], &[&remote]].concat());
    assert_eq!(
        exec(&jiffy, "far", "echo mine > /etc/mine; cat /etc/mine"),
        "mine"
    );
    jiffy.ok(&["rm", "-f", "far"]);
    jiffy.ok(&["image", "rm", &remote]);
}

/// An ext4 file system with busybox, made by mke2fs.
fn writable_image() -> Vec<u8> {
    let work = tempfile::tempdir().expect("a folder");
    let root = work.path().join("root");
    for folder in ["bin", "etc", "tmp", "proc", "sys", "dev"] {
        std::fs::create_dir_all(root.join(folder)).expect("a folder");
    }
    std::fs::copy("/bin/busybox", root.join("bin/busybox")).expect("busybox-static is installed");
    for applet in ["sh", "cat", "echo", "ls", "awk", "sync"] {
        std::os::unix::fs::symlink("busybox", root.join("bin").join(applet)).expect("a link");
    }
    let image = work.path().join("image");
    let made = std::process::Command::new("/usr/sbin/mke2fs")
        .args(["-q", "-t", "ext4", "-E", "root_owner=0:0", "-d"])
        .args([&root, &image])
        .arg("8M")
        .output()
        .expect("e2fsprogs is installed");
    assert!(
        made.status.success(),
        "{}",
        String::from_utf8_lossy(&made.stderr)
    );
    std::fs::read(image).expect("the image")
}

#[test]
fn a_command_is_not_started_without_its_volume() {
    let jiffy = jiffy();
    jiffy.ok(&["volume", "create", "--raw", "bare", "16M"]);
    let disk = ["--disk", "bare,mount=/data"];
    let words = ["run", "--rm", disk[0], disk[1], "--", "touch", "/data/lost"];
    let sentence = jiffy.refuses(125, &words);
    assert!(
        sentence.contains("The command was not started: /dev/vd") && sentence.contains("/data"),
        "{sentence}"
    );
    // A VM that waits for commands starts, and the user is told what it lacks.
    let words = ["run", "-d", "--name", "lacking", disk[0], disk[1]];
    let output = jiffy.run(&words);
    let said = output.error_text();
    assert!(output.code() == 0 && said.contains("on /data"), "{said}");
    jiffy.ok(&["rm", "-f", "lacking"]);
    jiffy.ok(&["volume", "rm", "bare"]);
}

#[test]
fn a_root_disk_is_captured_with_its_vm() {
    let jiffy = jiffy();
    jiffy.ok(&["run", "-d", "--name", "parent", "--root-disk=64M"]);
    exec(&jiffy, "parent", "echo one > /state");
    jiffy.ok(&["snapshot", "create", "parent", "captured"]);
    exec(&jiffy, "parent", "echo two > /state");
    jiffy.ok(&["run", "-d", "--name", "child", "--from", "captured"]);
    assert_eq!(
        exec(&jiffy, "child", "cat /state; echo child > /state; sync"),
        "one"
    );
    jiffy.ok(&["fork", "parent", "--name", "twin"]);
    assert_eq!(
        exec(&jiffy, "twin", "cat /state; echo twin > /state; sync"),
        "two"
    );
    assert_eq!(exec(&jiffy, "parent", "cat /state"), "two");
    jiffy.ok(&["hibernate", "parent"]);
    jiffy.ok(&["wake", "parent"]);
    assert_eq!(exec(&jiffy, "parent", "cat /state"), "two");
    for vm in ["child", "twin", "parent"] {
        jiffy.ok(&["rm", "-f", vm]);
    }
    jiffy.ok(&["snapshot", "rm", "captured"]);
}

#[test]
fn a_volume_is_mounted_and_its_file_system_grows_with_it() {
    let jiffy = jiffy();
    jiffy.ok(&["volume", "create", "grown", "64M"]);
    let run = |script: &str| {
        let disk = "grown,mount=/srv/data";
        jiffy.ok(&["run", "--rm", "--disk", disk, "--", "sh", "-c", script])
    };
    let size = "df -m /srv/data | awk 'NR == 2 { print $2 }'";
    let before: u64 = run(&format!("echo kept > /srv/data/file; {size}"))
        .parse()
        .expect("MiB");
    assert!((40..=64).contains(&before), "{before} MiB");
    jiffy.ok(&["volume", "resize", "grown", "1G"]);
    let after = run(&format!("cat /srv/data/file; {size}"));
    let (file, after) = after.split_once('\n').expect("two lines");
    assert_eq!(file, "kept");
    assert!(after.parse::<u64>().expect("MiB") > 900, "{after} MiB");
    let sentence = jiffy.refuses(125, &["volume", "resize", "grown", "64M"]);
    assert!(sentence.contains("file system"), "{sentence}");
    // A read-only volume is mounted read-only.
    let disk = "grown:ro,mount=/srv/data";
    let script = "cat /srv/data/file; touch /srv/data/other 2>/dev/null || echo refused";
    let said = jiffy.ok(&["run", "--rm", "--disk", disk, "--", "sh", "-c", script]);
    assert_eq!(said, "kept\nrefused");
    let volumes = jiffy.json(&["volume", "ls", "--format", "json"]);
    assert_eq!(volumes[0]["size_mib"], 1024);
    assert!(volumes[0]["disk_bytes"].as_u64().expect("bytes") < 100 << 20);
    jiffy.ok(&["volume", "rm", "grown"]);
}

#[test]
fn a_disk_is_not_used_faster_than_its_limit() {
    let jiffy = jiffy();
    let read = |disk: &str, script: &str| {
        let begin = Instant::now();
        jiffy.ok(&["run", "--rm", "--disk", disk, "--", "sh", "-c", script]);
        begin.elapsed()
    };
    // 8 MiB at 2 MiB per second, of which the first second's worth is free. A slow host can only
    // take longer.
    let script = "dd if=/dev/vdb of=/dev/null bs=64k count=128 iflag=direct 2>/dev/null";
    let took = read("slow:16M,bps=2M", script);
    assert!(took >= Duration::from_secs(3), "{took:?}");
    let script = "dd if=/dev/vdb of=/dev/null bs=4k count=60 iflag=direct 2>/dev/null";
    let took = read("slow,iops=20", script);
    assert!(took >= Duration::from_secs(2), "{took:?}");
    jiffy.ok(&["volume", "rm", "slow"]);
}

#[test]
fn a_disk_limit_is_removed_while_a_request_waits() {
    let jiffy = jiffy();
    jiffy.ok(&["run", "-d", "--name", "paced", "--disk", "paced:16M"]);
    // 8 MiB at 1 KiB per second: more than two hours.
    let slow = ["--disk-limit", "paced,bps=1K", "--root-limit", "iops=500"];
    jiffy.ok(&[&["update"], &slow[..], &["paced"]].concat());
    let script = "dd if=/dev/vdb of=/dev/null bs=64k count=128 iflag=direct 2>/dev/null; echo read";
    std::thread::scope(|scope| {
        let reads = scope.spawn(|| exec(&jiffy, "paced", script));
        std::thread::sleep(Duration::from_secs(2));
        assert!(!reads.is_finished());
        jiffy.ok(&["update", "--disk-limit", "paced,none", "paced"]);
        assert_eq!(reads.join().expect("no panic").trim(), "read");
    });
    let shown = jiffy.inspect("paced");
    assert_eq!(shown["limits"]["root"]["operations_per_second"], 500);
    assert!(shown["disks"][0]["limit"].is_null(), "{shown}");
    jiffy.ok(&["rm", "--force", "paced"]);
    jiffy.ok(&["volume", "rm", "paced"]);
}

#[test]
fn impossible_disk_and_volume_requests_are_refused() {
    let jiffy = jiffy();
    jiffy.ok(&["volume", "create", "spare", "16M"]);
    jiffy.refuses(125, &["volume", "create", "spare", "16M"]);
    jiffy.ok(&["run", "-d", "--name", "fixed", "--disk", "spare:ro"]);
    for order in ["attach", "detach"] {
        let sentence = jiffy.refuses(125, &["disk", order, "fixed", "spare"]);
        assert!(sentence.contains("hot-plug"), "{sentence}");
    }
    let sentence = jiffy.refuses(125, &["volume", "resize", "spare", "32M"]);
    assert!(sentence.contains("fixed"), "{sentence}");
    let volumes = jiffy.json(&["volume", "ls", "--format", "json"]);
    assert_eq!(volumes[0]["used_by"][0], "fixed");
    assert_eq!(volumes[0]["attached_to"][0], "fixed");
    jiffy.ok(&["rm", "-f", "fixed"]);
    jiffy.ok(&["volume", "rm", "spare"]);
    let sentence = jiffy.refuses(125, &["run", "--rm", "--root-copy", "--", "true"]);
    assert!(sentence.contains("EROFS"), "{sentence}");
    jiffy.refuses(125, &["run", "--rm", "--root-disk=1M", "--", "true"]);
}
