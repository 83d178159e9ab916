//! Killed at any moment, nothing stays that a later command does not clean up
//! or explain.

use crate::support::{Jiffy, jiffy};
use std::time::Duration;

/// Numbers that differ from one another and not from run to run.
fn delays(count: u32, up_to: Duration) -> impl Iterator<Item = Duration> {
    let mut state = 0x9e37_79b9_u32;
    (0..count).map(move |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        up_to.mul_f64(f64::from(state) / f64::from(u32::MAX))
    })
}

/// After a crash: a new VM runs, all others can be listed and removed, and
/// nothing of them is left.
fn all_is_well_again(jiffy: &Jiffy, before: &crate::support::Traces, what: &str) {
    let output = jiffy.run(&["run", "--rm", "--", "echo", "well"]);
    assert_eq!(output.text(), "well", "{what}: {}", output.error_text());
    jiffy.ok(&["ps", "-a"]);
    jiffy.remove_all();
    assert_eq!(jiffy.ok(&["ps", "-aq"]), "", "{what}");
    jiffy.leaves_nothing(before, what);
}

/// Starts a VM, waits, kills every process of that name, for many moments.
fn kill_at_many_moments(program: &str) {
    let jiffy = jiffy();
    jiffy.ok(&["run", "--rm", "--", "true"]);
    let before = jiffy.at_rest();
    for (n, delay) in delays(8, Duration::from_millis(400)).enumerate() {
        let name = format!("moment{n}");
        let running = jiffy
            .command(&["run", "--name", &name, "--", "sleep", "1000"])
            .time_limit(Duration::from_secs(60))
            .start()
            .expect("it starts");
        std::thread::sleep(delay);
        // A killed daemon still takes connections until the kernel gets to it.
        jiffy.sh(&format!(
            "killall -9 {program} 2>/dev/null; \
             for n in $(seq 500); do killall -0 {program} 2>/dev/null || break; sleep 0.01; done"
        ));
        drop(running);
        all_is_well_again(
            &jiffy,
            &before,
            &format!("{program} killed after {delay:?}"),
        );
    }
}

#[test]
fn the_daemon_may_be_killed_at_any_moment() {
    kill_at_many_moments("jiffyd");
}

#[test]
fn a_vmm_may_be_killed_at_any_moment() {
    kill_at_many_moments("jiffy-vmm");
}

#[test]
fn the_command_line_may_be_killed_at_any_moment() {
    kill_at_many_moments("jiffy");
}

#[test]
fn a_vm_survives_the_daemon_and_is_adopted() {
    let jiffy = jiffy();
    let id = jiffy.ok(&[
        "run",
        "-d",
        "--name",
        "survivor",
        "--",
        "sh",
        "-c",
        "n=0; while :; do n=$((n+1)); echo $n; sleep 0.1; done",
    ]);
    let vmm = jiffy.pids("jiffy-vmm");
    let daemon = jiffy.pids("jiffyd");
    jiffy.sh("killall -9 jiffyd");
    let inspected = jiffy.json(&["inspect", "survivor"]);
    let vm = if inspected.is_array() {
        &inspected[0]
    } else {
        &inspected
    };
    assert_eq!(vm["id"], id);
    assert_eq!(vm["state"], "running");
    assert_eq!(jiffy.pids("jiffy-vmm"), vmm, "the same process");
    assert_ne!(jiffy.pids("jiffyd"), daemon, "another daemon");
    assert_eq!(jiffy.ok(&["exec", "survivor", "echo", "alive"]), "alive");
    // Nothing the command wrote while the daemon was away is missing or doubled.
    std::thread::sleep(Duration::from_secs(1));
    let log = jiffy.ok(&["logs", "survivor"]);
    let expected: Vec<String> = (1..=log.lines().count()).map(|n| n.to_string()).collect();
    assert_eq!(log.lines().collect::<Vec<_>>(), expected);
    assert!(expected.len() > 5, "{log}");
    jiffy.ok(&["rm", "-f", "survivor"]);
}

#[test]
fn a_vmm_that_dies_is_told_to_who_waits() {
    let jiffy = jiffy();
    let mut running = jiffy
        .command(&[
            "run",
            "--name",
            "doomed",
            "--",
            "sh",
            "-c",
            "echo ready; sleep 1000",
        ])
        .start()
        .expect("it starts");
    running.read_until("ready").expect("it runs");
    jiffy.sh("killall -9 jiffy-vmm");
    let output = running.wait().expect("it ends");
    assert_eq!(output.code(), 125, "{}", output.error_text());
    assert!(
        output.error_text().starts_with("jiffy: "),
        "{}",
        output.error_text()
    );
    let inspected = jiffy.json(&["inspect", "doomed"]);
    let vm = if inspected.is_array() {
        &inspected[0]
    } else {
        &inspected
    };
    assert_eq!(vm["state"], "exited");
    assert!(vm["error"].is_string(), "{vm}");
}

#[test]
fn a_guest_kernel_that_panics_ends_its_vm_with_a_reason() {
    let jiffy = jiffy();
    let output = jiffy
        // Without our PID 1 the kernel looks for another, and there is none.
        .command(&["run", "--kernel-arg", "rdinit=/nothing", "--", "true"])
        .time_limit(Duration::from_secs(60))
        .output()
        .expect("it ends");
    assert_eq!(output.code(), 125, "{}", output.error_text());
    jiffy.eventually("no VMM is left", Duration::from_secs(5), || {
        jiffy.pids("jiffy-vmm").is_empty()
    });
}
