use super::*;

fn cold_run() -> Recorder {
    let mut recorder = Recorder::new("boot");
    recorder.received(100);
    recorder.image_ready(110, 120);
    recorder.spawned(120, 130);
    recorder.vmm_span(VMM_MAIN.into(), 150, 150, None);
    for (index, name) in [
        names::KVM_VM_CREATED,
        names::MEMORY,
        names::VCPUS,
        names::DEVICES,
        names::KERNEL_LOADED,
    ]
    .into_iter()
    .enumerate()
    {
        let start = 160 + 10 * index as u64;
        recorder.vmm_span(name.into(), start, start + 10, None);
    }
    recorder.vmm_span(names::FIRST_KVM_RUN.into(), 210, 210, None);
    recorder.mark(trace::MARK_KERNEL_ENTRY, 211);
    recorder.mark(trace::MARK_PID1, 1000);
    recorder.pid1_guest(700);
    recorder.guest_spans(vec![GuestSpan {
        kernel: false,
        name: "root".into(),
        start_ns: 710,
        end_ns: 720,
        error: Some("no\nroot".into()),
    }]);
    recorder.mark(trace::MARK_AGENT_READY, 1030);
    recorder.mark(trace::MARK_COMMAND_STARTED, 1040);
    recorder.mark(trace::MARK_COMMAND_DONE, 1050);
    recorder.mark(0x85, 1045);
    recorder
}

#[test]
fn what_a_hostile_vm_reports_takes_bounded_memory() {
    let mut recorder = Recorder::new("boot");
    let long = "x".repeat(1 << 16);
    let span = |name: &str| GuestSpan {
        kernel: false,
        name: name.to_owned(),
        start_ns: 1,
        end_ns: 2,
        error: Some(name.to_owned()),
    };
    recorder.guest_spans(vec![span(&long)]);
    recorder.vmm_span(long.clone(), 1, 2, Some(long.clone()));
    let kept = &recorder.guest[0];
    let (name, _, _, detail) = &recorder.vmm[0];
    let lengths = [&kept.name, kept.error.as_ref().unwrap(), name].map(String::len);
    assert_eq!(lengths, [200; 3]);
    assert_eq!(detail.as_ref().unwrap().len(), MAX_REMARK);
    // Events without an end.
    for number in 0..MAX_ACTIVITY as u64 {
        recorder.activity(Activity {
            thread: format!("thread {number}"),
            names: vec!["exits".into()],
            counts: vec![(0, number, 1); 2],
            dropped: 1,
            ..Activity::default()
        });
    }
    recorder.activity(Activity {
        dropped: 1,
        ..Activity::default()
    });
    assert_eq!(recorder.activity.len(), MAX_ACTIVITY);
    let points: usize = recorder.counters.values().map(Vec::len).sum();
    assert_eq!(points, MAX_ACTIVITY);
}

#[test]
fn a_cold_run_has_every_span_in_order() {
    let timeline = cold_run().build();
    let mut last = 0;
    for name in [
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
        names::KERNEL_BOOT,
        names::PID1,
        "root",
        names::AGENT_READY,
        names::COMMAND_STARTED,
        names::COMMAND,
        "mark 0x85",
        names::COMMAND_DONE,
    ] {
        let span = timeline.find(name).unwrap_or_else(|| panic!("no {name}"));
        assert!(span.start_ns >= last, "{name} is out of order");
        last = span.start_ns;
    }
    assert_eq!(timeline.find(names::VMM_SPAWNED).unwrap().end_ns, 150);
    let root = timeline.find("root").unwrap();
    assert_eq!((root.start_ns, root.end_ns), (1010, 1020));
    assert_eq!(root.detail.as_deref(), Some("noroot"));
}

#[test]
fn a_restored_run_has_gate_spans_instead_of_a_boot() {
    let mut recorder = Recorder::new("boot");
    recorder.received(100);
    recorder.image_ready(110, 120);
    recorder.spawned(120, 130);
    recorder.restored();
    recorder.vmm_span(VMM_MAIN.into(), 150, 150, None);
    recorder.vmm_span(names::STATE_LOADED.into(), 160, 170, None);
    recorder.vmm_span(names::MEMORY_ATTACHED.into(), 170, 180, None);
    recorder.vmm_span(names::VCPUS_RESUMED.into(), 190, 190, None);
    recorder.faults(PagerFaults {
        count: 3,
        total_ns: 30,
        first_ns: 191,
    });
    recorder.mark(trace::MARK_GATE_ENTERED, 200);
    recorder.pid1_guest(7000);
    recorder.guest_spans(vec![GuestSpan {
        kernel: false,
        name: "reseed".into(),
        start_ns: 7005,
        end_ns: 7010,
        error: None,
    }]);
    recorder.mark(trace::MARK_GATE_PASSED, 220);
    recorder.mark(trace::MARK_COMMAND_STARTED, 230);
    recorder.mark(trace::MARK_COMMAND_DONE, 240);
    let timeline = recorder.build();
    let mut last = 0;
    for name in [
        names::REQUEST_RECEIVED,
        names::IMAGE_READY,
        names::VMM_SPAWNED,
        names::STATE_LOADED,
        names::MEMORY_ATTACHED,
        names::VCPUS_RESUMED,
        names::FIRST_FAULT,
        names::FAULTS,
        names::GATE_ENTERED,
        "reseed",
        names::GATE_ACKNOWLEDGED,
        names::COMMAND_STARTED,
        names::COMMAND,
        names::COMMAND_DONE,
    ] {
        let span = timeline.find(name).unwrap_or_else(|| panic!("no {name}"));
        assert!(span.start_ns >= last, "{name} is out of order");
        last = span.start_ns;
    }
    let reseed = timeline.find("reseed").unwrap();
    assert_eq!((reseed.start_ns, reseed.end_ns), (205, 210));
    assert!(timeline.find(names::KERNEL_ENTRY).is_none());
}

#[test]
fn a_guest_without_marks_is_timed_by_its_messages() {
    let mut recorder = Recorder::new("boot");
    recorder.note_ready();
    recorder.note_started();
    recorder.note_ended();
    recorder.guest_spans(cold_run().guest);
    let timeline = recorder.build();
    assert!(timeline.find(names::COMMAND).is_some());
    assert!(
        timeline.find("root").is_none(),
        "the clocks can't be related"
    );
}

#[test]
fn a_guest_cannot_grow_its_timeline_without_bound() {
    let mut recorder = cold_run();
    for _ in 0..3 {
        recorder.guest_spans(vec![recorder.guest[0].clone(); MAX_GUEST]);
    }
    for _ in 0..3 * MAX_GUEST {
        recorder.mark(0x80, 1);
    }
    assert!(recorder.build().spans.len() <= 2 * MAX_GUEST + 64);
}
