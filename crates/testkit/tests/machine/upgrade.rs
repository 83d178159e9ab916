//! VMs of release 0.1 with today's programs. Their data is the fixture
//! `crates/jiffyd/tests/fixtures/release-0.1/`.

use crate::support::{Jiffy, jiffy};
use std::fs::File;
use std::path::Path;

/// A separate node, beside the one of other tests.
const DATA: &str = "/var/lib/jiffy/release-0.1";
const RUN: &str = "/run/release-0.1";

struct OldNode<'a> {
    jiffy: &'a Jiffy,
}

impl OldNode<'_> {
    /// Unpacks the fixture's data folder in the machine; starts no daemon yet.
    fn unpacked(jiffy: &Jiffy) -> OldNode<'_> {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../jiffyd/tests/fixtures/release-0.1/data.tar.zst");
        let packed = zstd::Decoder::new(File::open(fixture).expect("the fixture"));
        let mut packed = tar::Archive::new(packed.expect("zstd"));
        let mut wanted = tar::Builder::new(Vec::new());
        for entry in packed.entries().expect("a tar") {
            let entry = entry.expect("an entry");
            // The golden snapshot's memory is not needed.
            if !entry.path().expect("a path").ends_with("ram.raw") {
                wanted
                    .append(&entry.header().clone(), entry)
                    .expect("appended");
            }
        }
        let tar = wanted.into_inner().expect("a tar");
        jiffy
            .lab
            .write("/tests/release-0.1.tar", 0o600, tar)
            .expect("copied");
        let unpack = format!(
            "mkdir -p {DATA} && tar -C {DATA} -xf /tests/release-0.1.tar && rm /tests/release-0.1.tar"
        );
        jiffy.sh(&unpack);
        OldNode { jiffy }
    }

    fn ok(&self, arguments: &[&str]) -> String {
        let command = self.jiffy.command(arguments);
        let command = command.env("JIFFY_DATA", DATA).env("JIFFY_RUN", RUN);
        let output = command.output().expect("jiffy runs");
        let said = output.error_text();
        assert_eq!(output.code(), 0, "jiffy {}: {said}", arguments.join(" "));
        output.text()
    }

    fn counted(&self, vm: &str) -> u64 {
        self.ok(&["exec", vm, "cat", "/tmp/n"]).parse().unwrap_or(0)
    }

    /// Checks that its program still counts.
    fn assert_counting(&self, vm: &str) {
        let before = self.counted(vm);
        let counts = || self.counted(vm) > before;
        self.jiffy.eventually(&format!("{vm} counts"), counts);
    }
}

impl Drop for OldNode<'_> {
    fn drop(&mut self) {
        // Only processes of this node; the other node is used by other tests.
        let script = format!(
            "for pid in $(pidof jiffyd jiffy-vmm jiffy-pager); do \
             tr '\\0' ' ' < /proc/$pid/cmdline | grep -q release-0.1 && kill -9 $pid; done; \
             rm -rf {DATA} {RUN}"
        );
        if let Err(error) = self.jiffy.lab.sh(&script) {
            eprintln!("removing the data of release 0.1: {error:#}");
        }
    }
}

#[test]
fn a_guest_captured_by_release_0_1_wakes_forks_and_is_restored() {
    let jiffy = jiffy();
    let old = OldNode::unpacked(&jiffy);
    let listed = old.ok(&["ps", "--all"]);
    assert!(
        listed.contains("sleeper") && listed.contains("Hibernated"),
        "{listed}"
    );

    // Its memory contains 0.1's jiffy-init, which keeps running.
    assert_eq!(old.ok(&["wake", "sleeper"]), "sleeper");
    let kept = old.ok(&["exec", "sleeper", "cat", "/root/first", "/root/note"]);
    assert_eq!(kept, "first\nnote");
    old.assert_counting("sleeper");

    // That init connects to the next daemon as well.
    jiffy.kill(&format!(
        "$(for pid in $(pidof jiffyd); do \
         tr '\\0' ' ' < /proc/$pid/cmdline | grep -q {DATA} && echo $pid; done)"
    ));
    old.assert_counting("sleeper");

    // Today's programs fork, capture, hibernate and wake it.
    old.ok(&["fork", "sleeper", "--name", "child"]);
    assert_eq!(old.ok(&["exec", "child", "cat", "/root/note"]), "note");
    old.assert_counting("child");
    old.ok(&["rm", "-f", "child"]);
    old.ok(&["snapshot", "create", "sleeper", "today"]);
    old.ok(&["hibernate", "sleeper"]);
    old.ok(&["wake", "sleeper"]);
    old.assert_counting("sleeper");
    old.ok(&["rm", "-f", "sleeper"]);

    // Incremental captures of both releases are complete.
    for (snapshot, file, text) in [
        ("second", "/root/second", "second"),
        ("today", "/root/note", "note"),
    ] {
        old.ok(&["run", "-d", "--name", "again", "--from", snapshot]);
        assert_eq!(old.ok(&["exec", "again", "cat", file]), text, "{snapshot}");
        old.assert_counting("again");
        old.ok(&["rm", "-f", "again"]);
    }

    // The volume has the data that a guest of 0.1 wrote.
    let cat = [
        "run",
        "--rm",
        "--disk",
        "data,mount=/data",
        "--",
        "cat",
        "/data/kept",
    ];
    assert_eq!(old.ok(&cat), "kept");
    old.ok(&["start", "stopped"]);
    assert_eq!(old.ok(&["wait", "stopped"]), "3");
}
