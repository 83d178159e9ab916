//! The timeline of a cold run has every step, in order.

use crate::support::jiffy;
use jiffy_wire::timeline::{Timeline, names};

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
fn a_deep_timeline_has_exits_counters_and_initcalls_on_one_clock() {
    let jiffy = jiffy();
    jiffy.ok(&[
        "run",
        "--cold",
        "--name",
        "deep",
        "--timeline=deep:/tmp/deep.json",
        "--",
        "true",
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
}
