//! Compares figures with the committed ones and with the goals.

use crate::cases::{OWN_KERNEL, SAME_KERNEL};
use crate::disk;
use crate::figure::{Clock, Figure, Verdict, check_goals, format_value};
use crate::folder;
use crate::image;
use crate::network;
use crate::plan::Outcome;
use crate::proxy;
use crate::verbs::{EXEC, IDLE, IDLE_WAKE_UPS, MANY, RUN_DETACHED, RUN_GOLDEN};

/// How much worse a figure may get. Its median is compared with the committed 90th percentile, so
/// that a case that varies does not fail by chance.
const TOLERANCE: f64 = 1.02;
/// Bytes by which a VMM's memory may grow in addition: the program's layout decides how many of the
/// kernel's fault-around windows are touched.
const WINDOW: f64 = 65536.0;
/// Instructions per second by which an idle VM may differ in addition: a timer of the machine may
/// or may not expire during the measurement.
const TIMER: f64 = 10_000.0;

/// A figure that does not pass the check.
pub struct Complaint {
    /// The figure's case.
    pub case: String,
    /// The reason, as one sentence.
    pub line: String,
}

/// Complaints about figures of Jiffy's that got worse than the committed ones, are missing, or
/// break a promise.
pub fn complaints(committed: &[Figure], now: &[Figure]) -> Vec<Complaint> {
    let broken = check_goals(now).into_iter().filter(Verdict::is_broken);
    let broken = broken.map(|verdict| Complaint {
        case: verdict.case.to_owned(),
        line: format!("goal missed: {}", verdict.line),
    });
    regressions(committed, now).chain(broken).collect()
}

/// Complaints about figures that are missing or got worse. Not compared: wall-clock figures
/// (noise), peers, disk reads, shared folders, traffic and many VMs (all take long), ratios
/// (their parts are).
fn regressions<'a>(
    committed: &'a [Figure],
    now: &'a [Figure],
) -> impl Iterator<Item = Complaint> + 'a {
    let ours = committed
        .iter()
        .filter(|old| old.monitor == "jiffy" && old.clock != Clock::Wall)
        .filter(|old| !disk::is_reading(&old.case) && !network::is_traffic(&old.case))
        .filter(|old| !proxy::is_traffic(&old.case))
        .filter(|old| !folder::is_work(&old.case))
        .filter(|old| old.unit != "times")
        .filter(|old| !old.case.starts_with(MANY));
    ours.filter_map(|old| {
        let new = now.iter().find(|new| {
            new.case == old.case && new.monitor == old.monitor && new.clock == old.clock
        });
        let line = match new {
            None => format!("{}: committed, but not measured now", old.case),
            Some(new) if new.median > old.p90 * TOLERANCE + allowed_growth(old) => format!(
                "worse: {}: {} now, {} committed ({:+.1} %)",
                old.case,
                format_value(new.median, &new.unit),
                format_value(old.median, &old.unit),
                (new.median / old.median - 1.0) * 100.0
            ),
            Some(_) => return None,
        };
        Some(Complaint {
            case: old.case.clone(),
            line,
        })
    })
}

fn allowed_growth(figure: &Figure) -> f64 {
    match figure.case.as_str() {
        case if case.ends_with("memory-overhead") => WINDOW,
        IDLE => TIMER,
        _ => 0.0,
    }
}

/// The cases that must run to measure a figure.
pub fn cases_of(figure: &str) -> Vec<&str> {
    match figure {
        image::PULLED_RATIO => vec![image::PULLED, RUN_GOLDEN],
        image::LAZY_RATIO => vec![image::LAZY, RUN_GOLDEN],
        IDLE_WAKE_UPS => vec![IDLE],
        // In a complete run, VMs of this kind have run in the machine before.
        case @ (EXEC | RUN_DETACHED) => vec![RUN_GOLDEN, case],
        "boot/vm-exits" | "boot/same-kernel/memory-overhead" => vec![SAME_KERNEL],
        "vmm/memory-overhead" | "vmm/exec-to-first-run" => vec![OWN_KERNEL],
        case => vec![case],
    }
}

/// Adds the samples of a second measurement to the outcomes of the first.
pub fn merge_samples(outcomes: &mut [Outcome], again: Vec<Outcome>) {
    for more in again {
        let same = |it: &&mut Outcome| it.name == more.name && it.monitor == more.monitor;
        if let Some(outcome) = outcomes.iter_mut().find(same) {
            outcome.samples.extend(more.samples);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::{Bound, GOALS};
    use crate::plan::Sample;

    fn spread(case: &str, monitor: &str, unit: &str, values: &[f64]) -> Figure {
        Figure::of(case, monitor, Clock::Instructions, unit, values.to_vec()).unwrap()
    }

    fn figure(case: &str, monitor: &str, median: f64) -> Figure {
        spread(case, monitor, "instructions", &[median])
    }

    fn worse(committed: &[Figure], now: &[Figure]) -> usize {
        regressions(committed, now).count()
    }

    #[test]
    fn a_change_within_the_noise_of_the_baseline_is_no_regression() {
        let of = |values: &[f64]| [spread("c", "jiffy", "instructions", values)];
        let old = of(&[100.0, 100.0, 100.0, 150.0]);
        assert_eq!(worse(&old, &of(&[151.0])), 0);
        assert_eq!(worse(&old, &of(&[154.0])), 1);
    }

    #[test]
    fn a_regression_is_over_two_percent_of_jiffys_own_figure() {
        let old = [
            figure("a", "jiffy", 100.0),
            figure("b", "firecracker", 100.0),
        ];
        let now = |ours, theirs| {
            [
                figure("a", "jiffy", ours),
                figure("b", "firecracker", theirs),
            ]
        };
        assert_eq!(worse(&old, &now(102.0, 500.0)), 0);
        assert_eq!(worse(&old, &now(102.1, 100.0)), 1);
        assert_eq!(worse(&old, &[]), 1, "a figure that is missing is reported");
    }

    #[test]
    fn memory_may_grow_by_64_kib_before_it_is_a_regression() {
        let of = |bytes| [spread("vmm/memory-overhead", "jiffy", "bytes", &[bytes])];
        let old = of(1_478_656.0);
        assert_eq!(worse(&old, &of(1_478_656.0 + 65536.0)), 0);
        assert_eq!(worse(&old, &of(1_478_656.0 + 2.0 * 65536.0)), 1);
    }

    #[test]
    fn a_ratio_is_checked_only_against_its_promised_bound() {
        let ratio = |value| spread(image::PULLED_RATIO, "jiffy", "times", &[value]);
        let about = |now: f64| {
            let complaints = complaints(&[ratio(0.9)], &[ratio(now)]);
            let mut about = complaints.iter();
            about.any(|complaint| complaint.case == image::PULLED_RATIO)
        };
        let mut goals = GOALS.iter();
        let goal = goals.find(|goal| goal.case == image::PULLED_RATIO);
        let Some(Bound::AtMost(bound)) = goal.map(|goal| &goal.bound) else {
            panic!("the ratio has a promised bound of its own");
        };
        assert!(!about(bound - 0.01));
        assert!(about(bound + 0.01));
    }

    #[test]
    fn samples_of_a_repeated_case_are_merged() {
        let outcome = |name: &str, times: &[u64]| Outcome {
            name: name.into(),
            monitor: "jiffy".into(),
            samples: times
                .iter()
                .map(|nanoseconds| Sample {
                    nanoseconds: *nanoseconds,
                    ..Sample::default()
                })
                .collect(),
            failure: None,
        };
        let mut outcomes = [outcome("a", &[1, 2]), outcome("b", &[3])];
        merge_samples(&mut outcomes, vec![outcome("a", &[4])]);
        assert_eq!(outcomes, [outcome("a", &[1, 2, 4]), outcome("b", &[3])]);
    }

    #[test]
    fn a_derived_figure_names_the_cases_it_is_computed_from() {
        for name in ["boot/vm-exits", "vmm/memory-overhead", image::LAZY_RATIO] {
            assert!(!cases_of(name).contains(&name), "{name} is no case");
        }
        assert_eq!(cases_of("fork/1/host"), ["fork/1/host"]);
    }
}
