//! Pages of the kernel's ring buffer, as `trace_pipe_raw` gives them, and the fields of events.
//!
//! Their layout is that of `events/header_page`, `events/header_event` (linux/ring_buffer.h) and, for
//! each event, its `format`. The kernel writes all of it.

use std::collections::HashMap;

/// Time stamp and length, before a page's events.
const HEADER: usize = 16;
/// The length's bits; those above say that events are missing.
const LENGTH: u64 = 0xfff_ffff;
/// Types of records (linux/ring_buffer.h).
const PADDING: u32 = 29;
const TIME_EXTEND: u32 = 30;
const TIME_STAMP: u32 = 31;

/// Calls `each` with the time and the data of every event of a page.
pub fn events(page: &[u8], mut each: impl FnMut(u64, &[u8])) {
    let (Some(mut time), Some(length)) = (long(page, 0), long(page, 8)) else {
        return;
    };
    let end = page.len().min(HEADER + (length & LENGTH) as usize);
    let page = &page[..end];
    let mut at = HEADER;
    while let Some(header) = word(page, at) {
        let (kind, delta) = (header & 31, u64::from(header >> 5));
        let next = word(page, at + 4).unwrap_or(0);
        let (data, after) = match kind {
            PADDING if delta == 0 => return,
            TIME_STAMP => {
                time = delta | u64::from(next) << 27;
                at += 8;
                continue;
            }
            TIME_EXTEND => {
                time = time.wrapping_add(delta | u64::from(next) << 27);
                at += 8;
                continue;
            }
            // The length counts itself.
            0 | PADDING => (at + 8, at + 4 + next.max(4) as usize),
            words => (at + 4, at + 4 + 4 * words as usize),
        };
        time = time.wrapping_add(delta);
        if kind != PADDING
            && let Some(data) = page.get(data..after)
        {
            each(time, data);
        }
        at = after;
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_ne_bytes(*bytes))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(u64::from_ne_bytes(*bytes))
}

/// Where the fields of an event are.
#[derive(Debug, Default)]
pub struct Format {
    /// The event's number.
    pub id: u32,
    /// Place and size, by name.
    fields: HashMap<String, (usize, usize)>,
}

impl Format {
    /// Reads an event's `format`.
    pub fn read(text: &str) -> Format {
        let mut format = Format::default();
        for line in text.lines() {
            if let Some(id) = line.strip_prefix("ID: ") {
                format.id = id.trim().parse().unwrap_or(0);
            }
            let mut parts = line.trim().split(';').map(str::trim);
            let named = parts.next().and_then(|part| part.strip_prefix("field:"));
            let mut number = |prefix| parts.next()?.strip_prefix(prefix)?.parse().ok();
            if let Some(named) = named
                && let (Some(offset), Some(size)) = (number("offset:"), number("size:"))
                && let Some(name) = named.split(' ').next_back()
            {
                let name = name.split('[').next().unwrap_or(name);
                format.fields.insert(name.to_owned(), (offset, size));
            }
        }
        format
    }

    /// A field that is a number.
    pub fn number(&self, data: &[u8], field: &str) -> Option<u64> {
        let bytes = self.bytes(data, field)?;
        let mut value = [0; 8];
        value.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(u64::from_ne_bytes(value))
    }

    /// A field that is a task's name: any bytes up to a zero.
    pub fn name(&self, data: &[u8], field: &str) -> Option<String> {
        let bytes = self.bytes(data, field)?;
        let name = bytes.split(|byte| *byte == 0).next()?;
        Some(String::from_utf8_lossy(name).into_owned())
    }

    fn bytes<'a>(&self, data: &'a [u8], field: &str) -> Option<&'a [u8]> {
        let (offset, size) = *self.fields.get(field)?;
        data.get(offset..offset.checked_add(size)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FORMAT: &str = "name: sched_wakeup\nID: 314\nformat:\n\
        \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\
        \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n\
        \tfield:char comm[16];\toffset:8;\tsize:16;\tsigned:0;\n\
        \tfield:pid_t pid;\toffset:24;\tsize:4;\tsigned:1;\n\n\
        print fmt: \"comm=%s\", REC->comm\n";

    #[test]
    fn fields_are_found_by_their_format() {
        let format = Format::read(FORMAT);
        assert_eq!(format.id, 314);
        let mut data = [0; 28];
        data[..2].copy_from_slice(&314u16.to_ne_bytes());
        data[8..13].copy_from_slice(b"a\nb\"\xff");
        data[24..28].copy_from_slice(&77u32.to_ne_bytes());
        assert_eq!(format.number(&data, "common_type"), Some(314));
        assert_eq!(format.number(&data, "pid"), Some(77));
        assert_eq!(format.name(&data, "comm").unwrap(), "a\nb\"\u{fffd}");
        assert_eq!(format.number(&data, "prio"), None);
        assert_eq!(format.number(&data[..20], "pid"), None);
        assert_eq!(format.number(&data, "comm"), None);
    }

    /// A page with these records after its header.
    fn page(time: u64, length: u64, records: &[u32]) -> Vec<u8> {
        let mut page = time.to_ne_bytes().to_vec();
        page.extend(length.to_ne_bytes());
        page.extend(records.iter().flat_map(|word| word.to_ne_bytes()));
        page
    }

    fn read(page: &[u8]) -> Vec<(u64, Vec<u8>)> {
        let mut found = Vec::new();
        events(page, |time, data| found.push((time, data.to_vec())));
        found
    }

    #[test]
    fn events_have_the_times_of_their_records() {
        let records = [
            // One word, 5 ns later; a long one, whose length counts itself.
            1 | 5 << 5,
            7,
            7 << 5,
            12,
            8,
            9,
            // An event that was discarded; a long time; a time stamp.
            PADDING | 1 << 5,
            8,
            0,
            TIME_EXTEND | 3 << 5,
            1,
            1 | 1 << 5,
            10,
            TIME_STAMP | 11 << 5,
            0,
            1,
            11,
            // The rest of the page.
            PADDING,
            1,
        ];
        let expected = [
            (1005, vec![7]),
            (1012, vec![8, 9]),
            (1017 + (1 << 27), vec![10]),
            (11, vec![11]),
        ];
        let expected = expected.map(|(time, words): (u64, Vec<u32>)| {
            let bytes = words.iter().flat_map(|word| word.to_ne_bytes());
            (time, bytes.collect::<Vec<u8>>())
        });
        let length = 4 * records.len() as u64;
        // Bit 31: events were lost before this page.
        let whole = page(1000, length | 1 << 31, &records);
        assert_eq!(read(&whole), expected);
        // Bytes after the length are of an earlier use of the page.
        assert_eq!(read(&page(1000, 8, &records)), expected[..1]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_to_their_end(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            read(&bytes);
        }
    }
}
