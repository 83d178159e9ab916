//! Chrome trace events, which ui.perfetto.dev and chrome://tracing open.

use super::{extent, track_name};
use jiffy_wire::timeline::{Span, Timeline, Track};
use serde_json::{Value, json};

const TRACKS: [Track; 6] = [
    Track::Cli,
    Track::Node,
    Track::Vmm,
    Track::Kernel,
    Track::Init,
    Track::Guest,
];

/// One process per track and one thread per lane: slices of one thread must nest, and steps that
/// run in parallel do not.
pub fn perfetto(timeline: &Timeline) -> Value {
    let (origin, _) = extent(timeline).unwrap_or_default();
    let microseconds = |ns: u64| ns as f64 / 1000.0;
    let mut events = Vec::new();
    for (index, track) in TRACKS.iter().enumerate() {
        let process = index + 1;
        let lanes = lanes(timeline, *track);
        if lanes.is_empty() {
            continue;
        }
        let name = track_name(*track);
        events.push(named("process_name", process, 0, json!({ "name": name })));
        events.push(named(
            "process_sort_index",
            process,
            0,
            json!({ "sort_index": index }),
        ));
        for (lane, spans) in lanes.iter().enumerate() {
            let thread = lane + 1;
            let name = match lane {
                0 => name.to_owned(),
                _ => format!("{name} {thread}"),
            };
            events.push(named(
                "thread_name",
                process,
                thread,
                json!({ "name": name }),
            ));
            for span in spans {
                let mut event = json!({
                    "name": span.name,
                    "cat": track,
                    "pid": process,
                    "tid": thread,
                    "ts": microseconds(span.start_ns - origin),
                });
                match span.duration_ns() {
                    0 => {
                        event["ph"] = "i".into();
                        event["s"] = "t".into();
                    }
                    length => {
                        event["ph"] = "X".into();
                        event["dur"] = microseconds(length).into();
                    }
                }
                if let Some(detail) = &span.detail {
                    event["args"] = json!({ "detail": detail });
                }
                events.push(event);
            }
        }
    }
    json!({
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": { "clock": timeline.clock, "origin_ns": origin },
    })
}

fn named(what: &str, process: usize, thread: usize, arguments: Value) -> Value {
    json!({ "ph": "M", "name": what, "pid": process, "tid": thread, "args": arguments })
}

/// Distributes the spans of a track over as few lanes as possible such that the spans of each lane
/// nest.
fn lanes(timeline: &Timeline, track: Track) -> Vec<Vec<&Span>> {
    let mut spans: Vec<&Span> = timeline
        .spans
        .iter()
        .filter(|span| span.track == track)
        .collect();
    spans.sort_by_key(|span| (span.start_ns, std::cmp::Reverse(span.end_ns)));
    let mut lanes: Vec<(Vec<&Span>, Vec<u64>)> = Vec::new();
    for span in spans {
        let fits = |(_, open): &mut (Vec<&Span>, Vec<u64>)| {
            while open.last().is_some_and(|end| *end <= span.start_ns) {
                open.pop();
            }
            open.last().is_none_or(|end| span.end_ns <= *end)
        };
        let lane = match lanes.iter_mut().position(fits) {
            Some(lane) => lane,
            None => {
                lanes.push(Default::default());
                lanes.len() - 1
            }
        };
        lanes[lane].0.push(span);
        lanes[lane].1.push(span.end_ns);
    }
    lanes.into_iter().map(|(spans, _)| spans).collect()
}
