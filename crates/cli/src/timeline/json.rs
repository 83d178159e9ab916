//! The spans as JSON, for programs.

use super::extent;
use jiffy_wire::timeline::{Span, Timeline};
use serde::Serialize;

#[derive(Serialize)]
struct Document<'a> {
    clock: &'a str,
    origin_ns: u64,
    total_ns: u64,
    spans: &'a [Span],
}

/// A [`Timeline`], sorted, with the start of its first span (`origin_ns`) and its total length
/// (`total_ns`).
pub fn json(timeline: &Timeline) -> serde_json::Value {
    let mut sorted = timeline.clone();
    sorted.sort();
    let (origin, end) = extent(timeline).unwrap_or_default();
    serde_json::to_value(Document {
        clock: &timeline.clock,
        origin_ns: origin,
        total_ns: end - origin,
        spans: &sorted.spans,
    })
    .unwrap_or_default()
}
