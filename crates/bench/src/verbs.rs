//! Cases that use the `jiffy` command.

use crate::figure::{Clock, Figure};
use crate::plan::{
    BYTES, Case, DAEMON_BYTES, DAEMON_START, INSTRUCTIONS, Kind, LIST, Sample, WAKE_UPS,
};
use std::fmt::Display;

/// `jiffy run -- true` with a running daemon.
pub const RUN: &str = "run/cold/answer";
/// Like [`RUN`], from a golden snapshot.
pub const RUN_GOLDEN: &str = "run/golden/answer";
/// `jiffy run -- true` on a network.
pub const RUN_NETWORK: &str = "run/cold/network";
/// Like [`RUN_NETWORK`], from a golden snapshot.
pub const RUN_GOLDEN_NETWORK: &str = "run/golden/network";
/// `jiffy run --detach` without a command, from a golden snapshot: a VM that waits for execs.
pub const RUN_DETACHED: &str = "run/golden/detached";
/// The first `jiffy exec VM -- true` in such a VM.
pub const EXEC: &str = "exec/answer";
/// Size on disk of a snapshot of an idle VM.
pub const SNAPSHOT_BYTES: &str = "snapshot/idle-128/bytes";
/// Memory that only an idle clone has.
pub const CLONE_MEMORY: &str = "clone/unique-memory";
/// Prefix of the names of figures of many VMs.
pub const MANY: &str = "node/";
/// Memory of the host per clone, everything included.
pub const CLONES_MEMORY: &str = "node/clones/1000/memory";
/// Memory of the daemon with these clones.
const CLONES_DAEMON: &str = "node/clones/1000/daemon-memory";
/// `jiffy ps --all` of a thousand VMs, of which none runs.
pub const LIST_ALL: &str = "node/vms/1000/ps";
/// Memory of the daemon with ten thousand hibernated VMs.
pub const SLEEPERS_MEMORY: &str = "node/sleepers/10000/memory";
/// Start of the daemon with these VMs.
const SLEEPERS_START: &str = "node/sleepers/10000/start";
/// Instructions of an idle VM: guest, VMM, daemon and host kernel.
pub const IDLE: &str = "vm/idle/instructions-per-second";
/// Wake-ups of an idle VM.
pub const IDLE_WAKE_UPS: &str = "vm/idle/wake-ups-per-second";
/// `jiffy run` from a golden snapshot to the first byte of the answer, for several commands at
/// once.
pub const AT_ONCE: [(u32, &str); 3] = [
    (1, "restore/concurrent/1/answer"),
    (10, "restore/concurrent/10/answer"),
    (50, "restore/concurrent/50/answer"),
];

const JIFFY: &str = "/bin/jiffy";

/// `jiffy run -- true`: a cold start, or from the golden snapshot that the first run leaves. With
/// or without a network.
pub(crate) fn run_case(name: &str, cold: bool, network: bool, runs: u32) -> Case {
    let words = |list: &[&str]| Some(list.iter().map(|word| word.to_string()).collect());
    let vm = format!("{}-{{run}}", name.replace('/', "-"));
    let mut argv = vec![JIFFY, "run", "--name", &vm];
    if cold {
        argv.push("--cold");
    }
    if network {
        argv.extend(["--network", "default"]);
    }
    if network && !cold {
        // By this its golden snapshot is told from that of the other case.
        argv.extend(["--memory", "144"]);
    }
    let has_golden = match network {
        true => has_golden_of(144),
        false => HAS_GOLDEN.to_owned(),
    };
    argv.extend(["--", "true"]);
    Case {
        name: name.into(),
        monitor: "jiffy".into(),
        kind: Kind::ToExit {
            once: (!cold)
                .then(|| words(&["/bin/sh", "-c", &has_golden]))
                .flatten(),
            pull: None,
            before: None,
            argv: argv.into_iter().map(String::from).collect(),
            timeline: words(&[JIFFY, "timeline", &vm, "--format", "json"]),
            after: words(&[JIFFY, "rm", "--force", &vm]),
        },
        runs,
        // The first run starts the daemon and imports the image.
        warm_up: 2,
    }
}

/// A detached VM, and the first exec in one.
pub(crate) fn detached_cases(runs: u32) -> [Case; 2] {
    let vm = "detached-{run}";
    let words =
        |list: &[&str]| -> Vec<String> { list.iter().map(|word| word.to_string()).collect() };
    let case = |name: &str, before: Option<Vec<String>>, argv: Vec<String>| Case {
        name: name.into(),
        monitor: "jiffy".into(),
        kind: Kind::ToExit {
            pull: None,
            // A booted VM has touched less of its memory than a restored one, so a golden snapshot
            // must exist.
            once: Some(words(&["/bin/sh", "-c", HAS_GOLDEN])),
            before,
            argv,
            timeline: None,
            after: Some(words(&[JIFFY, "rm", "--force", vm])),
        },
        runs,
        // The first run boots a VM, and starts the daemon if it does not run.
        warm_up: 2,
    };
    let run = words(&[JIFFY, "run", "--detach", "--name", vm]);
    let exec = words(&[JIFFY, "exec", vm, "--", "true"]);
    [
        case(RUN_DETACHED, None, run.clone()),
        case(EXEC, Some(run), exec),
    ]
}

/// Factor of runs for cases that vary more: on one CPU the end of one run's VM sometimes delays the
/// next run.
pub const RUN_FACTOR: u32 = 3;

/// A shell command that succeeds if there is a golden snapshot.
pub(crate) const HAS_GOLDEN: &str = "jiffy snapshot ls --all --format json | grep -q golden";

/// The same for VMs with this much memory, which tells a case's golden snapshot from others.
pub(crate) fn has_golden_of(memory_mib: impl Display) -> String {
    format!(r#"jiffy snapshot ls --all --format json | grep -q '"memory_mib": {memory_mib}'"#)
}

/// Cases that count bytes.
pub(crate) fn count_cases(runs: u32) -> [Case; 3] {
    [
        (SNAPSHOT_BYTES, Kind::SnapshotBytes),
        (CLONE_MEMORY, Kind::CloneMemory),
        (IDLE, Kind::Idle),
    ]
    .map(|(name, kind)| Case {
        name: name.into(),
        monitor: "jiffy".into(),
        kind,
        // Each boots a VM; they vary little.
        runs: runs.min(5),
        warm_up: 1,
    })
}

/// The case of a node full of clones; one run, because it takes minutes.
pub(crate) fn clones_case() -> Case {
    Case {
        name: CLONES_MEMORY.into(),
        monitor: "jiffy".into(),
        kind: Kind::Clones { count: 1000 },
        runs: 1,
        warm_up: 0,
    }
}

/// A list of many VMs, once: making them takes a minute.
pub(crate) fn list_case() -> Case {
    Case {
        name: LIST_ALL.into(),
        monitor: "jiffy".into(),
        kind: Kind::List { count: 1000 },
        runs: 1,
        warm_up: 0,
    }
}

/// A node with many hibernated VMs, once: making them takes minutes.
pub(crate) fn sleepers_case() -> Case {
    Case {
        name: SLEEPERS_MEMORY.into(),
        monitor: "jiffy".into(),
        kind: Kind::Sleepers { count: 10_000 },
        runs: 1,
        warm_up: 0,
    }
}

/// Figures that are a counter of this case: name, unit and counter of each.
pub(crate) fn counters_of(
    case: &str,
) -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    let all = [
        (SNAPSHOT_BYTES, SNAPSHOT_BYTES, "bytes", BYTES),
        (CLONE_MEMORY, CLONE_MEMORY, "bytes", BYTES),
        (CLONES_MEMORY, CLONES_MEMORY, "bytes", BYTES),
        (CLONES_MEMORY, CLONES_DAEMON, "bytes", DAEMON_BYTES),
        (LIST_ALL, LIST_ALL, "instructions", LIST),
        (SLEEPERS_MEMORY, SLEEPERS_MEMORY, "bytes", DAEMON_BYTES),
        (
            SLEEPERS_MEMORY,
            SLEEPERS_START,
            "instructions",
            DAEMON_START,
        ),
    ];
    let of_case = all.into_iter().filter(move |counter| counter.0 == case);
    of_case.map(|(_, figure, unit, counter)| (figure, unit, counter))
}

/// Figures of [`Kind::Idle`].
pub(crate) fn idle_figures(monitor: &str, samples: &[Sample]) -> Vec<Figure> {
    let values = |counter: &str, share: f64| {
        let counters = samples
            .iter()
            .filter_map(|sample| sample.counters.get(counter));
        counters.map(|value| *value as f64 * share).collect()
    };
    let figure = |case: &str, unit: &str, values: Vec<f64>| {
        Figure::of(case, monitor, Clock::Count, unit, values)
    };
    let instructions = figure(IDLE, "instructions", values(INSTRUCTIONS, 1.0));
    let wake_ups = figure(IDLE_WAKE_UPS, "wake-ups", values(WAKE_UPS, 1e-3));
    instructions.into_iter().chain(wake_ups).collect()
}

/// Commands at once. The VMs stay until all have answered, so that their memory can be measured.
pub(crate) fn at_once((count, name): (u32, &str)) -> Case {
    let words = |list: &[&str]| list.iter().map(|word| word.to_string()).collect();
    let vm = format!("at-once-{count}-{{run}}");
    let script = "echo J; exec sleep 1000";
    Case {
        name: name.into(),
        monitor: "jiffy".into(),
        kind: Kind::AtOnce {
            count,
            argv: words(&[JIFFY, "run", "--name", &vm, "--", "sh", "-c", script]),
            once: words(&["/bin/sh", "-c", HAS_GOLDEN]),
            after: words(&[JIFFY, "rm", "--force", &vm]),
        },
        // About the same number of samples for each count.
        runs: match count {
            1 => 20,
            10 => 4,
            _ => 2,
        },
        warm_up: if count == 1 { 2 } else { 1 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::GOALS;

    #[test]
    fn the_case_of_many_sleeping_vms_has_two_figures_with_goals() {
        let case = sleepers_case();
        let figures = counters_of(&case.name);
        let figures: Vec<_> = figures.map(|(figure, unit, _)| (figure, unit)).collect();
        assert_eq!(figures.len(), 2);
        for (figure, unit) in figures {
            let mut goals = GOALS.iter();
            assert!(goals.any(|goal| (goal.case, goal.unit) == (figure, unit)));
        }
    }
}
