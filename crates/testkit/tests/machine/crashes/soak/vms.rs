//! VMs of the test, and checks of their state.

use super::trial::{Answer, HANG_LIMIT, Trial};
use serde_json::Value;
use std::time::Instant;

/// A first command that counts, on stdout and in `/tmp/n`.
pub const COUNT: &str = "n=0; while :; do n=$((n+1)); echo $n; echo $n > /tmp/n; sleep 0.3; done";

/// An acknowledged VM.
pub struct Vm {
    pub name: String,
    pub id: String,
    /// The content of its `/root/token`.
    pub token: String,
}

/// State of a VM.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It runs or is hibernated.
    Alive,
    /// It has ended normally.
    Ended,
    /// Its VMM was killed, and it is removed.
    Gone,
}

impl Vm {
    /// Starts a VM and writes its token. `None` if a kill prevented it; then nothing of the VM is
    /// left.
    pub fn start(trial: &Trial, name: &str, token: &str) -> Result<Option<Vm>, String> {
        let run = ["run", "-d", "--name", name, "--", "sh", "-c", COUNT];
        let Answer::Done(id) = trial.ask(None, &run)? else {
            trial.retry_until_done(&["rm", "-f", name])?;
            return Ok(None);
        };
        let vm = Vm::acknowledged(trial, name, id, token);
        Ok(vm.write_token(trial)?.then_some(vm))
    }

    /// A VM that exists from now on, until it is removed.
    pub fn acknowledged(trial: &Trial, name: &str, id: String, token: &str) -> Vm {
        let mut acknowledged = trial.acknowledged.lock().unwrap();
        acknowledged.insert(id.clone(), name.to_owned());
        Vm {
            name: name.to_owned(),
            id,
            token: token.to_owned(),
        }
    }

    /// A VM made by a fork; asks for its id.
    pub fn named(trial: &Trial, name: &str, token: &str) -> Result<Vm, String> {
        let id = inspect(trial, name)?["id"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        Ok(Vm::acknowledged(trial, name, id, token))
    }

    pub fn ask(&self, trial: &Trial, arguments: &[&str]) -> Result<Answer, String> {
        trial.ask(Some(&self.id), arguments)
    }

    /// Writes the token; false if the VM is gone.
    pub fn write_token(&self, trial: &Trial) -> Result<bool, String> {
        let script = format!("echo {} > /root/token", self.token);
        let write = ["exec", &self.name, "sh", "-c", &script];
        while !matches!(self.ask(trial, &write)?, Answer::Done(_)) {
            if self.fate(trial)? == Fate::Gone {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Checks that the VM answers with its token; false if its VMM was killed.
    pub fn answers(&self, trial: &Trial) -> Result<bool, String> {
        let deadline = Instant::now() + HANG_LIMIT;
        loop {
            if Instant::now() >= deadline {
                return Err(format!("{} does not answer", self.name));
            }
            let cat = ["exec", &self.name, "cat", "/root/token"];
            match self.ask(trial, &cat)? {
                Answer::Done(text) if text == self.token => return Ok(true),
                Answer::Done(text) => {
                    return Err(format!("{}: {text:?} is not {:?}", self.name, self.token));
                }
                _ if self.fate(trial)? == Fate::Gone => return Ok(false),
                _ => {}
            }
        }
    }

    /// The effect of kills on the VM: none unless its VMM was killed.
    pub fn fate(&self, trial: &Trial) -> Result<Fate, String> {
        match self.fate_of_stopped(trial)? {
            Fate::Ended => Err(format!("{} has ended, but was not killed", self.name)),
            fate => Ok(fate),
        }
    }

    /// The same for a VM that may have been stopped.
    pub fn fate_of_stopped(&self, trial: &Trial) -> Result<Fate, String> {
        let mut fate = Fate::Gone;
        let what = format!("{} is up or down", self.name);
        trial.eventually(&what, || {
            let vm = inspect(trial, &self.name)?;
            let mut causes = trial.causes.lock().unwrap();
            let killed = causes.killed_vmm_of(&self.id);
            fate = match vm["state"].as_str().unwrap_or_default() {
                // The node may not know of its end yet.
                "running" | "paused" if killed.is_some() && killed == vm["pid"].as_u64() => {
                    return Ok(false);
                }
                "running" | "paused" | "hibernated" => {
                    causes.forget(&self.id);
                    Fate::Alive
                }
                "exited" if killed.is_some() => Fate::Gone,
                "exited" => Fate::Ended,
                "starting" | "stopping" => return Ok(false),
                _ => return Err(vm.to_string()),
            };
            drop(causes);
            if vm["state"] == "paused" {
                // Paused by a user's request, or by a capture that a daemon has yet to finish.
                self.ask(trial, &["resume", &self.name])?;
                return Ok(false);
            }
            Ok(true)
        })?;
        if fate == Fate::Gone {
            self.remove(trial)?;
        }
        Ok(fate)
    }

    pub fn remove(&self, trial: &Trial) -> Result<(), String> {
        trial.acknowledged.lock().unwrap().remove(&self.id);
        trial.retry_until_done(&["rm", "-f", &self.name])?;
        trial.causes.lock().unwrap().forget(&self.id);
        Ok(())
    }
}

/// Inspects a VM that must exist.
pub fn inspect(trial: &Trial, name: &str) -> Result<Value, String> {
    let text = trial.retry_until_done(&["inspect", name])?;
    let value: Value = serde_json::from_str(&text).map_err(|error| format!("{error}: {text}"))?;
    Ok(match value {
        Value::Array(mut list) if list.len() == 1 => list.remove(0),
        value => value,
    })
}

/// Three VMs that are not killed: one that booted, one whose memory comes from the pager, and one
/// that is hibernated.
pub struct Keepers {
    booted: Vm,
    paged: Vm,
    sleeper: Vm,
    pids: [Value; 2],
}

const KEPT: &str = "kept";

impl Keepers {
    pub fn start(trial: &Trial) -> Result<Keepers, String> {
        let start =
            |name, token| Ok::<_, String>(Vm::start(trial, name, token)?.expect("no kills"));
        let booted = start("keeper", "booted")?;
        trial.retry_until_done(&["snapshot", "create", "keeper", KEPT])?;
        let from = ["run", "-d", "--from", KEPT, "--name", "paged"];
        let paged = Vm::acknowledged(trial, "paged", trial.retry_until_done(&from)?, "booted");
        let sleeper = start("sleeper", "asleep")?;
        trial.retry_until_done(&["hibernate", "sleeper"])?;
        let pid = |vm: &Vm| Ok::<_, String>(inspect(trial, &vm.name)?["pid"].clone());
        let pids = [pid(&booted)?, pid(&paged)?];
        let keepers = Keepers {
            booted,
            paged,
            sleeper,
            pids,
        };
        trial.causes.lock().unwrap().spared = keepers.ids();
        Ok(keepers)
    }

    pub fn ids(&self) -> Vec<String> {
        [&self.booted, &self.paged, &self.sleeper]
            .map(|vm| vm.id.clone())
            .into()
    }

    /// Checks that the first two run in the same processes and keep counting, and that the third is
    /// hibernated and can be woken. No line of a log is lost or duplicated.
    pub fn check(&self, trial: &Trial) -> Result<(), String> {
        for (vm, pid) in [&self.booted, &self.paged].into_iter().zip(&self.pids) {
            let now = inspect(trial, &vm.name)?;
            if now["state"] != "running" || now["pid"] != *pid {
                return Err(format!(
                    "its VMM was {pid} and was not killed, but now: {now}"
                ));
            }
            vm.answers(trial)?;
            let count = || trial.retry_until_done(&["exec", &vm.name, "cat", "/tmp/n"]);
            let counted = count()?;
            trial.eventually("its counter increases", || Ok(count()? != counted))?;
        }
        let log = trial.retry_until_done(&["logs", &self.booted.name])?;
        let is_whole = log.lines().zip(1..).all(|(line, n)| line.parse() == Ok(n));
        if !is_whole {
            return Err(format!("lines are lost or duplicated: {log}"));
        }
        let now = inspect(trial, &self.sleeper.name)?;
        if now["state"] != "hibernated" {
            return Err(format!(
                "it is no longer hibernated, but nobody woke it: {now}"
            ));
        }
        self.sleeper.answers(trial)?;
        trial.retry_until_done(&["hibernate", &self.sleeper.name])?;
        Ok(())
    }

    pub fn remove(&self, trial: &Trial) -> Result<(), String> {
        for vm in [&self.booted, &self.paged, &self.sleeper] {
            vm.answers(trial)?;
            vm.remove(trial)?;
        }
        trial.retry_until_done(&["snapshot", "rm", KEPT])?;
        Ok(())
    }
}
