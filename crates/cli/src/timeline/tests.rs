use super::*;
use jiffy_wire::timeline::{Counter, Span, Track, names};

const MS: u64 = 1_000_000;

/// The timeline of a cold run, a day after boot.
fn cold_run() -> Timeline {
    let day = 86_400_000 * MS;
    let at = |ms: f64| day + (ms * MS as f64) as u64;
    let span = |track, name: &str, from: f64, to: f64| Span::new(track, name, at(from), at(to));
    let moment = |track, name: &str, when: f64| Span::moment(track, name, at(when));
    let mut timeline = Timeline::new("11111111-2222-3333-4444-555555555555");
    timeline.spans = vec![
        moment(Track::Cli, names::ANSWER_DELIVERED, 123.4),
        span(Track::Cli, names::CLI_START, 0.0, 2.1),
        moment(Track::Node, names::REQUEST_RECEIVED, 2.4),
        span(Track::Node, names::IMAGE_READY, 2.5, 3.0).with_detail("base"),
        span(Track::Node, names::VMM_SPAWNED, 3.0, 5.2),
        span(Track::Vmm, names::KVM_VM_CREATED, 5.3, 7.9),
        span(Track::Vmm, names::MEMORY, 7.9, 8.4).with_detail("128 MiB"),
        span(Track::Vmm, names::VCPUS, 8.4, 9.0),
        span(Track::Vmm, names::DEVICES, 9.0, 9.1),
        span(Track::Vmm, names::KERNEL_LOADED, 9.1, 12.0),
        moment(Track::Vmm, names::FIRST_KVM_RUN, 12.1),
        moment(Track::Kernel, names::KERNEL_ENTRY, 12.2),
        span(Track::Kernel, names::KERNEL_BOOT, 12.2, 90.0),
        span(Track::Kernel, "memory set up", 20.0, 41.5),
        span(Track::Kernel, "memmap", 22.0, 40.0),
        span(Track::Kernel, "drivers", 50.0, 80.0),
        moment(Track::Init, names::PID1, 90.3),
        span(Track::Init, "mounts", 90.5, 96.0),
        span(Track::Init, "network", 91.0, 99.5).with_detail("lo\x1b"),
        span(Track::Init, "root", 96.0, 101.0),
        moment(Track::Init, names::AGENT_READY, 101.2),
        moment(Track::Init, names::COMMAND_STARTED, 103.0),
        span(Track::Guest, names::COMMAND, 103.0, 121.0),
        moment(Track::Init, names::COMMAND_DONE, 121.3),
    ];
    timeline
}

/// Compares with a file in this folder; `UPDATE_GOLDEN=1` writes it.
fn golden(name: &str, text: &str) {
    let path = format!("{}/src/timeline/golden/{name}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let wanted = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(text == wanted, "{path} differs; what came out:\n{text}");
}

fn plain(width: usize) -> Look {
    Look {
        width,
        colour: false,
    }
}

#[test]
fn a_table_has_bars() {
    golden("table-100.txt", &table(&cold_run(), plain(100)));
    golden("table-60.txt", &table(&cold_run(), plain(60)));
    let coloured = Look {
        width: 100,
        colour: true,
    };
    golden("table-colour.txt", &table(&cold_run(), coloured));
}

#[test]
fn a_table_fits_its_width() {
    for width in [80, 100, 137, 200] {
        for line in table(&cold_run(), plain(width)).lines() {
            assert!(line.chars().count() <= width, "{width}: {line}");
        }
    }
}

#[test]
fn blame_and_critical_chain_match_their_golden_files() {
    golden("blame.txt", &blame(&cold_run()));
    golden("critical-chain.txt", &critical_chain(&cold_run()));
}

#[test]
fn json_and_perfetto_match_their_golden_files() {
    golden("timeline.json", &format!("{:#}\n", json(&cold_run())));
    golden("perfetto.json", &format!("{:#}\n", perfetto(&cold_run())));
}

#[test]
fn the_table_follows_the_order_of_the_names() {
    let order = [
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
        names::KERNEL_BOOT,
        names::PID1,
        names::AGENT_READY,
        names::COMMAND_STARTED,
        names::COMMAND,
        names::COMMAND_DONE,
        names::ANSWER_DELIVERED,
    ];
    let timeline = cold_run();
    let shown: Vec<&str> = tree::rows(&timeline)
        .iter()
        .filter(|row| row.depth == 0)
        .map(|row| row.span.name.as_str())
        .filter(|name| order.contains(name))
        .collect();
    assert_eq!(shown, order);
}

#[test]
fn steps_that_overlap_get_tracks_of_their_own() {
    let trace = perfetto(&cold_run());
    let thread_of = |name: &str| {
        let events = trace["traceEvents"].as_array().unwrap();
        let event = events.iter().find(|event| event["name"] == name).unwrap();
        event["tid"].clone()
    };
    assert_eq!(thread_of("mounts"), 1);
    assert_eq!(thread_of("network"), 2, "it runs beside the mounts");
    assert_eq!(thread_of("memmap"), thread_of("kernel"), "it is part of it");
}

/// A cold run whose activity was recorded.
fn deep_run() -> Timeline {
    let mut timeline = cold_run();
    let began = timeline.find(names::FIRST_KVM_RUN).unwrap().start_ns;
    let of = |thread: &str, name: &str, after_us: u64, length_us: u64| {
        let start_ns = began + after_us * 1000;
        let track = match thread {
            "boot" | "kernel threads" | "programs" => Track::Kernel,
            _ => Track::Vmm,
        };
        let mut span = Span::new(track, name, start_ns, start_ns + length_us * 1000);
        span.thread = Some(thread.into());
        span
    };
    timeline.spans.extend([
        of("vcpu 0", "exit: MMIO write", 0, 40),
        of("vcpu 0", "exit: MMIO write", 100, 10),
        of("vcpu 0", "exit: port read", 2500, 10),
        of("block vda", "serves", 50, 400),
        of("block vda", "reads", 60, 300),
        of("boot", "driver_init", 1000, 500),
        of("boot", "devices_init", 1010, 400),
        of("boot", "probe: virtio_rng virtio0", 1020, 300),
        of("kernel threads", "kthreadd (2)", 900, 0),
        of("programs", "init (1)", 3000, 5000),
        of("programs", "false (40), exit 1", 4000, 500),
        of("programs", "thread 41 of 40", 4100, 0),
        // After the answer.
        of("vcpu 0", "exit: port write", 500_000, 10),
    ]);
    let counter = |name: &str, points: &[(u64, u64)]| Counter {
        track: Track::Vmm,
        thread: "vcpu 0".into(),
        name: name.into(),
        points: points
            .iter()
            .map(|(after_us, count)| (began + after_us * 1000, *count))
            .collect(),
    };
    timeline.counters = vec![
        counter("exits", &[(0, 9), (1000, 7), (2000, 7)]),
        counter("halt_exits", &[(1000, 1)]),
    ];
    timeline
}

#[test]
fn activity_is_summed_up_below_the_table_of_steps() {
    let deep = deep_run();
    assert_eq!(table(&deep, plain(100)), table(&cold_run(), plain(100)));
    assert_eq!(blame(&deep), blame(&cold_run()));
    assert_eq!(critical_chain(&deep), critical_chain(&cold_run()));
    golden("activity.txt", &activity(&deep));
    assert_eq!(activity(&cold_run()), "");
}

#[test]
fn activity_has_threads_and_counters_in_perfetto() {
    let trace = perfetto(&deep_run());
    let events = trace["traceEvents"].as_array().unwrap();
    let named = |name: &str| -> Vec<&serde_json::Value> {
        events
            .iter()
            .filter(|event| event["name"] == name)
            .collect()
    };
    let thread_of = |name: &str| {
        let tid = &named(name)[0]["tid"];
        let names = named("thread_name").into_iter();
        let pid = &named(name)[0]["pid"];
        let mut names = names.filter(|event| &event["tid"] == tid && &event["pid"] == pid);
        names.next().unwrap()["args"]["name"].clone()
    };
    assert_eq!(thread_of("exit: port read"), "vcpu 0");
    assert_eq!(thread_of("reads"), "block vda");
    assert_eq!(thread_of("false (40), exit 1"), "programs");
    assert_eq!(thread_of(names::VCPUS), "jiffy-vmm");
    let counts = |name: &str| -> Vec<(f64, u64)> {
        named(name)
            .into_iter()
            .map(|event| {
                assert_eq!(event["ph"], "C");
                let count = event["args"]["count"].as_u64().unwrap();
                (event["ts"].as_f64().unwrap(), count)
            })
            .collect()
    };
    // Two in the millisecond after 12, and none in the next.
    assert_eq!(
        counts("vcpu 0: MMIO write, per ms"),
        [(12_000.0, 2), (13_000.0, 0)]
    );
    assert_eq!(
        counts("vcpu 0: KVM exits"),
        [(12_100.0, 9), (13_100.0, 7)],
        "only changes"
    );
    assert_eq!(
        counts("vcpu 0: KVM halt_exits"),
        [(13_100.0, 1), (14_100.0, 0)]
    );
}

#[test]
fn spans_name_the_span_that_they_are_part_of() {
    let document = json(&deep_run());
    let spans = document["spans"].as_array().unwrap();
    let parent_of = |name: &str| {
        let span = spans.iter().find(|span| span["name"] == name).unwrap();
        let parent = span["parent"].as_u64();
        parent.map(|at| spans[at as usize]["name"].as_str().unwrap())
    };
    assert_eq!(parent_of("reads"), Some("serves"));
    assert_eq!(parent_of("memmap"), Some("memory set up"));
    assert_eq!(parent_of("devices_init"), Some("driver_init"));
    assert_eq!(parent_of("probe: virtio_rng virtio0"), Some("devices_init"));
    assert_eq!(parent_of("kthreadd (2)"), None);
    assert_eq!(parent_of("false (40), exit 1"), Some("init (1)"));
    assert_eq!(parent_of("driver_init"), None, "steps are no thread's");
    assert_eq!(parent_of("exit: port read"), None);
    assert_eq!(document["counters"].as_array().unwrap().len(), 2);
    assert_eq!(document["total_ns"], json(&cold_run())["total_ns"]);
}

#[test]
fn empty_and_malformed_timelines_are_rendered() {
    let empty = Timeline::new("x");
    assert_eq!(table(&empty, plain(100)), "The timeline is empty.\n");
    assert_eq!(critical_chain(&empty), "The timeline is empty.\n");
    assert_eq!(blame(&empty), "");
    assert_eq!(json(&empty)["total_ns"], 0);

    let mut odd = Timeline::new("x");
    odd.spans = vec![
        Span::moment(Track::Cli, "only", 5),
        Span::new(Track::Guest, "n".repeat(500), 0, u64::MAX),
        Span {
            track: Track::Vmm,
            thread: Some("\x1b]0;".into()),
            name: "backwards".into(),
            start_ns: u64::MAX,
            end_ns: 0,
            detail: Some("\x1b]0;title\x07".into()),
        },
    ];
    for width in [0, 1, 20, 100, 5000] {
        assert!(!table(&odd, plain(width)).contains('\x1b'));
    }
    critical_chain(&odd);
    assert!(!activity(&odd).contains('\x1b'));
    blame(&odd);
    perfetto(&odd);
    json(&odd);
}
