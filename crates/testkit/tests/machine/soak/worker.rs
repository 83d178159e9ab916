//! A client at work: a VM of its own and what is made of it.

use super::plan::Plan;
use super::steps;
use super::trial::Trial;
use super::vms::{Fate, Vm};

/// Snapshots that it may have at once.
pub const SNAPSHOTS: usize = 2;

/// One that was said to be made, or that is there.
pub struct Snapshot {
    pub name: String,
    /// Of the VM that it is of.
    pub token: String,
}

pub struct Worker<'a> {
    pub trial: &'a Trial<'a>,
    number: u64,
    plan: Plan,
    /// Steps so far: names have it, for what a client that was killed asked for may be made
    /// later.
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

    /// Step after step until it is over; then what was acknowledged is looked for, and
    /// removed.
    pub fn work(&mut self) -> Result<(), String> {
        while self.trial.goes_on() {
            self.step += 1;
            // Both drawn each time: what comes next does not depend on what came of this.
            let (kind, which) = (self.plan.below(24), self.plan.below(1 << 16));
            self.does(kind, which)?;
        }
        self.finds_all()?;
        self.removes_all()
    }

    fn does(&mut self, kind: u64, which: u64) -> Result<(), String> {
        let odd = which % 2 == 1;
        let slot = which as usize % SNAPSHOTS;
        match kind {
            0 | 1 => self.runs(true),
            2..=4 => self.runs(false),
            5 | 6 => self.execs(),
            7..=9 => self.sleeps(odd),
            10..=12 => self.captures(slot),
            13 | 14 => self.restores(slot),
            15 => self.optimises(slot),
            16 | 17 => self.forks(1 + slot as u64),
            18 => self.pauses(),
            19 => self.stops(),
            20 => self.removes_vm(),
            21 => self.pulls(),
            22 => steps::remove_image(self.trial).map(|_| ()),
            _ => self.lists(),
        }
    }

    /// After the last kill: each VM and snapshot that was said to be there is, and has
    /// its data.
    fn finds_all(&mut self) -> Result<(), String> {
        if let Some(vm) = self.vm.take() {
            let there = vm.fate(self.trial)? == Fate::Alive && vm.answers(self.trial)?;
            self.vm = there.then_some(vm);
        }
        for slot in 0..SNAPSHOTS {
            if !self.restores_one(slot)? {
                return Err(format!(
                    "nothing can be gone on from a snapshot of w{}",
                    self.number
                ));
            }
        }
        Ok(())
    }

    fn removes_all(&mut self) -> Result<(), String> {
        self.removes_vm()?;
        (0..SNAPSHOTS).try_for_each(|slot| self.removes_snapshot(slot))
    }

    /// A name for what this step makes.
    pub fn fresh(&self, what: &str) -> String {
        format!("w{}-{what}{}", self.number, self.step)
    }

    /// Its VM, started if there is none; `None` if a kill prevents it.
    pub fn vm(&mut self) -> Result<Option<&Vm>, String> {
        if self.vm.is_none() {
            self.vm = Vm::start(self.trial, &self.fresh("vm"), &self.fresh("token"))?;
        }
        Ok(self.vm.as_ref())
    }
}
