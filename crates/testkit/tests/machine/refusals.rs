//! Bad input gives one clear sentence and an exit status, and leaves nothing behind.

use crate::support::jiffy;

#[test]
fn missing_objects_are_named() {
    let jiffy = jiffy();
    for (arguments, name) in [
        (&["run", "--image", "nosuch", "--", "true"][..], "nosuch"),
        (&["run", "--kernel", "nosuch", "--", "true"], "nosuch"),
        (&["exec", "nosuch", "true"], "nosuch"),
        (&["stop", "nosuch"], "nosuch"),
        (&["rm", "nosuch"], "nosuch"),
        (&["logs", "nosuch"], "nosuch"),
        (&["image", "rm", "nosuch"], "nosuch"),
    ] {
        let sentence = jiffy.refuses(125, arguments);
        assert!(sentence.contains(name), "{sentence}");
    }
    assert_eq!(jiffy.ok(&["ps", "-aq"]), "", "nothing was made");
}

#[test]
fn a_name_is_used_once() {
    let jiffy = jiffy();
    jiffy.ok(&["run", "-d", "--name", "only"]);
    let sentence = jiffy.refuses(125, &["run", "--name", "only", "--", "true"]);
    assert!(sentence.contains("only"), "{sentence}");
}

#[test]
fn more_memory_than_the_host_has_is_refused() {
    let jiffy = jiffy();
    let sentence = jiffy.refuses(125, &["run", "--memory", "900G", "--", "true"]);
    assert!(sentence.to_lowercase().contains("memory"), "{sentence}");
    jiffy.refuses(125, &["run", "--memory", "1", "--", "true"]);
    assert_eq!(jiffy.ok(&["ps", "-aq"]), "");
}

#[test]
fn bad_kernels_are_refused_and_leave_nothing() {
    let jiffy = jiffy();
    let before = jiffy.settled_traces();
    jiffy.sh(
        "mkdir -p /run/bad; : > /run/bad/empty; head -c 100000 /dev/urandom > /run/bad/noise; \
         head -c 5000 /share/jiffy/kernels/base/vmlinux > /run/bad/cut; \
         cp /bin/busybox /run/bad/program",
    );
    for kernel in ["empty", "noise", "cut", "program"] {
        let path = format!("/run/bad/{kernel}");
        jiffy.refuses(125, &["run", "--rm", "--kernel", &path, "--", "true"]);
    }
    jiffy.sh("rm -rf /run/bad");
    jiffy.remove_all();
    jiffy.assert_nothing_left(&before, "after bad kernels");
}

#[test]
fn bad_images_are_refused_and_leave_nothing() {
    let jiffy = jiffy();
    // JSON, because the table shows the age of images, which changes.
    let list = || jiffy.ok(&["image", "ls", "--format", "json"]);
    let images = list();
    let stored = || jiffy.sh("find /var/lib/jiffy/images | sort");
    let before = stored();
    jiffy.sh(
        "mkdir -p /run/bad/x; head -c 100000 /dev/urandom > /run/bad/noise; \
         head -c 700000 /share/jiffy/images/base.tar > /run/bad/cut.tar; echo hi > /run/bad/x/f; \
         ln -s /etc/passwd /run/bad/x/l",
    );
    for tar in ["noise", "cut.tar", "missing.tar"] {
        let path = format!("/run/bad/{tar}");
        jiffy.refuses(125, &["image", "import", "bad", &path]);
    }
    jiffy.refuses(125, &["image", "import", "../escape", "/run/bad/x"]);
    assert_eq!(list(), images);
    assert_eq!(stored(), before);
    jiffy.sh("rm -rf /run/bad");
}

#[test]
fn an_imported_folder_is_an_image() {
    let jiffy = jiffy();
    jiffy.sh(
        "mkdir -p /run/mine/bin /run/mine/etc; cp /bin/busybox /run/mine/bin/; \
         ln -s busybox /run/mine/bin/sh; ln -s busybox /run/mine/bin/cat; echo mine > /run/mine/etc/mark",
    );
    jiffy.ok(&["image", "import", "mine", "/run/mine"]);
    assert!(jiffy.ok(&["image", "ls"]).contains("mine"));
    assert_eq!(
        jiffy.ok(&[
            "run",
            "--rm",
            "--image",
            "mine",
            "--",
            "/bin/cat",
            "/etc/mark"
        ]),
        "mine"
    );
    jiffy.ok(&["image", "rm", "mine"]);
    jiffy.sh("rm -rf /run/mine");
}

#[test]
fn bad_usage_has_status_2() {
    let jiffy = jiffy();
    for arguments in [
        &["run", "--no-such-option"][..],
        &["nosuchverb"],
        &["run", "--cpus", "0", "x"],
    ] {
        assert_eq!(jiffy.run(arguments).code(), 2, "{arguments:?}");
    }
}
