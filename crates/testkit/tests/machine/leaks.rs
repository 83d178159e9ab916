//! Many VMs leave nothing behind.

use crate::support::{Jiffy, jiffy, jiffy_with};
use std::time::Duration;

/// Resident memory (KiB) and number of descriptors of the daemon.
fn daemon(jiffy: &Jiffy) -> (u64, u64) {
    let pid = jiffy.pids("jiffyd")[0];
    let numbers = jiffy.sh(&format!(
        "awk '/^VmRSS/ {{ print $2 }}' /proc/{pid}/status; ls /proc/{pid}/fd | wc -l"
    ));
    let mut numbers = numbers
        .lines()
        .map(|line| line.trim().parse().expect("a number"));
    (
        numbers.next().expect("memory"),
        numbers.next().expect("descriptors"),
    )
}

/// Like [`daemon`], once the node has prepared the next run (a standby and a spare), because it
/// holds descriptors of them.
fn ready_daemon(jiffy: &Jiffy) -> (u64, u64) {
    jiffy.eventually("a VM and a VMM kept ready", || {
        let spares = "grep -l -e /vms/------------/ /proc/[0-9]*/cmdline 2>/dev/null || true";
        !jiffy.standbys().is_empty() && !jiffy.sh(spares).is_empty()
    });
    daemon(jiffy)
}

fn available_kib(jiffy: &Jiffy) -> i64 {
    jiffy
        .sh("sync; echo 3 > /proc/sys/vm/drop_caches; awk '/^MemAvailable/ { print $2 }' /proc/meminfo")
        .parse()
        .expect("a number")
}

#[test]
fn fifty_successive_vms_leave_nothing() {
    let jiffy = jiffy();
    // Fills caches and pools, and lets the daemon make its first allocations, before the
    // measurement.
    for _ in 0..3 {
        jiffy.ok(&["run", "--rm", "--", "true"]);
    }
    let before = jiffy.settled_traces();
    let (resident, descriptors) = ready_daemon(&jiffy);
    let available = available_kib(&jiffy);
    let answer = jiffy
        .lab
        .command([
            "/bin/sh",
            "-c",
            "export JIFFY_MACHINE=never; n=0; while [ $n -lt 50 ]; do n=$((n+1)); \
             [ \"$(/bin/jiffy run --rm -- echo $n)\" = $n ] || exit 1; done; echo all",
        ])
        .time_limit(Duration::from_secs(3600))
        .output()
        .expect("it runs");
    assert_eq!(answer.text(), "all", "{}", answer.error_text());
    jiffy.assert_nothing_left(&before, "after them");
    let mut after = (0, 0);
    jiffy.eventually("as many descriptors of jiffyd as before", || {
        after = ready_daemon(&jiffy);
        after.1 == descriptors
    });
    let resident_after = after.0;
    assert!(
        resident_after < resident + 4096,
        "jiffyd grew from {resident} to {resident_after} KiB"
    );
    let lost = available - available_kib(&jiffy);
    assert!(
        lost < 64 * 1024,
        "{lost} KiB of the machine's memory are lost"
    );
}

#[test]
fn ten_vms_at_once_all_answer_and_leave_nothing() {
    let jiffy = jiffy();
    jiffy.ok(&["run", "--rm", "--", "true"]);
    let before = jiffy.settled_traces();
    let answer = jiffy
        .lab
        .command([
            "/bin/sh",
            "-c",
            "export JIFFY_MACHINE=never; for n in 0 1 2 3 4 5 6 7 8 9; do \
             /bin/jiffy run --rm -- sh -c \"sleep 1; echo $n\" & done; wait",
        ])
        .output()
        .expect("it runs");
    let mut numbers: Vec<String> = answer.text().lines().map(String::from).collect();
    numbers.sort();
    assert_eq!(numbers.join(""), "0123456789", "{}", answer.error_text());
    jiffy.assert_nothing_left(&before, "after them");
}

/// Enough clones for more than 1,024 descriptors of the daemon, the usual limit. The benchmark
/// `node/clones/1000/memory` covers a thousand, which takes minutes.
const CLONES: u64 = 220;

#[test]
fn hundreds_of_clones_answer_take_little_memory_and_leave_nothing() {
    // Together they are promised more memory than there is.
    let jiffy = jiffy_with(&[("JIFFY_MEMORY_LIMIT", "none")]);
    let before = jiffy.settled_traces();
    jiffy.ok(&["run", "-d", "--memory", "128", "--name", "parent"]);
    jiffy.ok(&["exec", "parent", "true"]);
    let available = available_kib(&jiffy);
    let clones = CLONES.to_string();
    let names = jiffy.ok(&["fork", "parent", "-n", &clones, "--name", "clone"]);
    assert_eq!(names.lines().count() as u64, CLONES);
    let answers = jiffy
        .lab
        .command([
            "/bin/sh",
            "-c",
            "export JIFFY_MACHINE=never; for n in $(seq \"$1\"); do \
             [ \"$(/bin/jiffy exec clone-$n hostname)\" = clone-$n ] || exit 1; done; echo all",
            "each",
            &clones,
        ])
        .time_limit(Duration::from_secs(1800))
        .output()
        .expect("it runs");
    assert_eq!(answers.text(), "all", "{}", answers.error_text());
    let (resident_kib, descriptors) = daemon(&jiffy);
    assert!(descriptors > 1024, "{descriptors} descriptors");
    assert!(resident_kib < 64 << 10, "jiffyd has {resident_kib} KiB");
    let each = (available - available_kib(&jiffy)).max(0) as u64 / CLONES;
    assert!(each < 4 << 10, "a clone takes {each} KiB");
    let mut all: Vec<&str> = vec!["rm", "--force", "parent"];
    all.extend(names.lines());
    jiffy.ok(&all);
    jiffy.assert_nothing_left(&before, "after the clones");
}
