//! Lines of a byte stream: JSON messages that end with a newline, as on control sockets and in long
//! answers of the API.

use alloc::vec::Vec;
#[cfg(feature = "std")]
use serde::Serialize;
use thiserror::Error;

/// A line is longer than the reader's limit.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
#[error("a line is longer than {0} bytes")]
pub struct TooLong(pub usize);

/// A message as a line, with its newline.
///
/// # Errors
///
/// If the message can't be written as JSON, such as a map whose keys are not text.
#[cfg(feature = "std")]
pub fn encode(message: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    Ok(line)
}

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

    /// The next line without its newline; `None` if it is not complete yet.
    ///
    /// # Errors
    ///
    /// If the line, complete or not, is longer than the limit. The stream is then unusable.
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

    /// The next `count` bytes, which follow a line and are none; `None` if they have not all
    /// arrived.
    pub fn next_bytes(&mut self, count: usize) -> Option<Vec<u8>> {
        if self.buffer.len() < count {
            return None;
        }
        self.searched = 0;
        Some(self.buffer.drain(..count).collect())
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
    fn bytes_between_lines_are_taken_once_all_of_them_have_arrived() {
        let mut lines = Lines::new(9);
        lines.push(&encode(&[1]).unwrap());
        lines.push(b"a\n");
        assert_eq!(lines.next_line(), Ok(Some(b"[1]".to_vec())));
        assert_eq!(lines.next_bytes(3), None);
        lines.push(b"bc\n");
        assert_eq!(lines.next_bytes(3), Some(b"a\nb".to_vec()));
        assert_eq!(lines.next_line(), Ok(Some(b"c".to_vec())));
        assert_eq!(lines.next_bytes(0), Some(Vec::new()));
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
