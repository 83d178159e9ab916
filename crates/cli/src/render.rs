//! Tables, sizes, ages, and guest text made harmless.

use std::borrow::Cow;

/// Text from elsewhere, with every control character replaced, so that a
/// guest can't drive the user's terminal.
pub fn harmless(text: &str) -> Cow<'_, str> {
    // C1 controls are as good as an escape to some terminals; the bidirectional
    // overrides reorder what is read.
    let harmful =
        |c: char| c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let plain = |byte: &u8| (b' '..=b'~').contains(byte);
    if text.as_bytes().iter().all(plain) {
        text.into()
    } else if text.contains(harmful) {
        text.replace(harmful, "\u{fffd}").into()
    } else {
        text.into()
    }
}

/// Rows of text under headings; the last column is not padded.
pub struct Table<const N: usize> {
    /// Of all cells, row after row.
    text: String,
    /// Where each cell ends in it.
    ends: Vec<usize>,
    widths: [usize; N],
}

impl<const N: usize> Table<N> {
    /// An empty table with these headings.
    pub fn new(headings: [&str; N]) -> Table<N> {
        let mut table = Table {
            text: String::new(),
            ends: Vec::new(),
            widths: [0; N],
        };
        table.row(headings);
        table
    }

    /// Adds a row.
    pub fn row<T: AsRef<str>>(&mut self, cells: [T; N]) {
        for (cell, width) in cells.iter().zip(&mut self.widths) {
            let cell = harmless(cell.as_ref());
            *width = columns(&cell).max(*width);
            self.text.push_str(&cell);
            self.ends.push(self.text.len());
        }
    }
}

impl<const N: usize> std::fmt::Display for Table<N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let width: usize = self.widths.iter().map(|width| width + GAP).sum();
        let mut line = String::with_capacity(width * 2);
        let mut begin = 0;
        for row in self.ends.chunks_exact(N) {
            line.clear();
            for (end, width) in row.iter().zip(&self.widths) {
                let cell = &self.text[begin..*end];
                line.push_str(cell);
                line.extend(std::iter::repeat_n(' ', width - columns(cell) + GAP));
                begin = *end;
            }
            line.truncate(line.trim_end().len());
            line.push('\n');
            f.write_str(&line)?;
        }
        Ok(())
    }
}

/// Blanks between columns.
const GAP: usize = 3;

/// Columns of a terminal that a cell takes.
fn columns(cell: &str) -> usize {
    match cell.is_ascii() {
        true => cell.len(),
        false => cell.chars().count(),
    }
}

/// `512 B`, `5.9 MiB`.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// `3 seconds`, `2 hours`: the time from `since` to `now`, Unix seconds.
pub fn age(since: u64, now: u64) -> String {
    let seconds = now.saturating_sub(since);
    let (count, unit) = match seconds {
        0..60 => (seconds, "second"),
        60..3600 => (seconds / 60, "minute"),
        3600..86_400 => (seconds / 3600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    let mut age = count.to_string();
    age.extend([" ", unit, if count == 1 { "" } else { "s" }]);
    age
}

/// Unix time now, seconds.
pub fn now() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_do_not_reach_the_terminal() {
        assert_eq!(harmless("plain ünï"), "plain ünï");
        assert_eq!(
            harmless("a\x1b]0;x\x07b\nc\u{9b}d\u{202e}"),
            "a\u{fffd}]0;x\u{fffd}b\u{fffd}c\u{fffd}d\u{fffd}"
        );
    }

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(["ID", "NAME"]);
        table.row(["1", "a"]);
        table.row(["long", "bé"]);
        assert_eq!(table.to_string(), "ID     NAME\n1      a\nlong   bé\n");
    }

    #[test]
    fn sizes_and_ages_are_short() {
        assert_eq!(size(0), "0 B");
        assert_eq!(size(1023), "1023 B");
        assert_eq!(size(1024), "1.0 KiB");
        assert_eq!(size(1024 * 1024 - 1), "1.0 MiB");
        assert_eq!(size(6 * 1024 * 1024), "6.0 MiB");
        assert_eq!(size(u64::MAX), "16.0 EiB");
        assert_eq!(age(10, 11), "1 second");
        assert_eq!(age(11, 10), "0 seconds");
        assert_eq!(age(0, 7200), "2 hours");
        assert_eq!(age(0, 86_400 * 3), "3 days");
    }
}
