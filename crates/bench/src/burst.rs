//! Cases of bursts: many runs requested at once, on a node that is idle or has other work.

use crate::figure::{Clock, Figure};
use crate::plan::{
    BURST_WORK, Burst, Case, Kind, LEAST_SHARE, Load, OTHERS, OTHERS_IN_WINDOW, Outcome, Scheduler,
    Start, WORK,
};
use crate::verbs;

/// Prefix of the cases' names, such as `node/burst/50/golden/idle`. A figure is the time from a
/// request to the first byte of its command's answer.
pub const PREFIX: &str = "node/burst/";

const SIZES: [u32; 4] = [1, 10, 50, 200];
const STARTS: [(Start, &str); 2] = [(Start::Golden, "golden"), (Start::Cold, "cold")];
const LOADS: [(Load, &str); 5] = [
    (Load::Idle, "idle"),
    (Load::Programs, "programs"),
    (Load::ManyPrograms, "many-programs"),
    (Load::Disk, "disk"),
    (Load::Compression, "compression"),
];

const SCHEDULERS: [(Scheduler, &str); 3] = [
    (Scheduler::Usual, ""),
    (Scheduler::Eevdf, "/eevdf"),
    (Scheduler::SchedExt, "/sched-ext"),
];

/// Bursts of each size with each load: from golden snapshots by each scheduler, and cold on the
/// usual kernel.
pub fn cases(runs: u32) -> Vec<Case> {
    let mut cases = Vec::new();
    for (scheduler, scheduler_name) in SCHEDULERS {
        for (start, start_name) in STARTS {
            if start == Start::Cold && scheduler.needs_sched_ext() {
                continue;
            }
            for (load, load_name) in LOADS {
                cases.extend(SIZES.map(|size| {
                    let name = format!("{PREFIX}{size}/{start_name}/{load_name}{scheduler_name}");
                    let burst = Burst {
                        size,
                        start,
                        load,
                        scheduler,
                    };
                    case(name, burst, runs)
                }));
            }
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
            200 => 1,
            _ => 5,
        }),
        // The first run starts the daemon and leaves a golden snapshot.
        warm_up: 1,
    }
}

/// What a burst left to the work that was there before: `…/others` is the share of the processor
/// that other VMs had until the burst's last answer, `…/window` the share in a fixed time that is
/// longer, `…/least` what the one with the least had then of what the one with the most had,
/// `…/used` the instructions of everything else in that time, `…/work` the time that a capture took.
pub fn figures(outcome: &Outcome) -> Vec<Figure> {
    let (monitor, samples) = (&outcome.monitor, &outcome.samples);
    let figure = |end: &str, counter: &str, clock, unit, scale: f64| {
        let values = samples.iter().filter_map(|it| it.counters.get(counter));
        let values = values.map(|value| *value as f64 * scale).collect();
        Figure::of(
            &format!("{}/{end}", outcome.name),
            monitor,
            clock,
            unit,
            values,
        )
    };
    let (share, instructions) = (
        (Clock::Count, "share", 1e-3),
        (Clock::Instructions, "instructions", 1.0),
    );
    [
        ("others", OTHERS, share),
        ("window", OTHERS_IN_WINDOW, share),
        ("least", LEAST_SHARE, share),
        ("used", BURST_WORK, instructions),
        ("work", WORK, instructions),
    ]
    .into_iter()
    .filter_map(|(end, counter, (clock, unit, scale))| figure(end, counter, clock, unit, scale))
    .collect()
}

/// `…/ratio` of each burst that was measured by both: the 99th percentile by the policy of
/// `jiffy-sched`, divided by that of EEVDF.
pub fn ratios(figures: &[Figure]) -> Vec<Figure> {
    let ratio = |figure: &Figure| {
        let case = figure.case.strip_suffix("/sched-ext")?;
        let eevdf = format!("{case}/eevdf");
        let by_kernel = figures.iter().find(|other| other.case == eevdf)?;
        let (case, ratio) = (format!("{case}/ratio"), figure.p99 / by_kernel.p99);
        Figure::of(&case, &figure.monitor, Clock::Count, "times", vec![ratio])
    };
    figures.iter().filter_map(ratio).collect()
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

    #[test]
    fn the_99th_percentiles_by_both_schedulers_are_compared() {
        let figure = |scheduler: &str, values: &[f64]| {
            let case = format!("node/burst/10/golden/programs/{scheduler}");
            let (clock, unit) = (Clock::Instructions, "instructions");
            Figure::of(&case, "jiffy", clock, unit, values.to_vec()).unwrap()
        };
        let (eevdf, ours) = (
            figure("eevdf", &[1.0, 8.0]),
            figure("sched-ext", &[3.0, 4.0]),
        );
        assert_eq!(ratios(std::slice::from_ref(&ours)), []);
        let found = ratios(&[eevdf, ours]);
        assert_eq!(found[0].case, "node/burst/10/golden/programs/ratio");
        assert_eq!((found.len(), found[0].median), (1, 0.5));
    }
}
