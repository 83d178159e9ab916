//! A working client with a VM of its own, and with its forks and snapshots.

use super::plan::Plan;
use super::trial::Trial;
use super::vms::{Fate, Vm};

/// Most snapshots that a worker has at once.
pub const SNAPSHOTS: usize = 2;

/// A snapshot that was acknowledged, or that exists.
pub struct Snapshot {
    pub name: String,
    /// Token of the captured VM.
    pub token: String,
}

pub struct Worker<'a> {
    pub trial: &'a Trial<'a>,
    number: u64,
    plan: Plan,
    /// Steps so far. Names contain it, because a killed client's request may finish later.
    step: u64,
    pub vm: Option<Vm>,
    pub snapshots: [Option<Snapshot>; SNAPSHOTS],
}

impl<'a> Worker<'a> {
    pub fn new(trial: &'a Trial<'a>, number: u64, plan: Plan) -> Worker<'a> {
        Worker {
            trial,
            number,
            plan,
            step: 0,
            vm: None,
            snapshots: [const { None }; SNAPSHOTS],
        }
    }

    /// Runs steps until the round is over; then checks and removes all acknowledged results.
    pub fn work(&mut self) -> Result<(), String> {
        while self.trial.continues() {
            self.step += 1;
            // Both are drawn in each step, so that the sequence does not depend on results.
            let (kind, which) = (self.plan.below(28), self.plan.below(1 << 16));
            self.run_step(kind, which)?;
        }
        self.check_results()?;
        self.remove_results()
    }

    fn run_step(&mut self, kind: u64, which: u64) -> Result<(), String> {
        let odd = which % 2 == 1;
        let slot = which as usize % SNAPSHOTS;
        match kind {
            0 | 1 => self.run_command(true),
            2..=4 => self.run_command(false),
            5 | 6 => self.exec_command(),
            7..=9 => self.hibernate_vm(odd),
            10..=12 => self.capture_vm(slot),
            13 | 14 => self.restore_vm(slot),
            15 => self.optimise_snapshot(slot),
            16 | 17 => self.fork_vm(1 + slot as u64),
            18 => self.pause_vm(),
            19 => self.stop_vm(),
            20 => self.remove_vm(),
            21 => self.pull_image(),
            22 => self.remove_image(odd),
            23 | 24 => self.read_on_demand(which >> 1),
            25 => self.share_folder(),
            26 => self.commit_vm(),
            _ => self.check_snapshots(),
        }
    }

    /// After the last kill: checks that each acknowledged VM and snapshot exists and has its data.
    fn check_results(&mut self) -> Result<(), String> {
        if let Some(vm) = self.vm.take() {
            let there = vm.fate(self.trial)? == Fate::Alive && vm.answers(self.trial)?;
            self.vm = there.then_some(vm);
        }
        for slot in 0..SNAPSHOTS {
            if !self.try_restore(slot)? {
                return Err(format!(
                    "no VM can be started from a snapshot of w{}",
                    self.number
                ));
            }
        }
        Ok(())
    }

    fn remove_results(&mut self) -> Result<(), String> {
        self.remove_vm()?;
        (0..SNAPSHOTS).try_for_each(|slot| self.remove_snapshot(slot))
    }

    /// A name for the result of this step.
    pub fn new_name(&self, what: &str) -> String {
        format!("w{}-{what}{}", self.number, self.step)
    }

    /// The worker's VM, started if there is none; `None` if a kill prevents it.
    pub fn vm(&mut self) -> Result<Option<&Vm>, String> {
        if self.vm.is_none() {
            self.vm = Vm::start(self.trial, &self.new_name("vm"), &self.new_name("token"))?;
        }
        Ok(self.vm.as_ref())
    }
}
