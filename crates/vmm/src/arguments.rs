//! The command line of `jiffy-vmm`. It has few options and a parser of its own: with a library,
//! parsing would cost more instructions than building the VM.

use jiffy_vmm::sandbox::Sandbox;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use thiserror::Error;

/// What the program does.
#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    /// Run a VM.
    Run(RunOptions),
    /// Probe the host's KVM.
    Probe,
    /// Print the processor that the host can give a VM.
    Cpu,
    /// Print the version.
    Version,
    /// Print the usage.
    Help,
}

/// Options of `run`.
#[derive(Debug, PartialEq, Eq)]
pub struct RunOptions {
    /// Path of the VM's configuration, JSON.
    pub config: PathBuf,
    /// An inherited descriptor for events.
    pub events_fd: Option<i32>,
    /// An inherited socket on which the spare waits for its configuration and its events
    /// descriptor. `config` is then only a placeholder.
    pub spare_fd: Option<i32>,
    /// Inherited descriptors of files that can't be opened by name, with the names they stand for.
    pub handed: Vec<(PathBuf, i32)>,
    /// Whether threads are confined.
    pub sandbox: Sandbox,
}

/// Why a command line is not valid.
#[derive(Debug, PartialEq, Eq, Error)]
pub enum UsageError {
    /// There is no command.
    #[error("no command was given")]
    NoCommand,
    /// The word is not a command or an option.
    #[error("{0:?} is not a command or an option of jiffy-vmm")]
    Unknown(OsString),
    /// The value of the last option is missing.
    #[error("{0} needs a value")]
    NoValue(&'static str),
    /// The value of an option is not valid.
    #[error("{value:?} is not a valid value of {option}")]
    Value {
        /// Which option.
        option: &'static str,
        /// The value.
        value: OsString,
    },
    /// A spare gets its events descriptor later.
    #[error("--spare-fd and --events-fd can't be used together")]
    SpareEvents,
    /// `run` has no configuration.
    #[error("run needs --config FILE")]
    NoConfig,
}

/// Reads the arguments after the program's name.
///
/// # Errors
///
/// If there is no command, a word is unknown, a value is missing or not valid, or options
/// contradict each other.
pub fn parse(mut arguments: impl Iterator<Item = OsString>) -> Result<Command, UsageError> {
    let command = arguments.next().ok_or(UsageError::NoCommand)?;
    let parsed = match command.to_str() {
        Some("run") => return parse_run(arguments).map(Command::Run),
        Some("probe") => Command::Probe,
        Some("cpu") => Command::Cpu,
        Some("--version" | "-V") => Command::Version,
        Some("--help" | "-h") => Command::Help,
        _ => return Err(UsageError::Unknown(command)),
    };
    match arguments.next() {
        Some(extra) => Err(UsageError::Unknown(extra)),
        None => Ok(parsed),
    }
}

fn parse_run(mut arguments: impl Iterator<Item = OsString>) -> Result<RunOptions, UsageError> {
    let mut config = None;
    let mut events_fd = None;
    let mut spare_fd = None;
    let mut handed = Vec::new();
    let mut sandbox = Sandbox::On;
    while let Some(argument) = arguments.next() {
        let text = argument.to_str().unwrap_or_default();
        let (name, inline) = match text.split_once('=') {
            Some((name, value)) => (name, Some(OsString::from(value))),
            None => (text, None),
        };
        let option = match name {
            "--config" => "--config",
            "--events-fd" => "--events-fd",
            "--spare-fd" => "--spare-fd",
            "--fd" => "--fd",
            "--seccomp" => "--seccomp",
            _ => return Err(UsageError::Unknown(argument)),
        };
        let value = inline
            .or_else(|| arguments.next())
            .ok_or(UsageError::NoValue(option))?;
        let bad = || UsageError::Value {
            option,
            value: value.clone(),
        };
        match option {
            "--config" => config = Some(PathBuf::from(value)),
            "--events-fd" => events_fd = Some(descriptor(&value).ok_or_else(bad)?),
            "--spare-fd" => spare_fd = Some(descriptor(&value).ok_or_else(bad)?),
            "--fd" => handed.push(named(&value).ok_or_else(bad)?),
            _ => {
                sandbox = match value.to_str() {
                    Some("on") => Sandbox::On,
                    Some("off") => Sandbox::Off,
                    _ => return Err(bad()),
                }
            }
        }
    }
    if spare_fd.is_some() && events_fd.is_some() {
        return Err(UsageError::SpareEvents);
    }
    Ok(RunOptions {
        config: config.ok_or(UsageError::NoConfig)?,
        events_fd,
        spare_fd,
        handed,
        sandbox,
    })
}

/// `NAME=N`.
fn named(value: &OsStr) -> Option<(PathBuf, i32)> {
    let (name, number) = value.to_str()?.rsplit_once('=')?;
    Some((name.into(), descriptor(number.as_ref())?))
}

/// A descriptor's number; standard input, output and error are refused.
fn descriptor(value: &OsStr) -> Option<i32> {
    let number = value.to_str()?.parse().ok()?;
    (number > 2).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Command, UsageError> {
        parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn run_takes_its_options_in_both_forms() {
        let expected = Ok(Command::Run(RunOptions {
            config: "vmm.json".into(),
            events_fd: Some(5),
            spare_fd: None,
            handed: vec![("/dev/kvm".into(), 6), ("a=b".into(), 7)],
            sandbox: Sandbox::Off,
        }));
        assert_eq!(
            parsed("run --config vmm.json --events-fd 5 --fd /dev/kvm=6 --fd a=b=7 --seccomp off"),
            expected
        );
        assert_eq!(
            parsed("run --seccomp=off --fd=/dev/kvm=6 --fd=a=b=7 --events-fd=5 --config=vmm.json"),
            expected
        );
    }

    #[test]
    fn unknown_arguments_are_named() {
        assert_eq!(parsed(""), Err(UsageError::NoCommand));
        assert_eq!(parsed("run"), Err(UsageError::NoConfig));
        assert_eq!(
            parsed("run --config x --spare-fd 3 --events-fd 4"),
            Err(UsageError::SpareEvents)
        );
        assert_eq!(parsed("run --config"), Err(UsageError::NoValue("--config")));
        for line in ["fly", "probe now", "cpu now", "run --colour red"] {
            assert!(
                matches!(parsed(line), Err(UsageError::Unknown(_))),
                "{line}"
            );
        }
        for line in [
            "run --config x --events-fd 1",
            "run --config x --events-fd much",
            "run --config x --spare-fd 2",
            "run --config x --seccomp maybe",
            "run --config x --fd 4",
            "run --config x --fd /dev/kvm=2",
        ] {
            assert!(
                matches!(parsed(line), Err(UsageError::Value { .. })),
                "{line}"
            );
        }
    }
}
