//! Timelines as tables, JSON, trace events and chains.

mod activity;
mod blame;
mod chain;
pub mod clock;
mod json;
mod perfetto;
mod sched;
mod table;
mod tree;

pub use activity::activity;
pub use blame::blame;
pub use chain::critical_chain;
pub use json::json;
pub use perfetto::perfetto;
pub use sched::sched_events;
pub use table::{Look, table};

#[cfg(test)]
mod tests;

use jiffy_wire::timeline::{Timeline, Track};

/// Nanoseconds as milliseconds with one decimal; short ones with more.
fn milliseconds(ns: u64) -> String {
    format!("{:.1}", ns as f64 / 1e6)
}

/// A duration in the format of systemd-analyze: `871us`, `12.3ms`, `1.234s`, `2min 3.4s`.
fn span_length(ns: u64) -> String {
    let seconds = ns as f64 / 1e9;
    match ns {
        0..1_000_000 => format!("{}us", ns / 1000),
        1_000_000..1_000_000_000 => format!("{:.1}ms", ns as f64 / 1e6),
        1_000_000_000..60_000_000_000 => format!("{seconds:.3}s"),
        _ => format!("{}min {:.1}s", ns / 60_000_000_000, seconds % 60.0),
    }
}

/// Start of the first step and end of the last one; `None` without steps.
fn extent(timeline: &Timeline) -> Option<(u64, u64)> {
    let start = timeline.steps().map(|span| span.start_ns).min()?;
    let end = timeline.steps().map(|span| span.end_ns).max()?;
    Some((start, end))
}

/// The name of a track's process.
fn track_name(track: Track) -> &'static str {
    match track {
        Track::Cli => "jiffy",
        Track::Node => "jiffyd",
        Track::Vmm => "jiffy-vmm",
        Track::Kernel => "guest kernel",
        Track::Init => "jiffy-init",
        Track::Guest => "guest",
    }
}
