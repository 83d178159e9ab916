//! Timelines as rows with bars.

use super::tree::{Row, rows};
use super::{extent, milliseconds};
use crate::render::harmless;
use jiffy_wire::timeline::{Timeline, Track};

/// Width and colours of a table.
#[derive(Debug, Clone, Copy)]
pub struct Look {
    /// Width in columns.
    pub width: usize,
    /// Whether to colour the bars by track.
    pub colour: bool,
}

/// Least width of the bars, columns.
const MIN_BAR: usize = 20;
/// Longest name, columns; longer names are cut.
const MAX_NAME: usize = 48;

/// The timeline as rows with bars, and a line with the total time.
pub fn table(timeline: &Timeline, look: Look) -> String {
    let Some((origin, end)) = extent(timeline) else {
        return "The timeline is empty.\n".to_owned();
    };
    let rows = rows(timeline);
    let labels: Vec<String> = rows.iter().map(label).collect();
    let name_width = labels.iter().map(|l| l.chars().count()).max().unwrap_or(0);
    let columns = Columns {
        name: name_width,
        // "  start ms  length ms  " before and two spaces after the name.
        bar: look.width.saturating_sub(22 + name_width + 2).max(MIN_BAR),
    };
    let total = end - origin;
    let mut out = format!(
        "{:>9}  {:>9}  {:<name$}  {}\n",
        "start ms",
        "length",
        "step",
        scale(total, columns.bar),
        name = columns.name
    );
    for (row, label) in rows.iter().zip(&labels) {
        let span = row.span;
        let length = match span.duration_ns() {
            0 => "·".to_owned(),
            ns => milliseconds(ns),
        };
        let bar = bar(
            span.start_ns - origin,
            span.duration_ns(),
            total,
            columns.bar,
        );
        let line = format!(
            "{:>9}  {length:>9}  {label:<name$}  {}",
            milliseconds(span.start_ns - origin),
            coloured(&bar, span.track, look.colour),
            name = columns.name
        );
        out.push_str(line.trim_end());
        if let Some(detail) = &span.detail {
            // After the bar, if it fits on the line.
            let used = 22 + columns.name + 2 + bar.chars().count();
            let detail = harmless(detail);
            if used + 2 + detail.chars().count() <= look.width {
                out.push_str("  ");
                out.push_str(&detail);
            }
        }
        out.push('\n');
    }
    out.push_str(&format!(
        "nothing exists → answer: {} ms\n",
        milliseconds(total)
    ));
    out
}

struct Columns {
    name: usize,
    bar: usize,
}

fn label(row: &Row<'_>) -> String {
    let name = harmless(&row.span.name);
    let indent = 2 * row.depth.min(8);
    let room = MAX_NAME - indent;
    let mut label = " ".repeat(indent);
    if name.chars().count() > room {
        label.extend(name.chars().take(room - 1));
        label.push('…');
    } else {
        label.push_str(&name);
    }
    label
}

/// `0` and the total time above the ends of the bars.
fn scale(total: u64, width: usize) -> String {
    let end = format!("{} ms", milliseconds(total));
    format!("0{end:>width$}", width = width.saturating_sub(1))
}

/// A bar in steps of an eighth of a character; a moment is a diamond.
fn bar(start: u64, length: u64, total: u64, width: usize) -> String {
    const EIGHTHS: [char; 7] = ['▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    let total = total.max(1) as f64;
    let cells = |ns: u64| ns as f64 / total * width as f64;
    let first = (cells(start) as usize).min(width - 1);
    let mut out = " ".repeat(first);
    if length == 0 {
        out.push('◆');
        return out;
    }
    // Terminals have no glyphs for the right part of a cell, so the bar begins at the start of its
    // cell; its end is exact.
    let eighths = ((cells(start) - first as f64 + cells(length)) * 8.0).round() as usize;
    let eighths = eighths.clamp(1, (width - first) * 8);
    out.extend(std::iter::repeat_n('█', eighths / 8));
    if !eighths.is_multiple_of(8) {
        out.push(EIGHTHS[eighths % 8 - 1]);
    }
    out
}

fn coloured(bar: &str, track: Track, colour: bool) -> String {
    if !colour {
        return bar.to_owned();
    }
    let code = match track {
        Track::Cli => 36,
        Track::Node => 34,
        Track::Vmm => 35,
        Track::Kernel => 33,
        Track::Init => 32,
        Track::Guest => 31,
    };
    let drawn = bar.trim_start();
    let indent = &bar[..bar.len() - drawn.len()];
    format!("{indent}\x1b[{code}m{drawn}\x1b[0m")
}
