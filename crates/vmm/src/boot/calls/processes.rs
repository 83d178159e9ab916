//! Programs, and threads of the kernel, from their starts to their ends.

use super::record::Record;
use super::{Noted, What, noted};
use std::collections::BTreeMap;

/// What runs in processes that no program was executed in.
const KERNEL: &str = "kernel";

/// Processes and threads of the kernel that have not ended, and what was found of others.
#[derive(Default)]
pub struct Processes {
    programs: BTreeMap<u32, Started>,
    kernel_threads: BTreeMap<u32, Started>,
    found: Vec<Noted>,
}

/// Something that has started.
struct Started {
    name: String,
    at: u64,
}

impl Processes {
    /// The programs and threads in these records: what has ended in the order of ends, then what has
    /// not, up to a time if nothing is known of later ones. A thread of the kernel that has not ended
    /// is the moment of its start.
    pub fn of(records: &[(u64, Record)], known_until: Option<u64>) -> Vec<Noted> {
        let mut processes = Processes::default();
        for (tsc, record) in records {
            processes.note(*tsc, record);
        }
        let mut found = processes.found;
        found.extend(processes.programs.iter().map(|(pid, it)| Noted {
            what: What::Program(with_pid(&it.name, *pid)),
            start: it.at,
            end: known_until.map(|end| end.max(it.at)),
        }));
        let threads = processes.kernel_threads.iter();
        found.extend(threads.map(|(pid, it)| kernel_thread(*pid, it, it.at)));
        found
    }

    fn note(&mut self, at: u64, record: &Record) {
        match record {
            // Until it executes a program it runs its parent's.
            Record::Process { pid, parent } => {
                let parent = self.programs.get(parent);
                let name = parent.map_or(KERNEL, |parent| parent.name.as_str());
                self.start_program(*pid, name.to_owned(), at);
            }
            Record::Exec { pid, name } => self.start_program(*pid, name.clone(), at),
            Record::Thread { pid, process } => {
                let name = format!("thread {pid} of {process}");
                self.found.push(noted(What::Program(name), at, at));
            }
            Record::KernelThread { pid, name } => {
                let name = name.clone();
                let before = self.kernel_threads.insert(*pid, Started { name, at });
                self.found
                    .extend(before.map(|it| kernel_thread(*pid, &it, at)));
            }
            Record::Exit { pid, status } => {
                if let Some(it) = self.programs.remove(pid) {
                    let name = with_pid(&it.name, *pid) + &ended(*status);
                    self.found.push(noted(What::Program(name), it.at, at));
                } else if let Some(it) = self.kernel_threads.remove(pid) {
                    self.found.push(kernel_thread(*pid, &it, at));
                }
            }
            _ => {}
        }
    }

    /// The program replaces what ran in its process.
    fn start_program(&mut self, pid: u32, name: String, at: u64) {
        if let Some(before) = self.programs.insert(pid, Started { name, at }) {
            let name = with_pid(&before.name, pid);
            self.found.push(noted(What::Program(name), before.at, at));
        }
    }
}

fn kernel_thread(pid: u32, started: &Started, end: u64) -> Noted {
    let name = with_pid(&started.name, pid);
    noted(What::KernelThread(name), started.at, end)
}

fn with_pid(name: &str, pid: u32) -> String {
    format!("{name} ({pid})")
}

/// How a process has ended, if not with status 0.
fn ended(status: u32) -> String {
    match (status & 0x7f, status >> 8 & 0xff) {
        (0, 0) => String::new(),
        (0, code) => format!(", exit {code}"),
        (signal, _) => format!(", signal {signal}"),
    }
}
