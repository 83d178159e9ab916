//! Tables, sizes, ages, and guest text made harmless.

use std::borrow::Cow;

/// Text from elsewhere, with every control character replaced, so that a
/// guest can't drive the user's terminal.
pub fn harmless(text: &str) -> Cow<'_, str> {
    // C1 controls are as good as an escape to some terminals; the bidirectional
    // overrides reorder what is read.
    let harmful =
        |c: char| c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if text.contains(harmful) {
        text.replace(harmful, "\u{fffd}").into()
    } else {
        text.into()
    }
}

/// Rows of text under headings; the last column is not padded.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table with these headings.
    pub fn new<const N: usize>(headings: [&str; N]) -> Table {
        Table {
            rows: vec![headings.map(str::to_owned).to_vec()],
        }
    }

    /// Adds a row.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(
            cells
                .iter()
                .map(|cell| harmless(cell).into_owned())
                .collect(),
        );
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let columns = self.rows[0].len();
        let widths: Vec<usize> = (0..columns)
            .map(|column| {
                let cells = self.rows.iter().map(|row| row[column].chars().count());
                cells.max().unwrap_or(0)
            })
            .collect();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                line.push_str(&format!("{cell:<width$}   "));
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
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
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {unit}{plural}")
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
        table.row(["1".into(), "a".into()]);
        table.row(["long".into(), "bé".into()]);
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
