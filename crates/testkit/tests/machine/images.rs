//! Images from a registry and back to one.

use crate::registry::{BALLAST, HOST, Registry};
use crate::support::{Jiffy, jiffy};

fn pulled() -> String {
    format!("{HOST}/tests/layers:1")
}

/// Images that a user has, by name.
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
fn an_image_of_a_registry_runs_as_its_configuration_says() {
    let jiffy = jiffy();
    let registry = Registry::start(&jiffy);
    let image = pulled();
    // It is pulled because it is not there.
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
    assert_eq!(registry.sent(), 0, "it is here");
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
fn what_was_committed_and_pushed_runs_elsewhere_chunk_by_chunk() {
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
    let sum = shell("sum", &image, "cat /usr/share/ballast-* | md5sum");
    jiffy.remove_all();

    // A VM that runs is committed with what it changed.
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
        "echo mine > /etc/mine; rm /etc/changed; echo done; while :; do read x; done",
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

    // A second, empty store. The answer needs a part of the image only.
    let answer = shell("lazy", &remote, "cat /etc/mine");
    assert_eq!(answer, "mine");
    let moved = registry.sent();
    let share = moved as f64 / BALLAST as f64;
    assert!(
        share <= 0.15,
        "{moved} bytes moved, {share:.3} of the image"
    );
    // All the rest is there when it is asked for.
    assert_eq!(
        shell("whole", &remote, "cat /usr/share/ballast-* | md5sum"),
        sum
    );
    assert!(registry.sent() as usize > BALLAST / 2);
    remove_images(&jiffy);
}

#[test]
fn a_snapshot_in_a_registry_goes_on_elsewhere() {
    let jiffy = jiffy();
    let registry = Registry::start(&jiffy);
    jiffy.ok(&["run", "-d", "--name", "box", "--memory", "128"]);
    jiffy.ok(&["exec", "box", "sh", "-c", "echo kept > /tmp/kept"]);
    jiffy.ok(&["snapshot", "create", "--stop", "box", "ready"]);
    let remote = format!("{HOST}/tests/ready:1");
    jiffy.ok(&["push", "--snapshot", "ready", &remote]);
    jiffy.remove_all();
    assert_eq!(
        jiffy.ok(&["snapshot", "ls"]).lines().count(),
        1,
        "none is left"
    );
    registry.sent();
    jiffy.ok(&["run", "-d", "--name", "again", "--from", &remote]);
    assert_eq!(jiffy.ok(&["exec", "again", "cat", "/tmp/kept"]), "kept");
    assert!(registry.sent() > 0);
    remove_images(&jiffy);
}

#[test]
fn a_registry_that_goes_away_is_an_error_and_no_silence() {
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
        "while :; do read x; done",
    ]);
    // The programs have to be there, down to how they report an error.
    let used = "cat /usr/share | md5sum; cat /etc/changed";
    jiffy.run(&["exec", "-u", "0", "reader", "sh", "-c", used]);
    registry.stop();
    let read = jiffy.run(&[
        "exec",
        "-u",
        "0",
        "reader",
        "sh",
        "-c",
        "cat /usr/share/ballast-* | md5sum; true",
    ]);
    assert!(
        read.error_text().contains("Input/output error") || read.error_text().contains("I/O error"),
        "{} {}",
        read.text(),
        read.error_text()
    );
    assert_eq!(
        jiffy.ok(&["exec", "-u", "0", "reader", "echo", "alive"]),
        "alive"
    );
    let timeline = jiffy.ok(&["timeline", "reader"]);
    assert!(timeline.contains("unavailable"), "{timeline}");
    remove_images(&jiffy);
}
