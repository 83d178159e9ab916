//! The critical chain: the steps that had to wait for one another.

use super::{extent, span_length, tree};
use crate::render::harmless;
use jiffy_wire::timeline::{Span, Timeline};

/// The critical chain: it ends with the last step, and before each step is the one that ended last
/// before that began. Drawn as by `systemd-analyze critical-chain`. Parts of steps, and steps that
/// ran in parallel to the chain, are omitted.
pub fn critical_chain(timeline: &Timeline) -> String {
    let Some((origin, end)) = extent(timeline) else {
        return "The timeline is empty.\n".to_owned();
    };
    let chain = chain(timeline, end);
    let mut out = String::from(
        "The time when a step began is printed after the \"@\", the time it took after the \"+\".\n\n",
    );
    for (depth, span) in chain.iter().enumerate() {
        let branch = match depth {
            0 => String::new(),
            _ => format!("{}└─", "  ".repeat(depth - 1)),
        };
        out.push_str(&branch);
        out.push_str(&harmless(&span.name));
        out.push_str(&format!(" @{}", span_length(span.start_ns - origin)));
        if span.duration_ns() > 0 {
            out.push_str(&format!(" +{}", span_length(span.duration_ns())));
        }
        out.push('\n');
    }
    let covered: u64 = chain.iter().map(|span| span.duration_ns()).sum();
    out.push_str(&format!(
        "\nin the chain: {}; between its steps: {}\n",
        span_length(covered),
        span_length((end - origin).saturating_sub(covered))
    ));
    out
}

fn chain(timeline: &Timeline, end: u64) -> Vec<&Span> {
    let mut steps: Vec<&Span> = tree::rows(timeline)
        .into_iter()
        .filter(|row| row.depth == 0)
        .map(|row| row.span)
        .collect();
    let mut chain = Vec::new();
    let mut before = end;
    loop {
        // Of the steps that end together, a moment comes first (it marks the end of something),
        // then the longest.
        let next = steps
            .iter()
            .enumerate()
            .filter(|(_, span)| span.end_ns <= before)
            .max_by_key(|(index, span)| {
                let moment = span.duration_ns() == 0;
                (span.end_ns, moment, span.duration_ns(), *index)
            })
            .map(|(index, _)| index);
        let Some(index) = next else {
            return chain;
        };
        let span = steps.remove(index);
        before = span.start_ns;
        chain.push(span);
    }
}
