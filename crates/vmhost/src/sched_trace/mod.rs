//! Recordings of which thread ran on which CPU, by the kernel's own tracepoints, whoever schedules
//! (docs/scheduler.md).

mod pages;
mod runs;
mod tracefs;

use crate::scheduler::ProcessChange;
use jiffy_content::error::{Error, Result};
use jiffy_sys::clock::monotonic_ns;
use jiffy_wire::api::SchedTrace;
use pages::{Format, events};
use runs::{EVENTS, Present, Runs, event};
use std::fs;
use std::io;
use tracefs::{Instance, Tracefs};

/// Removes what a daemon left that was killed while it recorded. Without root it could leave nothing.
pub fn remove_left_over() {
    if rustix::process::geteuid().is_root() {
        let _ = Tracefs::open().and_then(|tracefs| tracefs.remove_left_over());
    }
}

/// A recording in progress; dropping it ends it and leaves nothing.
#[derive(Debug)]
pub struct Recording {
    instance: Instance,
    formats: Vec<Format>,
    cpus: Vec<u32>,
    begin_ns: u64,
    present: Vec<Present>,
    policy: Option<String>,
}

impl Recording {
    /// Begins a recording. Blocks for some milliseconds.
    ///
    /// # Errors
    ///
    /// If this is not root, or the kernel's tracing can't be used.
    pub fn begin() -> Result<Recording> {
        let user = rustix::process::geteuid();
        if !user.is_root() {
            return Err(Error::invalid(format!(
                "Recording what runs on each CPU needs root, and jiffyd is run by user {}.",
                user.as_raw()
            ))
            .hint("Run jiffyd as root for it."));
        }
        begin().map_err(|error| {
            Error::internal(format!(
                "What runs on each CPU can't be recorded: the kernel's tracing (tracefs): {error}."
            ))
            .hint("It needs a kernel with CONFIG_FTRACE and its tracepoints, as Debian's have, and no lockdown.")
        })
    }

    /// Ends the recording. Blocks while it reads; `told` is what the daemon knows of processes.
    ///
    /// # Errors
    ///
    /// If the recording can't be read.
    pub fn end(self, clock: String, told: Vec<ProcessChange>) -> Result<SchedTrace> {
        self.finish(clock, told).map_err(|error| {
            Error::internal(format!("The kernel's recording can't be read: {error}."))
        })
    }

    fn finish(self, clock: String, told: Vec<ProcessChange>) -> io::Result<SchedTrace> {
        self.instance.stop()?;
        let end_ns = monotonic_ns();
        let (mut found, mut lost, mut full) = (Vec::new(), 0, Vec::new());
        for cpu in self.cpus.iter().copied() {
            let missing = self.instance.lost(cpu)?;
            lost += missing;
            if missing > 0 {
                full.push(cpu);
            }
            self.instance.pages(cpu, |page| {
                events(page, |at_ns, data| {
                    found.extend(event(&self.formats, at_ns, cpu, data));
                });
            })?;
        }
        // Events of one CPU are in order already, and stay so.
        found.sort_by_key(|event| event.at_ns);
        let classes = self.policy.as_deref() == Some("jiffy");
        let mut runs = Runs::new(self.begin_ns, self.present, told, classes);
        for event in found {
            runs.push(event);
        }
        let (threads, runs) = runs.end(end_ns, &full);
        Ok(SchedTrace {
            clock,
            begin_ns: self.begin_ns,
            end_ns,
            cpus: self.cpus,
            lost,
            policy: self.policy,
            threads,
            runs,
        })
    }
}

fn begin() -> io::Result<Recording> {
    let tracefs = Tracefs::open()?;
    tracefs.remove_left_over()?;
    let instance = tracefs.instance()?;
    let cpus = instance.cpus()?;
    let formats = instance.start(&EVENTS, cpus.len())?;
    let begin_ns = monotonic_ns();
    // Threads that begin from now on are in the recording.
    let present = present();
    let policy = fs::read_to_string("/sys/kernel/sched_ext/root/ops").ok();
    Ok(Recording {
        instance,
        formats,
        cpus,
        begin_ns,
        present,
        policy: policy.map(|policy| policy.trim().to_owned()),
    })
}

/// All threads of this host.
fn present() -> Vec<Present> {
    let numbers = |folder: &str| -> Vec<u32> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let name = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
        entries.filter_map(name).collect()
    };
    let mut threads = Vec::new();
    for pid in numbers("/proc") {
        // Kernel threads have no memory that statm could count.
        let statm = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
        let is_kernel = statm.starts_with("0 ");
        for tid in numbers(&format!("/proc/{pid}/task")) {
            let name = fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm"));
            threads.push(Present {
                tid,
                pid,
                name: name.unwrap_or_default().trim_end_matches('\n').to_owned(),
                is_kernel,
            });
        }
    }
    threads
}
