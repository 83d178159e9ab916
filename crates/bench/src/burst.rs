//! Cases of bursts: many runs requested at once, on a node that is idle or has other work.

use crate::figure::{Clock, Figure};
use crate::plan::{
    BURST_WORK, Burst, BurstStart, Case, FEWER_RUNS, Kind, LEAST_SHARE, Load, OTHERS,
    OTHERS_IN_WINDOW, Outcome, Scheduler, WORK,
};
use crate::verbs;

/// Prefix of the cases' names, such as `node/burst/50/golden/idle`. A figure is the time from a
/// request to the first byte of its command's answer.
pub const PREFIX: &str = "node/burst/";

type Kinds = (
    BurstStart,
    &'static str,
    &'static [u32],
    &'static [(Load, &'static str)],
);

/// Those that boot take long.
const KINDS: [Kinds; 3] = [
    (BurstStart::Golden, "golden", &[1, 10, 50, 200], &LOADS),
    (BurstStart::Cold, "cold", &[1, 10, 50], &SOME_LOADS),
    (BurstStart::Pulled, "pulled", &[1, 10, 50], &SOME_LOADS),
];
const LOADS: [(Load, &str); 8] = [
    (Load::Idle, "idle"),
    (Load::Programs, "programs"),
    (Load::ManyPrograms, "many-programs"),
    (Load::Disk, "disk"),
    (Load::Compression, "compression"),
    (Load::GoldenSnapshot, "golden-snapshot"),
    (Load::Reading, "reading"),
    (Load::Trimming, "trimming"),
];
const SOME_LOADS: [(Load, &str); 3] = [LOADS[0], LOADS[2], LOADS[3]];

const SCHEDULERS: [(Scheduler, &str); 3] = [
    (Scheduler::Usual, ""),
    (Scheduler::Eevdf, "/eevdf"),
    (Scheduler::SchedExt, "/sched-ext"),
];

/// Bursts of each kind by each scheduler, and those of two owners.
pub fn cases(runs: u32) -> Vec<Case> {
    let mut cases = Vec::new();
    for (scheduler, scheduler_name) in SCHEDULERS {
        let mut push = |size, start, owners, load, name: &str| {
            let burst = Burst {
                size,
                start,
                owners,
                load,
                scheduler,
            };
            cases.push(case(&format!("{size}/{name}{scheduler_name}"), burst, runs));
        };
        for (start, start_name, sizes, loads) in KINDS {
            for (load, load_name) in loads {
                for size in sizes {
                    let name = format!("{start_name}/{load_name}");
                    push(*size, start, false, *load, &name);
                }
            }
        }
        let golden = BurstStart::Golden;
        push(50, golden, true, Load::Idle, "golden/owners");
        push(
            50,
            golden,
            true,
            Load::ManyPrograms,
            "golden/owners-many-programs",
        );
    }
    cases
}

/// The cases of bursts that need images of a registry.
pub fn from_registry(cases: &[Case]) -> impl Iterator<Item = &Case> {
    let needs_it = |case: &&Case| match case.kind {
        Kind::Burst { burst, .. } => {
            burst.start == BurstStart::Pulled || burst.load.needs_registry()
        }
        _ => false,
    };
    cases.iter().filter(needs_it)
}

fn case(name: &str, burst: Burst, runs: u32) -> Case {
    Case {
        name: format!("{PREFIX}{name}"),
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
/// longer, `…/least` the smallest share of one of these VMs in that time, divided by the greatest,
/// `…/used` the instructions of everything else in that time, `…/work` the time that a capture,
/// a golden snapshot, reading or trimming took. `…/fewer` is the time until the last answer to the owner of fewer
/// runs, as a share of that of the other.
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
        ("fewer", FEWER_RUNS, share),
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
        assert!(names.contains(&"node/burst/50/cold/disk".to_owned()));
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
