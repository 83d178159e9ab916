//! What the VMM's threads and the guest's kernel did, in all.

use crate::render::Table;
use jiffy_wire::timeline::{BOOT, EXIT, PROGRAMS, Span, Timeline, Track};
use std::collections::BTreeMap;

/// Calls of the kernel, and programs, that are listed.
const LONGEST: usize = 10;

/// Work of a thread, or exits of a vCPU for one reason.
#[derive(Default)]
struct Sum {
    count: u64,
    total_ns: u64,
}

/// Exits to the VMM by thread and reason, the work of the other threads, KVM's counters, and the
/// longest calls and programs of the guest; empty if no activity was recorded.
pub fn activity(timeline: &Timeline) -> String {
    let calls = longest(timeline, BOOT, "CALL", "calls of the guest's kernel");
    let programs = longest(timeline, PROGRAMS, "PROGRAM", "programs of the guest");
    threads(timeline) + &counters(timeline) + &calls + &programs
}

fn of_threads(timeline: &Timeline, track: Track) -> impl Iterator<Item = (&str, &Span)> {
    let spans = timeline.spans.iter();
    let spans = spans.filter(move |span| span.track == track);
    spans.filter_map(|span| Some((span.thread.as_deref()?, span)))
}

fn threads(timeline: &Timeline) -> String {
    let mut sums: BTreeMap<(&str, &str), Sum> = BTreeMap::new();
    for (thread, span) in of_threads(timeline, Track::Vmm) {
        let sum = sums.entry((thread, &span.name)).or_default();
        sum.count += 1;
        sum.total_ns += span.duration_ns();
    }
    if sums.is_empty() {
        return String::new();
    }
    let mut table = Table::new(["THREAD", "DOES", "TIMES", "MS"]);
    for ((thread, name), sum) in &sums {
        let name = name.strip_prefix(EXIT).unwrap_or(name);
        let count = sum.count.to_string();
        table.row([*thread, name, &count, &milliseconds(sum.total_ns)]);
    }
    format!(
        "\nthe monitor's threads, and the exits that they handle:\n{}",
        table.text()
    )
}

fn counters(timeline: &Timeline) -> String {
    if timeline.counters.is_empty() {
        return String::new();
    }
    let mut table = Table::new(["THREAD", "COUNTER", "IN ALL"]);
    for counter in &timeline.counters {
        let total: u64 = counter.points.iter().map(|(_, count)| count).sum();
        table.row([&counter.thread, &counter.name, &total.to_string()]);
    }
    format!("\nin KVM:\n{}", table.text())
}

/// The longest spans of a thread of the guest's kernel; its moments are not counted.
fn longest(timeline: &Timeline, thread: &str, column: &str, what: &str) -> String {
    let spans = of_threads(timeline, Track::Kernel);
    let spans = spans.filter(|(of, span)| *of == thread && span.duration_ns() > 0);
    let mut spans: Vec<&Span> = spans.map(|(_, span)| span).collect();
    if spans.is_empty() {
        return String::new();
    }
    spans.sort_by_key(|span| (std::cmp::Reverse(span.duration_ns()), span.start_ns));
    let mut table = Table::new([column, "MS"]);
    for span in spans.iter().take(LONGEST) {
        table.row([&*span.name, &milliseconds(span.duration_ns())]);
    }
    let count = spans.len();
    format!("\nthe longest of {count} {what}:\n{}", table.text())
}

fn milliseconds(ns: u64) -> String {
    format!("{:.3}", ns as f64 / 1e6)
}
