//! A recording of the scheduler as trace events.

use super::perfetto::{microseconds, named};
use crate::render::harmless_json;
use jiffy_wire::api::{SchedRun, SchedThread, SchedTrace};
use jiffy_wire::sched::Class;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The process whose threads are the CPUs.
const CPUS: usize = 1;

/// The name of a monitor's main thread (`comm`).
const MONITOR: &str = "jiffy-vmm";

/// A track for each CPU, with what ran on it, and one for each thread of a VM, with where it ran and
/// how long it waited for a CPU. The category of a run is its class.
pub fn sched_events(trace: &SchedTrace) -> String {
    let mut events = Events(String::from("{\"traceEvents\":["));
    events.push(&named("process_name", CPUS, 0, json!({ "name": "CPUs" })));
    for cpu in &trace.cpus {
        let name = json!({ "name": format!("CPU {cpu}") });
        events.push(&named("thread_name", CPUS, *cpu as usize + 1, name));
    }
    let tracks = tracks(&trace.threads, &mut events);
    for run in &trace.runs {
        // A position is the node's; one that is not there is none of a thread.
        let Some(thread) = trace.threads.get(run.thread as usize) else {
            continue;
        };
        let class = run.class.map_or("none", Class::name);
        let track = (CPUS, run.cpu as usize + 1);
        let mut on_cpu = slice(
            &label(thread),
            class,
            track,
            run.start_ns,
            run.end_ns,
            trace,
        );
        on_cpu["args"] = arguments(thread, run);
        events.push(&on_cpu);
        let Some(track) = tracks.get(&run.thread) else {
            continue;
        };
        let woken_ns = run.start_ns.saturating_sub(run.waited_ns);
        if woken_ns < run.start_ns {
            let waits = slice("waits", "waits", *track, woken_ns, run.start_ns, trace);
            events.push(&waits);
        }
        let name = format!("CPU {}", run.cpu);
        let runs = slice(&name, class, *track, run.start_ns, run.end_ns, trace);
        events.push(&runs);
    }
    let other = json!({
        "clock": trace.clock,
        "origin_ns": trace.begin_ns,
        "scheduler": trace.policy.as_deref().unwrap_or("kernel"),
        "lost_events": trace.lost,
    });
    let mut text = events.0;
    text.push_str(&format!(
        "\n],\"displayTimeUnit\":\"ms\",\"otherData\":{other}}}\n"
    ));
    harmless_json(text)
}

/// Events as text: there may be a million.
struct Events(String);

impl Events {
    fn push(&mut self, event: &Value) {
        let first = self.0.ends_with('[');
        self.0.push_str(if first { "\n" } else { ",\n" });
        self.0.push_str(&event.to_string());
    }
}

/// Names a track for each thread of a VM; the tracks, by the threads' positions.
fn tracks(threads: &[SchedThread], events: &mut Events) -> BTreeMap<u32, (usize, usize)> {
    let mut monitors: BTreeMap<(&str, u32), usize> = BTreeMap::new();
    for thread in threads {
        if let Some(vm) = &thread.vm {
            let process = CPUS + 1 + monitors.len();
            if *monitors.entry((vm, thread.pid)).or_insert(process) == process {
                let name = json!({ "name": format!("VM {vm}") });
                events.push(&named("process_name", process, 0, name));
            }
        }
    }
    let mut tracks = BTreeMap::new();
    for (position, thread) in (0..).zip(threads) {
        let vm = thread.vm.as_deref();
        if let Some(process) = vm.and_then(|vm| monitors.get(&(vm, thread.pid))) {
            let track = (*process, thread.tid as usize);
            let name = json!({ "name": role(thread) });
            events.push(&named("thread_name", track.0, track.1, name));
            tracks.insert(position, track);
        }
    }
    tracks
}

/// What a thread of a VM's monitor does.
fn role(thread: &SchedThread) -> &str {
    match thread.name.as_str() {
        MONITOR => "monitor",
        name => name,
    }
}

/// The name of a run: the VM and the thread, a program of Jiffy's, or the thread's own name.
fn label(thread: &SchedThread) -> String {
    match &thread.vm {
        Some(vm) => format!("{vm}: {}", role(thread)),
        None if thread.process.starts_with("jiffy") => thread.process.clone(),
        None => thread.name.clone(),
    }
}

fn arguments(thread: &SchedThread, run: &SchedRun) -> Value {
    json!({
        "thread": thread.name,
        "tid": thread.tid,
        "process": thread.process,
        "pid": thread.pid,
        "waited_us": microseconds(run.waited_ns, 0),
    })
}

fn slice(
    name: &str,
    category: &str,
    (process, thread): (usize, usize),
    start_ns: u64,
    end_ns: u64,
    trace: &SchedTrace,
) -> Value {
    json!({
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": thread,
        "ts": microseconds(start_ns, trace.begin_ns),
        "dur": microseconds(end_ns, start_ns),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(tid: u32, pid: u32, name: &str, process: &str, vm: Option<&str>) -> SchedThread {
        SchedThread {
            tid,
            pid,
            name: name.into(),
            process: process.into(),
            vm: vm.map(str::to_owned),
        }
    }

    fn run(cpu: u32, thread: u32, start_us: u64, end_us: u64, waited_us: u64) -> SchedRun {
        SchedRun {
            cpu,
            thread,
            start_ns: 1_000_000 + start_us * 1000,
            end_ns: 1_000_000 + end_us * 1000,
            waited_ns: waited_us * 1000,
            class: (thread < 4).then_some(Class::Launch),
        }
    }

    fn read(trace: &SchedTrace) -> (Vec<Value>, Value) {
        let mut all: Value = serde_json::from_str(&sched_events(trace)).unwrap();
        let events = all["traceEvents"].as_array().unwrap().clone();
        (events, all["otherData"].take())
    }

    #[test]
    fn threads_of_vms_are_named_on_their_cpus_and_have_tracks_of_their_own() {
        let trace = SchedTrace {
            begin_ns: 1_000_000,
            cpus: vec![0, 3],
            lost: 7,
            policy: Some("jiffy".into()),
            threads: vec![
                thread(11, 10, "vcpu 0", MONITOR, Some("box")),
                thread(10, 10, MONITOR, MONITOR, Some("box")),
                thread(21, 20, "vcpu 0", MONITOR, Some("web")),
                thread(31, 30, "tokio-runtime-w", "jiffyd", None),
                thread(40, 40, "sh", "sh", None),
            ],
            runs: vec![
                run(0, 0, 5, 9, 3),
                run(3, 1, 1, 4, 0),
                run(3, 2, 4, 6, 0),
                run(0, 3, 10, 12, 0),
                run(0, 4, 12, 13, 0),
                run(0, 99, 13, 14, 0),
            ],
            ..SchedTrace::default()
        };
        let (events, other) = read(&trace);
        let slices = |process: u64, thread: u64| -> Vec<(String, String, f64, f64)> {
            let text = |value: &Value| value.as_str().unwrap().to_owned();
            let on_track = |event: &&Value| {
                event["ph"] == "X" && event["pid"] == process && event["tid"] == thread
            };
            let slice = |event: &Value| {
                let (at, length) = (&event["ts"], &event["dur"]);
                let (name, category) = (text(&event["name"]), text(&event["cat"]));
                (
                    name,
                    category,
                    at.as_f64().unwrap(),
                    length.as_f64().unwrap(),
                )
            };
            events.iter().filter(on_track).map(slice).collect()
        };
        let expected = |all: &[(&str, &str, f64, f64)]| -> Vec<_> {
            let owned = all.iter().map(|(name, class, at, length)| {
                (name.to_string(), class.to_string(), *at, *length)
            });
            owned.collect()
        };
        let launch = "launch";
        let first = [
            ("box: vcpu 0", launch, 5.0, 4.0),
            ("jiffyd", launch, 10.0, 2.0),
            ("sh", "none", 12.0, 1.0),
        ];
        assert_eq!(slices(1, 1), expected(&first));
        let fourth = [
            ("box: monitor", launch, 1.0, 3.0),
            ("web: vcpu 0", launch, 4.0, 2.0),
        ];
        assert_eq!(slices(1, 4), expected(&fourth));
        let own = [("waits", "waits", 2.0, 3.0), ("CPU 0", launch, 5.0, 4.0)];
        assert_eq!(slices(2, 11), expected(&own));
        assert_eq!(slices(3, 21), expected(&[("CPU 3", launch, 4.0, 2.0)]));
        let names = events.iter().filter(|event| event["ph"] == "M");
        let names: Vec<&Value> = names.map(|event| &event["args"]["name"]).collect();
        let wanted = [
            "CPUs", "CPU 0", "CPU 3", "VM box", "VM web", "vcpu 0", "monitor", "vcpu 0",
        ];
        assert_eq!(names, wanted);
        assert_eq!(other["scheduler"], "jiffy");
        assert_eq!(other["lost_events"], 7);
    }

    #[test]
    fn hostile_names_are_escaped() {
        let hostile = "a\"},\n{\"\\\u{1b}]0;\u{202e}\u{9b}";
        let trace = SchedTrace {
            cpus: vec![0],
            threads: vec![thread(4, 4, hostile, hostile, None)],
            runs: vec![run(0, 0, 0, 1, 0)],
            ..SchedTrace::default()
        };
        let text = sched_events(&trace);
        assert!(!text.contains(['\u{1b}', '\u{9b}']) && text.lines().count() == 5);
        let (events, _) = read(&trace);
        assert_eq!(events.len(), 3);
        assert_eq!(events[2]["name"], hostile);
    }
}
