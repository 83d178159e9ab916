//! Spans and marks for the node, one JSON object per line.

use jiffy_sys::clock;
use jiffy_sys::mutex::lock;
use jiffy_wire::vmm::{ExitRecord, VmmEvent};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How long the last event waits for a reader that is behind.
const LAST_EVENT_TIMEOUT: Duration = Duration::from_secs(1);

/// Most bytes that are buffered for a reader that is behind; further marks are dropped.
const KEPT_MAX: usize = 64 << 10;

/// Writes events to a pipe or socket. A slow reader loses events, and never delays the guest.
#[derive(Debug)]
pub struct Events {
    output: Option<OwnedFd>,
    kept: Mutex<Vec<u8>>,
}

impl Events {
    /// Events are written to a pipe or socket, or discarded.
    pub fn new(output: Option<File>) -> io::Result<Events> {
        let output = output.map(OwnedFd::from);
        if let Some(output) = &output {
            let flags = rustix::fs::fcntl_getfl(output)?;
            rustix::fs::fcntl_setfl(output, flags | rustix::fs::OFlags::NONBLOCK)?;
            rustix::io::fcntl_setfd(output, rustix::io::FdFlags::CLOEXEC)?;
        }
        Ok(Events {
            output,
            kept: Mutex::default(),
        })
    }

    /// Runs a step of the VMM's work and buffers its span until the next [`flush`](Events::flush),
    /// so that many spans need one write.
    pub fn step<T>(&self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let start_ns = clock::monotonic_ns();
        let result = work();
        self.keep_span(name, start_ns, clock::monotonic_ns());
        result
    }

    /// Buffers a moment until the next [`flush`](Events::flush).
    pub fn moment(&self, name: &'static str, at_ns: u64) {
        self.keep_span(name, at_ns, at_ns);
    }

    /// Writes a mark of the guest, after the buffered events. Marks are dropped while the reader is
    /// far behind.
    pub fn mark(&self, value: u8, at_ns: u64) {
        if self.lock().len() > KEPT_MAX {
            return self.flush();
        }
        self.keep(&VmmEvent::Mark { value, at_ns });
        self.flush();
    }

    /// Writes a moment with a remark, after the buffered events. It is dropped while the reader is
    /// far behind.
    pub fn remark(&self, name: &'static str, detail: String) {
        if self.lock().len() > KEPT_MAX {
            return self.flush();
        }
        let now = clock::monotonic_ns();
        self.keep(&VmmEvent::Span {
            name: name.to_owned(),
            start_ns: now,
            end_ns: now,
            detail: Some(detail),
        });
        self.flush();
    }

    /// Writes the buffered events.
    pub fn flush(&self) {
        let mut kept = self.lock();
        let _ = self.write(&mut kept);
    }

    /// Writes the last event; waits a short time for a reader that is behind.
    pub fn exited(&self, record: &ExitRecord) {
        self.keep(&VmmEvent::Exited(record.clone()));
        let mut kept = self.lock();
        let until = Instant::now() + LAST_EVENT_TIMEOUT;
        while self.write(&mut kept) == Err(Errno::AGAIN) {
            let Some(output) = &self.output else { return };
            let left = until.saturating_duration_since(Instant::now());
            let left = rustix::time::Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            let mut wait = [PollFd::new(output, PollFlags::OUT)];
            if !matches!(poll(&mut wait, Some(&left)), Ok(1..)) {
                return;
            }
        }
    }

    fn keep_span(&self, name: &str, start_ns: u64, end_ns: u64) {
        self.keep(&VmmEvent::Span {
            name: name.to_owned(),
            start_ns,
            end_ns,
            detail: None,
        });
    }

    fn keep(&self, event: &VmmEvent) {
        if self.output.is_none() {
            return;
        }
        let mut kept = self.lock();
        serde_json::to_writer(&mut *kept, event).expect("events are plain data");
        kept.push(b'\n');
    }

    /// Writes as much as the pipe takes; the rest stays buffered. If the reader is gone, everything
    /// is discarded.
    fn write(&self, kept: &mut Vec<u8>) -> Result<(), Errno> {
        let Some(output) = &self.output else {
            return Ok(());
        };
        let mut written = 0;
        let result = loop {
            if written == kept.len() {
                break Ok(());
            }
            match rustix::io::write(output, &kept[written..]) {
                Ok(count) => written += count,
                Err(Errno::INTR) => {}
                Err(error) => break Err(error),
            }
        };
        if matches!(result, Ok(()) | Err(Errno::AGAIN)) {
            kept.drain(..written);
        } else {
            kept.clear();
        }
        result
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<u8>> {
        lock(&self.kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_wire::vmm::ExitReason;
    use std::io::{BufRead, BufReader, Read};

    fn pipe() -> (File, Events) {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        (
            reader.into(),
            Events::new(Some(File::from(writer))).unwrap(),
        )
    }

    #[test]
    fn buffered_spans_are_written_before_the_next_mark() {
        let (reader, events) = pipe();
        events.step("memory", || ());
        events.mark(0x10, 7);
        let mut lines = BufReader::new(reader).lines();
        let mut next = || serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert!(matches!(next(), VmmEvent::Span { name, .. } if name == "memory"));
        assert_eq!(
            next(),
            VmmEvent::Mark {
                value: 0x10,
                at_ns: 7
            }
        );
    }

    #[test]
    fn a_slow_reader_blocks_nobody_and_gets_whole_lines() {
        let (mut reader, events) = pipe();
        for at in 0..20_000 {
            events.mark(1, at);
        }
        assert!(events.lock().len() <= KEPT_MAX + 100);
        rustix::fs::fcntl_setfl(&reader, rustix::fs::OFlags::NONBLOCK).unwrap();
        let mut text = Vec::new();
        let _ = reader.read_to_end(&mut text);
        rustix::fs::fcntl_setfl(&reader, rustix::fs::OFlags::empty()).unwrap();
        let last = std::thread::spawn(move || {
            events.exited(&ExitRecord {
                reason: ExitReason::Shutdown,
                message: "the guest powered off".into(),
                hint: None,
            });
        });
        reader.read_to_end(&mut text).unwrap();
        last.join().unwrap();
        let lines: Vec<VmmEvent> = String::from_utf8(text)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert!(lines.len() > 1000);
        assert!(matches!(lines.last(), Some(VmmEvent::Exited(_))));
    }

    #[test]
    fn a_reader_that_is_gone_is_no_error() {
        let (reader, events) = pipe();
        drop(reader);
        events.mark(1, 1);
        assert!(events.lock().is_empty());
    }
}
