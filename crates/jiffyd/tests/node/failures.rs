//! VMMs and guests that fail or misbehave.

use crate::client::Answer;
use crate::daemon::{
    Daemon, bad_vm, command, eventually, id_of, kill, release_guest, shell, started, status_of, vm,
};
use jiffy_wire::agent::{ExecOutput, ExitStatus};
use jiffy_wire::api::{ApiError, CreateVm, ErrorKind, Vm, VmState};
use std::time::{Duration, Instant};

fn named(name: &str, vm: CreateVm) -> CreateVm {
    CreateVm {
        name: Some(name.into()),
        ..vm
    }
}

#[test]
fn every_client_hears_why_the_vmm_could_not_build_the_vm() {
    let daemon = Daemon::start();
    daemon.create(&named("bad", bad_vm("start-failed", None)));
    let error = daemon
        .post("/v1/vms/bad/start", b"")
        .error(ErrorKind::VmFailed);
    assert_eq!(error.message, "The kernel /x is not bootable.");
    assert_eq!(error.hint.as_deref(), Some("Give another."));
    assert_eq!(
        daemon.vm("bad").error.as_deref(),
        Some("The kernel /x is not bootable.")
    );

    let frames = daemon.run(bad_vm("start-failed", Some(command(&["true"]))));
    let finished = frames.finish();
    assert!(!finished.started);
    assert_eq!(finished.lost(), "The kernel /x is not bootable.");

    let error = daemon
        .run_detached(bad_vm("start-failed", None))
        .error(ErrorKind::VmFailed);
    assert!(error.message.contains("not bootable"));
}

#[test]
fn a_detached_run_says_why_its_command_could_not_be_started() {
    let daemon = Daemon::start();
    let failed = |answer: Answer, program: &str, code| {
        assert_eq!(answer.status, ErrorKind::VmFailed.status());
        let error: ApiError = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!(error.exit_code, Some(code), "{}", error.message);
        assert!(error.message.contains(program), "{}", error.message);
    };
    for (program, code) in [("/no/such/program", 127), ("/dev/null", 126)] {
        // The report of the command comes with that of being ready, or later.
        let at_once = vm(command(&[program]));
        failed(daemon.run_detached(at_once), program, code);
        let later = bad_vm("slow-report", Some(command(&[program])));
        failed(daemon.run_detached(later), program, code);
    }
    let later = bad_vm("slow-report", Some(command(&["/no/such/program"])));
    daemon.create(&named("bad", later));
    let answer = daemon.post("/v1/vms/bad/start", b"");
    failed(answer, "/no/such/program", 127);
}

#[test]
fn a_guest_that_never_gets_ready_is_ended() {
    let daemon = Daemon::with(&["--start-timeout", "1"]);
    daemon.create(&named("mute", bad_vm("mute", None)));
    // Its log has a line, unless a busy host left no time to write it.
    let says_its_last_line = (0..20).any(|_| {
        let error = daemon
            .post("/v1/vms/mute/start", b"")
            .error(ErrorKind::VmFailed);
        assert!(
            error.message.contains("not ready after 1 s"),
            "{}",
            error.message
        );
        assert_eq!(daemon.vm("mute").state, VmState::Exited);
        error.message.contains("fake-vmm: VM")
    });
    assert!(says_its_last_line);
    let finished = daemon
        .run(bad_vm("mute", Some(command(&["true"]))))
        .finish();
    assert!(finished.lost().contains("not ready after 1 s"));
}

#[test]
fn a_killed_vmm_is_reported_as_the_reason() {
    let daemon = Daemon::start();
    let mut frames = daemon.run(vm(command(&["sleep", "100"])));
    let id = id_of(&frames);
    started(&mut frames);
    let mut exec = daemon.exec(&id, &command(&["sleep", "100"]));
    while exec.as_ref().is_err_and(|answer| answer.status == 409) {
        exec = daemon.exec(&id, &command(&["sleep", "100"]));
    }
    let mut exec = exec.unwrap();
    started(&mut exec);
    kill(daemon.vm(&id).pid.unwrap());
    assert!(frames.finish().lost().contains("killed by signal 9"));
    assert!(exec.finish().lost().contains("killed by signal 9"));
    let vm = daemon.when(&id, VmState::Exited);
    assert!(vm.error.unwrap().contains("its VMM was killed by signal 9"));
    assert!(!daemon.run_folder(&id).exists());
}

#[test]
fn a_vmm_that_dies_in_mid_message_leaves_whole_frames() {
    let daemon = Daemon::start();
    daemon.run_detached(named("dies", bad_vm("die-in-message", None)));
    let finished = daemon
        .exec("dies", &command(&["sleep", "100"]))
        .unwrap()
        .finish();
    assert!(finished.started);
    assert_eq!(finished.stdout, b"", "an incomplete message is delivered");
    assert!(finished.lost().contains("killed by signal 9"));
}

#[test]
fn a_guests_crash_and_early_power_off_are_distinguished() {
    let daemon = Daemon::start();
    let crashed = daemon
        .run(bad_vm("crash", Some(command(&["sleep", "1"]))))
        .finish();
    assert_eq!(crashed.lost(), "The guest crashed: triple fault.");
    let off = daemon
        .run(bad_vm("early-off", Some(command(&["sleep", "1"]))))
        .finish();
    assert!(off.lost().contains("powered off before its command ended"));
}

#[test]
fn invalid_data_of_a_guest_closes_only_that_connection() {
    let daemon = Daemon::start();
    let finished = daemon
        .run(bad_vm("garbage", Some(shell("echo fine"))))
        .finish();
    assert_eq!(finished.text(), "fine\n");
    assert_eq!(finished.status(), ExitStatus::Code(0));
    daemon.run_detached(named("odd", bad_vm("exec-garbage", None)));
    let finished = daemon.exec("odd", &command(&["true"])).unwrap().finish();
    assert!(finished.lost().contains("protocol"));
    assert_eq!(daemon.vm("odd").state, VmState::Running);
    assert_eq!(daemon.get("/v1/vms/odd/stat").status, 200);
}

#[test]
fn a_guest_that_reconnects_is_served_on_its_last_connection() {
    let daemon = Daemon::start();
    let vm = CreateVm {
        remove: true,
        ..bad_vm("redials", Some(shell("echo heard")))
    };
    let finished = daemon.run(vm).finish();
    assert_eq!(finished.text(), "heard\n");
    assert_eq!(finished.status(), ExitStatus::Code(0));
    // The guest powers off when it knows that its end is stored.
    daemon.assert_nothing_left();
}

#[test]
fn a_guest_that_floods_the_trace_port_is_still_served() {
    let daemon = Daemon::start();
    daemon.run_detached(named("flood", bad_vm("flood", None)));
    let finished = daemon
        .exec("flood", &shell("echo through"))
        .unwrap()
        .finish();
    assert_eq!(finished.text(), "through\n");
    let quiet = daemon.run(vm(command(&["true"]))).finish();
    assert_eq!(quiet.status(), ExitStatus::Code(0));
    let stopped: Vm = daemon.post("/v1/vms/flood/stop", b"").json();
    assert_eq!(stopped.state, VmState::Exited);
    let timeline: jiffy_wire::timeline::Timeline = daemon.get("/v1/vms/flood/timeline").json();
    assert!(timeline.spans.len() < 5000);
}

/// The daemon's memory, in MiB.
fn memory_of(daemon: &Daemon) -> u64 {
    status_of(daemon.pid(), "VmRSS") / 1024
}

fn descriptors_of(daemon: &Daemon) -> usize {
    let folder = format!("/proc/{}/fd", daemon.pid());
    std::fs::read_dir(folder).unwrap().count()
}

/// The slowest of several commands in an unrelated VM, except two: the host may have stalled.
fn slowest_exec(vm: &str, daemon: &Daemon) -> Duration {
    let times = (0..20).map(|_| {
        let begun = Instant::now();
        let finished = daemon.exec(vm, &command(&["true"])).unwrap().finish();
        assert_eq!(finished.status(), ExitStatus::Code(0));
        begun.elapsed()
    });
    let mut times: Vec<_> = times.collect();
    times.sort();
    times[times.len() - 3]
}

#[test]
fn a_guest_that_floods_the_supervisor_port_delays_no_others() {
    /// MiB that the floods of one guest may cost the daemon: eight connections, each with some
    /// messages of 64 KiB in transit.
    const MOST: u64 = 32;
    const PROMPT: Duration = Duration::from_secs(5);
    let daemon = Daemon::start();
    daemon.run_detached(named("calm", CreateVm::default()));
    slowest_exec("calm", &daemon);
    let (memory, descriptors) = (memory_of(&daemon), descriptors_of(&daemon));
    let bounded = || {
        let now = memory_of(&daemon);
        assert!(now < memory + MOST, "{memory} MiB became {now} MiB");
        let now = descriptors_of(&daemon);
        assert!(now < descriptors + 40, "{descriptors} files became {now}");
    };
    let storm = named("storm", bad_vm("storm", None));
    let storm: Vm = daemon.run_detached(storm).json();
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        let slowest = slowest_exec("calm", &daemon);
        assert!(slowest < PROMPT, "an exec in another VM took {slowest:?}");
        bounded();
    }
    let folder = daemon.vm_folder(&storm.id);
    release_guest(&folder);
    eventually("a hundred silent connections are open", || {
        folder.join("silent").exists()
    });
    let slowest = slowest_exec("calm", &daemon);
    assert!(slowest < PROMPT, "an exec in another VM took {slowest:?}");
    bounded();
    // The VM still works for its own user.
    assert_eq!(daemon.vm("storm").state, VmState::Running);
    assert!(daemon.vm("storm").warnings.len() <= 100);
    let finished = daemon.exec("storm", &shell("echo through")).unwrap();
    assert_eq!(finished.finish().text(), "through\n");
    let timeline: jiffy_wire::timeline::Timeline = daemon.get("/v1/vms/storm/timeline").json();
    assert!(timeline.spans.len() < 5000);
    let stopped: Vm = daemon.post("/v1/vms/storm/stop?grace_ms=2000", b"").json();
    assert_eq!(stopped.state, VmState::Exited);
    assert_eq!(daemon.delete("/v1/vms/storm").status, 204);
    assert_eq!(daemon.vm("calm").state, VmState::Running);
}

#[test]
fn invalid_client_input_closes_only_its_own_stream() {
    use std::io::Write;
    let daemon = Daemon::start();
    let mut sleeping = command(&["sleep", "100"]);
    sleeping.stdin = true;
    let mut frames = daemon.run(named("calm", vm(sleeping)));
    started(&mut frames);
    frames.stream.write_all(&[0xff; 1000]).unwrap();
    assert_eq!(frames.next::<ExecOutput>(), None);
    assert_eq!(daemon.vm("calm").state, VmState::Running);
    let mut exec = daemon.exec("calm", &command(&["sleep", "100"])).unwrap();
    started(&mut exec);
    exec.stream.write_all(&[1, 0, 0, 0, 77]).unwrap();
    assert_eq!(exec.next::<ExecOutput>(), None);
    assert_eq!(daemon.vm("calm").state, VmState::Running);
}

#[test]
fn a_missing_vmm_is_reported_and_leaves_nothing() {
    let daemon = Daemon::start();
    std::fs::remove_file(daemon.folder.path().join("lib/jiffy-vmm")).unwrap();
    let error = daemon
        .try_run(vm(command(&["true"])))
        .unwrap_err()
        .error(ErrorKind::Internal);
    assert!(error.message.contains("jiffy-vmm"));
    daemon.assert_nothing_left();
}
