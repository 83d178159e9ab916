//! Spans and marks for the node, one JSON object per line.

use jiffy_sys::mutex::lock;
use jiffy_sys::{activity, clock};
use jiffy_wire::timeline::{BOOT, KERNEL_THREADS, PROGRAMS};
use jiffy_wire::vmm::{Activity, ExitRecord, VmmEvent};
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

/// Most spans or counts in an event, and most bytes of their names: the node refuses lines of more
/// than 64 KiB.
const PART: usize = 1000;
const PART_NAMES: usize = 10 << 10;

/// Writes events to a pipe or socket. A slow reader loses events, and never delays the guest.
#[derive(Debug)]
pub struct Events {
    output: Option<OwnedFd>,
    kept: Mutex<Vec<u8>>,
}

impl Events {
    /// Events are written to a pipe or socket, which is made non-blocking, or discarded.
    ///
    /// # Errors
    ///
    /// If fcntl(2) fails.
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

    /// Buffers a moment (CLOCK_MONOTONIC) until the next [`flush`](Events::flush).
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

    /// Buffers what the threads have done, if that was recorded, for the last event.
    pub fn report_activity(&self) {
        for log in activity::take() {
            let spans = log
                .spans
                .iter()
                .map(|span| (span.name, span.start_ns, span.end_ns - span.start_ns));
            for part in parts(spans) {
                self.keep(&VmmEvent::Activity(Activity {
                    thread: log.thread.clone(),
                    names: part.names,
                    spans: part.items,
                    ..Activity::default()
                }));
            }
            let samples = log.samples.iter();
            for part in parts(samples.map(|it| (&*it.name, it.at_ns, it.count))) {
                self.keep(&VmmEvent::Activity(Activity {
                    thread: log.thread.clone(),
                    names: part.names,
                    counts: part.items,
                    ..Activity::default()
                }));
            }
            if log.dropped > 0 {
                self.keep(&VmmEvent::Activity(Activity {
                    thread: log.thread,
                    dropped: log.dropped,
                    ..Activity::default()
                }));
            }
        }
    }

    /// Buffers what the guest's kernel has noted, by threads, with starts (CLOCK_MONOTONIC) and
    /// lengths, nanoseconds, for the last event; and how many further records it had no room for.
    pub fn report_kernel(&self, noted: &[KernelSpan], dropped: u32) {
        let activity = |thread: &str| Activity {
            thread: thread.to_owned(),
            kernel: true,
            ..Activity::default()
        };
        for thread in [BOOT, KERNEL_THREADS, PROGRAMS] {
            let spans = noted.iter().filter(|span| span.thread == thread);
            for part in parts(spans.map(|span| (&*span.name, span.start_ns, span.length_ns))) {
                self.keep(&VmmEvent::Activity(Activity {
                    names: part.names,
                    spans: part.items,
                    ..activity(thread)
                }));
            }
        }
        if dropped > 0 {
            self.keep(&VmmEvent::Activity(Activity {
                dropped: dropped.into(),
                ..activity(PROGRAMS)
            }));
        }
    }

    /// Writes the last event; waits a short time for a reader that is behind.
    pub fn exited(&self, record: &ExitRecord) {
        self.exited_within(record, LAST_EVENT_TIMEOUT);
    }

    fn exited_within(&self, record: &ExitRecord, time: Duration) {
        self.keep(&VmmEvent::Exited(record.clone()));
        let mut kept = self.lock();
        let until = Instant::now() + time;
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

/// Something that the guest's kernel has noted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelSpan {
    /// [`BOOT`], [`KERNEL_THREADS`] or [`PROGRAMS`].
    pub thread: &'static str,
    /// What it was.
    pub name: String,
    /// Its start, CLOCK_MONOTONIC.
    pub start_ns: u64,
    /// Its length; 0 for a moment.
    pub length_ns: u64,
}

/// A part of a thread's activity that fits into an event.
#[derive(Default)]
struct Part {
    names: Vec<String>,
    name_bytes: usize,
    items: Vec<(u32, u64, u64)>,
}

impl Part {
    fn has_room(&self, name: &str) -> bool {
        self.items.len() < PART && self.name_bytes + name.len() <= PART_NAMES
    }
}

/// Divides named numbers into parts.
fn parts<S: AsRef<str>>(items: impl Iterator<Item = (S, u64, u64)>) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for (name, first, second) in items {
        let name = name.as_ref();
        if !parts.last().is_some_and(|part| part.has_room(name)) {
            parts.push(Part::default());
        }
        let Some(part) = parts.last_mut() else { break };
        let known = part.names.iter().position(|known| known == name);
        let index = known.unwrap_or_else(|| {
            part.names.push(name.to_owned());
            part.name_bytes += name.len();
            part.names.len() - 1
        });
        part.items.push((index as u32, first, second));
    }
    parts
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
            let record = ExitRecord {
                reason: ExitReason::Shutdown,
                message: "the guest powered off".into(),
                hint: None,
            };
            events.exited_within(&record, Duration::from_secs(300));
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
    fn activity_is_divided_into_lines_that_the_node_reads() {
        let item = |number: u64| match number % 2 {
            0 => ("exit: MMIO write", u64::MAX - number, u64::MAX),
            _ => ("exit: port read", number, 1),
        };
        let parts = parts((0..2 * PART as u64 + 1).map(item));
        let lengths: Vec<_> = parts.iter().map(|part| part.items.len()).collect();
        assert_eq!(lengths, [PART, PART, 1]);
        assert_eq!(parts[0].names, ["exit: MMIO write", "exit: port read"]);
        assert_eq!(parts[1].items[1], (1, PART as u64 + 1, 1));
        for part in parts {
            let event = VmmEvent::Activity(Activity {
                thread: "vcpu 31".into(),
                names: part.names,
                spans: part.items,
                ..Activity::default()
            });
            assert!(serde_json::to_vec(&event).unwrap().len() < 60_000);
        }
    }

    #[test]
    fn what_the_kernel_noted_is_reported_by_threads_in_lines_that_the_node_reads() {
        let (reader, events) = pipe();
        let name = |number| format!("a program's name (4194304), signal {number}");
        let span = |number: u64| KernelSpan {
            thread: if number == 0 { BOOT } else { PROGRAMS },
            name: name(number),
            start_ns: u64::MAX - number,
            length_ns: u64::MAX,
        };
        let spans: Vec<_> = (0..1000).map(span).collect();
        events.report_kernel(&spans, 7);
        let writer = std::thread::spawn(move || {
            while !events.lock().is_empty() {
                events.flush();
            }
        });
        let mut seen = Vec::new();
        let mut dropped = 0;
        for line in BufReader::new(reader).lines() {
            let line = line.unwrap();
            assert!(line.len() < 60_000);
            let VmmEvent::Activity(activity) = serde_json::from_str(&line).unwrap() else {
                panic!("{line}");
            };
            assert!(activity.kernel);
            dropped += activity.dropped;
            for (index, ..) in activity.spans {
                seen.push((
                    activity.thread.clone(),
                    activity.names[index as usize].clone(),
                ));
            }
        }
        writer.join().unwrap();
        let expected = spans
            .iter()
            .map(|span| (span.thread.to_owned(), span.name.clone()));
        assert_eq!(seen, expected.collect::<Vec<_>>());
        assert_eq!(dropped, 7);
    }

    #[test]
    fn a_reader_that_is_gone_is_no_error() {
        let (reader, events) = pipe();
        drop(reader);
        events.mark(1, 1);
        assert!(events.lock().is_empty());
    }
}
