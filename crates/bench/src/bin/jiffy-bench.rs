//! Measures Jiffy, and its peers where they are on PATH, in the machine.

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use jiffy_bench::cases::{self, Kernels};
use jiffy_bench::figure::{self, Clock, Figure};
use jiffy_bench::peers::Peer;
use jiffy_bench::plan::Outcome;
use jiffy_bench::report;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Measures Jiffy beside its peers, or checks that it got no slower.
#[derive(Parser)]
struct Arguments {
    /// Our kernel (vmlinux).
    #[arg(long)]
    base_kernel: PathBuf,
    /// The neutral kernel all monitors boot (vmlinux).
    #[arg(long)]
    plain_kernel: PathBuf,
    /// Folder of the committed results.
    #[arg(long, default_value = "bench/results")]
    results: PathBuf,
    /// Compare with the committed results instead of writing new ones: fail if
    /// one of our figures got worse by more than 2 %. Peers are left out.
    #[arg(long)]
    check: bool,
    /// Counted runs of each case.
    #[arg(long, default_value_t = 20)]
    runs: u32,
    /// Measure only the cases whose name contains this, on the instruction
    /// clock or with --wall on the other, and print them; nothing is written.
    #[arg(long, conflicts_with = "check")]
    only: Option<String>,
    /// With --only: on the wall clock.
    #[arg(long, requires = "only", conflicts_with = "no_wall")]
    wall: bool,
    /// Leave out the wall clock.
    #[arg(long)]
    no_wall: bool,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("jiffy-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool> {
    let kernels = Kernels {
        base: &arguments.base_kernel,
        plain: &arguments.plain_kernel,
    };
    let peers: Vec<Peer> = if arguments.check {
        Vec::new()
    } else {
        Peer::ALL.into()
    };
    if let Some(only) = &arguments.only {
        let clock = match arguments.wall {
            true => Clock::Wall,
            false => Clock::Instructions,
        };
        let measured = cases::measure(clock, &kernels, &peers, arguments.runs, only)?;
        let outcomes = measured.outcomes;
        report_failures(&outcomes)?;
        let mut figures = cases::figures(clock, &outcomes);
        figures.extend(measured.figures);
        println!("{}", report::markdown(&figures, &outcomes, &[], &[]));
        for outcome in &outcomes {
            println!("{}", report::all_counters(outcome));
        }
        return Ok(true);
    }
    eprintln!("kernel: counting instructions to PID 1");
    let mut figures = cases::kernel_figures(&arguments.base_kernel)?;
    eprintln!(
        "machine on the instruction clock: {} runs a case",
        arguments.runs
    );
    let mut outcomes =
        cases::measure(Clock::Instructions, &kernels, &peers, arguments.runs, "")?.outcomes;
    report_failures(&outcomes)?;
    figures.extend(cases::figures(Clock::Instructions, &outcomes));
    if arguments.check {
        return check(&arguments.results, &figures);
    }
    if !arguments.no_wall {
        eprintln!("machine on the wall clock: {} runs a case", arguments.runs);
        let wall = cases::measure(Clock::Wall, &kernels, &peers, arguments.runs, "")?;
        report_failures(&wall.outcomes)?;
        figures.extend(cases::figures(Clock::Wall, &wall.outcomes));
        figures.extend(wall.figures);
        // The report's other tables are of the instruction clock.
        let at_once = |outcome: &Outcome| {
            let mut cases = cases::AT_ONCE.iter();
            cases.any(|(_, case)| outcome.name == *case)
        };
        outcomes.extend(wall.outcomes.into_iter().filter(at_once));
    }
    let versions: Vec<(Peer, String)> = peers
        .iter()
        .filter_map(|peer| Some((*peer, peer.version()?)))
        .collect();
    let verdicts = figure::judge(&figures);
    let text = report::markdown(&figures, &outcomes, &verdicts, &versions);
    report::write(&arguments.results, &figures, &text)?;
    println!("{text}");
    Ok(!verdicts.iter().any(figure::Verdict::is_broken))
}

/// Our own case must not fail; a peer's is told and left out.
fn report_failures(outcomes: &[Outcome]) -> Result<()> {
    for outcome in outcomes {
        if let Some(failure) = &outcome.failure {
            if outcome.monitor == "jiffy" {
                bail!("{}: {failure}", outcome.name);
            }
            eprintln!("{} {}: left out: {failure}", outcome.name, outcome.monitor);
        }
    }
    Ok(())
}

fn check(results: &Path, figures: &[Figure]) -> Result<bool> {
    let path = results.join("latest.json");
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("{}: run `make bench` and commit it", path.display()))?;
    let committed: Vec<Figure> =
        serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    ensure!(!committed.is_empty(), "{} holds no figures", path.display());
    let regressions = figure::regressions(&committed, figures);
    for line in &regressions {
        println!("worse: {line}");
    }
    let missed: Vec<_> = figure::judge(figures)
        .into_iter()
        .filter(figure::Verdict::is_broken)
        .collect();
    for verdict in &missed {
        println!("goal missed: {}", verdict.line);
    }
    if regressions.is_empty() && missed.is_empty() {
        println!(
            "bench-check: {} figures, none worse by more than 2 %",
            figures.len()
        );
    }
    Ok(regressions.is_empty() && missed.is_empty())
}
