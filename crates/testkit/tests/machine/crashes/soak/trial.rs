//! State shared by workers, visitors and the killer: commands with judged results, and a log of the
//! last events.

use super::causes::{Causes, Victim};
use super::images::Sums;
use super::requests::{WAYS, Way};
use crate::support::Jiffy;
use jiffy_testkit::Output;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// A command that takes longer hangs. Longer than the time limit of a guest's start.
pub const HANG_LIMIT: Duration = Duration::from_secs(300);
/// Pause before a command is repeated or a condition is checked again.
const RETRY_PAUSE: Duration = Duration::from_millis(250);
/// Number of polls for a standby and a spare between two runs that make the node prepare them.
const POLLS_PER_RUN: u32 = 20;
/// A run of that length wakes VMs in each way.
const LONG: Duration = Duration::from_secs(900);
/// Number of events in a report.
const MOST_EVENTS: usize = 200;
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
    pub causes: Mutex<Causes>,
    /// Names of acknowledged VMs that nobody has removed, by id.
    pub acknowledged: Mutex<BTreeMap<String, String>>,
    /// Number of commands begun; the killer waits for a number of them.
    pub begun: AtomicUsize,
    /// The sums of the image's files.
    pub sums: OnceLock<Sums>,
    done: AtomicUsize,
    failed: AtomicUsize,
    /// How many requests were answered by VMs that slept when they began.
    woken: Mutex<BTreeMap<Way, usize>>,
    /// Looks for VMs that are awake twice, and the most VMMs that one has seen.
    looks: Mutex<(usize, usize)>,
    events: Mutex<VecDeque<String>>,
    failure: Mutex<Option<String>>,
    since: Instant,
}

impl<'a> Trial<'a> {
    pub fn new(jiffy: &'a Jiffy) -> Trial<'a> {
        Trial {
            jiffy,
            stopping: AtomicBool::new(false),
            causes: Mutex::default(),
            acknowledged: Mutex::default(),
            begun: AtomicUsize::new(0),
            sums: OnceLock::new(),
            done: AtomicUsize::new(0),
            failed: AtomicUsize::new(0),
            woken: Mutex::default(),
            looks: Mutex::default(),
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

    /// Like [`ask`](Self::ask); a failure whose message `tolerates` accepts needs no kill. The
    /// message may be that of a program in the VM.
    pub fn ask_tolerating(
        &self,
        vm: Option<&str>,
        arguments: &[&str],
        tolerates: impl FnOnce(&str) -> bool,
    ) -> Result<Answer, String> {
        let began = self.begin();
        let command = self.jiffy.command(arguments).time_limit(HANG_LIMIT);
        let output = command.output().map_err(|error| format!("{error:#}"))?;
        let line = format!("jiffy {}", arguments.join(" "));
        let (code, said) = (output.code(), output.error_text());
        let took = began.elapsed().as_millis();
        let outcome = format!("{line}: {code} after {took} ms {said}");
        let what = || format!("{line}: status {code}, {said:?} {:?}", output.text());
        if said.contains("panicked") {
            return Err(what());
        }
        if code == 0 {
            self.note(&outcome);
            self.count(true);
            return Ok(Answer::Done(output.text()));
        }
        if (code != FAILED || is_one_sentence(&output)) && tolerates(&said) {
            return Ok(Answer::Refused);
        }
        self.note(&outcome);
        // Waits for a kill in progress.
        let causes = self.causes.lock().unwrap();
        let is_client = |victim| victim == Victim::Client;
        let failed = match code {
            KILLED if causes.killed_since(began, is_client) => Ok(Answer::Failed),
            FAILED if !is_one_sentence(&output) => {
                Err(format!("not exactly one sentence: {}", what()))
            }
            FAILED if causes.explain(began, vm, &said) => Ok(Answer::Failed),
            FAILED => Err(format!("nothing explains it: {}", what())),
            _ => Err(what()),
        };
        self.count(false);
        failed
    }

    /// The sums of the image's files, once they are known.
    pub fn sums(&self) -> &Sums {
        self.sums.get().expect("read before all work")
    }

    /// Counts a request that begins now.
    pub fn begin(&self) -> Instant {
        self.begun.fetch_add(1, Ordering::Relaxed);
        Instant::now()
    }

    /// Counts an answer of a VM that slept when the request began.
    pub fn woken(&self, way: Way) {
        *self.woken.lock().unwrap().entry(way).or_default() += 1;
    }

    /// Adds what the watcher says at its end: `N looks, at most M VMMs`.
    pub fn watched(&self, said: &str) -> Result<(), String> {
        let numbers = said.split(' ').filter_map(|word| word.parse().ok());
        let &[looks, vmms] = &numbers.collect::<Vec<usize>>()[..] else {
            return Err(format!("the watcher said {said:?}"));
        };
        let mut all = self.looks.lock().unwrap();
        *all = (all.0 + looks, all.1.max(vmms));
        Ok(())
    }

    /// Counts a request that was answered, or was not.
    pub fn count(&self, was_answered: bool) {
        let counter = if was_answered {
            &self.done
        } else {
            &self.failed
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Repeats a command until it succeeds; `None` if the VMM of this VM (an id) was killed.
    pub fn retry(&self, vm: Option<&str>, arguments: &[&str]) -> Result<Option<String>, String> {
        loop {
            match self.ask(vm, arguments)? {
                Answer::Done(text) => return Ok(Some(text)),
                Answer::Failed if vm.is_some_and(|vm| self.was_killed(vm)) => return Ok(None),
                // On a full disk it fails until there is space.
                Answer::Failed | Answer::Refused => std::thread::sleep(RETRY_PAUSE),
            }
        }
    }

    /// Repeats a command that needs no running VM until it succeeds.
    pub fn retry_until_done(&self, arguments: &[&str]) -> Result<String, String> {
        Ok(self.retry(None, arguments)?.expect("of no VM"))
    }

    fn was_killed(&self, vm: &str) -> bool {
        self.causes.lock().unwrap().killed_vmm_of(vm).is_some()
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
            std::thread::sleep(RETRY_PAUSE);
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
        let woken = self.woken.lock().unwrap();
        let woken: Vec<_> = woken
            .iter()
            .map(|(way, count)| format!("{count} by {}", way.name()))
            .collect();
        let (looks, vmms) = *self.looks.lock().unwrap();
        format!(
            "{} requests succeeded, {} failed; answered after a wake: {}; {}; {looks} looks at up \
             to {vmms} VMMs",
            count(&self.done),
            count(&self.failed),
            woken.join(", "),
            self.causes.lock().unwrap().summary()
        )
    }

    /// Checks that enough happened for a meaningful test: most requests succeeded, VMMs were seen, and
    /// VMs that slept were woken. In a long run, in each way.
    pub fn was_meaningful(&self) -> Result<(), String> {
        let woken = self.woken.lock().unwrap();
        let ways = if self.since.elapsed() < LONG {
            1
        } else {
            WAYS.len()
        };
        let done = self.done.load(Ordering::Relaxed) > self.failed.load(Ordering::Relaxed);
        match done && woken.len() >= ways && self.looks.lock().unwrap().1 > 0 {
            true => Ok(()),
            false => Err("most requests failed, or too few VMs were woken".into()),
        }
    }

    /// The last events and the end of the daemon's log.
    pub fn report(&self) -> String {
        let events = self.events.lock().unwrap();
        let mut text = String::from("the last requests and kills (seconds, what):\n");
        for line in events.iter() {
            text += &format!("{line}\n");
        }
        let logs = "JIFFY_MACHINE=never /bin/jiffy ps -a; tail -n 120 /run/jiffy/jiffyd.log; \
                    tail -n 40 /run/jiffy/jiffy-pager.log; \
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
