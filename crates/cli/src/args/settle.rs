//! From the words of a command line to the verb: what clap can't decide.

use super::{Cli, HugePages, Later, Verb, mebibytes, run_timeline_output};
use clap::parser::ValueSource;
use clap::{CommandFactory, Error, FromArgMatches, ValueEnum};
use std::ffi::OsString;

/// Whether a word may be the value of an option.
type Fits = fn(&str) -> bool;

/// Options of `run` and `create` whose value must follow an equals sign.
pub(super) const WITH_EQUALS: [(&str, Fits); 4] = [
    ("--huge-pages", |word| {
        HugePages::from_str(word, false).is_ok()
    }),
    ("--init", |word| word.starts_with('/')),
    ("--root-disk", |word| mebibytes(word).is_ok()),
    ("--timeline", |word| run_timeline_output(word).is_ok()),
];

/// The option with the word after it as its value, if that may have been meant.
fn joined(option: &str, word: &str) -> Option<String> {
    WITH_EQUALS
        .iter()
        .any(|(known, fits)| *known == option && fits(word))
        .then(|| format!("{option}={word}"))
}

impl Cli {
    /// This process's command line; exits with a usage error if it is not valid.
    pub fn of_this_process() -> Cli {
        jiffy_sys::environment::unset_empty();
        let words: Vec<OsString> = std::env::args_os().collect();
        Cli::of(&words).unwrap_or_else(|error| error.exit())
    }

    /// The command line with these words, of which the first is the program.
    pub(super) fn of(words: &[OsString]) -> Result<Cli, Error> {
        let mut command = Cli::command();
        let mut matches = command.try_get_matches_from_mut(words)?;
        let network_by_environment = matches.subcommand().is_some_and(|(verb, options)| {
            verb == "run" && options.value_source("network") == Some(ValueSource::EnvVariable)
        });
        let mut cli =
            Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))?;
        if network_by_environment {
            cli.keep_network_of_snapshot();
        }
        cli.take_image(words);
        Ok(cli)
    }

    /// `JIFFY_NETWORK` is for VMs that boot: one from a snapshot has the network of that.
    fn keep_network_of_snapshot(&mut self) {
        if let Verb::Run(Later(run)) = &mut self.verb
            && run.from.is_some()
        {
            run.vm.network.network = None;
        }
    }

    /// Takes the image from the words after the options of `run` and `create`: it is
    /// the first one, unless `--` comes before it.
    fn take_image(&mut self, words: &[OsString]) {
        let (vm, argv) = match &mut self.verb {
            Verb::Run(Later(run)) if run.from.is_none() => (&mut run.vm, &mut run.argv),
            Verb::Create(Later(create)) => (&mut create.vm, &mut create.argv),
            _ => return,
        };
        // Clap takes everything from the first positional word on as it is.
        let before = words.len().checked_sub(argv.len() + 1);
        let escaped = before.is_some_and(|before| words[before] == "--");
        if escaped || vm.image.is_some() || argv.is_empty() {
            return;
        }
        let option = before.map(|before| words[before].to_string_lossy());
        vm.meant_as_value = option.and_then(|option| joined(&option, &argv[0]));
        vm.image = Some(argv.remove(0));
        vm.image_is_a_word = true;
        if argv.first().is_some_and(|word| word == "--") {
            argv.remove(0);
        }
    }
}
