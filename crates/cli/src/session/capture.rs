//! Keeps a command's output instead of printing it.

use jiffy_wire::agent::Stream;
use serde_json::{Value, json};

/// Most bytes that are kept of each stream.
const LIMIT: usize = 16 * 1024 * 1024;

/// A command's output.
#[derive(Debug, Default)]
pub struct Captured {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    truncated: bool,
}

impl Captured {
    /// Keeps these bytes, up to a limit.
    pub fn push(&mut self, stream: Stream, bytes: &[u8]) {
        let kept = match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        };
        let room = LIMIT - kept.len();
        kept.extend_from_slice(&bytes[..bytes.len().min(room)]);
        self.truncated |= bytes.len() > room;
    }

    /// `stdout`, `stderr` and `truncated` for a JSON object; invalid UTF-8 becomes U+FFFD.
    pub fn fields(&self) -> [(&'static str, Value); 3] {
        [
            ("stdout", json!(String::from_utf8_lossy(&self.stdout))),
            ("stderr", json!(String::from_utf8_lossy(&self.stderr))),
            ("truncated", json!(self.truncated)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn captured_output_is_bounded() {
        let mut captured = Captured::default();
        let piece = vec![b'x'; 60 * 1024];
        for _ in 0..300 {
            captured.push(Stream::Stdout, &piece);
        }
        captured.push(Stream::Stderr, b"e");
        assert_eq!(captured.stdout.len(), LIMIT);
        assert!(captured.truncated);
        assert_eq!(captured.stderr, b"e");
    }
}
