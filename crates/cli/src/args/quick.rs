//! The verbs that have to be quick, each parsed by its own definitions.
//!
//! Making the definitions of all verbs takes longer than anything else a quick
//! `jiffy run`, `exec` or `ps` does. Whatever one verb's own don't take, help and
//! mistakes among it, is for all of them.

use super::{Cli, Exec, MachineUse, Ps, Run, Verb};
use clap::{Args, Parser, Subcommand};
use std::ffi::OsString;

/// What these words say, if they are such a verb's and no mistake.
pub(super) fn parse(words: &[OsString]) -> Option<Cli> {
    let verb = words.get(1)?;
    if verb == "run" {
        let alone = Alone::<OnlyRun>::try_parse_from(words).ok()?;
        let OnlyRun::Run(run) = alone.verb;
        Some(alone.machine.with(Verb::Run(*run)))
    } else if verb == "exec" {
        let alone = Alone::<OnlyExec>::try_parse_from(words).ok()?;
        let OnlyExec::Exec(exec) = alone.verb;
        Some(alone.machine.with(Verb::Exec(exec)))
    } else if verb == "ps" {
        let alone = Alone::<OnlyPs>::try_parse_from(words).ok()?;
        let OnlyPs::Ps(ps) = alone.verb;
        Some(alone.machine.with(Verb::Ps(ps)))
    } else {
        None
    }
}

/// [`Cli`] with one verb.
#[derive(Debug, Parser)]
#[command(name = "jiffy", disable_help_subcommand = true)]
struct Alone<V: Subcommand> {
    #[command(flatten)]
    machine: WhichMachine,
    #[command(subcommand)]
    verb: V,
}

#[derive(Debug, Args)]
struct WhichMachine {
    #[arg(
        long,
        global = true,
        env = "JIFFY_MACHINE",
        value_enum,
        default_value = "auto"
    )]
    machine: MachineUse,
}

impl WhichMachine {
    fn with(self, verb: Verb) -> Cli {
        Cli {
            machine: self.machine,
            verb,
        }
    }
}

#[derive(Debug, Subcommand)]
enum OnlyRun {
    Run(Box<Run>),
}

#[derive(Debug, Subcommand)]
enum OnlyExec {
    Exec(Exec),
}

#[derive(Debug, Subcommand)]
enum OnlyPs {
    Ps(Ps),
}
