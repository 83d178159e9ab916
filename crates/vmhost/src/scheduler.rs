//! Tells the host's scheduling policy which processes are urgent: `jiffy-sched`, if it was asked for
//! (docs/scheduler.md).
//!
//! Nothing depends on it. If it can't be started, or ends, the kernel's own scheduler runs the VMs.

use jiffy_content::paths::Paths;
use jiffy_sys::clock::monotonic_ns;
use jiffy_sys::mutex::lock;
use jiffy_wire::lines::{self, Lines};
use jiffy_wire::sched::{Class, LONGEST_LINE, PolicyEvent, SetClass};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use tokio::io::AsyncReadExt;
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tracing::{debug, info, warn};

/// The policy of the host's scheduler, if there is one.
#[derive(Debug, Default)]
pub struct Scheduler {
    /// The stdin of `jiffy-sched`.
    input: Mutex<Option<OwnedFd>>,
    /// What a recording in progress wants to know.
    journal: Mutex<Option<Vec<ProcessChange>>>,
    /// Processes that are urgent as long as they live.
    urgent: Mutex<Vec<u32>>,
}

/// What became of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessChange {
    /// When, by the monotonic clock.
    pub at_ns: u64,
    /// The process.
    pub pid: u32,
    /// The VM whose monitor it is from now on, if it was not before.
    pub vm: Option<String>,
    /// Its class from now on, if the policy was told one.
    pub class: Option<Class>,
}

/// Collects what becomes of processes until it is dropped.
#[derive(Debug)]
pub struct Journal(Arc<Scheduler>);

impl Journal {
    /// What was collected, oldest first.
    pub fn take(&self) -> Vec<ProcessChange> {
        let mut journal = lock(&self.0.journal);
        journal.as_mut().map(std::mem::take).unwrap_or_default()
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        *lock(&self.0.journal) = None;
    }
}

impl Scheduler {
    /// No policy: nice values do what they can.
    pub fn none() -> Scheduler {
        Scheduler::default()
    }

    /// Starts `jiffy-sched`. It ends with this process, because its stdin is closed then.
    pub fn start(paths: &Paths) -> Scheduler {
        match spawn(paths) {
            Ok((child, input, output)) => {
                let own = child.id();
                tokio::spawn(watch(child, output));
                let scheduler = Scheduler {
                    input: Mutex::new(Some(input)),
                    // It has told the policy about itself.
                    urgent: Mutex::new(own.into_iter().collect()),
                    ..Scheduler::default()
                };
                scheduler.tell(std::process::id(), Class::Urgent);
                scheduler
            }
            Err(error) => {
                let program = paths.sched();
                warn!(program = %program.display(), %error, "the scheduling policy can't be started: the kernel's own scheduler runs the VMs");
                Scheduler::none()
            }
        }
    }

    /// Collects from now on, for one recording at a time.
    pub fn journal(self: &Arc<Scheduler>) -> Option<Journal> {
        let mut journal = lock(&self.journal);
        if journal.is_some() {
            return None;
        }
        let urgent = lock(&self.urgent);
        let told = urgent.iter().map(|pid| ProcessChange {
            at_ns: 0,
            pid: *pid,
            vm: None,
            class: Some(Class::Urgent),
        });
        *journal = Some(told.collect());
        Some(Journal(Arc::clone(self)))
    }

    fn note(&self, pid: u32, vm: Option<&str>, class: Option<Class>) {
        if let Some(told) = lock(&self.journal).as_mut() {
            told.push(ProcessChange {
                at_ns: monotonic_ns(),
                pid,
                vm: vm.map(str::to_owned),
                class,
            });
        }
    }

    /// A process is the monitor of a VM from now on, and the VM starts. One in the background has a
    /// nice value, which is sufficient.
    pub fn starts(&self, pid: u32, vm: &str, in_background: bool) {
        self.note(pid, Some(vm), None);
        if !in_background {
            self.tell(pid, Class::Launch);
        }
    }

    /// The class of a process from now on. A no-op without a policy.
    pub fn tell(&self, pid: u32, class: Class) {
        self.note(pid, None, Some(class));
        if class == Class::Urgent {
            let mut urgent = lock(&self.urgent);
            urgent.retain(|pid| Path::new("/proc").join(pid.to_string()).exists());
            urgent.push(pid);
        }
        let mut input = lock(&self.input);
        let Some(pipe) = input.as_ref() else { return };
        let Ok(line) = lines::encode(&SetClass { pid, class }) else {
            return;
        };
        // Shorter than PIPE_BUF: all of it is written, or nothing.
        match rustix::io::write(pipe, &line) {
            Ok(_) => {}
            Err(rustix::io::Errno::AGAIN) => {
                debug!(pid, ?class, "the scheduling policy does not read its input")
            }
            Err(_) => *input = None,
        }
    }
}

fn spawn(paths: &Paths) -> io::Result<(Child, OwnedFd, ChildStdout)> {
    let mut child = Command::new(paths.sched())
        .arg("--policy")
        .arg(paths.sched_policy())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let taken = child.stdin.take().zip(child.stdout.take());
    let (input, output): (ChildStdin, ChildStdout) = taken.ok_or(io::ErrorKind::BrokenPipe)?;
    let input = input.into_owned_fd()?;
    rustix::io::ioctl_fionbio(&input, true)?;
    Ok((child, input, output))
}

/// Reports what becomes of the policy, and reaps its process.
async fn watch(mut child: Child, mut output: ChildStdout) {
    let mut lines = Lines::new(LONGEST_LINE);
    let mut bytes = [0; 1024];
    let mut why = None;
    while let Ok(length @ 1..) = output.read(&mut bytes).await {
        lines.push(&bytes[..length]);
        while let Ok(Some(line)) = lines.next_line() {
            match serde_json::from_slice(&line) {
                Ok(PolicyEvent::Loaded) => info!("jiffy-sched schedules this host"),
                Ok(PolicyEvent::Ended { reason }) => why = Some(reason),
                Err(error) => debug!(%error, "a line of jiffy-sched is not a message"),
            }
        }
    }
    let status = child.wait().await;
    let why = why.unwrap_or_else(|| match status {
        Ok(status) => format!("jiffy-sched ended: {status}"),
        Err(error) => error.to_string(),
    });
    warn!(
        why,
        "the kernel's own scheduler runs the VMs from now on; restart jiffyd to try again"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::time::Duration;

    fn paths(folder: &Path) -> Paths {
        Paths {
            data: folder.into(),
            run: folder.into(),
            lib: folder.into(),
            share: folder.into(),
            socket: folder.join("jiffyd.sock"),
            peer: None,
        }
    }

    #[test]
    fn a_recording_begins_with_the_urgent_processes_that_live() {
        let scheduler = Arc::new(Scheduler::none());
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        scheduler.tell(ended.id(), Class::Urgent);
        ended.wait().unwrap();
        scheduler.tell(std::process::id(), Class::Urgent);
        let journal = scheduler.journal().unwrap();
        let pids: Vec<_> = journal.take().iter().map(|told| told.pid).collect();
        assert_eq!(pids, [std::process::id()]);
    }

    #[tokio::test]
    async fn each_class_is_a_line_and_the_end_of_the_program_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let paths = paths(folder.path());
        let script = "#!/bin/sh\nhead -n 2 > \"$0.told\"\n";
        jiffy_sys::testing::write_program(&paths.sched(), script);
        let scheduler = Scheduler::start(&paths);
        scheduler.tell(7, Class::Launch);
        let told = folder.path().join("jiffy-sched.told");
        let expected = format!(
            "{{\"pid\":{},\"class\":\"urgent\"}}\n{{\"pid\":7,\"class\":\"launch\"}}\n",
            std::process::id()
        );
        while fs::read_to_string(&told).unwrap_or_default() != expected {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // It has ended: telling it more finds a closed pipe.
        while scheduler.input.lock().unwrap().is_some() {
            scheduler.tell(7, Class::Steady);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[test]
    fn one_recording_at_a_time_learns_what_becomes_of_processes() {
        let scheduler = Arc::new(Scheduler::none());
        scheduler.starts(6, "early", false);
        scheduler.tell(5, Class::Urgent);
        let journal = scheduler.journal().unwrap();
        assert!(scheduler.journal().is_none());
        scheduler.starts(7, "box", false);
        scheduler.starts(8, "golden", true);
        let told = journal.take().into_iter();
        let told: Vec<_> = told.map(|told| (told.pid, told.vm, told.class)).collect();
        let expected = [
            (5, None, Some(Class::Urgent)),
            (7, Some("box".to_owned()), None),
            (7, None, Some(Class::Launch)),
            (8, Some("golden".to_owned()), None),
        ];
        assert_eq!(told, expected);
        drop(journal);
        assert!(scheduler.journal().is_some());
    }

    #[tokio::test]
    async fn without_the_program_nothing_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let scheduler = Scheduler::start(&paths(folder.path()));
        scheduler.tell(7, Class::Launch);
        assert!(scheduler.input.lock().unwrap().is_none());
    }
}
