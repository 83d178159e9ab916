//! The steps of a worker.

use super::trial::Answer;
use super::vms::{Fate, Vm};
use super::worker::{Snapshot, Worker};
use std::thread::sleep;
use std::time::Duration;

/// The request of a killed client is still being processed.
fn is_being_optimised(said: &str) -> bool {
    said.contains("is being optimised")
}

impl Worker<'_> {
    /// Runs a command in a new VM, which boots or comes from a golden snapshot.
    pub fn run_command(&mut self, cold: bool) -> Result<(), String> {
        let name = self.new_name("run");
        let mut arguments = vec!["run", "--rm", "--name", &name];
        arguments.extend(cold.then_some("--cold"));
        arguments.extend(["--", "echo", &name]);
        match self.trial.ask(None, &arguments)? {
            Answer::Done(text) if text != name => Err(format!("{name} said {text:?}")),
            _ => Ok(()),
        }
    }

    pub fn exec_command(&mut self) -> Result<(), String> {
        let trial = self.trial;
        let Some(vm) = self.vm()? else { return Ok(()) };
        if !vm.answers(trial)? {
            self.vm = None;
        }
        Ok(())
    }

    /// Hibernates the VM. It is woken now or by a later step.
    pub fn hibernate_vm(&mut self, wakes: bool) -> Result<(), String> {
        let Some(vm) = self.take_running_vm()? else {
            return Ok(());
        };
        let mut answer = vm.ask(self.trial, &["hibernate", &vm.name])?;
        if matches!(answer, Answer::Done(_)) && wakes {
            answer = vm.ask(self.trial, &["wake", &vm.name])?;
        }
        self.give_back(vm, &answer)
    }

    /// Takes the worker's VM and makes sure that it runs, because a hibernated VM can't be
    /// captured. The caller must give it back.
    pub fn take_running_vm(&mut self) -> Result<Option<Vm>, String> {
        self.exec_command()?;
        Ok(self.vm.take())
    }

    /// Gives the VM back. After a failure its state is checked first.
    pub fn give_back(&mut self, vm: Vm, answer: &Answer) -> Result<(), String> {
        let failed = !matches!(answer, Answer::Done(_));
        if failed {
            // A request of a killed client may still be processed; this command waits for it.
            let wake = ["wake", &vm.name];
            let is_paused = |said: &str| said.contains("paused");
            self.trial.ask_tolerating(Some(&vm.id), &wake, is_paused)?;
        }
        if !failed || vm.fate(self.trial)? == Fate::Alive {
            self.vm = Some(vm);
        }
        Ok(())
    }

    pub fn capture_vm(&mut self, slot: usize) -> Result<(), String> {
        self.remove_snapshot(slot)?;
        let Some(vm) = self.take_running_vm()? else {
            return Ok(());
        };
        let name = self.new_name("shot");
        let answer = vm.ask(self.trial, &["snapshot", "create", &vm.name, &name])?;
        let token = vm.token.clone();
        self.give_back(vm, &answer)?;
        // A command that failed may have made the snapshot; then it is complete.
        if matches!(answer, Answer::Done(_)) || self.snapshot_names()?.contains(&name) {
            self.snapshots[slot] = Some(Snapshot { name, token });
        }
        Ok(())
    }

    fn snapshot_names(&self) -> Result<Vec<String>, String> {
        let list = self.trial.retry_until_done(&["snapshot", "ls"])?;
        let names = list
            .lines()
            .skip(1)
            .filter_map(|line| line.split_whitespace().next());
        Ok(names.map(str::to_owned).collect())
    }

    pub fn remove_snapshot(&mut self, slot: usize) -> Result<(), String> {
        let Some(Snapshot { name, .. }) = self.snapshots[slot].take() else {
            return Ok(());
        };
        let remove = ["snapshot", "rm", &name];
        loop {
            let mut is_busy = false;
            let answer = self.trial.ask_tolerating(None, &remove, |said| {
                is_busy = is_being_optimised(said);
                // A killed client may have removed it without an acknowledgement.
                is_busy || said.contains("There is no snapshot")
            })?;
            match answer {
                Answer::Failed => {}
                Answer::Refused if is_busy => sleep(Duration::from_millis(50)),
                _ => return Ok(()),
            }
        }
    }

    pub fn restore_vm(&mut self, slot: usize) -> Result<(), String> {
        if self.snapshots[slot].is_none() {
            return self.capture_vm(slot);
        }
        self.try_restore(slot).map(|_| ())
    }

    /// Starts a VM from a snapshot, if there is one, and checks that it has the captured data.
    /// False if a kill prevented it.
    pub fn try_restore(&mut self, slot: usize) -> Result<bool, String> {
        let Some(snapshot) = &self.snapshots[slot] else {
            return Ok(true);
        };
        let name = self.new_name("from");
        let run = ["run", "-d", "--from", &snapshot.name, "--name", &name];
        let Answer::Done(id) = self.trial.ask(None, &run)? else {
            self.trial.retry_until_done(&["rm", "-f", &name])?;
            return Ok(false);
        };
        let vm = Vm::acknowledged(self.trial, &name, id, &snapshot.token);
        let answers = vm.answers(self.trial)?;
        if answers {
            vm.remove(self.trial)?;
        }
        Ok(answers)
    }

    pub fn optimise_snapshot(&mut self, slot: usize) -> Result<(), String> {
        if !self.try_restore(slot)? {
            return Ok(());
        }
        let Some(snapshot) = &self.snapshots[slot] else {
            return Ok(());
        };
        // A killed pager had not written its recording.
        let tolerated =
            |said: &str| said.contains("There is no recording yet") || is_being_optimised(said);
        let optimise = ["snapshot", "optimise", &snapshot.name];
        self.trial.ask_tolerating(None, &optimise, tolerated)?;
        Ok(())
    }

    pub fn fork_vm(&mut self, count: u64) -> Result<(), String> {
        let Some(vm) = self.take_running_vm()? else {
            return Ok(());
        };
        let (trial, child) = (self.trial, self.new_name("child"));
        let number = count.to_string();
        let fork = ["fork", &vm.name, "-n", &number, "--name", &child];
        let answer = vm.ask(trial, &fork)?;
        if let Answer::Done(names) = &answer {
            for name in names.lines() {
                let child = Vm::named(trial, name, &vm.token)?;
                if child.answers(trial)? {
                    child.remove(trial)?;
                }
            }
        } else {
            let several = (1..=count).map(|n| format!("{child}-{n}"));
            for name in std::iter::once(child.clone()).chain(several) {
                trial.retry_until_done(&["rm", "-f", &name])?;
            }
        }
        self.give_back(vm, &answer)
    }

    pub fn pause_vm(&mut self) -> Result<(), String> {
        let Some(vm) = self.take_running_vm()? else {
            return Ok(());
        };
        let mut answer = vm.ask(self.trial, &["pause", &vm.name])?;
        if matches!(answer, Answer::Done(_)) {
            answer = vm.ask(self.trial, &["resume", &vm.name])?;
        }
        self.give_back(vm, &answer)
    }

    /// Stops the VM's command; then the VM boots again without its memory.
    pub fn stop_vm(&mut self) -> Result<(), String> {
        let trial = self.trial;
        let Some(mut vm) = self.take_running_vm()? else {
            return Ok(());
        };
        let answer = vm.ask(trial, &["stop", "-t", "1", &vm.name])?;
        let mut fate = vm.fate_of_stopped(trial)?;
        if fate == Fate::Alive && matches!(answer, Answer::Done(_)) {
            return Err(format!("{} was reported as stopped but runs", vm.name));
        }
        if fate == Fate::Alive {
            // A killed client's stop request may still be processed.
            vm.ask(trial, &["stop", "-t", "1", &vm.name])?;
            fate = vm.fate_of_stopped(trial)?;
        }
        vm.token = self.new_name("token");
        while fate == Fate::Ended {
            vm.ask(trial, &["start", &vm.name])?;
            fate = vm.fate_of_stopped(trial)?;
        }
        if fate == Fate::Alive && vm.write_token(trial)? {
            self.vm = Some(vm);
        }
        Ok(())
    }

    pub fn remove_vm(&mut self) -> Result<(), String> {
        self.vm.take().map_or(Ok(()), |vm| vm.remove(self.trial))
    }

    /// Checks that acknowledged snapshots are listed.
    pub fn check_snapshots(&mut self) -> Result<(), String> {
        let there = self.snapshot_names()?;
        for snapshot in self.snapshots.iter().flatten() {
            if !there.contains(&snapshot.name) {
                return Err(format!("{} was made, and is not listed", snapshot.name));
            }
        }
        Ok(())
    }
}
