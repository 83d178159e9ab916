//! Charts of a cold and of a golden run, with everything that Jiffy records of one, and which of its
//! steps took longest (docs/timeline.md).

use crate::plan::Case;
use crate::verbs;
use anyhow::{Context, Result};
use jiffy_testkit::Lab;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// The folder of the charts, in that of the results.
const FOLDER: &str = "charts";
/// In the machine: a chart.
const FILE: &str = "/tmp/chart.json";
/// Number of steps in a table.
const HEAVIEST: usize = 10;

/// What was recorded of a run.
#[derive(Debug)]
pub struct Chart {
    /// The case that it is a run of.
    pub case: String,
    /// The recording as JSON for Perfetto.
    pub perfetto: Vec<u8>,
    /// The steps that took longest, the longest first.
    pub heaviest: Vec<Step>,
}

/// All spans of a name in one track and thread.
#[derive(Debug, PartialEq, Eq)]
pub struct Step {
    /// Its track, and its thread, if it is of one.
    pub place: String,
    /// Its name.
    pub name: String,
    /// Number of spans.
    pub count: usize,
    /// Nanoseconds, without the spans that are parts of these.
    pub own_ns: u64,
}

/// A timeline as `jiffy timeline --format json` prints it.
#[derive(Deserialize)]
struct Timeline {
    spans: Vec<Span>,
}

#[derive(Deserialize)]
struct Span {
    track: String,
    thread: Option<String>,
    name: String,
    start_ns: u64,
    end_ns: u64,
    parent: Option<usize>,
}

/// Runs what this case measures once more, and records all of it; nothing if there is no chart of
/// the case. The case has started the daemon and made what the run needs.
///
/// # Errors
///
/// If a command of `jiffy` fails in the machine, or its timeline can't be parsed.
pub fn of(lab: &Lab, case: &Case) -> Result<Option<Chart>> {
    let is_cold = match case.name.as_str() {
        verbs::RUN => true,
        verbs::RUN_GOLDEN => false,
        _ => return Ok(None),
    };
    let vm = "chart";
    let deep = format!("--timeline=deep:{FILE}");
    let mut run = vec!["/bin/jiffy", "run", "--name", vm, &deep];
    run.extend(is_cold.then_some("--cold"));
    run.extend(["--", "true"]);
    let in_machine = |argv: &[&str]| -> Result<Vec<u8>> {
        let command = lab.command(argv.iter().copied());
        let command = command
            .env("JIFFY_MACHINE", "never")
            .env("JIFFY_NETWORK", "none");
        let output = command.keep_output().output()?.success();
        Ok(output.with_context(|| argv.join(" "))?.stdout)
    };
    in_machine(&run)?;
    let json = in_machine(&["/bin/jiffy", "timeline", vm, "--format", "json"])?;
    in_machine(&["/bin/jiffy", "rm", "--force", vm])?;
    let timeline: Timeline = serde_json::from_slice(&json).context("the timeline")?;
    Ok(Some(Chart {
        case: case.name.clone(),
        perfetto: lab.read(FILE)?,
        heaviest: heaviest(&timeline),
    }))
}

fn heaviest(timeline: &Timeline) -> Vec<Step> {
    let spans = &timeline.spans;
    let length = |span: &Span| span.end_ns.saturating_sub(span.start_ns);
    let mut own: Vec<u64> = spans.iter().map(length).collect();
    for span in spans {
        if let Some(parent) = span.parent.and_then(|parent| own.get_mut(parent)) {
            *parent = parent.saturating_sub(length(span));
        }
    }
    let mut sums = BTreeMap::<(String, &str), (usize, u64)>::new();
    for (span, own) in spans.iter().zip(own) {
        let place = match &span.thread {
            Some(thread) => format!("{}, {thread}", span.track),
            None => span.track.clone(),
        };
        let (count, sum) = sums.entry((place, &span.name)).or_default();
        *count += 1;
        *sum += own;
    }
    let mut steps: Vec<Step> = sums
        .into_iter()
        .map(|((place, name), (count, own_ns))| Step {
            place,
            name: name.to_owned(),
            count,
            own_ns,
        })
        .collect();
    steps.sort_by_key(|step| std::cmp::Reverse(step.own_ns));
    steps.truncate(HEAVIEST);
    steps
}

/// The tables of these charts in Markdown. On the instruction clock a nanosecond is an instruction.
pub fn markdown(charts: &[Chart]) -> String {
    let mut out = String::new();
    for chart in charts {
        let _ = writeln!(
            out,
            "\n## Heaviest steps of one `{}`\n\nWithout their parts.\n\n| where | step | times | instructions |\n|---|---|--:|--:|",
            chart.case
        );
        for step in &chart.heaviest {
            let millions = step.own_ns as f64 / 1e6;
            let _ = writeln!(
                out,
                "| {} | {} | {} | {millions:.2} M |",
                step.place, step.name, step.count
            );
        }
    }
    out
}

/// Writes each chart to a file in the folder of charts below this one.
///
/// # Errors
///
/// If a file can't be written.
pub fn write(results: &Path, charts: &[Chart]) -> Result<()> {
    let folder = results.join(FOLDER);
    std::fs::create_dir_all(&folder)?;
    for chart in charts {
        let file = format!("{}.json", chart.case.replace('/', "-"));
        jiffy_sys::durable::replace(&folder.join(file), &chart.perfetto)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steps_own_time_is_without_its_parts() {
        let timeline = serde_json::json!({ "spans": [
            { "track": "node", "name": "start", "start_ns": 0, "end_ns": 100 },
            { "track": "node", "name": "part", "start_ns": 10, "end_ns": 40, "parent": 0 },
            { "track": "node", "name": "part", "start_ns": 50, "end_ns": 100, "parent": 0 },
            { "track": "vmm", "thread": "vcpu 0", "name": "part", "start_ns": 20, "end_ns": 21 },
        ]});
        let steps = heaviest(&serde_json::from_value(timeline).unwrap());
        let short: Vec<_> = steps
            .iter()
            .map(|step| (&*step.place, &*step.name, step.count, step.own_ns))
            .collect();
        assert_eq!(
            short,
            [
                ("node", "part", 2, 80),
                ("node", "start", 1, 20),
                ("vmm, vcpu 0", "part", 1, 1),
            ]
        );
    }
}
