//! What the VMM's threads and the guest's kernel did, in all.

use crate::render::Table;
use jiffy_wire::timeline::{EXIT, Span, Timeline, Track};
use std::collections::BTreeMap;

/// Calls of the kernel that are listed.
const LONGEST: usize = 10;

/// Work of a thread, or exits of a vCPU for one reason.
#[derive(Default)]
struct Sum {
    count: u64,
    total_ns: u64,
}

/// Exits to the VMM by thread and reason, the work of the other threads, KVM's counters, and the
/// longest calls of the kernel; empty if no activity was recorded.
pub fn activity(timeline: &Timeline) -> String {
    threads(timeline) + &counters(timeline) + &longest(timeline)
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

fn longest(timeline: &Timeline) -> String {
    let mut calls: Vec<_> = of_threads(timeline, Track::Kernel).collect();
    if calls.is_empty() {
        return String::new();
    }
    calls.sort_by_key(|(_, call)| (std::cmp::Reverse(call.duration_ns()), call.start_ns));
    let mut table = Table::new(["CALL", "MS"]);
    for (_, call) in calls.iter().take(LONGEST) {
        table.row([&*call.name, &milliseconds(call.duration_ns())]);
    }
    let count = calls.len();
    format!(
        "\nthe longest of {count} calls of the guest's kernel:\n{}",
        table.text()
    )
}

fn milliseconds(ns: u64) -> String {
    format!("{:.3}", ns as f64 / 1e6)
}
