//! The timeline of a cold run has every step, in order.

use crate::support::{Jiffy, jiffy};
use jiffy_testkit::Running;
use jiffy_wire::timeline::{Span, Timeline, Track, names};

const IN_ORDER: &[&str] = &[
    names::CLI_START,
    names::REQUEST_RECEIVED,
    names::IMAGE_READY,
    names::VMM_SPAWNED,
    names::KVM_VM_CREATED,
    names::MEMORY,
    names::VCPUS,
    names::DEVICES,
    names::KERNEL_LOADED,
    names::FIRST_KVM_RUN,
    names::KERNEL_ENTRY,
    names::PID1,
    names::AGENT_READY,
    names::ANSWER_DELIVERED,
];

#[test]
fn a_timeline_has_every_step_and_the_main_ones_in_order() {
    let jiffy = jiffy();
    jiffy.ok(&[
        "run",
        "--cold",
        "--rm",
        "--timeline=json:/tmp/timeline.json",
        "--",
        "true",
    ]);
    let bytes = jiffy
        .lab
        .read("/tmp/timeline.json")
        .expect("it was written");
    jiffy.sh("rm /tmp/timeline.json");
    let timeline: Timeline = serde_json::from_slice(&bytes).expect("a timeline");
    let mut missing: Vec<&str> = IN_ORDER
        .iter()
        .chain(&[
            names::COMMAND_STARTED,
            names::COMMAND,
            names::COMMAND_DONE,
            names::KERNEL_BOOT,
        ])
        .copied()
        .filter(|name| timeline.find(name).is_none())
        .collect();
    missing.sort_unstable();
    assert!(missing.is_empty(), "missing: {missing:?}");
    for pair in [
        [names::CLI_START, names::REQUEST_RECEIVED],
        [names::REQUEST_RECEIVED, names::VMM_SPAWNED],
        [names::VMM_SPAWNED, names::KVM_VM_CREATED],
        [names::KVM_VM_CREATED, names::FIRST_KVM_RUN],
        [names::KERNEL_LOADED, names::FIRST_KVM_RUN],
        [names::FIRST_KVM_RUN, names::PID1],
        [names::PID1, names::COMMAND_STARTED],
        [names::COMMAND_STARTED, names::COMMAND_DONE],
        [names::COMMAND_DONE, names::ANSWER_DELIVERED],
    ] {
        let [earlier, later] = pair.map(|name| timeline.find(name).expect("present").start_ns);
        assert!(earlier <= later, "{} begins after {}", pair[0], pair[1]);
    }
}

#[test]
fn a_timeline_is_shown_as_table_blame_and_critical_chain() {
    let jiffy = jiffy();
    let output = jiffy.run(&[
        "run",
        "--cold",
        "--name",
        "timed",
        "--timeline",
        "--",
        "echo",
        "hi",
    ]);
    assert_eq!(output.text(), "hi");
    assert!(
        output.error_text().contains(names::FIRST_KVM_RUN),
        "{}",
        output.error_text()
    );
    assert!(jiffy.ok(&["timeline", "timed"]).contains(names::PID1));
    assert!(!jiffy.ok(&["timeline", "blame", "timed"]).is_empty());
    assert!(
        !jiffy
            .ok(&["timeline", "critical-chain", "timed"])
            .is_empty()
    );
    let trace = jiffy.json(&["timeline", "--format", "perfetto", "timed"]);
    assert!(trace.is_object() || trace.is_array());
}

#[test]
fn a_deep_timeline_has_exits_counters_the_boot_and_programs_on_one_clock() {
    let jiffy = jiffy();
    jiffy.ok(&[
        "run",
        "--cold",
        "--name",
        "deep",
        "--timeline=deep:/tmp/deep.json",
        "--",
        "sh",
        "-c",
        "/bin/sleep 0.01; /bin/sh -c 'exit 3'; /bin/true",
    ]);
    let bytes = jiffy.lab.read("/tmp/deep.json").expect("it was written");
    jiffy.sh("rm /tmp/deep.json");
    let trace: serde_json::Value = serde_json::from_slice(&bytes).expect("trace events");
    let events = trace["traceEvents"].as_array().expect("events");
    let is_there = |name: &str| events.iter().any(|event| event["args"]["name"] == name);
    assert!(is_there("vcpu 0") && is_there("vsock") && is_there("boot"));
    assert!(
        events
            .iter()
            .any(|event| event["name"] == "vcpu 0: KVM exits")
    );

    let timeline = jiffy.json(&["timeline", "--format", "json", "deep"]);
    let timeline: Timeline = serde_json::from_value(timeline).expect("a timeline");
    let of = |thread: &'static str| {
        let spans = timeline.spans.iter();
        spans.filter(move |span| span.thread.as_deref() == Some(thread))
    };
    let first_run = timeline
        .find(names::FIRST_KVM_RUN)
        .expect("a boot")
        .start_ns;
    let kernel = timeline.find(names::KERNEL_BOOT).expect("a boot");
    let exits = of("vcpu 0").count() as u64;
    assert!(exits > 10, "{exits} exits");
    assert!(of("vcpu 0").all(|span| span.start_ns >= first_run));
    let in_all = timeline
        .counters
        .iter()
        .find(|counter| counter.name == "exits");
    let in_all: u64 = in_all
        .expect("KVM counts")
        .points
        .iter()
        .map(|it| it.1)
        .sum();
    assert!(
        in_all >= exits,
        "KVM counted {in_all} exits, of which {exits} left it"
    );
    // The guest's calls lie inside its boot on the host's clock.
    for name in ["setup_arch", "mm_core_init", "inet_init", "populate_rootfs"] {
        let call = of("boot").find(|call| call.name == name);
        let call = call.unwrap_or_else(|| panic!("no {name}"));
        assert!(
            first_run <= call.start_ns && call.end_ns <= kernel.end_ns && call.duration_ns() > 0,
            "{call:?} is outside of {kernel:?}"
        );
    }
    let unnamed = of("boot")
        .filter(|call| call.name.starts_with("0x"))
        .count();
    assert_eq!(unnamed, 0, "calls without a name");
    has_probes_threads_and_programs(&timeline);
}

/// Asserts that it has what a kernel of ours notes beside calls, in the order in which it must be.
fn has_probes_threads_and_programs(timeline: &Timeline) {
    let find = |thread: &str, name: &str| {
        let mut spans = timeline.spans.iter().filter(|span| {
            span.thread.as_deref() == Some(thread)
                && span.name.split_once(" (").map_or(&*span.name, |it| it.0) == name
        });
        let span = spans.next();
        span.unwrap_or_else(|| panic!("no {name} in {thread}: {:?}", timeline.spans))
    };
    let within = |inner: &Span, outer: &Span| {
        assert!(
            outer.start_ns <= inner.start_ns && inner.end_ns <= outer.end_ns,
            "{inner:?} is outside of {outer:?}"
        );
    };
    let cut = |span: &Span| span.track == Track::Kernel && span.name == names::ACTIVITY_CUT;
    assert!(!timeline.spans.iter().any(cut));
    let kernel = timeline.find(names::KERNEL_BOOT).expect("a boot");
    let probes: Vec<&Span> = timeline
        .spans
        .iter()
        .filter(|span| span.name.starts_with("probe: "))
        .collect();
    for driver in [
        "probe: virtio-mmio ",
        "probe: virtio_rng ",
        "probe: vmw_vsock_virtio ",
    ] {
        let probe = probes.iter().find(|probe| probe.name.starts_with(driver));
        let probe = probe.unwrap_or_else(|| panic!("no {driver}in {probes:?}"));
        within(probe, kernel);
        assert!(probe.duration_ns() > 0, "{probe:?}");
    }
    within(find("kernel threads", "kthreadd"), kernel);

    let command = timeline.find(names::COMMAND).expect("a command");
    let init = find("programs", "init");
    assert!(
        init.name == "init (1)" && init.start_ns >= kernel.start_ns,
        "{init:?}"
    );
    let shell = find("programs", "sh");
    within(shell, init);
    assert!(shell.end_ns > command.start_ns && command.end_ns > shell.start_ns);
    let sleep = find("programs", "sleep");
    within(sleep, shell);
    assert!(sleep.duration_ns() >= 10_000_000, "{sleep:?}");
    let failed = timeline
        .spans
        .iter()
        .find(|span| span.name.ends_with(", exit 3"));
    within(failed.expect("a program that failed"), shell);
}

/// Starts a recording of what runs on each CPU, and waits until it has begun.
fn record(jiffy: &Jiffy) -> Running {
    jiffy.sh("grep -q tracefs /proc/mounts || mount -t tracefs tracefs /sys/kernel/tracing");
    let arguments = ["sched", "trace", "--seconds", "60", "-o", "/tmp/sched.json"];
    let recording = jiffy.command(&arguments).start().expect("it starts");
    jiffy.eventually("a recording", || !instances(jiffy).is_empty());
    recording
}

/// Instances of tracing that Jiffy has made. The shell lists them, because `ls` fails if one is
/// removed while it reads the folder.
fn instances(jiffy: &Jiffy) -> String {
    jiffy.sh("cd /sys/kernel/tracing/instances; [ \"$(echo *)\" = '*' ] || echo *")
}

#[test]
fn a_recording_of_the_scheduler_has_the_vcpus_of_a_burst_on_tracks_of_cpus() {
    let jiffy = jiffy();
    jiffy.warm_up();
    let mut recording = record(&jiffy);
    let burst = ["burst0", "burst1", "burst2"];
    for vm in burst {
        jiffy.ok(&["run", "--rm", "--name", vm, "--", "true"]);
    }
    recording.signal(2).expect("it runs");
    let output = recording.wait().expect("it ends");
    assert_eq!(output.code(), 0, "{}", output.error_text());
    assert_eq!(instances(&jiffy), "");
    let bytes = jiffy.lab.read("/tmp/sched.json").expect("it was written");
    jiffy.sh("rm /tmp/sched.json");
    let trace: serde_json::Value = serde_json::from_slice(&bytes).expect("trace events");
    assert_eq!(trace["otherData"]["scheduler"], "kernel");
    let events = trace["traceEvents"].as_array().expect("events");
    let process = |name: &str| {
        let mut named = events
            .iter()
            .filter(|event| event["name"] == "process_name");
        let found = named.find(|event| event["args"]["name"] == name);
        found.unwrap_or_else(|| panic!("no {name}"))["pid"].clone()
    };
    let cpus = process("CPUs");
    for vm in burst {
        let name = format!("{vm}: vcpu 0");
        let ran = |event: &&serde_json::Value| event["pid"] == cpus && event["name"] == name;
        let run = events.iter().find(ran);
        let run = run.unwrap_or_else(|| panic!("{name} is on no CPU"));
        assert_eq!(run["args"]["process"], "jiffy-vmm");
        // The same run, on the VM's own track.
        let own = process(&format!("VM {vm}"));
        let same = |event: &serde_json::Value| event["pid"] == own && event["ts"] == run["ts"];
        assert!(events.iter().any(same));
    }
    // What runs on a CPU begins after what ran there before.
    let mut ends = 0.0;
    for event in events
        .iter()
        .filter(|event| event["pid"] == cpus && event["ph"] == "X")
    {
        let [at, length] = ["ts", "dur"].map(|key| event[key].as_f64().expect("a number"));
        assert!(at + 0.01 > ends, "{event} begins before {ends}");
        ends = at + length;
    }
}

#[test]
fn tracing_ends_with_the_client_that_records_or_with_the_next_daemon() {
    let jiffy = jiffy();
    let mut recording = record(&jiffy);
    recording.signal(9).expect("it runs");
    recording.wait().expect("it ends");
    jiffy.eventually("nothing is left", || instances(&jiffy).is_empty());
    let recording = record(&jiffy);
    jiffy.kill_all("jiffyd");
    let output = recording.wait().expect("it ends");
    assert_eq!(output.code(), 125, "{}", output.error_text());
    jiffy.ok(&["ps"]);
    jiffy.eventually("nothing is left", || instances(&jiffy).is_empty());
}
