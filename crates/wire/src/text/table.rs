//! Tables of text with headings.

use super::{harmless, is_plain};

/// A table of text with headings; the last column is not padded.
pub struct Table<const N: usize> {
    /// Text of all cells, row after row.
    text: String,
    /// Bytes of each cell's text. Kept small: a table has thousands, and each page of them is a page
    /// fault.
    lengths: Vec<u32>,
}

impl<const N: usize> Table<N> {
    /// An empty table with these headings.
    pub fn new(headings: [&str; N]) -> Table<N> {
        let mut table = Table {
            text: String::new(),
            lengths: Vec::new(),
        };
        table.row(headings);
        table
    }

    /// Reserves space for so many more rows, with `bytes` of text in all.
    pub fn reserve(&mut self, rows: usize, bytes: usize) {
        self.lengths.reserve(rows * N);
        self.text.reserve(bytes);
    }

    /// Adds a cell. `N` cells make a row.
    pub fn cell(&mut self, text: &str) {
        self.cell_with(|cell| cell.push_str(text));
    }

    /// Adds a cell whose text `write` appends.
    pub fn cell_with(&mut self, write: impl FnOnce(&mut String)) {
        let begin = self.text.len();
        write(&mut self.text);
        self.lengths.push((self.text.len() - begin) as u32);
    }

    /// Adds a row.
    pub fn row<T: AsRef<str>>(&mut self, cells: [T; N]) {
        for cell in cells {
            self.cell(cell.as_ref());
        }
    }

    /// Renders the lines, with [`harmless`] cells. Not by [`ToString`], which would copy them once
    /// more.
    pub fn text(&self) -> String {
        // One check for all cells, because nearly all tables are plain.
        if is_plain(self.text.as_bytes()) {
            return lines::<N>(&self.text, &self.lengths, &self.lengths);
        }
        let mut shown = Table::<N> {
            text: String::new(),
            lengths: Vec::new(),
        };
        let mut widths = Vec::new();
        let mut rest = &self.text[..];
        for length in &self.lengths {
            let (cell, after) = rest.split_at(*length as usize);
            let cell = harmless(cell);
            widths.push(cell.chars().count() as u32);
            shown.cell(&cell);
            rest = after;
        }
        lines::<N>(&shown.text, &shown.lengths, &widths)
    }
}

/// Aligns the columns of cells with these lengths in bytes, and widths in columns of a terminal.
fn lines<const N: usize>(text: &str, lengths: &[u32], widths: &[u32]) -> String {
    let mut columns = [0; N];
    for row in widths.chunks_exact(N) {
        for (column, width) in columns.iter_mut().zip(row) {
            *column = *width.max(column);
        }
    }
    let length: usize = columns.iter().map(|width| *width as usize + GAP).sum();
    let blanks = " ".repeat(length);
    let mut lines = String::with_capacity(text.len() + lengths.len() / N * (length + 1));
    let mut rest = text;
    for (lengths, widths) in lengths.chunks_exact(N).zip(widths.chunks_exact(N)) {
        // Spaces to write before the next cell that is not empty.
        let mut before = 0;
        for ((length, width), column) in lengths.iter().zip(widths).zip(&columns) {
            if *length > 0 {
                let (cell, after) = rest.split_at(*length as usize);
                lines.push_str(&blanks[..before]);
                lines.push_str(cell);
                rest = after;
                before = 0;
            }
            before += (column - width) as usize + GAP;
        }
        lines.push('\n');
    }
    lines
}

impl<const N: usize> std::fmt::Display for Table<N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Written as one string, because each write to a formatter costs as much as a cell.
        f.write_str(&self.text())
    }
}

/// Spaces between columns.
const GAP: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(["ID", "NAME", "OF"]);
        table.row(["1", "a", ""]);
        table.row(["long", "bé", "x"]);
        table.row(["", "\x1b", "y"]);
        let expected = "ID     NAME   OF\n1      a\nlong   bé     x\n       \u{fffd}      y\n";
        assert_eq!(table.to_string(), expected);
    }
}
