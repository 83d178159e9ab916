//! Tables of text with headings.

use super::{harmless, is_plain};

/// A table of text with headings; the last column is not padded.
pub struct Table<const N: usize> {
    /// Text of all cells, row after row.
    text: String,
    cells: Vec<Cell>,
    widths: [usize; N],
}

/// A cell is kept small: a table has thousands, and each page of them is a page fault.
struct Cell {
    /// Length of its text, bytes.
    length: u32,
    /// Its width in columns of a terminal.
    width: u32,
}

impl<const N: usize> Table<N> {
    /// An empty table with these headings.
    pub fn new(headings: [&str; N]) -> Table<N> {
        let mut table = Table {
            text: String::new(),
            cells: Vec::new(),
            widths: [0; N],
        };
        table.row(headings);
        table
    }

    /// Reserves space for so many more rows, with `bytes` of text in all.
    pub fn reserve(&mut self, rows: usize, bytes: usize) {
        self.cells.reserve(rows * N);
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
        let mut width = self.text.len() - begin;
        if !is_plain(&self.text.as_bytes()[begin..]) {
            let cell = harmless(&self.text[begin..]).into_owned();
            width = cell.chars().count();
            self.text.truncate(begin);
            self.text.push_str(&cell);
        }
        self.end_cell(begin, width);
    }

    /// Adds a cell whose text `write` appends; the text must be printable ASCII.
    pub fn plain_cell(&mut self, write: impl FnOnce(&mut String)) {
        let begin = self.text.len();
        write(&mut self.text);
        debug_assert!(is_plain(&self.text.as_bytes()[begin..]));
        self.end_cell(begin, self.text.len() - begin);
    }

    fn end_cell(&mut self, begin: usize, width: usize) {
        let column = self.cells.len() % N;
        self.widths[column] = width.max(self.widths[column]);
        self.cells.push(Cell {
            length: (self.text.len() - begin) as u32,
            width: width as u32,
        });
    }

    /// Adds a row.
    pub fn row<T: AsRef<str>>(&mut self, cells: [T; N]) {
        for cell in cells {
            self.cell(cell.as_ref());
        }
    }

    /// Renders the lines. Not by [`ToString`], which would copy them once more.
    pub fn text(&self) -> String {
        let length: usize = self.widths.iter().map(|width| width + GAP).sum();
        let blanks = " ".repeat(length);
        let padded = self.cells.len() / N * (length + 1);
        let mut lines = String::with_capacity(padded + self.text.len());
        let mut begin = 0;
        for row in self.cells.chunks_exact(N) {
            // Spaces to write before the next cell that is not empty.
            let mut before = 0;
            for (cell, width) in row.iter().zip(&self.widths) {
                let end = begin + cell.length as usize;
                if end > begin {
                    lines.push_str(&blanks[..before]);
                    lines.push_str(&self.text[begin..end]);
                    before = 0;
                }
                before += width - cell.width as usize + GAP;
                begin = end;
            }
            lines.push('\n');
        }
        lines
    }
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
