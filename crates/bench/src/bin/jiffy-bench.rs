//! Measures Jiffy, and other VMMs that are on PATH, in the machine.

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use jiffy_bench::cases::{self, Kernels};
use jiffy_bench::charts;
use jiffy_bench::check;
use jiffy_bench::figure::{self, Clock, Figure};
use jiffy_bench::peers::Peer;
use jiffy_bench::plan::Outcome;
use jiffy_bench::report;
use jiffy_bench::{disk, folder, import, network, proxy};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Measures Jiffy and other monitors, or checks that Jiffy got no slower
#[derive(Parser)]
struct Arguments {
    /// Jiffy's kernel (vmlinux)
    #[arg(long)]
    base_kernel: PathBuf,
    /// The neutral kernel that all monitors boot (vmlinux)
    #[arg(long)]
    plain_kernel: PathBuf,
    /// Folder of the committed results
    #[arg(long, default_value = "bench/results")]
    results: PathBuf,
    /// Compare with the committed results instead of writing new ones: fail if one of Jiffy's
    /// figures got worse by more than 2 %. Other monitors are not measured
    #[arg(long)]
    check: bool,
    /// Number of counted runs per case
    #[arg(long, default_value_t = 20)]
    runs: u32,
    /// Measure and print only the cases whose name, followed by a blank and the monitor's name,
    /// contains this text, on the instruction clock or, with --wall, on the wall clock; nothing is
    /// written
    #[arg(long, conflicts_with = "check")]
    only: Option<String>,
    /// With --only: use the wall clock
    #[arg(long, requires = "only", conflicts_with = "no_wall")]
    wall: bool,
    /// Omit cases on the wall clock
    #[arg(long)]
    no_wall: bool,
    /// Also measure guests' disk reads, their traffic, their work in shared folders, many VMs, and
    /// bursts of runs, and draw charts of single runs, which takes longer than all other cases
    #[arg(long)]
    long: bool,
}

/// Runs of a case with which a check begins: enough to find nearly all figures unchanged.
const FIRST_RUNS: u32 = 5;

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
        if import::RATIO == only || import::WALL_RATIO == only {
            println!("{}", report::markdown(&import::figures()?, &[], &[], &[]));
            return Ok(true);
        }
        let measured = cases::measure(
            clock,
            &kernels,
            &peers,
            arguments.runs,
            &|case| case.contains(only.as_str()),
            arguments.long,
        )?;
        let outcomes = measured.outcomes;
        report_failures(&outcomes)?;
        let mut figures = cases::figures(clock, &outcomes);
        figures.extend(measured.figures);
        println!("{}", report::markdown(&figures, &outcomes, &[], &[]));
        println!("{}", charts::markdown(&measured.charts));
        for outcome in &outcomes {
            println!("{}", report::all_counters(outcome));
        }
        return Ok(true);
    }
    eprintln!("kernel: counting instructions to PID 1");
    let mut figures = cases::kernel_figures(&arguments.base_kernel)?;
    let runs = match arguments.check {
        true => arguments.runs.min(FIRST_RUNS),
        false => arguments.runs,
    };
    eprintln!("machine on the instruction clock: {runs} runs a case");
    let measured = cases::measure(
        Clock::Instructions,
        &kernels,
        &peers,
        runs,
        &|_| true,
        arguments.long,
    )?;
    let (mut outcomes, charts) = (measured.outcomes, measured.charts);
    report_failures(&outcomes)?;
    if arguments.check {
        return check(arguments, &kernels, &figures, outcomes);
    }
    figures.extend(cases::figures(Clock::Instructions, &outcomes));
    if !arguments.no_wall {
        eprintln!("machine on the wall clock: {} runs a case", arguments.runs);
        let wall = cases::measure(
            Clock::Wall,
            &kernels,
            &peers,
            arguments.runs,
            &|_| true,
            false,
        )?;
        report_failures(&wall.outcomes)?;
        figures.extend(cases::figures(Clock::Wall, &wall.outcomes));
        figures.extend(wall.figures);
        eprintln!("this host: an image imported, and by hand");
        figures.extend(import::figures()?);
        // The other tables of the report use the instruction clock.
        let at_once = |outcome: &Outcome| {
            let mut cases = jiffy_bench::verbs::AT_ONCE.iter();
            cases.any(|(_, case)| outcome.name == *case)
        };
        outcomes.extend(wall.outcomes.into_iter().filter(at_once));
    }
    let versions: Vec<(Peer, String)> = peers
        .iter()
        .filter_map(|peer| Some((*peer, peer.version()?)))
        .collect();
    let verdicts = figure::check_goals(&figures);
    let mut text = report::markdown(&figures, &outcomes, &verdicts, &versions);
    text.push_str(&charts::markdown(&charts));
    charts::write(&arguments.results, &charts)?;
    report::write(&arguments.results, &figures, &text)?;
    println!("{text}");
    Ok(!verdicts.iter().any(figure::Verdict::is_broken))
}

/// Fails if a case of Jiffy's failed. Failures of peers, and of disk reads, shared folders and
/// traffic, in which the emulator may hang, are only reported.
fn report_failures(outcomes: &[Outcome]) -> Result<()> {
    for outcome in outcomes {
        if let Some(failure) = &outcome.failure {
            let mut may_hang = [
                disk::is_reading,
                folder::is_work,
                network::is_traffic,
                proxy::is_traffic,
            ]
            .iter();
            let may_hang = may_hang.any(|is_it| is_it(&outcome.name));
            if outcome.monitor == "jiffy" && !may_hang {
                bail!("{}: {failure}", outcome.name);
            }
            eprintln!("{} {}: left out: {failure}", outcome.name, outcome.monitor);
        }
    }
    Ok(())
}

/// Compares with the committed figures. A figure that seems worse is measured a second time, with
/// the usual number of runs, and judged by all runs, because runs vary.
fn check(
    arguments: &Arguments,
    kernels: &Kernels,
    kernel_figures: &[Figure],
    mut outcomes: Vec<Outcome>,
) -> Result<bool> {
    let committed = committed(&arguments.results)?;
    let figures = |outcomes: &[Outcome]| {
        let mut figures = kernel_figures.to_vec();
        figures.extend(cases::figures(Clock::Instructions, outcomes));
        figures
    };
    let mut now = figures(&outcomes);
    let mut complaints = check::complaints(&committed, &now);
    if !complaints.is_empty() {
        for complaint in &complaints {
            eprintln!("measured again: {}", complaint.line);
        }
        let again: Vec<String> = complaints
            .iter()
            .flat_map(|complaint| check::cases_of(&complaint.case))
            .map(|case| format!("{case} jiffy"))
            .collect();
        let wanted = |case: &str| again.iter().any(|wanted| wanted == case);
        let runs = arguments.runs;
        let more = cases::measure(Clock::Instructions, kernels, &[], runs, &wanted, false)?;
        report_failures(&more.outcomes)?;
        check::merge_samples(&mut outcomes, more.outcomes);
        now = figures(&outcomes);
        complaints = check::complaints(&committed, &now);
    }
    for complaint in &complaints {
        println!("{}", complaint.line);
    }
    if complaints.is_empty() {
        println!(
            "bench-check: {} figures, none worse by more than 2 %",
            now.len()
        );
    }
    Ok(complaints.is_empty())
}

fn committed(results: &Path) -> Result<Vec<Figure>> {
    let path = results.join("latest.json");
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("{}: run `make bench` and commit it", path.display()))?;
    let committed: Vec<Figure> =
        serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    ensure!(!committed.is_empty(), "{} holds no figures", path.display());
    Ok(committed)
}
