//! Kills a process at one of its system calls that change a file or another process.
//!
//!     killer PID                        kills nothing
//!     killer PID before|after CALL NTH  kills PID at its NTH such call
//!
//! All threads are traced, and counted together; child processes are not traced. Prints `ready`
//! when all threads are traced, then a line for each call that has succeeded, as [`calls`] names
//! them, and `killed` before it kills. It runs until the process has ended or it is killed itself: then the process continues.
//!
//! strace(1) can't do this: its `when=` counts the calls of each thread separately.

mod calls;

use calls::{Call, called};
use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

/// `PTRACE_SYSCALL_INFO_ENTRY` and `…_EXIT` of linux/ptrace.h.
const ENTRY: u8 = 1;
const EXIT: u8 = 2;
/// `PTRACE_EVENT_STOP`: a new thread stops, or one that was interrupted.
const STOPPED: i32 = 128;
/// How long a child that has not executed its program yet is held after its parent's death.
const HELD: Duration = Duration::from_millis(100);

/// When to kill the process.
struct Point {
    is_before: bool,
    call: Call,
    nth: u32,
}

struct Tracer {
    process: Pid,
    point: Option<Point>,
    /// How many of the point's calls were seen.
    seen: u32,
    /// By thread: the call that it is in, if that counts.
    within: HashMap<Pid, Option<Call>>,
    /// Children that are stopped before their first instruction.
    children: HashSet<Pid>,
    /// By thread: the child that it has just created, until its stop is seen.
    expected: HashSet<Pid>,
    /// All threads are traced, so calls count.
    is_ready: bool,
    is_killed: bool,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (process, point) = match words[..] {
        [process] => (process, None),
        [process, when @ ("before" | "after"), call, nth] => {
            let point = Point {
                is_before: when == "before",
                call: Call::from_str(call).unwrap(),
                nth: nth.parse().unwrap(),
            };
            (process, Some(point))
        }
        _ => {
            eprintln!("killer: PID [before|after CALL NTH]");
            std::process::exit(2);
        }
    };
    let mut tracer = Tracer {
        process: Pid::from_raw(process.parse().unwrap()),
        point,
        seen: 0,
        within: HashMap::new(),
        children: HashSet::new(),
        expected: HashSet::new(),
        is_ready: false,
        is_killed: false,
    };
    tracer.attach();
    println!("ready");
    tracer.is_ready = true;
    while tracer.step() {}
    tracer.release_children();
}

impl Tracer {
    /// Repeats until no unknown thread is found: threads create others meanwhile.
    fn attach(&mut self) {
        let options = Options::PTRACE_O_TRACESYSGOOD
            | Options::PTRACE_O_TRACECLONE
            | Options::PTRACE_O_TRACEFORK
            | Options::PTRACE_O_TRACEVFORK;
        loop {
            let unknown: Vec<Pid> = self
                .threads()
                .into_iter()
                .filter(|thread| !self.within.contains_key(thread))
                .collect();
            if unknown.is_empty() {
                return;
            }
            for thread in unknown {
                match ptrace::seize(thread, options) {
                    Ok(()) => ptrace::interrupt(thread).unwrap(),
                    // The thread has ended, or was attached with its creator.
                    Err(Errno::ESRCH | Errno::EPERM) => {}
                    Err(error) => panic!("thread {thread}: {error}"),
                }
                while self.exists(thread) && !self.within.contains_key(&thread) {
                    assert!(self.step(), "the process has ended");
                }
            }
        }
    }

    fn threads(&self) -> Vec<Pid> {
        let threads = fs::read_dir(format!("/proc/{}/task", self.process));
        let names = threads.into_iter().flatten().flatten();
        names
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .map(Pid::from_raw)
            .collect()
    }

    fn exists(&self, thread: Pid) -> bool {
        Path::new(&format!("/proc/{}/task/{thread}", self.process)).exists()
    }

    /// Handles the next event; false when the process has ended.
    fn step(&mut self) -> bool {
        let status = match waitpid(Pid::from_raw(-1), Some(WaitPidFlag::__WALL)) {
            Ok(status) => status,
            Err(Errno::ECHILD) => return false,
            Err(error) => panic!("{error}"),
        };
        match status {
            WaitStatus::PtraceSyscall(thread) => self.syscall(thread),
            WaitStatus::PtraceEvent(thread, _, STOPPED) => self.stopped(thread),
            WaitStatus::PtraceEvent(thread, ..) => self.made(thread),
            WaitStatus::Stopped(thread, signal) => resume_thread(thread, Some(signal)),
            WaitStatus::Exited(thread, _) | WaitStatus::Signaled(thread, ..) => {
                self.within.remove(&thread);
                return thread != self.process;
            }
            _ => {}
        }
        true
    }

    fn stopped(&mut self, thread: Pid) {
        if self.exists(thread) {
            self.within.insert(thread, None);
            resume_thread(thread, None);
        } else if self.expected.remove(&thread) && !self.is_killed {
            let _ = ptrace::detach(thread, None);
        } else {
            self.children.insert(thread);
        }
    }

    /// A thread has created a thread or a process.
    fn made(&mut self, thread: Pid) {
        let Ok(made) = ptrace::getevent(thread) else {
            return;
        };
        let made = Pid::from_raw(made as i32);
        if !self.exists(made) {
            self.expected.insert(made);
            self.counts(Call::Spawn);
            if !self.is_killed && self.children.remove(&made) {
                self.expected.remove(&made);
                let _ = ptrace::detach(made, None);
            }
        }
        resume_thread(thread, None);
    }

    fn syscall(&mut self, thread: Pid) {
        // It may have been killed meanwhile.
        let Ok(info) = ptrace::syscall_info(thread) else {
            return;
        };
        let Ok(registers) = ptrace::getregs(thread) else {
            return;
        };
        match info.op {
            ENTRY => {
                let call = called(thread, &registers);
                self.within.insert(thread, call);
                let strikes = |point: &Point| point.is_before && Some(point.call) == call;
                if self.is_ready && self.point.as_ref().is_some_and(strikes) {
                    self.kill_if_due();
                }
            }
            EXIT => {
                let call = self.within.insert(thread, None).flatten();
                if let Some(call) = call.filter(|_| (registers.rax as i64) >= 0) {
                    self.counts(call);
                }
            }
            _ => {}
        }
        resume_thread(thread, None);
    }

    /// A call has succeeded.
    fn counts(&mut self, call: Call) {
        if self.is_killed || !self.is_ready {
            return;
        }
        println!("{call}");
        let strikes = |point: &Point| !point.is_before && point.call == call;
        if self.point.as_ref().is_some_and(strikes) {
            self.kill_if_due();
        }
    }

    fn kill_if_due(&mut self) {
        self.seen += 1;
        if self
            .point
            .as_ref()
            .is_some_and(|point| point.nth == self.seen)
        {
            self.is_killed = true;
            println!("killed");
            let _ = kill(self.process, Signal::SIGKILL);
        }
    }

    /// Children that were created as the process was killed continue.
    fn release_children(&mut self) {
        if !self.expected.is_empty() || !self.children.is_empty() {
            std::thread::sleep(HELD);
        }
        for child in &self.children {
            let _ = ptrace::detach(*child, None);
        }
    }
}

/// Continues the thread until its next call or event. It may have been killed meanwhile.
fn resume_thread(thread: Pid, signal: Option<Signal>) {
    let _ = ptrace::syscall(thread, signal);
}
