//! The spans as JSON, for programs.

use super::{extent, tree};
use jiffy_wire::timeline::{Counter, Span, Timeline};
use serde::Serialize;

#[derive(Serialize)]
struct Document<'a> {
    clock: &'a str,
    origin_ns: u64,
    total_ns: u64,
    spans: Vec<Part<'a>>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    counters: &'a [Counter],
}

#[derive(Serialize)]
struct Part<'a> {
    #[serde(flatten)]
    span: &'a Span,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<usize>,
}

/// A [`Timeline`], sorted, with the start of its first step (`origin_ns`), its total length
/// (`total_ns`), and with the position of the span of which each span is a part (`parent`).
pub fn json(timeline: &Timeline) -> serde_json::Value {
    let mut sorted = timeline.clone();
    sorted.sort();
    let (origin, end) = extent(timeline).unwrap_or_default();
    let spans: Vec<&Span> = sorted.spans.iter().collect();
    let parents = tree::parents(&spans);
    let parts = spans.into_iter().zip(parents);
    let parts = parts.map(|(span, parent)| Part { span, parent });
    serde_json::to_value(Document {
        clock: &timeline.clock,
        origin_ns: origin,
        total_ns: end - origin,
        spans: parts.collect(),
        counters: &timeline.counters,
    })
    .unwrap_or_default()
}
