//! Writes the results of a benchmark: JSON, Markdown and SVG.

use crate::cases;
use crate::figure::{Clock, Figure, Verdict, format_value};
use crate::peers::Peer;
use crate::plan::{Outcome, Sample};
use crate::plot;
use crate::verbs::AT_ONCE;
use anyhow::Result;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

/// Counters that are reported for every VMM.
const COUNTERS: [(&str, &str); 9] = [
    ("exits", "VM exits"),
    ("io_exits", "port I/O"),
    ("mmio_exits", "memory-mapped I/O"),
    ("halt_exits", "halts"),
    ("irq_exits", "host interrupts"),
    ("irq_window_exits", "interrupt windows"),
    ("signal_exits", "signals"),
    ("pf_taken", "page faults taken"),
    ("pf_fixed", "page faults mapped"),
];

/// The whole report in Markdown.
pub fn markdown(
    figures: &[Figure],
    outcomes: &[Outcome],
    verdicts: &[Verdict],
    versions: &[(Peer, String)],
) -> String {
    let mut out = format!("# Benchmark of {}\n\n{}\n\n", today(), host());
    for (peer, version) in versions {
        let _ = writeln!(out, "* {}: {version}", peer.name());
    }
    out.push_str("\n## Figures\n\n| case | monitor | clock | n | median | p90 | p99 |\n|---|---|---|--:|--:|--:|--:|\n");
    for figure in figures {
        let clock = match figure.clock {
            Clock::Instructions => "instructions",
            Clock::Wall => "wall",
            Clock::Count => "count",
        };
        let _ = writeln!(
            out,
            "| `{}` | {} | {clock} | {} | {} | {} | {} |",
            figure.case,
            figure.monitor,
            figure.n,
            format_value(figure.median, &figure.unit),
            format_value(figure.p90, &figure.unit),
            format_value(figure.p99, &figure.unit)
        );
    }
    out.push_str("\n## Goals\n\n");
    for verdict in verdicts {
        let mark = match (verdict.reached, verdict.promised) {
            (true, _) => "reached",
            (false, true) => "MISSED",
            (false, false) => "not reached yet",
        };
        let _ = writeln!(out, "* {mark}: {}", verdict.line);
    }
    at_once_table(&mut out, outcomes);
    counters_table(&mut out, outcomes);
    for outcome in outcomes {
        let at_once = AT_ONCE.iter().any(|(_, case)| outcome.name == *case);
        if !at_once && outcome.samples.iter().any(|s| !s.spans.is_empty()) {
            span_table(&mut out, outcome);
        }
    }
    out
}

/// Medians of all counters and spans of a case.
pub fn all_counters(outcome: &Outcome) -> String {
    let names: BTreeSet<&String> = outcome
        .samples
        .iter()
        .flat_map(|sample| sample.counters.keys())
        .collect();
    let mut out = format!("{} {}:", outcome.name, outcome.monitor);
    for name in names {
        let values = outcome
            .samples
            .iter()
            .filter_map(|sample| sample.counters.get(name));
        let values = values.map(|value| *value as f64).collect();
        if let Some(figure) = Figure::of("", "", Clock::Count, "", values)
            && figure.median > 0.0
        {
            let _ = write!(out, " {name} {}", figure.median);
        }
    }
    out
}

/// Table of the times of concurrent restores.
fn at_once_table(out: &mut String, outcomes: &[Outcome]) {
    let mut rows = String::new();
    for (count, case) in AT_ONCE {
        let found = outcomes.iter().find(|outcome| outcome.name == case);
        let Some(outcome) = found.filter(|outcome| !outcome.samples.is_empty()) else {
            continue;
        };
        let samples = &outcome.samples;
        let Some(latency) = Figure::of_times(case, "jiffy", Clock::Wall, samples) else {
            continue;
        };
        let median = |counter: &str, unit: &str, scale: f64| {
            let figure = Figure::of_counter(case, "jiffy", unit, samples, counter);
            figure.map_or("–".into(), |figure| {
                format_value(figure.median * scale, unit)
            })
        };
        let _ = writeln!(
            rows,
            "| {count} | {} | {} | {} | {} | {} | {} | {} | {} |",
            format_value(latency.median, "ms"),
            format_value(latency.p90, "ms"),
            format_value(latency.p99, "ms"),
            median("cpu_ns", "ms", 1e-6),
            median("pf_taken", "", 1.0),
            median("bytes_read", "bytes", 1.0),
            median("unique", "bytes", 1.0),
            median("shared", "bytes", 1.0),
        );
    }
    if !rows.is_empty() {
        out.push_str(
            "\n## Restores at once, wall clock\n\n`jiffy run` from a golden snapshot to the \
             first byte of the answer, on the machine's one CPU; then, of each VM (medians), \
             the machine's CPU time, page faults of the guest, bytes its monitor read (mapped \
             memory is not read), and the monitor's memory, guest RAM included, that it alone \
             and that others too have mapped.\n\n\
             | at once | p50 | p90 | p99 | CPU | faults | read | unique | shared |\n\
             |--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
        );
        out.push_str(&rows);
    }
}

fn counters_table(out: &mut String, outcomes: &[Outcome]) {
    out.push_str("\n## The same kernel: what KVM counted until the marker (medians)\n\n| |");
    let cases: Vec<_> = outcomes
        .iter()
        .filter(|outcome| outcome.name == cases::SAME_KERNEL && !outcome.samples.is_empty())
        .collect();
    for outcome in &cases {
        let _ = write!(out, " {} |", outcome.monitor);
    }
    let _ = write!(out, "\n|---|{}\n", "--:|".repeat(cases.len()));
    let mut row = |name: &str, key: &str, scale: f64, unit: &str| {
        let _ = write!(out, "| {name} |");
        for outcome in &cases {
            let values = outcome
                .samples
                .iter()
                .filter_map(|sample| sample.counters.get(key));
            let values = values.map(|value| *value as f64 * scale).collect();
            let figure = Figure::of("", "", Clock::Count, unit, values);
            let text = figure.map_or("–".into(), |figure| format_value(figure.median, unit));
            let _ = write!(out, " {text} |");
        }
        out.push('\n');
    };
    for (key, name) in COUNTERS {
        row(name, key, 1.0, "");
    }
    row("CPU time of the monitor", "cpu_ns", 1.0, "instructions");
    row("memory outside guest RAM", "rss_outside_ram", 1.0, "bytes");
}

fn span_table(out: &mut String, outcome: &Outcome) {
    let whose = match outcome.monitor.as_str() {
        "jiffy" => String::new(),
        other => format!(", {other}"),
    };
    let _ = writeln!(
        out,
        "\n## Spans of `{}`{whose}\n\nLengths; moments are times since the start.\n\n| span | median | p90 | p99 |\n|---|--:|--:|--:|",
        outcome.name
    );
    let names: BTreeSet<&String> = outcome
        .samples
        .iter()
        .flat_map(|sample: &Sample| sample.spans.keys())
        .collect();
    let mut rows: Vec<_> = names
        .into_iter()
        .filter_map(|name| {
            let values = outcome
                .samples
                .iter()
                .filter_map(|sample| sample.spans.get(name));
            let values = values.map(|value| *value as f64).collect();
            Some((
                name,
                Figure::of("", "", Clock::Instructions, "instructions", values)?,
            ))
        })
        .collect();
    rows.sort_by(|a, b| b.1.median.total_cmp(&a.1.median));
    for (name, figure) in rows {
        let value = |value| format_value(value, "instructions");
        let _ = writeln!(
            out,
            "| {name} | {} | {} | {} |",
            value(figure.median),
            value(figure.p90),
            value(figure.p99)
        );
    }
}

/// Writes `latest.json`, `latest.md` and `latest.svg`.
///
/// # Errors
///
/// If a file can't be written.
pub fn write(folder: &Path, figures: &[Figure], markdown: &str) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    let mut json = serde_json::to_vec_pretty(figures)?;
    json.push(b'\n');
    jiffy_sys::durable::replace(&folder.join("latest.json"), &json)?;
    jiffy_sys::durable::replace(&folder.join("latest.md"), markdown.as_bytes())?;
    let shown: Vec<&Figure> = figures
        .iter()
        .filter(|figure| {
            figure.clock != Clock::Wall
                && (figure.case == cases::SAME_KERNEL || figure.case == "boot/vm-exits")
        })
        .collect();
    let title = format!("Spawn of the monitor to PID 1, and VM exits, {}", today());
    let picture = plot::svg(&title, &shown);
    jiffy_sys::durable::replace(&folder.join("latest.svg"), picture.as_bytes())?;
    Ok(())
}

fn today() -> String {
    let output = Command::new("date").arg("+%Y-%m-%d").output();
    output.map_or_else(
        |_| "an unknown day".into(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_string(),
    )
}

fn host() -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("unknown processor", |(_, model)| model);
    let cpus = cpuinfo.matches("processor\t").count();
    format!(
        "Host: {model}, {cpus} CPUs; all of it inside QEMU TCG. 1 M is a million \
         instructions of machine kernel, monitor and guest together; wall-clock times \
         under software emulation vary by a factor of two."
    )
}
