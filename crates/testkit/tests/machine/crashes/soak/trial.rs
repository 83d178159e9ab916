//! State shared by workers and the killer: commands with judged results, and a log of the last
//! events.

use super::kills::Kills;
use crate::support::Jiffy;
use jiffy_testkit::Output;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A command that takes longer hangs. Longer than the time limit of a guest's start.
const HANG_LIMIT: Duration = Duration::from_secs(300);
/// Number of polls for a standby and a spare between two runs that make the node prepare them.
const POLLS_PER_RUN: u32 = 50;
/// Number of events in a report.
const MOST_EVENTS: usize = 80;
/// Exit status of a `jiffy` that failed, and of one killed by SIGKILL.
const FAILED: i32 = 125;
const KILLED: i32 = 137;

/// Result of a command.
pub enum Answer {
    /// It succeeded with this output.
    Done(String),
    /// It failed with a message or was killed, and a kill explains that.
    Failed,
    /// It failed with a message that the caller tolerates.
    Refused,
}

/// The shared state.
pub struct Trial<'a> {
    pub jiffy: &'a Jiffy,
    /// Whether workers must finish.
    pub stopping: AtomicBool,
    pub kills: Mutex<Kills>,
    /// Number of commands begun; the killer waits for a number of them.
    pub begun: AtomicUsize,
    done: AtomicUsize,
    failed: AtomicUsize,
    events: Mutex<VecDeque<String>>,
    failure: Mutex<Option<String>>,
    since: Instant,
}

impl<'a> Trial<'a> {
    pub fn new(jiffy: &'a Jiffy) -> Trial<'a> {
        Trial {
            jiffy,
            stopping: AtomicBool::new(false),
            kills: Mutex::default(),
            begun: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            failed: AtomicUsize::new(0),
            events: Mutex::default(),
            failure: Mutex::default(),
            since: Instant::now(),
        }
    }

    pub fn continues(&self) -> bool {
        !self.stopping.load(Ordering::Relaxed)
    }

    /// Adds a line to the report.
    pub fn note(&self, what: &str) {
        let mut events = self.events.lock().unwrap();
        if events.len() == MOST_EVENTS {
            events.pop_front();
        }
        let at = self.since.elapsed().as_secs_f64();
        events.push_back(format!("{at:9.3} {what}"));
    }

    /// Runs `work`. A failure ends all work. Only the first failure is kept, because it may cause
    /// others.
    pub fn run_or_stop(&self, work: impl FnOnce() -> Result<(), String>) {
        if let Err(why) = work() {
            self.note(&format!("FAILURE: {why}"));
            self.failure.lock().unwrap().get_or_insert(why);
            self.stopping.store(true, Ordering::Relaxed);
        }
    }

    pub fn result(&self) -> Result<(), String> {
        self.failure.lock().unwrap().take().map_or(Ok(()), Err)
    }

    /// Runs `jiffy`. It must succeed, or fail with one sentence and be explained by a kill: of any
    /// process meanwhile, or earlier of the VMM of this VM (an id).
    pub fn ask(&self, vm: Option<&str>, arguments: &[&str]) -> Result<Answer, String> {
        self.ask_tolerating(vm, arguments, |_| false)
    }

    /// Like [`ask`](Self::ask); a failure whose message `tolerates` accepts needs no kill.
    pub fn ask_tolerating(
        &self,
        vm: Option<&str>,
        arguments: &[&str],
        tolerates: impl FnOnce(&str) -> bool,
    ) -> Result<Answer, String> {
        let began = Instant::now();
        self.begun.fetch_add(1, Ordering::Relaxed);
        let command = self.jiffy.command(arguments).time_limit(HANG_LIMIT);
        let output = command.output().map_err(|error| format!("{error:#}"))?;
        let line = format!("jiffy {}", arguments.join(" "));
        let (code, said) = (output.code(), output.error_text());
        let took = began.elapsed().as_millis();
        self.note(&format!("{line}: {code} after {took} ms {said}"));
        let what = || format!("{line}: status {code}, {said:?} {:?}", output.text());
        if said.contains("panicked") {
            return Err(what());
        }
        if code == 0 {
            self.done.fetch_add(1, Ordering::Relaxed);
            return Ok(Answer::Done(output.text()));
        }
        self.failed.fetch_add(1, Ordering::Relaxed);
        // Waits for a kill in progress.
        let kills = self.kills.lock().unwrap();
        match code {
            KILLED if kills.client_killed_since(began) => Ok(Answer::Failed),
            FAILED if !is_one_sentence(&output) => {
                Err(format!("not exactly one sentence: {}", what()))
            }
            FAILED if tolerates(&said) => Ok(Answer::Refused),
            FAILED if kills.explains(began, vm, &said) => Ok(Answer::Failed),
            FAILED => Err(format!("no kill explains it: {}", what())),
            _ => Err(what()),
        }
    }

    /// Repeats a command until it succeeds; `None` if the VMM of this VM (an id) was killed.
    pub fn retry(&self, vm: Option<&str>, arguments: &[&str]) -> Result<Option<String>, String> {
        loop {
            match self.ask(vm, arguments)? {
                Answer::Done(text) => return Ok(Some(text)),
                Answer::Failed if vm.is_some_and(|vm| self.was_killed(vm)) => return Ok(None),
                Answer::Failed | Answer::Refused => {}
            }
        }
    }

    /// Repeats a command that needs no running VM until it succeeds.
    pub fn retry_until_done(&self, arguments: &[&str]) -> Result<String, String> {
        Ok(self.retry(None, arguments)?.expect("of no VM"))
    }

    fn was_killed(&self, vm: &str) -> bool {
        self.kills.lock().unwrap().killed_vmm_of(vm).is_some()
    }

    /// Waits until a condition holds.
    pub fn eventually(
        &self,
        what: &str,
        mut holds: impl FnMut() -> Result<bool, String>,
    ) -> Result<(), String> {
        let deadline = Instant::now() + HANG_LIMIT;
        while !holds()? {
            if Instant::now() >= deadline {
                return Err(format!("{what}: not within {HANG_LIMIT:?}"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Waits until the node has a golden snapshot, a standby and a spare.
    pub fn warm_up(&self) -> Result<(), String> {
        self.jiffy.warm_up();
        let spares = "grep -l -e /vms/------------/ /proc/[0-9]*/cmdline 2>/dev/null || true";
        let mut looks = 0;
        self.eventually("a VM and a VMM kept ready", || {
            // A run makes the node prepare the next standby. If that fails, the node does not retry
            // before the next run.
            if looks % POLLS_PER_RUN == 0 {
                self.retry_until_done(&["run", "--rm", "--", "true"])?;
            }
            looks += 1;
            Ok(!self.jiffy.standbys().is_empty() && !self.jiffy.sh(spares).is_empty())
        })
    }

    /// Checks that no program of Jiffy's has panicked.
    pub fn has_not_panicked(&self) -> Result<(), String> {
        let logs = "grep -h panicked /run/jiffy/*.log /var/lib/jiffy/vms/*/vmm.log || true";
        let panics = self.jiffy.sh(logs);
        match panics.as_str() {
            "" => Ok(()),
            panics => Err(panics.to_owned()),
        }
    }

    pub fn summary(&self) -> String {
        let count = |number: &AtomicUsize| number.load(Ordering::Relaxed);
        format!(
            "{} commands succeeded, {} failed; killed: {}",
            count(&self.done),
            count(&self.failed),
            self.kills.lock().unwrap().summary()
        )
    }

    /// Whether enough commands succeeded for a meaningful test.
    pub fn succeeded(&self) -> bool {
        self.done.load(Ordering::Relaxed) > self.failed.load(Ordering::Relaxed)
    }

    /// The last events and the end of the daemon's log.
    pub fn report(&self) -> String {
        let events = self.events.lock().unwrap();
        let mut text = String::from("the last commands and kills (seconds, what):\n");
        for line in events.iter() {
            text += &format!("{line}\n");
        }
        let logs = "JIFFY_MACHINE=never /bin/jiffy ps -a; tail -n 120 /run/jiffy/jiffyd.log; \
                    for log in /var/lib/jiffy/vms/*/vmm.log; do echo \"== $log\"; \
                    tail -n 5 $log; done 2>/dev/null; dmesg | tail -n 10";
        let said = self.jiffy.lab.sh(logs).map(|output| output.text());
        text + "the node's VMs, its log, and its monitors':\n"
            + &said.unwrap_or_else(|error| format!("{error:#}"))
    }
}

/// Whether the output is one sentence, with or without a hint.
fn is_one_sentence(output: &Output) -> bool {
    let text = output.error_text();
    let is_sentence = |line: &&str| line.starts_with("jiffy: ");
    let is_ours = |line: &str| is_sentence(&line) || line.starts_with("  hint: ");
    text.lines().filter(is_sentence).count() == 1 && text.lines().all(is_ours)
}
