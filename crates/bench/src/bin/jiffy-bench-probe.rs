//! Runs inside the machine: a plan on stdin, outcomes on stdout.

use anyhow::{Context, Result};
use std::io::Read;

fn main() -> Result<()> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    let plan = serde_json::from_str(&text).context("stdin is not a plan")?;
    serde_json::to_writer(std::io::stdout(), &jiffy_bench::probe::run(&plan))?;
    println!();
    Ok(())
}
