//! Hosts with little memory left: memory is reclaimed from idle VMs.

use crate::daemon::{Daemon, bad_vm, eventually, named, shell, status_of};
use crate::room::{self, patient};
use crate::snapshots::{ask_control, ask_vmm};
use jiffy_wire::agent::ExitStatus;
use jiffy_wire::api::{CreateVm, ErrorKind, IdleAction, IdlePolicy, Priority, Vm, VmState};
use std::fs;
use std::path::PathBuf;
use std::thread::{self, sleep};
use std::time::Duration;

/// A VM with this action after an idle hour.
fn idles(name: &str, action: IdleAction) -> CreateVm {
    let policy = IdlePolicy {
        after_s: 3600,
        action,
    };
    CreateVm {
        idle: Some(policy),
        ..named(name, CreateVm::default())
    }
}

fn run(daemon: &Daemon, vm: CreateVm) {
    daemon.run_detached(vm).json::<Vm>();
}

fn exec(daemon: &Daemon, name: &str) {
    let done = daemon.exec(name, &shell("true")).unwrap().finish();
    assert_eq!(done.status(), ExitStatus::Code(0));
}

fn states(daemon: &Daemon, names: &[&str]) -> Vec<VmState> {
    names.iter().map(|name| daemon.vm(name).state).collect()
}

#[test]
fn a_waiting_request_hibernates_the_least_recently_used_idle_vm() {
    let daemon = patient("512M");
    run(&daemon, named("steady", CreateVm::default()));
    run(&daemon, idles("first", IdleAction::Hibernate));
    run(&daemon, idles("second", IdleAction::Hibernate));
    run(&daemon, idles("job", IdleAction::Stop));
    // A VM is taken for active until it is first looked at.
    eventually("all are known to be idle", || {
        ["first", "second", "job"].iter().all(|name| {
            let idle = daemon.vm(name).idle.expect("an idle time");
            idle.idle_s.is_some_and(|seconds| seconds >= 1)
        })
    });
    exec(&daemon, "first");
    // There is memory for four.
    run(&daemon, named("fifth", CreateVm::default()));
    let all = ["steady", "first", "second", "job", "fifth"];
    let [awake, asleep] = [VmState::Running, VmState::Hibernated];
    assert_eq!(states(&daemon, &all), [awake, awake, asleep, awake, awake]);
    // A VM that was idle for less than some seconds is not hibernated for another.
    exec(&daemon, "second");
    assert_eq!(states(&daemon, &all), [awake, asleep, awake, awake, awake]);
    let log = fs::read_to_string(daemon.folder.path().join("jiffyd.log")).unwrap();
    assert_eq!(log.matches("hibernated early").count(), 2);
}

#[test]
fn idle_vms_hibernate_and_busy_guests_give_up_caches() {
    // Any host has less memory than this reserve.
    let mut daemon = Daemon::with(&["--memory-limit", "none", "--memory-reserve", "100%"]);
    run(&daemon, idles("sleeper", IdleAction::Hibernate));
    run(&daemon, named("steady", bad_vm("caches", None)));
    daemon.when("sleeper", VmState::Hibernated);
    let target = |vm: &str| -> String {
        let status = ask_vmm(&daemon, vm, "\"balloon\"\n");
        let (_, rest) = status.split_once("\"target_mib\":").unwrap();
        rest.split(',').next().unwrap().to_owned()
    };
    // The guest has 100 MiB available, and 32 are left to it.
    eventually("its caches are taken", || target("steady") == "68");
    // It gets them back while it is in use,
    let used = daemon.exec("steady", &shell("sleep 1000")).unwrap();
    eventually("it has its memory", || target("steady") == "0");
    drop(used);
    eventually("they are taken again", || target("steady") == "68");
    // and children inherit no balloon.
    daemon.post("/v1/vms/steady/fork", br#"{"name": "child"}"#);
    assert_eq!(target("child"), "0");
    daemon.restart_with(&["--memory-reserve", "0"]);
    eventually("the next daemon gives it its memory", || {
        ask_vmm(&daemon, "steady", "\"balloon\"\n").contains("\"target_mib\":0,")
    });
    run(&daemon, idles("other", IdleAction::Hibernate));
    sleep(Duration::from_secs(6));
    assert_eq!(daemon.vm("other").state, VmState::Running);
}

/// A daemon and two VMs that grow on a host with too little memory: while the first grows, the second
/// is halted. Returns their folders.
fn one_of_two_halted() -> (Daemon, [PathBuf; 2]) {
    let reserve = format!("{}M", room::available() * 2);
    let daemon = Daemon::with(&["--memory-limit", "none", "--memory-reserve", &reserve]);
    let folders = [("first", Priority::High), ("second", Priority::Low)].map(|(name, priority)| {
        let vm = CreateVm {
            priority,
            ..named(name, bad_vm("grows", None))
        };
        daemon.vm_folder(&daemon.run_detached(vm).json::<Vm>().id)
    });
    eventually("one is halted", || is_halted(&daemon, "second"));
    (daemon, folders)
}

fn is_halted(daemon: &Daemon, name: &str) -> bool {
    let error = daemon.vm(name).error;
    error.is_some_and(|why| why.contains("it is halted"))
}

#[test]
fn a_command_in_a_halted_vm_waits_until_it_is_resumed() {
    let (daemon, [first, _]) = one_of_two_halted();
    thread::scope(|scope| {
        let exec = scope.spawn(|| exec(&daemon, "second"));
        // A guest that does not accept the connection is given up after 20 s.
        sleep(Duration::from_secs(22));
        assert!(!exec.is_finished());
        assert!(is_halted(&daemon, "second"));
        fs::write(first.join("enough"), "").unwrap();
        exec.join().unwrap();
    });
}

#[test]
fn halted_vms_run_on_when_the_daemon_ends() {
    let (mut daemon, folders) = one_of_two_halted();
    let second = daemon.vm("second").id;
    let control = daemon.run_folder(&second).join("control.sock");
    let status = || ask_control(&control, "\"status\"\n");
    eventually("its vCPUs stop", || status().contains("\"paused\":true"));
    daemon.shut_down();
    assert!(status().contains("\"paused\":false"), "{}", status());
    for folder in folders {
        fs::write(folder.join("enough"), "").unwrap();
    }
}

#[test]
fn more_memory_is_promised_than_vms_together_use() {
    let arguments = ["--memory-limit", "256M", "--memory-overcommit", "300"];
    let more = ["--memory-reserve", "64M", "--memory-wait", "86400"];
    let daemon = Daemon::with(&[&arguments[..], &more].concat());
    // Six of 128 MiB, which use little, are promised 300 %.
    for number in 0..6 {
        run(
            &daemon,
            named(&format!("small-{number}"), CreateVm::default()),
        );
    }
    let seventh = named("seventh", CreateVm::default());
    let wanted = serde_json::json!({"vm": seventh, "detach": true, "wait_s": 0});
    let refused = daemon.post("/v1/run", wanted.to_string().as_bytes());
    let refused = refused.error(ErrorKind::NoRoom).message;
    assert!(refused.contains("768 MiB of the 768 MiB"), "{refused}");
    for number in 0..6 {
        daemon.delete(&format!("/v1/vms/small-{number}?force=true"));
    }
    // VMs that use what they were promised make each other sleep: four times 96 MiB are too much.
    let names = ["one", "two", "three", "four"];
    for name in names {
        let vm = CreateVm {
            idle: idles(name, IdleAction::Hibernate).idle,
            ..named(name, bad_vm("uses-memory", None))
        };
        run(&daemon, vm);
        let running = names.iter().filter_map(|name| {
            let vm = daemon.get(&format!("/v1/vms/{name}"));
            (vm.status == 200).then(|| vm.json::<Vm>().pid).flatten()
        });
        let used: u64 = running.map(|pid| status_of(pid, "VmRSS") >> 10).sum();
        assert!(used <= 256, "{used} MiB");
    }
    let states = states(&daemon, &names);
    assert_eq!(states[3], VmState::Running, "{states:?}");
    assert_eq!(states[0], VmState::Hibernated, "{states:?}");
}

#[test]
fn overcommitted_memory_needs_a_limit_and_a_reserve() {
    for (arguments, missing) in [
        (
            &["--memory-overcommit", "200", "--memory-limit", "none"][..],
            "--memory-limit",
        ),
        (
            &[
                "--memory-overcommit",
                "200",
                "--memory-limit",
                "1G",
                "--memory-reserve",
                "0",
            ],
            "--memory-reserve",
        ),
    ] {
        let daemon = Daemon::prepared(arguments);
        let ended = daemon.command().output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(!ended.status.success());
        assert!(said.contains(missing), "{said}");
    }
}
