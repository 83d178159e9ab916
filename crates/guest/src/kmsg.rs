//! Reads the kernel's milestones from its log (the kernel's Documentation/ABI/testing/dev-kmsg).

use crate::report::Report;
use crate::syscalls;
use alloc::{string::String, vec::Vec};
use core::fmt::Write;
use jiffy_wire::agent::GuestSpan;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// Log lines that end a phase of the kernel's boot: the beginning or a part of the line, and the
/// name of the phase.
const LINES: [(&str, &str); 9] = [
    ("Mount-cache", "kernel early setup"),
    ("smp: Brought up", "kernel vCPUs"),
    ("Memory: ", "kernel memory"),
    ("clocksource: Switched to", "kernel core"),
    ("Unpacking initramfs", "kernel network"),
    ("Freeing initrd memory", "kernel initramfs"),
    ("NET: Registered PF_VSOCK", "kernel drivers"),
    (
        "Freeing unused kernel image (initmem)",
        "kernel late initcalls",
    ),
    ("Run /init", "kernel hand-over"),
];

/// Most records that are read; a boot has some hundred.
const MOST_RECORDS: usize = 2000;
/// The kernel's largest record.
const RECORD: usize = 8192;
/// Beginning of init's own log line.
const OWN_LINE: &str = "jiffy-init: reads the kernel's log";

/// Whether the milestones must still be read.
#[derive(Debug)]
pub struct Milestones {
    wanted: bool,
}

impl Milestones {
    /// Reads the milestones once, if they are wanted.
    pub fn new(wanted: bool) -> Milestones {
        Milestones { wanted }
    }
}

/// Reads the log, once, and reports what it finds.
pub fn report(milestones: &mut Milestones, report: &mut Report) {
    if core::mem::take(&mut milestones.wanted) {
        for span in read().unwrap_or_default() {
            report.span(span);
        }
    }
}

fn read() -> Result<Vec<GuestSpan>, Errno> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let kmsg = rustix::fs::open(c"/dev/kmsg", flags, Mode::empty())?;
    // The log has its own clock; a line written now gives the offset.
    let now = syscalls::monotonic_ns();
    let mut own = String::new();
    let _ = writeln!(own, "<7>{OWN_LINE} at {now}");
    let _ = rustix::io::write(&kmsg, own.as_bytes());

    let mut records = Vec::new();
    let mut buffer = [0u8; RECORD];
    for _ in 0..MOST_RECORDS {
        match rustix::io::read(&kmsg, &mut buffer[..]) {
            Ok(count) => {
                if let Some(record) = parse(&buffer[..count]) {
                    records.push((record.0, String::from(record.1)));
                }
            }
            // The record was overwritten meanwhile; the next one is newer.
            Err(Errno::PIPE | Errno::INTR) => {}
            Err(_) => break,
        }
    }
    let records: Vec<(u64, &str)> = records
        .iter()
        .map(|(time, text)| (*time, text.as_str()))
        .collect();
    Ok(milestones(&records))
}

/// Parses a record: `priority,sequence,microseconds,flags;text\n…`. Returns the time in nanoseconds
/// and the first line of the text.
fn parse(record: &[u8]) -> Option<(u64, &str)> {
    let record = core::str::from_utf8(record).ok()?;
    let (prefix, text) = record.split_once(';')?;
    let microseconds: u64 = prefix.split(',').nth(2)?.parse().ok()?;
    Some((microseconds.checked_mul(1000)?, text.lines().next()?))
}

/// Spans between the known lines, on CLOCK_MONOTONIC.
fn milestones(records: &[(u64, &str)]) -> Vec<GuestSpan> {
    let offset = records.iter().rev().find_map(|(time, text)| {
        let at: i64 = text
            .strip_prefix(OWN_LINE)?
            .strip_prefix(" at ")?
            .parse()
            .ok()?;
        Some(at - *time as i64)
    });
    let offset = offset.unwrap_or(0);
    let mut spans: Vec<GuestSpan> = Vec::new();
    let mut start: Option<u64> = None;
    for (time, text) in records {
        let at = time.saturating_add_signed(offset);
        let begin = *start.get_or_insert(at);
        let known = LINES.iter().find(|(line, name)| {
            text.starts_with(line) && !spans.iter().any(|span| span.name == *name)
        });
        if let Some((_, name)) = known {
            spans.push(GuestSpan {
                kernel: true,
                name: String::from(*name),
                start_ns: begin.min(at),
                end_ns: at,
                error: None,
            });
            start = Some(at);
        }
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_kmsg_record_is_split_at_its_separators() {
        let record = b"6,339,5140900,-;NET: Registered PF_INET\n SUBSYSTEM=net\n";
        assert_eq!(
            parse(record),
            Some((5_140_900_000, "NET: Registered PF_INET"))
        );
        for bad in [&b"x"[..], b";", b"6,1;text", b"6,1,x,-;text", b"\xff;"] {
            assert_eq!(parse(bad), None);
        }
    }

    #[test]
    fn kernel_milestones_become_consecutive_spans() {
        let own = std::format!("{OWN_LINE} at 9000");
        let spans = milestones(&[
            (0, "Linux version 6.12"),
            (1000, "smp: Brought up 1 node"),
            (4000, "Memory: 100K available"),
            (4500, "something else"),
            (7000, "Run /init as init process"),
            (8000, own.as_str()),
        ]);
        let short: Vec<(&str, u64, u64)> = spans
            .iter()
            .map(|span| (span.name.as_str(), span.start_ns, span.end_ns))
            .collect();
        assert_eq!(
            short,
            [
                ("kernel vCPUs", 1000, 2000),
                ("kernel memory", 2000, 5000),
                ("kernel hand-over", 5000, 8000)
            ]
        );
        assert!(spans.iter().all(|span| span.kernel));
    }

    proptest! {
        #[test]
        fn any_log_gives_spans_that_do_not_end_before_they_start(records in proptest::collection::vec((any::<u64>(), "(Memory: |Run /init|.{0,9})"), 0..20)) {
            let records: Vec<(u64, &str)> =
                records.iter().map(|(time, text)| (*time, text.as_str())).collect();
            for span in milestones(&records) {
                prop_assert!(span.start_ns <= span.end_ns);
            }
        }

        #[test]
        fn any_record_is_parsed(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = parse(&bytes);
        }
    }
}
