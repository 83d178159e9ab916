//! Figures: results of benchmarks, and the goals they must reach.

use crate::plan::Sample;
use serde::{Deserialize, Serialize};

/// How a figure was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Clock {
    /// Instruction clock: repeatable.
    Instructions,
    /// Wall clock under software emulation: noisy.
    Wall,
    /// A count, such as bytes or exits.
    Count,
}

/// A figure in `bench/results/latest.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// The case.
    pub case: String,
    /// The VMM.
    pub monitor: String,
    /// How it was measured.
    pub clock: Clock,
    /// `instructions`, `ms`, `us`, `bytes`, `MiB/s`, `exits`, `wake-ups`, `times`, `share`.
    pub unit: String,
    /// Number of samples.
    pub n: usize,
    /// Median, in `unit`.
    pub median: f64,
    /// 90th percentile, in `unit`.
    pub p90: f64,
    /// 99th percentile, in `unit`.
    pub p99: f64,
}

impl Figure {
    /// The figure of these values; `None` if there are none.
    pub fn of(
        case: &str,
        monitor: &str,
        clock: Clock,
        unit: &str,
        mut values: Vec<f64>,
    ) -> Option<Figure> {
        values.sort_by(f64::total_cmp);
        // Nearest-rank percentiles: always a measured value.
        let rank = |share: f64| {
            let index = (share * values.len() as f64).ceil() as usize;
            values.get(index.saturating_sub(1)).copied()
        };
        Some(Figure {
            case: case.into(),
            monitor: monitor.into(),
            clock,
            unit: unit.into(),
            n: values.len(),
            median: rank(0.5)?,
            p90: rank(0.9)?,
            p99: rank(0.99)?,
        })
    }

    /// Figure of the times of samples: instructions on the instruction clock (one per nanosecond),
    /// milliseconds on the wall clock.
    pub fn of_times(case: &str, monitor: &str, clock: Clock, samples: &[Sample]) -> Option<Figure> {
        let (unit, scale) = match clock {
            Clock::Wall => ("ms", 1e-6),
            _ => ("instructions", 1.0),
        };
        let values = samples
            .iter()
            .map(|sample| sample.nanoseconds as f64 * scale);
        Figure::of(case, monitor, clock, unit, values.collect())
    }

    /// Figure of a counter, of the samples that have it.
    pub fn of_counter(
        case: &str,
        monitor: &str,
        unit: &str,
        samples: &[Sample],
        counter: &str,
    ) -> Option<Figure> {
        let values = samples
            .iter()
            .filter_map(|sample| sample.counters.get(counter))
            .map(|value| *value as f64);
        Figure::of(case, monitor, Clock::Count, unit, values.collect())
    }
}

/// Goal of a figure.
pub struct Goal {
    /// Case of Jiffy's figure.
    pub case: &'static str,
    /// Unit of that figure: a case may have figures on several clocks.
    pub unit: &'static str,
    /// The bound.
    pub bound: Bound,
    /// Whether it is a promise. The check fails on a broken promise; other goals are only reported.
    pub promised: bool,
}

/// Bound in the figure's unit.
pub enum Bound {
    /// At most.
    AtMost(f64),
    /// At least.
    AtLeast(f64),
    /// At most this share of a peer's figure in the same run, if the peer was measured.
    OfPeer(&'static str, f64),
    /// At most this multiple of Jiffy's figure of another case in the same run.
    OfCase(&'static str, f64),
}

const MIB: f64 = 1024.0 * 1024.0;

const fn promise(case: &'static str, unit: &'static str, bound: Bound) -> Goal {
    Goal {
        case,
        unit,
        bound,
        promised: true,
    }
}

const fn aim(case: &'static str, unit: &'static str, bound: Bound) -> Goal {
    Goal {
        case,
        unit,
        bound,
        promised: false,
    }
}

const fn at_least_as(peer: &'static str, case: &'static str) -> Goal {
    aim(case, INSTRUCTIONS, Bound::OfPeer(peer, 1.0))
}

const INSTRUCTIONS: &str = "instructions";
const QEMU: &str = "qemu-microvm";
const FIRECRACKER: &str = "firecracker";

/// Promises (on the instruction clock and of counts) and aims. Figures on the wall clock are never
/// promises.
pub const GOALS: &[Goal] = &[
    promise("kernel/instructions", INSTRUCTIONS, Bound::AtMost(9.5e6)),
    promise("kernel/bytes", "bytes", Bound::AtMost(6.0 * MIB)),
    promise("vmm/exec-to-first-run", INSTRUCTIONS, Bound::AtMost(8e6)),
    promise("vmm/memory-overhead", "bytes", Bound::AtMost(3.0 * MIB)),
    // 0.8 of the 59.7 M that was first measured for Firecracker 1.17-dev. With Jiffy's command line
    // for both, the guest's own 31 M are most of either figure.
    promise(
        "boot/same-kernel/pid1",
        INSTRUCTIONS,
        Bound::AtMost(0.8 * 59.7e6),
    ),
    promise(
        "boot/same-kernel/pid1",
        INSTRUCTIONS,
        Bound::OfPeer(FIRECRACKER, 1.0),
    ),
    promise("boot/vm-exits", "exits", Bound::OfPeer(FIRECRACKER, 1.0)),
    promise("boot/own-kernel/pid1", INSTRUCTIONS, Bound::AtMost(30e6)),
    promise("run/cold/answer", INSTRUCTIONS, Bound::AtMost(45e6)),
    aim(
        "restore/mapped/128/visible",
        INSTRUCTIONS,
        Bound::AtMost(2e6),
    ),
    aim(
        "restore/mapped/512/visible",
        INSTRUCTIONS,
        Bound::AtMost(2e6),
    ),
    // The cost of a restore does not grow with RAM.
    promise(
        "restore/mapped/4096/visible",
        INSTRUCTIONS,
        Bound::OfCase("restore/mapped/128/visible", 1.1),
    ),
    promise(
        "restore/spare/128/resumed",
        INSTRUCTIONS,
        Bound::AtMost(1.5e6),
    ),
    promise("restore/lazy/128/visible", INSTRUCTIONS, Bound::AtMost(5e6)),
    promise(
        "restore/lazy-serial/128/visible",
        INSTRUCTIONS,
        Bound::AtMost(3.2e6),
    ),
    promise(
        "restore/lazy-spare/128/visible",
        INSTRUCTIONS,
        Bound::AtMost(3.2e6),
    ),
    promise(
        "restore/lazy-first/128/visible",
        INSTRUCTIONS,
        Bound::AtMost(12e6),
    ),
    promise("snapshot/full/128/pause", INSTRUCTIONS, Bound::AtMost(25e6)),
    promise("run/golden/answer", INSTRUCTIONS, Bound::AtMost(6e6)),
    promise("run/cold/network", INSTRUCTIONS, Bound::AtMost(30e6)),
    promise("run/golden/network", INSTRUCTIONS, Bound::AtMost(8e6)),
    promise("net/host-setup", INSTRUCTIONS, Bound::AtMost(1e6)),
    promise("net/cold/tcp", INSTRUCTIONS, Bound::AtMost(36e6)),
    promise("net/golden/tcp", INSTRUCTIONS, Bound::AtMost(11e6)),
    promise("proxy/wake/first-byte", INSTRUCTIONS, Bound::AtMost(14e6)),
    aim("proxy/rtt/overhead", INSTRUCTIONS, Bound::AtMost(0.25e6)),
    // At least as good as the better of the two.
    at_least_as(QEMU, "net/tx/instructions-per-mib"),
    at_least_as(QEMU, "net/tx-8/instructions-per-mib"),
    at_least_as(QEMU, "net/rx/instructions-per-mib"),
    at_least_as(QEMU, "net/rx-8/instructions-per-mib"),
    at_least_as(QEMU, "net/udp/instructions-per-packet"),
    at_least_as(QEMU, "net/rtt"),
    at_least_as(FIRECRACKER, "net/tx/instructions-per-mib"),
    at_least_as(FIRECRACKER, "net/tx-8/instructions-per-mib"),
    at_least_as(FIRECRACKER, "net/rx/instructions-per-mib"),
    at_least_as(FIRECRACKER, "net/rx-8/instructions-per-mib"),
    at_least_as(FIRECRACKER, "net/udp/instructions-per-packet"),
    at_least_as(FIRECRACKER, "net/rtt"),
    promise("run/golden/detached", INSTRUCTIONS, Bound::AtMost(6e6)),
    promise("exec/answer", INSTRUCTIONS, Bound::AtMost(6e6)),
    promise("fork/1/host", INSTRUCTIONS, Bound::AtMost(1.5e6)),
    promise("snapshot/idle-128/bytes", "bytes", Bound::AtMost(8.0 * MIB)),
    promise("clone/unique-memory", "bytes", Bound::AtMost(4.0 * MIB)),
    aim("node/clones/1000/memory", "bytes", Bound::AtMost(4.0 * MIB)),
    aim(
        "node/clones/1000/daemon-memory",
        "bytes",
        Bound::AtMost(64.0 * MIB),
    ),
    aim("node/vms/1000/ps", INSTRUCTIONS, Bound::AtMost(5e6)),
    aim(
        "node/sleepers/10000/memory",
        "bytes",
        Bound::AtMost(128.0 * MIB),
    ),
    // 2 s of a processor that executes an instruction in a nanosecond.
    aim(
        "node/sleepers/10000/start",
        INSTRUCTIONS,
        Bound::AtMost(2e9),
    ),
    aim(
        "node/burst/10/golden/many-programs/ratio",
        "times",
        Bound::AtMost(0.6),
    ),
    aim(
        "node/burst/50/golden/many-programs/ratio",
        "times",
        Bound::AtMost(0.6),
    ),
    promise(
        "vm/idle/instructions-per-second",
        INSTRUCTIONS,
        Bound::AtMost(1e6),
    ),
    promise(
        "vm/idle/wake-ups-per-second",
        "wake-ups",
        Bound::AtMost(2.0),
    ),
    promise(
        "disk/create-root/instructions",
        INSTRUCTIONS,
        Bound::AtMost(5e6),
    ),
    promise(
        "disk/clone-root/instructions",
        INSTRUCTIONS,
        Bound::AtMost(5e6),
    ),
    promise(
        "image/first-answer/bytes-share",
        "share",
        Bound::AtMost(0.15),
    ),
    promise("run/pulled-second/ratio", "times", Bound::AtMost(1.2)),
    promise("run/pulled-lazy-second/ratio", "times", Bound::AtMost(1.2)),
    // At least as fast as QEMU; the ratio of the times is reported as well.
    promise("disk/seq-read", INSTRUCTIONS, Bound::OfPeer(QEMU, 1.0)),
    promise("disk/rand-read", INSTRUCTIONS, Bound::OfPeer(QEMU, 1.0)),
    aim("disk/seq-read-cold", INSTRUCTIONS, Bound::OfPeer(QEMU, 1.0)),
    promise(
        "disk/rand-read-cold",
        INSTRUCTIONS,
        Bound::OfPeer(QEMU, 1.0),
    ),
    aim("image/import/ratio", "times", Bound::AtMost(1.5)),
    aim("pager/replay/throughput", "MiB/s", Bound::AtLeast(2048.0)),
    aim("pager/fault/p50", "us", Bound::AtMost(12.0)),
    aim("pager/fault/times-sparse", "times", Bound::AtLeast(5.0)),
    aim(
        "pager/fault/times-sparse-cold",
        "times",
        Bound::AtLeast(5.0),
    ),
];

/// A goal compared with its figure.
pub struct Verdict {
    /// The case.
    pub case: &'static str,
    /// The result, as one sentence for the report.
    pub line: String,
    /// Whether the goal was reached.
    pub reached: bool,
    /// Whether it is a promise.
    pub promised: bool,
}

impl Verdict {
    /// Whether it is a broken promise.
    pub fn is_broken(&self) -> bool {
        self.promised && !self.reached
    }
}

/// Compares Jiffy's figures with the goals. A goal without a figure is not reached; a goal whose
/// peer was not measured is left out.
pub fn check_goals(figures: &[Figure]) -> Vec<Verdict> {
    GOALS
        .iter()
        .filter_map(|goal| check_goal(goal, figures))
        .collect()
}

fn check_goal(goal: &Goal, figures: &[Figure]) -> Option<Verdict> {
    let of = |case: &str, monitor: &str| {
        figures.iter().find(|figure| {
            figure.case == case && figure.monitor == monitor && figure.unit == goal.unit
        })
    };
    let find = |monitor: &str| of(goal.case, monitor);
    let (least, bound, words) = match goal.bound {
        Bound::AtMost(bound) => (false, bound, String::new()),
        Bound::AtLeast(bound) => (true, bound, String::new()),
        Bound::OfPeer(peer, share) => (
            false,
            find(peer)?.median * share,
            format!(" ({share} of {peer})"),
        ),
        Bound::OfCase(other, times) => (
            false,
            of(other, "jiffy")?.median * times,
            format!(" ({times} × {other})"),
        ),
    };
    let (line, reached) = match find("jiffy") {
        None => (format!("{}: not measured", goal.case), false),
        Some(ours) => (
            format!(
                "{}: {} of at {} {}{words}",
                goal.case,
                format_value(ours.median, &ours.unit),
                if least { "least" } else { "most" },
                format_value(bound, &ours.unit)
            ),
            match least {
                true => ours.median >= bound,
                false => ours.median <= bound,
            },
        ),
    };
    Some(Verdict {
        case: goal.case,
        line,
        reached,
        promised: goal.promised,
    })
}

/// Formats a value with its unit.
pub fn format_value(value: f64, unit: &str) -> String {
    match unit {
        "instructions" if value < 1e5 => format!("{:.1} k", value / 1e3),
        "instructions" => format!("{:.2} M", value / 1e6),
        "ms" => format!("{value:.1} ms"),
        "bytes" => format!("{:.2} MiB", value / MIB),
        "us" => format!("{value:.1} µs"),
        "times" => format!("{value:.2} ×"),
        "share" => format!("{:.1} %", value * 100.0),
        "wake-ups" => format!("{value:.1} wake-ups"),
        other => format!("{value:.0} {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(case: &str, monitor: &str, median: f64) -> Figure {
        Figure::of(
            case,
            monitor,
            Clock::Instructions,
            "instructions",
            vec![median],
        )
        .unwrap()
    }

    #[test]
    fn percentiles_are_measured_values() {
        let values = (1..=20).rev().map(f64::from).collect();
        let figure = Figure::of("c", "jiffy", Clock::Count, "exits", values).unwrap();
        assert_eq!((figure.median, figure.p90, figure.p99), (10.0, 18.0, 20.0));
        assert_eq!(
            Figure::of("c", "jiffy", Clock::Count, "exits", vec![]),
            None
        );
    }

    #[test]
    fn a_missed_aim_is_reported_and_not_a_failure() {
        let verdict = |figures: &[Figure], case: &str| {
            let mut verdicts = check_goals(figures).into_iter();
            verdicts
                .find(|verdict| verdict.line.starts_with(case))
                .unwrap()
        };
        let aim = "pager/replay/throughput";
        let missing = verdict(&[], aim);
        assert!(!missing.reached && !missing.is_broken());
        let measured = |value| Figure::of(aim, "jiffy", Clock::Wall, "MiB/s", vec![value]).unwrap();
        assert!(!verdict(&[measured(2000.0)], aim).reached);
        assert!(verdict(&[measured(2100.0)], aim).reached);
        let promise = verdict(&[figure("run/cold/answer", "jiffy", 46e6)], "run/cold");
        assert!(promise.is_broken());
    }

    #[test]
    fn no_wall_clock_figure_is_promised() {
        let wall = ["ms", "us", "MiB/s"];
        let promises = GOALS.iter().filter(|goal| goal.promised);
        assert!(promises.into_iter().all(|goal| !wall.contains(&goal.unit)));
    }

    #[test]
    fn a_goal_against_a_peer_needs_that_peers_figure() {
        let ours = figure("boot/same-kernel/pid1", "jiffy", 45e6);
        let verdicts = |figures: &[Figure]| -> Vec<bool> {
            check_goals(figures)
                .into_iter()
                .filter(|verdict| verdict.line.starts_with("boot/same-kernel"))
                .map(|verdict| verdict.reached)
                .collect()
        };
        assert_eq!(verdicts(std::slice::from_ref(&ours)), [true]);
        let peer = figure("boot/same-kernel/pid1", "firecracker", 44e6);
        assert_eq!(verdicts(&[ours, peer]), [true, false]);
    }

    #[test]
    fn a_relative_goal_is_a_share_of_another_cases_figure() {
        let small = figure("restore/mapped/128/visible", "jiffy", 1.9e6);
        let reached = |large| {
            let large = figure("restore/mapped/4096/visible", "jiffy", large);
            let mut verdicts = check_goals(&[small.clone(), large]).into_iter();
            let of_large = verdicts.find(|verdict| verdict.case.contains("4096"));
            of_large.unwrap().reached
        };
        assert!(reached(2.0e6) && !reached(2.1e6));
    }
}
