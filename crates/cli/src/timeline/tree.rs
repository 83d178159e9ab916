//! Which spans are parts of others.

use jiffy_wire::timeline::{Span, Timeline};

/// A span and its depth.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    /// The span.
    pub span: &'a Span,
    /// 0 for a span that is not part of another.
    pub depth: usize,
}

/// The steps by start, each followed by its parts in the same track. A moment comes before a span
/// that begins at the same time.
pub fn rows(timeline: &Timeline) -> Vec<Row<'_>> {
    let mut spans: Vec<&Span> = timeline.steps().collect();
    spans.sort_by_key(|span| {
        let length = span.duration_ns();
        (
            span.start_ns,
            length > 0,
            std::cmp::Reverse(length),
            span.track,
        )
    });
    let parents: Vec<Option<usize>> = parents(&spans);
    let mut children = vec![Vec::new(); spans.len()];
    let mut roots = Vec::new();
    for (index, parent) in parents.iter().enumerate() {
        match parent {
            Some(parent) => children[*parent].push(index),
            None => roots.push(index),
        }
    }
    let mut rows = Vec::with_capacity(spans.len());
    let mut waiting: Vec<(usize, usize)> = roots.into_iter().rev().map(|root| (root, 0)).collect();
    while let Some((index, depth)) = waiting.pop() {
        rows.push(Row {
            span: spans[index],
            depth,
        });
        waiting.extend(
            children[index]
                .iter()
                .rev()
                .map(|child| (*child, depth + 1)),
        );
    }
    rows
}

/// The index of the smallest span of the same track and thread that contains each span. A moment
/// contains nothing, and a moment on a span's edge is not part of it.
pub fn parents(sorted: &[&Span]) -> Vec<Option<usize>> {
    let mut open: Vec<usize> = Vec::new();
    let mut parents = Vec::with_capacity(sorted.len());
    for (index, span) in sorted.iter().enumerate() {
        open.retain(|other| sorted[*other].end_ns > span.start_ns);
        let inside = |other: &&usize| {
            let other = sorted[**other];
            let within = match span.duration_ns() {
                0 => other.start_ns < span.start_ns && span.end_ns < other.end_ns,
                _ => span.end_ns <= other.end_ns,
            };
            other.track == span.track && other.thread == span.thread && within
        };
        parents.push(open.iter().rev().find(inside).copied());
        if span.duration_ns() > 0 {
            open.push(index);
        }
    }
    parents
}
