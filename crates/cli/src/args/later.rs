//! Argument definitions that are built only for the verb that is used.
//!
//! Building those of all verbs takes more instructions than anything else that a short
//! `jiffy run`, `exec` or `ps` does.

use clap::builder::Resettable;
use clap::error::Error;
use clap::{ArgMatches, Args, Command, FromArgMatches, Subcommand};

/// The arguments of a verb, whose definitions clap builds when the verb is parsed.
#[derive(Debug)]
pub struct Later<T>(pub T);

/// Adds definitions to a verb and keeps its description.
fn add_definitions(verb: Command, definitions: fn(Command) -> Command) -> Command {
    let (about, long_about) = (verb.get_about().cloned(), verb.get_long_about().cloned());
    definitions(verb)
        .about(Resettable::from(about))
        .long_about(Resettable::from(long_about))
}

impl<T: Args> Args for Later<T> {
    fn augment_args(verb: Command) -> Command {
        verb.defer(|verb| add_definitions(verb, T::augment_args))
    }

    fn augment_args_for_update(verb: Command) -> Command {
        verb.defer(|verb| add_definitions(verb, T::augment_args_for_update))
    }
}

impl<T: Subcommand> Subcommand for Later<T> {
    fn augment_subcommands(verb: Command) -> Command {
        verb.defer(|verb| add_definitions(verb, T::augment_subcommands))
    }

    fn augment_subcommands_for_update(verb: Command) -> Command {
        verb.defer(|verb| add_definitions(verb, T::augment_subcommands_for_update))
    }

    fn has_subcommand(name: &str) -> bool {
        T::has_subcommand(name)
    }
}

impl<T: FromArgMatches> FromArgMatches for Later<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        T::from_arg_matches(matches).map(Later)
    }

    fn from_arg_matches_mut(matches: &mut ArgMatches) -> Result<Self, Error> {
        T::from_arg_matches_mut(matches).map(Later)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        self.0.update_from_arg_matches(matches)
    }
}
