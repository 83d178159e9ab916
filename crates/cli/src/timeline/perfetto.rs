//! Chrome trace events, which ui.perfetto.dev and chrome://tracing open.

use super::{extent, track_name};
use jiffy_wire::timeline::{EXIT, Span, Timeline, Track};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

const TRACKS: [Track; 6] = [
    Track::Cli,
    Track::Node,
    Track::Vmm,
    Track::Kernel,
    Track::Init,
    Track::Guest,
];

/// Width of the intervals in which exits are counted, nanoseconds.
const INTERVAL_NS: u64 = 1_000_000;

/// One process per track of the timeline. In it Perfetto has a thread track for each thread whose
/// activity was recorded, and as many for the steps as are needed: slices of one thread track must
/// nest, and steps that run in parallel do not.
pub fn perfetto(timeline: &Timeline) -> Value {
    let (origin, _) = extent(timeline).unwrap_or_default();
    let mut events = Vec::new();
    for (index, track) in TRACKS.iter().enumerate() {
        let process = index + 1;
        let name = track_name(*track);
        let threads = threads(timeline, *track);
        if threads.is_empty() {
            continue;
        }
        events.push(named("process_name", process, 0, json!({ "name": name })));
        let order = json!({ "sort_index": index });
        events.push(named("process_sort_index", process, 0, order));
        let mut thread = 0;
        for of in threads {
            for (number, spans) in thread_tracks(timeline, *track, of).into_iter().enumerate() {
                thread += 1;
                let name = of.unwrap_or(name);
                let name = match number {
                    0 => name.to_owned(),
                    _ => format!("{name} {}", number + 1),
                };
                events.push(named(
                    "thread_name",
                    process,
                    thread,
                    json!({ "name": name }),
                ));
                let slices = spans.into_iter();
                events.extend(slices.map(|span| slice(span, origin, process, thread)));
            }
            events.extend(exits(timeline, *track, of, origin, process));
        }
        events.extend(counters(timeline, *track, origin, process));
    }
    json!({
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": { "clock": timeline.clock, "origin_ns": origin },
    })
}

pub(super) fn microseconds(at_ns: u64, origin: u64) -> f64 {
    at_ns.saturating_sub(origin) as f64 / 1000.0
}

fn slice(span: &Span, origin: u64, process: usize, thread: usize) -> Value {
    let mut event = json!({
        "name": span.name,
        "cat": span.track,
        "pid": process,
        "tid": thread,
        "ts": microseconds(span.start_ns, origin),
    });
    match span.duration_ns() {
        0 => {
            event["ph"] = "i".into();
            event["s"] = "t".into();
        }
        length => {
            event["ph"] = "X".into();
            event["dur"] = microseconds(length, 0).into();
        }
    }
    if let Some(detail) = &span.detail {
        event["args"] = json!({ "detail": detail });
    }
    event
}

/// The threads of a track; `None` for the steps.
fn threads(timeline: &Timeline, track: Track) -> BTreeSet<Option<&str>> {
    let spans = timeline.spans.iter().filter(|span| span.track == track);
    spans.map(|span| span.thread.as_deref()).collect()
}

/// How many exits to the VMM a vCPU had, by reason, in each interval.
fn exits(
    timeline: &Timeline,
    track: Track,
    thread: Option<&str>,
    origin: u64,
    process: usize,
) -> Vec<Value> {
    let mut counts: BTreeMap<(&str, u64), u64> = BTreeMap::new();
    for span in &timeline.spans {
        if let Some(reason) = span.name.strip_prefix(EXIT)
            && (span.track, span.thread.as_deref()) == (track, thread)
            && thread.is_some()
        {
            let at_ns = span.start_ns.saturating_sub(origin);
            *counts.entry((reason, at_ns / INTERVAL_NS)).or_default() += 1;
        }
    }
    let thread = thread.unwrap_or_default();
    let mut events = Vec::new();
    for ((reason, interval), count) in &counts {
        let name = format!("{thread}: {reason}, per ms");
        let at_ns = interval * INTERVAL_NS;
        events.push(counted(&name, process, at_ns, *count));
        if !counts.contains_key(&(reason, interval + 1)) {
            events.push(counted(&name, process, at_ns + INTERVAL_NS, 0));
        }
    }
    events
}

/// How much counters have grown since the sample before.
fn counters(timeline: &Timeline, track: Track, origin: u64, process: usize) -> Vec<Value> {
    let of = |thread: &str| {
        let same = timeline.counters.iter();
        let same = same.filter(|one| one.track == track && one.thread == thread);
        same.flat_map(|one| one.points.iter().map(|(at_ns, _)| *at_ns))
            .collect::<BTreeSet<_>>()
    };
    let mut times: BTreeMap<&str, BTreeSet<u64>> = BTreeMap::new();
    let mut events = Vec::new();
    for counter in timeline.counters.iter().filter(|one| one.track == track) {
        let thread = counter.thread.as_str();
        let times = times.entry(thread).or_insert_with(|| of(thread));
        let points: BTreeMap<u64, u64> = counter.points.iter().copied().collect();
        let name = format!("{thread}: KVM {}", counter.name);
        let mut shown = 0;
        for at_ns in times.iter() {
            // A counter that has not grown has no point.
            let count = points.get(at_ns).copied().unwrap_or(0);
            if count != shown {
                events.push(counted(&name, process, at_ns.saturating_sub(origin), count));
            }
            shown = count;
        }
    }
    events
}

fn counted(name: &str, process: usize, after_ns: u64, count: u64) -> Value {
    json!({
        "ph": "C",
        "name": name,
        "pid": process,
        "ts": microseconds(after_ns, 0),
        "args": { "count": count },
    })
}

pub(super) fn named(what: &str, process: usize, thread: usize, arguments: Value) -> Value {
    json!({ "ph": "M", "name": what, "pid": process, "tid": thread, "args": arguments })
}

/// Distributes the spans of a track's thread over as few thread tracks as possible such that the spans
/// of each nest.
fn thread_tracks<'a>(timeline: &'a Timeline, track: Track, of: Option<&str>) -> Vec<Vec<&'a Span>> {
    let mut spans: Vec<&Span> = timeline
        .spans
        .iter()
        .filter(|span| span.track == track && span.thread.as_deref() == of)
        .collect();
    spans.sort_by_key(|span| (span.start_ns, std::cmp::Reverse(span.end_ns)));
    let mut tracks: Vec<(Vec<&Span>, Vec<u64>)> = Vec::new();
    for span in spans {
        let fits = |(_, open): &mut (Vec<&Span>, Vec<u64>)| {
            while open.last().is_some_and(|end| *end <= span.start_ns) {
                open.pop();
            }
            open.last().is_none_or(|end| span.end_ns <= *end)
        };
        let number = match tracks.iter_mut().position(fits) {
            Some(number) => number,
            None => {
                tracks.push(Default::default());
                tracks.len() - 1
            }
        };
        tracks[number].0.push(span);
        tracks[number].1.push(span.end_ns);
    }
    tracks.into_iter().map(|(spans, _)| spans).collect()
}
