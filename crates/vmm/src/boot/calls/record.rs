//! The records that a kernel writes.
//!
//! A record is a value of the time stamp counter and a word. The word is a function's address, or,
//! with the highest bit clear, that of a call that has ended. Other events have their kind in the
//! highest byte, a process id in the lowest three, and a number between; some have names, each in
//! one of the records that follow.

/// Bytes of a record.
pub const RECORD: usize = 16;
/// Set in all addresses of a kernel, and clear in those of calls that have ended.
pub const HIGHEST: u64 = 1 << 63;

/// What a record says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// The function at this address was called.
    Call(u64),
    /// It has returned.
    CallEnd(u64),
    /// A thread began to probe a device.
    Probe {
        /// The thread.
        pid: u32,
        /// Driver and device.
        name: String,
    },
    /// The thread's last probe that had not ended has ended.
    ProbeEnd {
        /// The thread.
        pid: u32,
        /// 0, or Linux's number of an error.
        error: u32,
    },
    /// A process was created.
    Process {
        /// Its id.
        pid: u32,
        /// Its parent's.
        parent: u32,
    },
    /// A thread of a process was created.
    Thread {
        /// Its id.
        pid: u32,
        /// Its process's.
        process: u32,
    },
    /// A thread of the kernel was created.
    KernelThread {
        /// Its id.
        pid: u32,
        /// Its name.
        name: String,
    },
    /// A process executes another program.
    Exec {
        /// Its id.
        pid: u32,
        /// The program's name.
        name: String,
    },
    /// A process or a thread of the kernel has ended.
    Exit {
        /// Its id.
        pid: u32,
        /// Its status, as wait(2) returns it.
        status: u32,
    },
}

/// The records in these bytes, each with its time.
pub fn decode(bytes: &[u8]) -> Vec<(u64, Record)> {
    let mut records = bytes.chunks_exact(RECORD);
    let mut decoded = Vec::new();
    while let Some(record) = records.next() {
        let (tsc, word) = (word(&record[..8]), word(&record[8..]));
        let pid = word as u32 & 0xff_ffff;
        let number = (word >> 24) as u32;
        let mut name = || text(records.next().unwrap_or(&[]));
        let record = match word >> 56 {
            1 => {
                let (driver, device) = (name(), name());
                let name = format!("{driver} {device}");
                Record::Probe { pid, name }
            }
            2 => Record::ProbeEnd { pid, error: number },
            3 => Record::Process {
                pid,
                parent: number,
            },
            4 => Record::Thread {
                pid,
                process: number,
            },
            5 => Record::KernelThread { pid, name: name() },
            6 => Record::Exec { pid, name: name() },
            7 => Record::Exit {
                pid,
                status: number,
            },
            _ if word & HIGHEST != 0 => Record::Call(word),
            _ => Record::CallEnd(word | HIGHEST),
        };
        decoded.push((tsc, record));
    }
    decoded
}

/// How many records at the end of these bytes are empty.
pub fn empty_at_end(bytes: &[u8]) -> u32 {
    let records = bytes.rchunks_exact(RECORD);
    records.take_while(|record| **record == [0; RECORD]).count() as u32
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("8 bytes"))
}

/// A name, which ends with a zero if it is short, in printable characters.
fn text(bytes: &[u8]) -> String {
    let bytes = bytes.iter().take_while(|byte| **byte != 0);
    let text: String = bytes
        .map(|byte| match byte {
            b' '..=b'~' => char::from(*byte),
            _ => '?',
        })
        .collect();
    match text.is_empty() {
        true => "?".to_owned(),
        false => text,
    }
}
