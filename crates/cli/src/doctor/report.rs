//! The results of the checks, and the conclusion.

use crate::render::harmless;
use jiffy_wire::vmm::{KvmKind, KvmProbe};
use serde::Serialize;
use std::fmt;

/// All results.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Where VMs run.
    pub verdict: Verdict,
    /// The KVM probe, if it could run.
    pub kvm: Option<KvmProbe>,
    /// The checks in order.
    pub checks: Vec<Check>,
    /// How long they took, microseconds.
    pub took_us: u64,
}

/// Where VMs run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// On this host.
    Native,
    /// Only in the machine.
    Machine,
    /// Nowhere, until something is changed.
    Nowhere,
}

impl Verdict {
    /// The exit status, for scripts.
    pub fn exit_status(self) -> u8 {
        match self {
            Verdict::Native => 0,
            Verdict::Machine => 3,
            Verdict::Nowhere => 4,
        }
    }
}

/// The result of one check.
#[derive(Debug, Serialize)]
pub struct Check {
    /// A short name for programs, such as `huge_pages`.
    pub id: &'static str,
    /// Its name for people.
    #[serde(skip)]
    pub name: &'static str,
    /// The state.
    pub state: State,
    /// What was found, one sentence or less.
    pub detail: String,
    /// What to do, if anything.
    pub hint: Option<String>,
    /// Which VMs can't run without it.
    #[serde(skip)]
    pub needed: Needed,
}

/// The state of a checked thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It exists and works.
    Good,
    /// It is missing or does not work.
    Bad,
    /// It does not matter here, or can't be determined.
    Neutral,
}

/// Which VMs need a checked thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needed {
    /// Every VM.
    Always,
    /// VMs on this host.
    Natively,
    /// VMs in the machine.
    InMachine,
    /// No VM, only some feature.
    Never,
}

impl Check {
    /// A result for a thing that no VM needs.
    pub fn new(
        id: &'static str,
        name: &'static str,
        state: State,
        detail: impl Into<String>,
    ) -> Check {
        Check {
            id,
            name,
            state,
            detail: detail.into(),
            hint: None,
            needed: Needed::Never,
        }
    }

    /// Adds what the user can do.
    pub fn hint(mut self, hint: impl Into<String>) -> Check {
        self.hint = Some(hint.into());
        self
    }

    /// Sets which VMs need it.
    pub fn needed(mut self, needed: Needed) -> Check {
        self.needed = needed;
        self
    }
}

impl Report {
    /// Computes the verdict.
    pub fn new(
        (kvm, probe): (Check, Option<KvmProbe>),
        others: Vec<Check>,
        took_us: u64,
    ) -> Report {
        let mut checks = vec![kvm];
        checks.extend(others);
        let works = |place: Needed| {
            checks.iter().all(|check| {
                check.state != State::Bad
                    || !(check.needed == Needed::Always || check.needed == place)
            })
        };
        let real = probe
            .as_ref()
            .is_some_and(|probe| probe.kind == KvmKind::Real);
        let verdict = if real && works(Needed::Natively) {
            Verdict::Native
        } else if works(Needed::InMachine) {
            Verdict::Machine
        } else {
            Verdict::Nowhere
        };
        // A missing thing of the machine is no problem if no machine is needed.
        if verdict == Verdict::Native {
            for check in &mut checks {
                if check.needed == Needed::InMachine && check.state == State::Bad {
                    check.state = State::Neutral;
                    check.hint = None;
                    check.detail.push_str("; not needed on this host");
                }
            }
        }
        Report {
            verdict,
            kvm: probe,
            checks,
            took_us,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.checks.iter().map(|check| check.name.chars().count());
        let width = width.max().unwrap_or(0);
        for check in &self.checks {
            let mark = match check.state {
                State::Good => '✓',
                State::Bad => '✗',
                State::Neutral => '–',
            };
            writeln!(
                f,
                "{mark} {:<width$}  {}",
                check.name,
                harmless(&check.detail)
            )?;
            if let Some(hint) = &check.hint {
                writeln!(f, "  {:<width$}  → {hint}", "")?;
            }
        }
        let verdict = match self.verdict {
            Verdict::Native => "VMs run on this host itself.",
            Verdict::Machine => "VMs run in the machine, which jiffy starts when it is needed.",
            Verdict::Nowhere => "VMs do not run here until the problems above are fixed.",
        };
        writeln!(
            f,
            "\n{verdict} (checked in {} ms)",
            self.took_us.div_ceil(1000)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(kind: KvmKind) -> (Check, Option<KvmProbe>) {
        let state = match kind {
            KvmKind::Real => State::Good,
            _ => State::Bad,
        };
        let probe = KvmProbe {
            kind,
            detail: String::new(),
            ring0_ps_per_iteration: None,
            syscall_enters_ring0: None,
            took_us: 1,
        };
        (
            Check::new("kvm", "KVM", state, "x").needed(Needed::Natively),
            Some(probe),
        )
    }

    fn check(needed: Needed, state: State) -> Check {
        Check::new("c", "check", state, "seen").needed(needed)
    }

    #[test]
    fn a_real_kvm_needs_no_machine() {
        let report = Report::new(
            probe(KvmKind::Real),
            vec![
                check(Needed::InMachine, State::Bad),
                check(Needed::Never, State::Bad),
            ],
            0,
        );
        assert_eq!(report.verdict.exit_status(), 0);
        assert_eq!(report.checks[1].state, State::Neutral);
    }

    #[test]
    fn without_a_real_kvm_the_verdict_depends_on_the_machine() {
        for kind in [KvmKind::Emulated, KvmKind::None] {
            let works = vec![check(Needed::InMachine, State::Good)];
            let report = Report::new(probe(kind), works, 0);
            assert_eq!(report.verdict.exit_status(), 3);
            let broken = vec![check(Needed::InMachine, State::Bad)];
            let report = Report::new(probe(kind), broken, 0);
            assert_eq!(report.verdict.exit_status(), 4);
        }
        let report = Report::new(
            probe(KvmKind::Real),
            vec![check(Needed::Always, State::Bad)],
            0,
        );
        assert_eq!(report.verdict.exit_status(), 4);
    }

    #[test]
    fn the_report_text_has_marks_hints_and_a_verdict() {
        let others = vec![
            check(Needed::InMachine, State::Bad).hint("do this"),
            check(Needed::Never, State::Neutral),
        ];
        let report = Report::new(probe(KvmKind::Emulated), others, 12_300);
        assert_eq!(
            report.to_string(),
            "✗ KVM    x\n✗ check  seen\n         → do this\n– check  seen\n\n\
             VMs do not run here until the problems above are fixed. (checked in 13 ms)\n"
        );
    }
}
