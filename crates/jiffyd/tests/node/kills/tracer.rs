//! Kills a daemon at one of its system calls, by `examples/killer`.

use crate::client::TIMEOUT;
use crate::daemon::{Daemon, example};
use rustix::fs::{CWD, FileType, Mode};
use std::fmt;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Printed by the tracer before it kills.
const KILLED: &str = "killed";

/// The NTH call of a kind, counted over all threads of the daemon.
#[derive(Debug, Clone)]
pub struct Point {
    pub when: &'static str,
    pub call: String,
    pub nth: usize,
}

impl fmt::Display for Point {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{} call {} of {}", self.when, self.nth, self.call)
    }
}

/// Traces a daemon, and kills it if requested.
pub struct Killer {
    process: Child,
    output: BufReader<ChildStdout>,
}

impl Killer {
    /// Traces a process; when this returns, all of its threads are traced.
    pub fn of(pid: u32, point: Option<&Point>) -> Killer {
        let mut command = Command::new(example("killer"));
        command.arg(pid.to_string());
        if let Some(point) = point {
            command.args([point.when, &point.call, &point.nth.to_string()]);
        }
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n", "the process is traced");
        Killer { process, output }
    }

    /// Traces the next daemon from its first call on.
    pub fn of_next(daemon: &mut Daemon, point: Option<&Point>) -> Killer {
        let gate = daemon.folder.path().join("gate");
        let mode = Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(CWD, &gate, FileType::Fifo, mode, 0).unwrap();
        let next = daemon.command();
        let mut held = Command::new("/bin/sh");
        held.args(["-c", "read _ <\"$0\"; exec \"$@\""]).arg(&gate);
        held.arg(next.get_program()).args(next.get_args());
        for (name, value) in next.get_envs() {
            held.env(name, value.unwrap_or_default());
        }
        daemon.begin(held);
        let killer = Killer::of(daemon.pid(), point);
        fs::write(&gate, "\n").unwrap();
        fs::remove_file(&gate).unwrap();
        killer
    }

    /// Has it killed the daemon within this time? If not, it stops tracing, and the daemon continues.
    pub fn kills_within(&mut self, time: Duration, daemon: &mut Daemon) -> bool {
        let until = Instant::now() + time;
        while daemon.is_up() {
            if Instant::now() >= until {
                // On a busy host, it may be about to kill.
                return self.stop().lines().any(|line| line == KILLED);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        true
    }

    /// Stops tracing; returns the names of the traced calls.
    pub fn calls(mut self) -> Vec<String> {
        self.stop().lines().map(str::to_owned).collect()
    }

    fn stop(&mut self) -> String {
        let _ = self.process.kill();
        let mut text = String::new();
        self.output.read_to_string(&mut text).unwrap();
        text
    }
}

impl Drop for Killer {
    fn drop(&mut self) {
        // The daemon continues, if it is alive.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts the next daemon; returns the time until it answers.
pub fn up(daemon: &mut Daemon) -> Duration {
    let begin = Instant::now();
    daemon.begin(daemon.command());
    while super::ask(daemon, "GET", "/v1/info", b"").is_err() {
        assert!(daemon.is_up(), "the next daemon ended");
        assert!(begin.elapsed() < TIMEOUT, "the next daemon does not answer");
        std::thread::sleep(Duration::from_millis(2));
    }
    begin.elapsed()
}
