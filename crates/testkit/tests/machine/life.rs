//! The life of a VM: it is created, started, inspected, stopped and removed.

use crate::support::jiffy;

#[test]
fn a_detached_vm_is_listed_used_stopped_and_removed() {
    let jiffy = jiffy();
    let id = jiffy.ok(&[
        "run",
        "-d",
        "--name",
        "worker",
        "--",
        "sh",
        "-c",
        "echo begun; sleep 1000",
    ]);
    assert_eq!(id.len(), 12, "{id}");
    assert!(jiffy.ok(&["ps"]).contains("worker"));
    assert_eq!(jiffy.ok(&["exec", "worker", "echo", "hi"]), "hi");
    jiffy.eventually("the log", || jiffy.ok(&["logs", "worker"]) == "begun");
    let inspected = jiffy.json(&["inspect", "worker"]);
    let vm = if inspected.is_array() {
        &inspected[0]
    } else {
        &inspected
    };
    assert_eq!(vm["id"], id);
    assert_eq!(vm["state"], "running");
    jiffy.ok(&["stop", "-t", "2", "worker"]);
    assert!(!jiffy.ok(&["ps"]).contains("worker"));
    assert!(jiffy.ok(&["ps", "-a"]).contains("worker"));
    assert!(jiffy.pids("jiffy-vmm").is_empty());
    jiffy.ok(&["rm", "worker"]);
    assert!(!jiffy.ok(&["ps", "-a"]).contains("worker"));
}

#[test]
fn a_created_vm_is_started_more_than_once() {
    let jiffy = jiffy();
    jiffy.ok(&["create", "--name", "later", "--", "echo", "now"]);
    assert!(jiffy.pids("jiffy-vmm").is_empty(), "create starts nothing");
    for _ in 0..2 {
        let output = jiffy.run(&["start", "-a", "later"]);
        assert_eq!(
            (output.code(), output.text().as_str()),
            (0, "now"),
            "{}",
            output.error_text()
        );
    }
}

#[test]
fn wait_gives_the_status_when_the_vm_has_ended() {
    let jiffy = jiffy();
    jiffy.ok(&[
        "run",
        "-d",
        "--name",
        "short",
        "--",
        "sh",
        "-c",
        "sleep 0.3; exit 9",
    ]);
    assert_eq!(jiffy.ok(&["wait", "short"]), "9");
}

#[test]
fn kill_ends_a_vm_at_once_or_signals_its_command() {
    let jiffy = jiffy();
    jiffy.ok(&[
        "run",
        "-d",
        "--name",
        "target",
        "--",
        "sh",
        "-c",
        "trap 'exit 11' USR1; echo ready; while :; do sleep 0.1; done",
    ]);
    jiffy.eventually("the command", || jiffy.ok(&["logs", "target"]) == "ready");
    jiffy.ok(&["kill", "-s", "USR1", "target"]);
    assert_eq!(jiffy.ok(&["wait", "target"]), "11");
    jiffy.ok(&["run", "-d", "--name", "victim"]);
    jiffy.ok(&["kill", "victim"]);
    jiffy.eventually("the end of the VMM", || jiffy.pids("jiffy-vmm").is_empty());
}

#[test]
fn run_with_rm_leaves_nothing() {
    let jiffy = jiffy();
    let before = jiffy.settled_traces();
    jiffy.ok(&["run", "--rm", "--", "true"]);
    jiffy.assert_nothing_left(&before, "after --rm");
    assert_eq!(jiffy.ok(&["ps", "-aq"]), "");
}

#[test]
fn the_console_of_a_vm_is_logged_on_request() {
    let jiffy = jiffy();
    jiffy.ok(&[
        "run",
        "--name",
        "talker",
        "--console",
        "--kernel-arg",
        "loglevel=7",
        "--",
        "true",
    ]);
    let console = jiffy.ok(&["logs", "--console", "talker"]);
    assert!(console.contains("Linux version 6.12"), "{console}");
}

#[test]
fn a_service_of_the_distribution_may_be_pid_1() {
    let jiffy = jiffy();
    // busybox's init of the base image reads no inittab; it runs a shell script.
    jiffy.ok(&["run", "-d", "--name", "distro", "--init=/sbin/init"]);
    jiffy.eventually("the agent", || {
        jiffy.run(&["exec", "distro", "true"]).code() == 0
    });
    let first = jiffy.ok(&[
        "exec",
        "distro",
        "sh",
        "-c",
        "tr '\\0' ' ' < /proc/1/cmdline",
    ]);
    assert!(
        first.contains("init") && !first.contains("jiffy"),
        "{first}"
    );
    // The guest's own power-off ends the VM, also without ACPI.
    jiffy.run(&["exec", "distro", "poweroff"]);
    jiffy.eventually("the end of the VM", || {
        !jiffy.ok(&["ps"]).contains("distro")
    });
}
