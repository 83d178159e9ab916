//! Cases of bursts: many runs requested at once, on a node that is idle or has other work.

use crate::figure::{Clock, Figure};
use crate::plan::{Burst, Case, Kind, Load, OTHERS, Outcome, Start, WORK};
use crate::verbs;

/// Prefix of the cases' names, such as `node/burst/50/golden/idle`. A figure is the time from a
/// request to the first byte of its command's answer.
pub const PREFIX: &str = "node/burst/";

const SIZES: [u32; 3] = [1, 10, 50];
const STARTS: [(Start, &str); 2] = [(Start::Golden, "golden"), (Start::Cold, "cold")];
const LOADS: [(Load, &str); 3] = [
    (Load::Idle, "idle"),
    (Load::Programs, "programs"),
    (Load::Compression, "compression"),
];

/// Bursts of each size, from golden snapshots and cold, with each load.
pub fn cases(runs: u32) -> Vec<Case> {
    let mut cases = Vec::new();
    for (start, start_name) in STARTS {
        for (load, load_name) in LOADS {
            cases.extend(SIZES.map(|size| {
                let name = format!("{PREFIX}{size}/{start_name}/{load_name}");
                case(name, Burst { size, start, load }, runs)
            }));
        }
    }
    cases
}

fn case(name: String, burst: Burst, runs: u32) -> Case {
    Case {
        name,
        monitor: "jiffy".into(),
        kind: Kind::Burst {
            burst,
            once: ["/bin/sh", "-c", verbs::HAS_GOLDEN]
                .map(String::from)
                .into(),
        },
        // A large burst has a sample of each run, and the other work takes long to prepare.
        runs: runs.min(match burst.size {
            1 => 8,
            10 => 3,
            _ => 1,
        }),
        // The first run starts the daemon and leaves a golden snapshot.
        warm_up: 1,
    }
}

/// What a burst left to the work that was there before: `…/others` is the share of the processor
/// that programs of other VMs had during a burst, `…/work` the time that a capture took.
pub fn figures(outcome: &Outcome) -> Vec<Figure> {
    let (monitor, samples) = (&outcome.monitor, &outcome.samples);
    let counter = |name: &str| -> Vec<f64> {
        let values = samples.iter().filter_map(|it| it.counters.get(name));
        values.map(|value| *value as f64).collect()
    };
    let shares = counter(OTHERS).into_iter().map(|it| it / 1000.0).collect();
    let name = |end: &str| format!("{}/{end}", outcome.name);
    let others = Figure::of(&name("others"), monitor, Clock::Count, "share", shares);
    let (clock, unit) = (Clock::Instructions, "instructions");
    let work = Figure::of(&name("work"), monitor, clock, unit, counter(WORK));
    others.into_iter().chain(work).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Sample;

    #[test]
    fn bursts_have_names_of_their_own() {
        let mut names: Vec<String> = cases(20).into_iter().map(|case| case.name).collect();
        assert!(names.contains(&"node/burst/50/cold/compression".to_owned()));
        names.sort();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    #[test]
    fn the_share_of_other_programs_is_a_figure_of_its_burst() {
        let sample = |counter: &str, value| Sample {
            counters: [(counter.to_owned(), value)].into(),
            ..Sample::default()
        };
        let outcome = Outcome {
            name: "node/burst/1/golden/programs".into(),
            monitor: "jiffy".into(),
            samples: vec![sample(OTHERS, 250), sample(WORK, 7)],
            failure: None,
        };
        let found = figures(&outcome);
        let others = &found[0];
        assert_eq!(others.case, "node/burst/1/golden/programs/others");
        assert_eq!(others.median, 0.25);
        assert_eq!(found[1].median, 7.0);
    }
}
