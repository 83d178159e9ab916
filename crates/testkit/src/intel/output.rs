//! Parses the serial port's output: output of programs, and control lines in between.

use jiffy_wire::lines::Lines;
use std::collections::VecDeque;

/// A part of the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Output of the running program.
    Output(Vec<u8>),
    /// The program ended with this status.
    Ended(i32),
    /// There is no `/dev/kvm`.
    NoKvm,
}

/// Parses the stream. Control lines begin with a control character and a token that the programs do
/// not know.
#[derive(Debug)]
pub struct Reader {
    mark: Vec<u8>,
    lines: Lines,
    events: VecDeque<Event>,
    booted: bool,
}

impl Reader {
    pub fn new(token: &str) -> Reader {
        Reader {
            mark: mark(token).into_bytes(),
            lines: Lines::new(usize::MAX),
            events: VecDeque::new(),
            booted: false,
        }
    }

    /// Whether the machine has booted and programs run.
    pub fn has_booted(&self) -> bool {
        self.booted
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.lines.push(bytes);
        while let Ok(Some(mut line)) = self.lines.next_line() {
            line.push(b'\n');
            let control = find(&line, &self.mark).map(|at| line.split_off(at));
            if !line.is_empty() && self.booted {
                self.events.push_back(Event::Output(line));
            }
            if let Some(control) = control {
                self.parse_control_line(&control[self.mark.len()..]);
            }
        }
    }

    fn parse_control_line(&mut self, line: &[u8]) {
        let line = String::from_utf8_lossy(line);
        match line.trim_end().split_once(' ') {
            Some(("ended", status)) => {
                // An invalid status counts as a failure.
                let status = status.parse().unwrap_or(255);
                self.events.push_back(Event::Ended(status));
            }
            _ if line.trim_end() == "booted" => self.booted = true,
            _ => self.events.push_back(Event::NoKvm),
        }
    }

    pub fn next(&mut self) -> Option<Event> {
        self.events.pop_front()
    }
}

fn mark(token: &str) -> String {
    format!("\u{1e}{token} ")
}

fn find(line: &[u8], mark: &[u8]) -> Option<usize> {
    line.windows(mark.len()).position(|window| window == mark)
}

/// A shell command that writes a control line.
pub fn control_line_command(token: &str, what: &str) -> String {
    format!("printf '\\036{token} %s\\n' \"{what}\"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(reader: &mut Reader) -> Vec<Event> {
        std::iter::from_fn(|| reader.next()).collect()
    }

    #[test]
    fn output_and_control_lines_are_separated_at_any_chunk_size() {
        let stream = "noise\n\u{1e}ab booted\none\n\u{1e}xx ended 0\ntwo\u{1e}ab ended 0\n\u{1e}ab ended 101\n";
        let expected = [
            Event::Output(b"one\n".to_vec()),
            Event::Output("\u{1e}xx ended 0\n".into()),
            Event::Output(b"two".to_vec()),
            Event::Ended(0),
            Event::Ended(101),
        ];
        for size in [1, 2, 7, stream.len()] {
            let mut reader = Reader::new("ab");
            let mut seen = Vec::new();
            for piece in stream.as_bytes().chunks(size) {
                reader.push(piece);
                seen.extend(events(&mut reader));
            }
            assert_eq!(seen, expected, "in pieces of {size}");
            assert!(reader.has_booted());
        }
    }

    #[test]
    fn an_unreadable_status_counts_as_failure() {
        let mut reader = Reader::new("t");
        reader.push("\u{1e}t booted\n\u{1e}t ended x\n\u{1e}t no-kvm\n".as_bytes());
        assert_eq!(events(&mut reader), [Event::Ended(255), Event::NoKvm]);
    }

    #[test]
    fn control_lines_written_by_a_shell_are_parsed() {
        let script = control_line_command("t0ken", "booted")
            + &control_line_command("t0ken", "ended $((3 + 4))");
        let output = std::process::Command::new("sh")
            .args(["-c", &script])
            .output();
        let mut reader = Reader::new("t0ken");
        reader.push(&output.expect("a shell").stdout);
        assert_eq!(events(&mut reader), [Event::Ended(7)]);
        assert!(reader.has_booted());
    }
}
