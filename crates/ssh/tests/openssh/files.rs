//! scp, sftp, rsync and git.

use crate::node::{Node, bytes, stderr, stdout};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

/// A tree with a large file, an empty one, a program and a link.
fn create_tree(root: &Path) {
    fs::create_dir_all(root.join("inner/deep")).unwrap();
    fs::write(root.join("large"), bytes(5_000_000)).unwrap();
    fs::write(root.join("inner/empty"), "").unwrap();
    fs::write(root.join("inner/deep/program"), "#!/bin/sh\n").unwrap();
    let mode = fs::Permissions::from_mode(0o751);
    fs::set_permissions(root.join("inner/deep/program"), mode).unwrap();
}

fn same(one: &Path, other: &Path) {
    let diff = Command::new("diff").arg("-r").args([one, other]).output();
    let diff = diff.unwrap();
    assert!(diff.status.success(), "{diff:?}");
    let facts = |root: &Path| {
        let facts = fs::metadata(root.join("inner/deep/program")).unwrap();
        (facts.mode(), facts.mtime())
    };
    assert_eq!(facts(one), facts(other));
}

fn succeeds(mut command: Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", stderr(&output));
}

#[test]
fn scp_copies_both_ways_by_sftp_and_by_the_old_protocol() {
    let node = Node::start();
    create_tree(&node.path("tree"));
    for (options, name) in [(&["-rpq"][..], "new"), (&["-rpq", "-O"], "old")] {
        let [there, back] = ["there", "back"].map(|way| node.text(&format!("{name}-{way}")));
        let mut scp = node.openssh("scp");
        scp.args(options)
            .args([node.text("tree"), format!("web.jiffy:{there}")]);
        succeeds(scp);
        same(&node.path("tree"), Path::new(&there));
        let mut scp = node.openssh("scp");
        scp.args(options)
            .args([format!("web.jiffy:{there}"), back.clone()]);
        succeeds(scp);
        same(&node.path("tree"), Path::new(&back));
    }
}

#[test]
fn sftp_batch_commands_work() {
    let node = Node::start();
    fs::write(node.path("one"), "one").unwrap();
    let folder = node.text("folder");
    let batch = format!(
        "mkdir {folder}\ncd {folder}\nput {} a\nrename a b\nln -s b link\nln b hard\nchmod 600 b\n\
         ls -l\ndf\nget link {}\nrm hard\n",
        node.text("one"),
        node.text("two"),
    );
    fs::write(node.path("batch"), batch).unwrap();
    let mut sftp = node.openssh("sftp");
    let output = sftp.arg("-b").arg(node.path("batch")).arg("web.jiffy");
    let text = stdout(&output.output().unwrap());
    assert!(text.contains("-rw-------"), "{text}");
    assert_eq!(fs::read_to_string(node.path("two")).unwrap(), "one");
    let mut names: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["b", "link"]);
    assert_eq!(
        fs::read_link(node.path("folder/link")).unwrap(),
        Path::new("b")
    );
    for (order, complaint) in [
        ("rm /no/such/file", "No such file"),
        ("get /proc/self/mem /dev/null", "read"),
    ] {
        fs::write(node.path("batch"), order).unwrap();
        let mut sftp = node.openssh("sftp");
        let output = sftp
            .arg("-b")
            .arg(node.path("batch"))
            .arg("web.jiffy")
            .output();
        let output = output.unwrap();
        assert!(!output.status.success(), "{order}");
        assert!(stderr(&output).contains(complaint), "{output:?}");
    }
}

#[test]
fn rsync_copies_both_ways() {
    let node = Node::start();
    create_tree(&node.path("tree"));
    symlink("large", node.path("tree/link")).unwrap();
    let shell = format!("ssh -F {}", node.text("ssh_config"));
    let rsync = |from: String, to: String| {
        let mut rsync = node.program("rsync");
        rsync.args(["-a", "--delete", "-e", &shell, &from, &to]);
        succeeds(rsync);
    };
    let (there, back) = (node.text("there"), node.text("back"));
    rsync(
        format!("{}/", node.text("tree")),
        format!("web.jiffy:{there}"),
    );
    same(&node.path("tree"), Path::new(&there));
    rsync(format!("web.jiffy:{there}/"), back.clone());
    same(&node.path("tree"), Path::new(&back));
    assert_eq!(
        fs::read_link(node.path("back/link")).unwrap(),
        Path::new("large")
    );
}

#[test]
fn git_clones_and_pushes() {
    let node = Node::start();
    let shell = format!("ssh -F {}", node.text("ssh_config"));
    let git = |words: &[&str]| {
        let mut git = node.program("git");
        git.env("GIT_SSH_COMMAND", &shell).args(words);
        for (name, value) in [("NAME", "me"), ("EMAIL", "me@example.org")] {
            git.env(format!("GIT_AUTHOR_{name}"), value);
            git.env(format!("GIT_COMMITTER_{name}"), value);
        }
        succeeds(git);
    };
    let (bare, clone, again) = (node.text("bare"), node.text("clone"), node.text("again"));
    git(&["init", "-q", "--bare", &bare]);
    let url = format!("web.jiffy:{bare}");
    git(&["clone", "-q", &url, &clone]);
    fs::write(node.path("clone/file"), bytes(1_000_000)).unwrap();
    git(&["-C", &clone, "add", "file"]);
    git(&["-C", &clone, "commit", "-q", "-m", "One"]);
    git(&["-C", &clone, "push", "-q", "origin", "HEAD:refs/heads/main"]);
    git(&["clone", "-q", "-b", "main", &url, &again]);
    assert_eq!(fs::read(node.path("again/file")).unwrap(), bytes(1_000_000));
}
