//! Images pulled from and pushed to a registry.

use crate::registry::{BALLAST, HOST, Registry};
use crate::support::{Jiffy, jiffy};

/// Reads a little at the end of an image.
const END: &str = "tail -c 8192 /usr/share/ballast-5 | md5sum";

fn pulled() -> String {
    format!("{HOST}/tests/layers:1")
}

/// Names of the user's images.
fn images(jiffy: &Jiffy) -> Vec<String> {
    let mut names: Vec<String> = jiffy
        .ok(&["image", "ls", "--quiet"])
        .lines()
        .filter(|name| *name != "base")
        .map(str::to_owned)
        .collect();
    names.sort();
    names
}

fn remove_images(jiffy: &Jiffy) {
    jiffy.remove_all();
    for name in images(jiffy) {
        jiffy.ok(&["image", "rm", &name]);
    }
}

#[test]
fn a_registry_image_runs_with_its_configuration() {
    let jiffy = jiffy();
    let registry = Registry::start(&jiffy);
    let image = pulled();
    // The image is pulled because it is missing.
    assert_eq!(jiffy.ok(&["run", "--rm", &image]), "hello world /srv 1000");
    assert_eq!(images(&jiffy), [image.as_str()]);
    assert!(registry.sent() > BALLAST as u64);
    assert_eq!(
        jiffy.ok(&[
            "run",
            "--rm",
            "-e",
            "GREETING=bye",
            "-w",
            "/tmp",
            "-u",
            "0",
            &image,
            "you"
        ]),
        "bye you /tmp 0"
    );
    assert_eq!(registry.sent(), 0, "the image is stored here");
    let script = "cat /etc/changed; echo; ls /old; cat /old/new";
    assert_eq!(
        jiffy.ok(&[
            "run",
            "--rm",
            "--entrypoint",
            "/bin/sh",
            &image,
            "-c",
            script
        ]),
        "second\nnew\nof the second layer"
    );
    let inspected = jiffy.json(&["image", "inspect", &image]);
    assert!(inspected.to_string().contains("8080"), "{inspected}");
    let sentence = jiffy.refuses(125, &["image", "pull", &format!("{HOST}/tests/layers:2")]);
    assert!(sentence.contains("tests/layers:2"), "{sentence}");
    registry.stop();
    let sentence = jiffy.refuses(125, &["image", "pull", &format!("{HOST}/tests/other:1")]);
    assert!(sentence.contains(HOST), "{sentence}");
    remove_images(&jiffy);
}

#[test]
fn a_committed_and_pushed_image_is_pulled_by_chunks_and_runs() {
    let jiffy = jiffy();
    let registry = Registry::start(&jiffy);
    let image = pulled();
    let shell = |name: &str, image: &str, script: &str| {
        jiffy.ok(&[
            "run",
            "--name",
            name,
            "-u",
            "0",
            "--entrypoint",
            "/bin/sh",
            image,
            "-c",
            script,
        ])
    };
    let sums = shell("sums", &image, "md5sum /usr/share/ballast-*");
    let end = shell("end", &image, END);
    jiffy.remove_all();

    // A running VM is committed with its changes.
    jiffy.ok(&[
        "run",
        "-d",
        "--name",
        "writer",
        "-u",
        "0",
        "--entrypoint",
        "/bin/sh",
        &image,
        "-c",
        "echo mine > /etc/mine; rm /etc/changed; echo done; exec sleep 1000000",
    ]);
    jiffy.eventually("it has written", || jiffy.ok(&["logs", "writer"]) == "done");
    jiffy.ok(&["commit", "writer", "mine"]);
    jiffy.remove_all();
    assert_eq!(
        shell(
            "check",
            "mine",
            "cat /etc/mine; ls /etc/changed 2>/dev/null; true"
        ),
        "mine"
    );

    let remote = format!("{HOST}/tests/mine:1");
    registry.sent();
    jiffy.ok(&["push", "mine", &remote]);
    remove_images(&jiffy);
    registry.sent();

    // A second, empty store. The answer needs only a part of the image.
    let answer = shell("lazy", &remote, "cat /etc/mine");
    assert_eq!(answer, "mine");
    let moved = registry.sent();
    let share = moved as f64 / BALLAST as f64;
    assert!(
        share <= 0.15,
        "{moved} bytes moved, {share:.3} of the image"
    );
    kept_with_parts_missing(&jiffy, &remote, &end);
    captured_with_parts_missing(&jiffy, &remote, &sums);
    // The remaining parts are fetched when they are read.
    assert_eq!(shell("whole", &remote, "md5sum /usr/share/ballast-*"), sums);
    assert!(registry.sent() as usize > BALLAST / 2);
    remove_images(&jiffy);
}

fn wait_for_golden(jiffy: &Jiffy, image: &str) {
    jiffy.eventually("a booted guest is kept", || {
        let all = jiffy.json(&["snapshot", "ls", "--all", "--format", "json"]);
        let mut all = all.as_array().expect("a list").iter();
        all.any(|one| one["golden"] == true && one["image"] == image)
    });
}

/// The second start of a partly fetched image is from a golden snapshot, and reads parts that were
/// not read before.
fn kept_with_parts_missing(jiffy: &Jiffy, remote: &str, end: &str) {
    wait_for_golden(jiffy, remote);
    let script = format!("cat /etc/mine; {END}");
    for vm in ["second", "third"] {
        let shell = ["--entrypoint", "/bin/sh", remote, "-c", &script];
        let answer = jiffy.ok(&[&["run", "--name", vm, "-u", "0"], &shell[..]].concat());
        assert_eq!(answer, format!("mine\n{end}"));
        assert_eq!(jiffy.inspect(vm)["origin"], "golden");
        jiffy.ok(&["rm", vm]);
    }
}

/// A VM with a partly fetched root is forked, hibernated and captured; each result still reads the
/// whole image.
fn captured_with_parts_missing(jiffy: &Jiffy, remote: &str, sums: &str) {
    let script = "exec busybox sleep 100000";
    jiffy.ok(&[
        "run",
        "-d",
        "--name",
        "parent",
        "-u",
        "0",
        "--entrypoint",
        "/bin/sh",
        remote,
        "-c",
        script,
    ]);
    let present = || {
        let images = jiffy.json(&["image", "inspect", remote]);
        images[0]["present"].as_u64().expect("bytes that are here") as usize
    };
    assert!(present() < BALLAST / 2, "parts are missing: {}", present());
    let reads = |vm: &str, file: usize| {
        let path = format!("/usr/share/ballast-{file}");
        let line = sums.lines().nth(file).expect("as many files");
        assert_eq!(
            jiffy.ok(&["exec", "-u", "0", vm, "md5sum", &path]),
            line,
            "{vm}"
        );
    };
    jiffy.ok(&["fork", "parent", "--name", "child"]);
    reads("child", 1);
    reads("parent", 2);
    assert!(
        present() < BALLAST / 2 + (8 << 20),
        "parts are missing still"
    );
    // The parent is removed; the child keeps the disk with its missing parts.
    jiffy.ok(&["rm", "--force", "parent"]);
    reads("child", 3);
    // Hibernated and captured VMs do not need the registry any more.
    jiffy.ok(&["hibernate", "child"]);
    jiffy.ok(&["wake", "child"]);
    reads("child", 0);
    jiffy.ok(&["snapshot", "create", "child", "whole"]);
    jiffy.ok(&["rm", "--force", "child"]);
    jiffy.ok(&["run", "-d", "--name", "again", "--from", "whole"]);
    assert_eq!(
        jiffy.ok(&[
            "exec",
            "-u",
            "0",
            "again",
            "sh",
            "-c",
            "md5sum /usr/share/ballast-*"
        ]),
        sums
    );
    jiffy.ok(&["rm", "--force", "again"]);
    jiffy.ok(&["snapshot", "rm", "whole"]);
}

#[test]
fn a_snapshot_pulled_from_a_registry_is_restored() {
    let jiffy = jiffy();
    let registry = Registry::start(&jiffy);
    let own = ["--memory", "128", "--root-disk=64M"];
    let volume = ["--disk", "goes:16M,mount=/srv/data"];
    jiffy.ok(&[&["run", "-d", "--name", "box"], &own[..], &volume].concat());
    let script = "echo kept > /tmp/kept; echo written > /etc/written; \
                  echo along > /srv/data/goes; sync";
    jiffy.ok(&["exec", "box", "sh", "-c", script]);
    jiffy.ok(&["snapshot", "create", "--stop", "box", "ready"]);
    let remote = format!("{HOST}/tests/ready:1");
    jiffy.ok(&["push", "--snapshot", "ready", &remote]);
    jiffy.remove_all();
    jiffy.ok(&["volume", "rm", "goes"]);
    assert_eq!(
        jiffy.ok(&["snapshot", "ls"]).lines().count(),
        1,
        "none is left"
    );
    registry.sent();
    jiffy.ok(&["run", "-d", "--name", "again", "--from", &remote]);
    assert_eq!(jiffy.ok(&["exec", "again", "cat", "/tmp/kept"]), "kept");
    // From the disk, after the guest has dropped its caches.
    let script = "echo 3 > /proc/sys/vm/drop_caches; cat /etc/written /srv/data/goes; \
                  echo more | tee /etc/more > /srv/data/more; sync";
    assert_eq!(
        jiffy.ok(&["exec", "again", "sh", "-c", script]),
        "written\nalong"
    );
    // It belongs to the VM and is not a volume of the node.
    assert!(!jiffy.ok(&["volume", "ls"]).contains("goes"));
    assert!(registry.sent() > 0);
    remove_images(&jiffy);
}

#[test]
fn losing_the_registry_is_an_io_error_and_no_hang() {
    let jiffy = jiffy();
    let registry = Registry::start(&jiffy);
    let image = pulled();
    jiffy.ok(&["image", "pull", &image]);
    let remote = format!("{HOST}/tests/lazy:1");
    jiffy.ok(&["push", &image, &remote]);
    remove_images(&jiffy);
    jiffy.ok(&[
        "run",
        "-d",
        "--name",
        "reader",
        "-u",
        "0",
        "--entrypoint",
        "/bin/sh",
        &remote,
        "-c",
        "exec sleep 1000000",
    ]);
    // Fetches the programs, including what they need to report an error.
    let used = "cat /usr/share | md5sum; cat /etc/changed";
    jiffy.run(&["exec", "-u", "0", "reader", "sh", "-c", used]);
    wait_for_golden(&jiffy, &remote);
    registry.stop();
    let missing = |file: u32| format!("cat /usr/share/ballast-{file} | md5sum; true");
    let fails = |words: &[&str]| {
        let read = jiffy.run(words);
        let said = read.error_text();
        assert!(
            said.contains("Input/output error") || said.contains("I/O error"),
            "{words:?}: {} {said}",
            read.text()
        );
    };
    fails(&["exec", "-u", "0", "reader", "sh", "-c", &missing(3)]);
    // A VM that starts now from a golden snapshot gets the same errors.
    let script = missing(5);
    let shell = ["--entrypoint", "/bin/sh", &remote, "-c", &script];
    fails(&[&["run", "--name", "late", "-u", "0"], &shell[..]].concat());
    assert_eq!(jiffy.inspect("late")["origin"], "golden");
    assert_eq!(
        jiffy.ok(&["exec", "-u", "0", "reader", "echo", "alive"]),
        "alive"
    );
    let timeline = jiffy.ok(&["timeline", "reader"]);
    assert!(timeline.contains("unavailable"), "{timeline}");
    remove_images(&jiffy);
}
