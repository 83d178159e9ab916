//! `jiffy completions`

use super::context::show;
use crate::args::{Cli, Completions, Shell};
use crate::failure::{Outcome, Result};
use clap::CommandFactory;

/// `jiffy completions`
///
/// # Errors
///
/// If stdout can't be written.
pub fn completions(completions: Completions) -> Result<Outcome> {
    let shell = match completions.shell {
        Shell::Bash => clap_complete::Shell::Bash,
        Shell::Zsh => clap_complete::Shell::Zsh,
        Shell::Fish => clap_complete::Shell::Fish,
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "jiffy", &mut script);
    show(&String::from_utf8_lossy(&script))?;
    Ok(Outcome::Done)
}
