//! Cases that use the `jiffy` command.

use crate::figure::{Clock, Figure};
use crate::plan::{Case, INSTRUCTIONS, Kind, Sample, WAKE_UPS};

/// `jiffy run -- true`, the daemon being up.
pub const RUN: &str = "run/cold/answer";
/// The same from a golden snapshot.
pub const RUN_GOLDEN: &str = "run/golden/answer";
/// The two on a network.
pub const RUN_NETWORK: &str = "run/cold/network";
/// See [`RUN_NETWORK`].
pub const RUN_GOLDEN_NETWORK: &str = "run/golden/network";
/// `jiffy exec VM -- true`, the VM having nothing else to do.
pub const EXEC: &str = "exec/answer";
/// A snapshot of an idle VM, on disk.
pub const SNAPSHOT_BYTES: &str = "snapshot/idle-128/bytes";
/// Memory that only an idle clone has.
pub const CLONE_MEMORY: &str = "clone/unique-memory";
/// Memory of the host that goes with each of a thousand idle clones, all told.
pub const CLONES_MEMORY: &str = "node/clones/1000/memory";
/// Instructions of an idle VM: guest, VMM, daemon and host kernel.
pub const IDLE: &str = "vm/idle/instructions-per-second";
/// Its wake-ups.
pub const IDLE_WAKE_UPS: &str = "vm/idle/wake-ups-per-second";
/// `jiffy run` from a golden snapshot to the first byte of the answer, so many
/// at once.
pub const AT_ONCE: [(u32, &str); 3] = [
    (1, "restore/concurrent/1/answer"),
    (10, "restore/concurrent/10/answer"),
    (50, "restore/concurrent/50/answer"),
];

const JIFFY: &str = "/bin/jiffy";

/// `jiffy run -- true`, from nothing or from a golden snapshot, which the
/// first run has left behind; perhaps on a network.
pub(crate) fn run_case(name: &str, cold: bool, network: bool, runs: u32) -> Case {
    let words = |list: &[&str]| Some(list.iter().map(|word| word.to_string()).collect());
    let vm = format!("{}-{{run}}", name.replace('/', "-"));
    let mut argv = vec![JIFFY, "run", "--name", &vm];
    if cold {
        argv.push("--cold");
    }
    if network {
        argv.extend(["--network", "default", "--memory", "144"]);
    }
    let has_golden = match network {
        true => HAS_GOLDEN_NETWORK,
        false => HAS_GOLDEN,
    };
    argv.extend(["--", "true"]);
    Case {
        name: name.into(),
        monitor: "jiffy".into(),
        kind: Kind::ToExit {
            once: (!cold)
                .then(|| words(&["/bin/sh", "-c", has_golden]))
                .flatten(),
            pull: None,
            before: None,
            argv: argv.into_iter().map(String::from).collect(),
            timeline: words(&[JIFFY, "timeline", &vm, "--format", "json"]),
            after: words(&[JIFFY, "rm", "--force", &vm]),
        },
        runs,
        // The first starts the daemon and imports the image.
        warm_up: 2,
    }
}

pub(crate) fn exec_case(runs: u32) -> Case {
    let vm = "exec-{run}";
    let words = |list: &[&str]| list.iter().map(|word| word.to_string()).collect();
    Case {
        name: EXEC.into(),
        monitor: "jiffy".into(),
        kind: Kind::ToExit {
            pull: None,
            // A VM that booted has touched less of its memory than a restored one.
            once: Some(words(&["/bin/sh", "-c", HAS_GOLDEN])),
            before: Some(words(&[JIFFY, "run", "--detach", "--name", vm])),
            argv: words(&[JIFFY, "exec", vm, "--", "true"]),
            timeline: None,
            after: Some(words(&[JIFFY, "rm", "--force", vm])),
        },
        runs,
        // The first boots, and starts the daemon if it does not run.
        warm_up: 2,
    }
}

/// Factor of runs for cases that vary more: on one CPU the end of one run's VM sometimes
/// delays the next.
pub const SPREAD: u32 = 3;

/// How to ask whether there is a golden snapshot.
pub(crate) const HAS_GOLDEN: &str = "jiffy snapshot ls --all --format json | grep -q golden";

/// The same of a kind with a network, which its size tells from the other.
const HAS_GOLDEN_NETWORK: &str =
    r#"jiffy snapshot ls --all --format json | grep -q '"memory_mib": 144'"#;

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

/// A node full of clones, once: it takes minutes.
pub(crate) fn clones_case() -> Case {
    Case {
        name: CLONES_MEMORY.into(),
        monitor: "jiffy".into(),
        kind: Kind::Clones { count: 1000 },
        runs: 1,
        warm_up: 0,
    }
}

/// What [`Kind::Idle`] counted.
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

/// The VMs stay until all have answered, so that one can look at them.
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
        // About as many samples of each.
        runs: match count {
            1 => 20,
            10 => 4,
            _ => 2,
        },
        warm_up: if count == 1 { 2 } else { 1 },
    }
}
