//! Lines of a byte stream: JSON messages that end with a newline, as on control sockets and in long
//! answers of the API.

use alloc::vec::Vec;
use thiserror::Error;

/// A line is longer than the reader's limit.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
#[error("a line is longer than {0} bytes")]
pub struct TooLong(pub usize);

/// Splits a byte stream into lines.
#[derive(Debug)]
pub struct Lines {
    buffer: Vec<u8>,
    /// Number of leading bytes that contain no newline.
    searched: usize,
    longest: usize,
}

impl Lines {
    /// `longest` is the longest line, bytes without the newline.
    pub fn new(longest: usize) -> Lines {
        Lines {
            buffer: Vec::new(),
            searched: 0,
            longest,
        }
    }

    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next line without its newline; `None` if it is not complete yet. After an error the
    /// stream is unusable.
    pub fn next_line(&mut self) -> Result<Option<Vec<u8>>, TooLong> {
        let new = &self.buffer[self.searched..];
        let end = new.iter().position(|byte| *byte == b'\n');
        let length = end.map_or(self.buffer.len(), |end| self.searched + end);
        if length > self.longest {
            return Err(TooLong(self.longest));
        }
        if end.is_none() {
            self.searched = length;
            return Ok(None);
        }
        self.searched = 0;
        let mut line: Vec<u8> = self.buffer.drain(..=length).collect();
        line.pop();
        Ok(Some(line))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_stream_split_anywhere_gives_the_same_lines(
            sent in proptest::collection::vec("[a-z]{0,9}", 0..20),
            cut in 1usize..20,
        ) {
            let mut bytes = sent.join("\n").into_bytes();
            bytes.extend(b"\nrest");
            let mut lines = Lines::new(9);
            let mut got = Vec::new();
            for piece in bytes.chunks(cut) {
                lines.push(piece);
                while let Some(line) = lines.next_line().unwrap() {
                    got.push(std::string::String::from_utf8(line).unwrap());
                }
            }
            let sent = if sent.is_empty() { std::vec![std::string::String::new()] } else { sent };
            prop_assert_eq!(got, sent);
        }
    }

    #[test]
    fn a_long_line_is_refused_even_if_incomplete() {
        let mut lines = Lines::new(3);
        lines.push(b"abc\nabcd");
        assert_eq!(lines.next_line(), Ok(Some(b"abc".to_vec())));
        assert_eq!(lines.next_line(), Err(TooLong(3)));
        lines.push(b"\n");
        assert_eq!(lines.next_line(), Err(TooLong(3)));
    }
}
