//! Processes are killed at arbitrary moments. Later commands must clean up or explain what is left.

mod soak;

use crate::support::{Jiffy, jiffy};
use std::time::Duration;

/// Distinct delays that are the same in each run.
fn delays(count: u32, up_to: Duration) -> impl Iterator<Item = Duration> {
    let mut state = 0x9e37_79b9_u32;
    (0..count).map(move |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        up_to.mul_f64(f64::from(state) / f64::from(u32::MAX))
    })
}

/// After a crash a new VM runs, and all others can be listed and removed and leave nothing behind.
fn assert_recovered(jiffy: &Jiffy, before: &crate::support::Traces, what: &str) {
    let output = jiffy.run(&["run", "--rm", "--", "echo", "well"]);
    assert_eq!(output.text(), "well", "{what}: {}", output.error_text());
    jiffy.ok(&["ps", "-a"]);
    // A daemon may still be handling the request of a killed client.
    jiffy.eventually(&format!("{what}: all VMs are removed"), || {
        jiffy.remove_all();
        jiffy.ok(&["ps", "-aq"]).is_empty()
    });
    jiffy.assert_nothing_left(before, what);
}

/// Starts a VM and kills every process of that name after a delay, for several delays.
fn kill_at_many_moments(program: &str) {
    let jiffy = jiffy();
    jiffy.ok(&["run", "--rm", "--", "true"]);
    let before = jiffy.settled_traces();
    for (n, delay) in delays(8, Duration::from_millis(400)).enumerate() {
        let name = format!("moment{n}");
        let mut running = jiffy
            .command(&["run", "--name", &name, "--", "sleep", "1000"])
            .start()
            .expect("it starts");
        std::thread::sleep(delay);
        // A killed process exists until the kernel has ended it, and until then a daemon accepts
        // connections.
        jiffy.kill_all(program);
        // A command that finds no daemon would start another, and a VM later.
        let _ = running.signal(9);
        let _ = running.wait();
        assert_recovered(
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
    let vmm = jiffy.inspect("survivor")["pid"].clone();
    let daemon = jiffy.pids("jiffyd");
    jiffy.kill_all("jiffyd");
    let inspected = jiffy.json(&["inspect", "survivor"]);
    let vm = if inspected.is_array() {
        &inspected[0]
    } else {
        &inspected
    };
    assert_eq!(vm["id"], id);
    assert_eq!(vm["state"], "running");
    assert!(vmm.is_u64());
    assert_eq!(vm["pid"], vmm, "the same process");
    assert_ne!(jiffy.pids("jiffyd"), daemon, "another daemon");
    assert_eq!(jiffy.ok(&["exec", "survivor", "echo", "alive"]), "alive");
    let lines_before = jiffy.ok(&["logs", "survivor"]).lines().count();
    // No output of the command from while the daemon was gone is lost or duplicated.
    let mut log = String::new();
    jiffy.eventually("more output", || {
        log = jiffy.ok(&["logs", "survivor"]);
        log.lines().count() > lines_before + 5
    });
    let expected: Vec<String> = (1..=log.lines().count()).map(|n| n.to_string()).collect();
    assert_eq!(log.lines().collect::<Vec<_>>(), expected);
    jiffy.ok(&["rm", "-f", "survivor"]);
}

#[test]
fn the_death_of_a_vmm_is_reported_to_its_clients() {
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
        // Without Jiffy's PID 1 the kernel looks for another init, and there is none.
        .command(&["run", "--kernel-arg", "rdinit=/nothing", "--", "true"])
        .output()
        .expect("it ends");
    assert_eq!(output.code(), 125, "{}", output.error_text());
    jiffy.eventually("no VMM is left", || jiffy.pids("jiffy-vmm").is_empty());
}
