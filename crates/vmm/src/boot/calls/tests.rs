use super::record::HIGHEST;
use super::*;
use proptest::prelude::*;

fn memory() -> GuestMemory {
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
    assert_eq!(offer(&memory), "boot.calls=0x30000");
    memory
}

/// Notes an event as the kernel does.
fn note(memory: &GuestMemory, tsc: u64, word: u64, names: &[&str]) {
    let header = |at: u64| -> u32 { memory.read_obj(GuestAddress(BOOT_CALLS + at)).unwrap() };
    let (capacity, at) = (header(0), header(4));
    let end = at + 1 + names.len() as u32;
    memory.write_obj(end, GuestAddress(BOOT_CALLS + 4)).unwrap();
    if end > capacity {
        return;
    }
    let mut bytes = [tsc.to_le_bytes(), word.to_le_bytes()].concat();
    for name in names {
        let mut field = [0; RECORD];
        let length = name.len().min(RECORD);
        field[..length].copy_from_slice(&name.as_bytes()[..length]);
        bytes.extend(field);
    }
    let at = BOOT_CALLS + HEADER + u64::from(at) * RECORD as u64;
    memory.write_slice(&bytes, GuestAddress(at)).unwrap();
}

/// The word of an event that is no call.
fn event(kind: u64, pid: u32, number: u32) -> u64 {
    kind << 56 | u64::from(number) << 24 | u64::from(pid)
}

const PROBE: u64 = 1;
const PROBE_END: u64 = 2;
const PROCESS: u64 = 3;
const THREAD: u64 = 4;
const KERNEL_THREAD: u64 = 5;
const EXEC: u64 = 6;
const EXIT: u64 = 7;

fn until(what: What, start: u64, end: u64) -> Noted {
    noted(what, start, end)
}

fn program(name: &str, start: u64, end: impl Into<Option<u64>>) -> Noted {
    Noted {
        what: What::Program(name.into()),
        start,
        end: end.into(),
    }
}

#[test]
fn calls_are_read_inside_their_callers() {
    let memory = memory();
    assert_eq!(read(&memory), Notes::default());
    let (outer, inner, lost) = (HIGHEST | 1, HIGHEST | 2, HIGHEST | 3);
    for (tsc, function) in [(10, outer), (20, inner), (30, inner & !HIGHEST)] {
        note(&memory, tsc, function, &[]);
    }
    // One that does not end, and an end without a beginning.
    note(&memory, 40, lost, &[]);
    note(&memory, 45, 9, &[]);
    note(&memory, 50, outer & !HIGHEST, &[]);
    let calls = read(&memory);
    assert_eq!(
        calls.noted,
        [
            until(What::Call(inner), 20, 30),
            until(What::Call(outer), 10, 50)
        ]
    );
    assert_eq!(calls.dropped, 0);
}

#[test]
fn probes_nest_in_their_thread_and_name_driver_and_device() {
    let memory = memory();
    let call = HIGHEST | 0x7fff_ffff_8100_0000;
    note(&memory, 10, call, &[]);
    note(
        &memory,
        20,
        event(PROBE, 1, 0),
        &["virtio-mmio", "virtio-mmio.0"],
    );
    // Another thread's begins and ends between.
    note(
        &memory,
        30,
        event(PROBE, 7, 0),
        &["serial8250", "a_name_of_sixteen"],
    );
    note(&memory, 40, event(PROBE, 1, 0), &["virtio_rng", "virtio0"]);
    note(&memory, 50, event(PROBE_END, 1, 0), &[]);
    note(&memory, 60, event(PROBE_END, 7, 19), &[]);
    note(&memory, 70, event(PROBE_END, 1, 0), &[]);
    // An end without a beginning, and one that has not ended.
    note(&memory, 75, event(PROBE_END, 1, 0), &[]);
    note(&memory, 76, event(PROBE, 1, 0), &["virtio_blk", "virtio1"]);
    note(&memory, 80, call & !HIGHEST, &[]);
    let probe = |name: &str, start, end| until(What::Probe(format!("probe: {name}")), start, end);
    assert_eq!(
        read(&memory).noted,
        [
            until(What::Call(call), 10, 80),
            probe("virtio_rng virtio0", 40, 50),
            probe("serial8250 a_name_of_sixtee, error 19", 30, 60),
            probe("virtio-mmio virtio-mmio.0", 20, 70),
        ]
    );
}

#[test]
fn programs_last_from_exec_to_exec_or_exit() {
    let memory = memory();
    for (tsc, word, name) in [
        (1, event(PROCESS, 1, 0), None),
        (2, event(EXEC, 1, 0), Some("init")),
        (3, event(PROCESS, 40, 1), None),
        (4, event(PROCESS, 41, 1), None),
        (5, event(EXEC, 40, 0), Some("sh")),
        (6, event(THREAD, 42, 40), None),
        (7, event(EXIT, 41, 0), None),
        (8, event(EXEC, 40, 0), Some("false")),
        (9, event(EXIT, 40, 1 << 8), None),
        // Its id is used again.
        (10, event(PROCESS, 40, 1), None),
        (11, event(EXIT, 40, 9), None),
        // What was started before, and what has ended twice.
        (12, event(EXEC, 50, 0), Some("late")),
        (13, event(EXIT, 41, 0), None),
    ] {
        note(&memory, tsc, word, name.as_slice());
    }
    assert_eq!(
        read(&memory).noted,
        [
            program("kernel (1)", 1, 2),
            program("init (40)", 3, 5),
            program("thread 42 of 40", 6, 6),
            program("init (41)", 4, 7),
            program("sh (40)", 5, 8),
            program("false (40), exit 1", 8, 9),
            program("init (40), signal 9", 10, 11),
            program("init (1)", 2, None),
            program("late (50)", 12, None),
        ]
    );
}

#[test]
fn threads_of_the_kernel_are_moments_until_they_end() {
    let memory = memory();
    note(&memory, 1, event(KERNEL_THREAD, 2, 0), &["kthreadd"]);
    note(&memory, 2, event(KERNEL_THREAD, 3, 2), &["kworker/0:0"]);
    note(&memory, 9, event(EXIT, 3, 0), &[]);
    let thread = |name: &str, start, end| until(What::KernelThread(name.into()), start, end);
    assert_eq!(
        read(&memory).noted,
        [
            thread("kworker/0:0 (3)", 2, 9),
            thread("kthreadd (2)", 1, 1)
        ]
    );
}

#[test]
fn names_are_printable() {
    let memory = memory();
    note(&memory, 1, event(EXEC, 1, 0), &["\x1b[2J\u{e9}\n x"]);
    note(&memory, 2, event(EXEC, 2, 0), &[""]);
    assert_eq!(
        read(&memory).noted,
        [program("?[2J??? x (1)", 1, None), program("? (2)", 2, None)]
    );
}

#[test]
fn no_record_is_written_or_read_beyond_the_capacity() {
    let memory = memory();
    for number in 0..2 * CAPACITY {
        let ended = if number % 2 == 0 { HIGHEST } else { 0 };
        note(&memory, number.into(), ended | 7, &[]);
    }
    let notes = read(&memory);
    assert_eq!(notes.noted.len(), CAPACITY as usize / 2);
    assert_eq!(notes.dropped, CAPACITY);
    let after: u64 = memory
        .read_obj(GuestAddress(BOOT_CALLS + BOOT_CALLS_SIZE))
        .unwrap();
    assert_eq!(after, 0);
}

#[test]
fn an_event_that_does_not_fit_is_dropped_as_a_whole() {
    let memory = memory();
    note(&memory, 1, event(EXEC, 1, 0), &["init"]);
    for pid in 4..CAPACITY {
        note(&memory, 5, event(THREAD, pid, 1), &[]);
    }
    note(&memory, 7, event(PROBE, 1, 0), &["driver", "device"]);
    note(&memory, 8, event(EXIT, 1, 0), &[]);
    let notes = read(&memory);
    assert_eq!(notes.noted.len(), CAPACITY as usize - 3);
    assert_eq!(notes.dropped, 4);
    // It ended, but that is not known.
    assert_eq!(notes.noted.last(), Some(&program("init (1)", 1, 5)));
}

#[test]
fn a_counter_is_converted_before_and_after_the_known_moment() {
    let clock = TscClock {
        tsc: 5_000_000,
        at_ns: 1000,
        khz: 2_000_000,
    };
    assert_eq!(clock.time_ns(5_000_000), 1000);
    assert_eq!(clock.time_ns(5_002_000), 2000);
    assert_eq!(clock.time_ns(4_999_000), 500);
    assert_eq!(clock.time_ns(0), 0);
    let stopped = TscClock { khz: 0, ..clock };
    assert_eq!(stopped.time_ns(u64::MAX), u64::MAX);
}

/// Words of calls and events that often belong together, and any others.
fn words() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..5u64,
        HIGHEST..HIGHEST + 5,
        (1..9u64, 0..3u32, 0..3u32).prop_map(|(kind, pid, number)| event(kind, pid, number)),
        any::<u64>(),
    ]
}

proptest! {
    #[test]
    fn any_memory_gives_bounded_spans_that_do_not_end_before_they_start(
        count: u32,
        records in prop::collection::vec((0..50u64, words()), 0..60),
    ) {
        let memory = memory();
        for (tsc, word) in &records {
            note(&memory, *tsc, *word, &[]);
        }
        for limit in [records.len() as u32, count] {
            memory.write_obj(limit, GuestAddress(BOOT_CALLS + 4)).unwrap();
            let notes = read(&memory);
            prop_assert!(notes.noted.len() <= records.len());
            for one in notes.noted {
                prop_assert!(one.end.is_none_or(|end| one.start <= end));
                match one.what {
                    What::Call(function) => prop_assert!(function >= HIGHEST),
                    What::Probe(name) | What::KernelThread(name) | What::Program(name) => {
                        let printable = |byte: u8| (b' '..=b'~').contains(&byte);
                        prop_assert!(name.len() < 80 && name.bytes().all(printable));
                    }
                }
            }
        }
    }
}
