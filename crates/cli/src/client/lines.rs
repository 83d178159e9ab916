//! Answers of lines, each a JSON document.

use crate::failure::{Failure, Result};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use jiffy_wire::lines::Lines;
use serde::de::DeserializeOwned;

/// Longest line of the node, bytes.
const MAX_LINE: usize = 16 << 20;

/// The lines of an answer.
pub struct JsonLines {
    body: Incoming,
    lines: Lines,
}

impl JsonLines {
    /// Reads the lines of this body.
    pub fn new(body: Incoming) -> JsonLines {
        JsonLines {
            body,
            lines: Lines::new(MAX_LINE),
        }
    }

    /// The next line; `None` if the answer has ended, or the connection was lost.
    ///
    /// # Errors
    ///
    /// If a line is too long, or is not the JSON of a `T`.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        loop {
            let line = self.lines.next_line();
            if let Some(line) = line.map_err(|_| JsonLines::not_understood())? {
                let line = serde_json::from_slice(&line);
                return line.map(Some).map_err(|_| JsonLines::not_understood());
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.lines.push(&data);
                    }
                }
                _ => return Ok(None),
            }
        }
    }

    /// The failure of a line that is not as expected.
    pub fn not_understood() -> Failure {
        Failure::new("jiffyd gave an answer that this jiffy does not understand")
            .hint("`jiffy version` shows whether they are of different versions")
    }
}
