//! A client of a VM with an idle time, which falls asleep between its visits.

use super::causes::{is_about_space, is_of_a_busy_host};
use super::plan::Plan;
use super::requests::{Host, PORT, WAYS, Way};
use super::trial::{Answer, Trial};
use super::vms::{Fate, Vm, inspect};
use std::thread;
use std::time::{Duration, Instant};

/// Idle time of the VMs.
const IDLE: &str = "2s";
/// Longest pause between two visits: a VM sleeps some seconds after the last one.
const PAUSE_MS: u64 = 15_000;
/// Most requests at a time.
const AT_ONCE: u64 = 3;
/// The server.
const SERVE: [&str; 6] = ["httpd", "-f", "-h", "/", "-p", "8080"];
/// The first port of a visitor's VMs on the host, and how many a visitor has.
const FIRST_PORT: u16 = 20_000;
const PORTS: u16 = 1000;

pub struct Visitor<'a> {
    trial: &'a Trial<'a>,
    number: u16,
    plan: Plan,
    /// Visits so far. Names and ports contain it, because a killed client's request may finish later.
    step: u16,
    host: Option<Host>,
}

impl<'a> Visitor<'a> {
    pub fn new(trial: &'a Trial<'a>, number: u16, plan: Plan) -> Visitor<'a> {
        Visitor {
            trial,
            number,
            plan,
            step: 0,
            host: None,
        }
    }

    /// Visits its VM until the round is over. Then that must answer, fall asleep and answer again, and
    /// is removed.
    pub fn visit(&mut self) -> Result<(), String> {
        while self.trial.continues() {
            self.step += 1;
            // All are drawn in each step, so that the sequence does not depend on results.
            let pause = Duration::from_millis(self.plan.below(PAUSE_MS));
            let count = 1 + self.plan.below(AT_ONCE);
            let draw = |_| WAYS[self.plan.below(4) as usize];
            let ways: Vec<Way> = (0..AT_ONCE).map(draw).collect();
            self.wait(pause);
            self.ask(&ways[..count as usize])?;
        }
        self.ask(&WAYS)?;
        if self.falls_asleep()? {
            self.ask(&WAYS)?;
        }
        match self.host.take() {
            Some(host) => host.vm.remove(self.trial),
            None => Ok(()),
        }
    }

    /// Waits until the VM sleeps; false if it can't, for a reason that it gives.
    fn falls_asleep(&self) -> Result<bool, String> {
        let Some(host) = &self.host else {
            return Ok(false);
        };
        let (mut sleeps, mut why) = (false, None);
        self.trial.eventually("it sleeps or says why not", || {
            let vm = inspect(self.trial, &host.vm.name)?;
            sleeps = vm["state"] == "hibernated";
            why = vm["idle"]["error"].as_str().map(str::to_owned);
            Ok(sleeps || why.is_some())
        })?;
        let Some(why) = why.filter(|_| !sleeps) else {
            return Ok(true);
        };
        self.trial
            .note(&format!("{} stays awake: {why}", host.vm.name));
        match is_about_space(&why)
            || is_of_a_busy_host(&why)
            || host.has_lost_its_folder(self.trial)
        {
            true => Ok(false),
            false => Err(format!(
                "nothing explains why {} stays awake: {why}",
                host.vm.name
            )),
        }
    }

    fn wait(&self, time: Duration) {
        let until = Instant::now() + time;
        while self.trial.continues() && Instant::now() < until {
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Asks in these ways at the same time.
    fn ask(&mut self, ways: &[Way]) -> Result<(), String> {
        let (trial, number) = (self.trial, self.number);
        self.host = match self.host.take() {
            Some(host) => Some(host),
            None => self.start()?,
        };
        let Some(host) = &self.host else {
            return Ok(());
        };
        // This also starts the daemon, if it was killed: a connection can't do that.
        let slept = inspect(trial, &host.vm.name)?["state"] == "hibernated";
        let answers: Vec<Result<bool, String>> = thread::scope(|scope| {
            let asking = ways.iter().enumerate().map(|(n, way)| {
                let scratch = format!("/tests/copy-{number}-{n}");
                scope.spawn(move || host.ask(trial, *way, &scratch))
            });
            let asking: Vec<_> = asking.collect();
            let ended = asking.into_iter().map(|one| one.join());
            ended.map(|ended| ended.expect("nobody panics")).collect()
        });
        let mut all_answered = true;
        for (way, answered) in ways.iter().zip(answers) {
            let answered = answered?;
            all_answered &= answered;
            if slept && answered {
                trial.woken(*way);
            }
        }
        if !all_answered {
            self.look_after_failure()?;
        }
        Ok(())
    }

    /// Without its VMM a VM is gone, and without its folder it is removed. Any other must answer later.
    fn look_after_failure(&mut self) -> Result<(), String> {
        let Some(host) = self.host.take() else {
            return Ok(());
        };
        if host.vm.fate(self.trial)? == Fate::Gone {
            return Ok(());
        }
        if host.has_lost_its_folder(self.trial) {
            return host.vm.remove(self.trial);
        }
        if host.shares || host.vm.answers(self.trial)? {
            self.host = Some(host);
        }
        Ok(())
    }

    /// Starts a VM with a server; every second visitor's shares a folder with the host. `None` if a
    /// kill prevents it.
    fn start(&self) -> Result<Option<Host>, String> {
        let (trial, number) = (self.trial, self.number);
        let name = format!("v{number}-vm{}", self.step);
        let port = FIRST_PORT + PORTS * number + self.step % PORTS;
        let publish = format!("127.0.0.1:{port}:{PORT}");
        let shares = number % 2 == 1;
        let token = format!("v{number}-token{}", self.step);
        let folder = format!("/tests/shared-{number}");
        let share = format!("{folder}:/root:capture");
        if shares {
            trial
                .jiffy
                .sh(&format!("mkdir -p {folder}; echo {token} > {folder}/token"));
        }
        let mut run = vec!["run", "-d", "--name", &name, "--idle", IDLE, "-p", &publish];
        run.extend(shares.then_some(["-v", &share]).into_iter().flatten());
        run.push("--");
        run.extend(SERVE);
        let since = Instant::now();
        let Answer::Done(id) = trial.ask(None, &run)? else {
            trial.retry_until_done(&["rm", "-f", &name])?;
            return Ok(None);
        };
        let vm = Vm::acknowledged(trial, &name, id, &token);
        if !shares && !vm.write_token(trial)? {
            return Ok(None);
        }
        let host = Host {
            vm,
            port,
            since,
            shares,
        };
        Ok(self.wait_for_server(&host)?.then_some(host))
    }

    /// Waits until the VM's server listens; false if the VM is gone.
    fn wait_for_server(&self, host: &Host) -> Result<bool, String> {
        let listens = format!("until netstat -ltn | grep -q :{PORT}; do sleep 0.2; done");
        let wait = ["exec", &host.vm.name, "sh", "-c", &listens];
        while !matches!(host.vm.ask(self.trial, &wait)?, Answer::Done(_)) {
            if host.vm.fate(self.trial)? == Fate::Gone {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
