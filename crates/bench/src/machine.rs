//! The machine in which cases run, one after another.

use crate::figure::Clock;
use crate::plan::{Case, Kind, Needs, Outcome, SMALL_CACHE, Scheduler};
use crate::proxy;
use anyhow::{Context, Result};
use jiffy_machine::image::build::Addition;
use jiffy_testkit::{Lab, LabOptions, host_kernel};
use std::time::Duration;

/// In the machine: the program that measures a case.
pub const PROBE: &str = "/bench/probe";
/// In the machine: the VMM.
pub const VMM: &str = "/lib/jiffy/jiffy-vmm";
/// Environment variable that is passed on to `jiffyd`, to measure the cost of a jail.
const JAIL: &str = "JIFFY_JAIL";
/// Environment variable: the number of the machine's CPUs, 1 without it (docs/laboratory.md).
const CPUS: &str = "JIFFY_BENCH_CPUS";
/// Environment variable that chooses the scheduler of `jiffyd`.
const SCHEDULER: &str = "JIFFY_SCHEDULER";
/// Environment variable that limits the caches of `jiffyd`.
const CACHE: &str = "JIFFY_CACHE";
/// Time limit for all runs of a case: several times what the longest case takes.
const CASE_TIME: Duration = Duration::from_secs(150);
/// Memory of a machine for many VMs at once.
const MUCH_MEMORY_MIB: u32 = 8192;
/// Time limit for a case with many VMs.
const MANY_TIME: Duration = Duration::from_secs(900);
/// Time limit for a case of bursts, and what each run of a burst adds: beside programs, fifty take minutes.
const BURST_TIME: Duration = Duration::from_secs(300);
const BURST_TIME_OF_RUN: Duration = Duration::from_secs(60);
/// Most attempts of a case, each in a new machine.
const MOST_MACHINES: u32 = 3;

/// A machine that the first case starts.
pub struct Machine {
    clock: Clock,
    files: Vec<Addition>,
    has_much_memory: bool,
    needs: Needs,
    lab: Option<Lab>,
}

impl Machine {
    /// A machine with this clock, these files in addition to its own, and the usual memory or as
    /// much as fifty VMs at once or a thousand clones need.
    pub fn new(clock: Clock, files: Vec<Addition>, has_much_memory: bool) -> Machine {
        Machine {
            clock,
            files,
            has_much_memory,
            needs: Needs::default(),
            lab: None,
        }
    }

    /// The running machine; starts one if there is none.
    ///
    /// # Errors
    ///
    /// If it can't be booted, or the environment asks for a number of CPUs that is none.
    pub fn lab(&mut self) -> Result<&Lab> {
        let lab = match self.lab.take() {
            Some(lab) => lab,
            None => self.boot()?,
        };
        Ok(self.lab.insert(lab))
    }

    /// Measures a case; a failure is in the outcome.
    ///
    /// Under software emulation a guest of any VMM sometimes hangs (docs/laboratory.md). A new machine
    /// is then started for this case and later ones.
    pub fn measure(&mut self, case: &Case) -> Outcome {
        if case.kind.needs() != self.needs {
            self.needs = case.kind.needs();
            // The daemon that runs there began with other options.
            self.lab = None;
        }
        let mut tries = 0;
        loop {
            tries += 1;
            let error = match self.probe(case) {
                Ok(outcome) => return outcome,
                Err(error) => error,
            };
            self.lab = None;
            if tries == MOST_MACHINES {
                return Outcome::failed(case, format!("{error:#}"));
            }
            eprint!("(once more, in another machine: {error:#}) ");
        }
    }

    fn boot(&self) -> Result<Lab> {
        let options = match self.clock {
            Clock::Instructions => LabOptions::instruction_clock(),
            _ => LabOptions {
                disk_gib: None,
                ..LabOptions::default()
            },
        };
        let memory_mib = match self.has_much_memory {
            true => MUCH_MEMORY_MIB,
            false => options.memory_mib,
        };
        let cpus = match std::env::var(CPUS) {
            Ok(cpus) => cpus.parse().with_context(|| format!("{CPUS}={cpus}"))?,
            Err(_) => options.cpus,
        };
        let kernel = self.needs.scheduler.needs_sched_ext();
        Lab::boot(LabOptions {
            files: self.files.clone(),
            kernel: kernel.then(|| host_kernel::SCHED.to_owned()),
            memory_mib,
            cpus,
            ..options
        })
    }

    fn probe(&mut self, case: &Case) -> Result<Outcome> {
        let network = std::env::var("JIFFY_NETWORK").unwrap_or_else(|_| "none".to_owned());
        let mut command = self
            .lab()?
            .command([PROBE])
            .env("JIFFY_MACHINE", "never")
            // Peers are measured without a network, so Jiffy is as well by default.
            .env("JIFFY_NETWORK", &network)
            // A thousand clones are promised more memory than the machine has.
            .env("JIFFY_MEMORY_LIMIT", "none")
            // A daemon serves several cases, so that of each has a proxy.
            .env(proxy::VARIABLE, &proxy::ADDRESS.to_string());
        if let Ok(jail) = std::env::var(JAIL) {
            command = command.env(JAIL, &jail);
        }
        let Needs {
            scheduler,
            small_cache,
        } = case.kind.needs();
        if scheduler == Scheduler::SchedExt {
            command = command.env(SCHEDULER, "sched-ext");
        }
        if small_cache {
            command = command.env(CACHE, &SMALL_CACHE.to_string());
        }
        let output = command
            .stdin(serde_json::to_vec(case)?)
            .time_limit(match case.kind {
                Kind::Burst { burst, .. } => BURST_TIME + BURST_TIME_OF_RUN * burst.size,
                Kind::Clones { .. } | Kind::List { .. } | Kind::Sleepers { .. } => MANY_TIME,
                _ => CASE_TIME,
            })
            .keep_output()
            .output()?
            .success()?;
        serde_json::from_slice(&output.stdout).context("the probe's answer")
    }
}
