//! The steps, longest first.

use super::{span_length, track_name};
use crate::render::harmless;
use jiffy_wire::timeline::{Span, Timeline};

/// One step per line, longest first, as in `systemd-analyze blame`. Moments are omitted because
/// they take no time.
pub fn blame(timeline: &Timeline) -> String {
    let mut spans: Vec<&Span> = timeline
        .steps()
        .filter(|span| span.duration_ns() > 0)
        .collect();
    spans.sort_by_key(|span| (std::cmp::Reverse(span.duration_ns()), span.start_ns));
    spans
        .iter()
        .map(|span| {
            format!(
                "{:>10} {} ({})\n",
                span_length(span.duration_ns()),
                harmless(&span.name),
                track_name(span.track)
            )
        })
        .collect()
}
