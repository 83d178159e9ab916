//! Runs in the machine: reads a case from stdin and writes its outcome to stdout.

use anyhow::{Context, Result};
use std::io::Read;

fn main() -> Result<()> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    let case = serde_json::from_str(&text).context("stdin is not a case")?;
    serde_json::to_writer(std::io::stdout(), &jiffy_bench::probe::run(&case))?;
    println!();
    Ok(())
}
