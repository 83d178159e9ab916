//! The part of an image's configuration that commands are started with, and how it is merged with
//! a request (OCI image configuration; Docker's rules).

use crate::error::{Error, Result};
use jiffy_wire::agent::Command;
use jiffy_wire::api::{ImageConfig, NoCommand};
use jiffy_wire::signal;

/// Most bytes of all strings in a configuration.
const MAX_CONFIG: usize = 256 * 1024;
/// SIGTERM.
const TERM: i32 = 15;

/// A shell, for a VM that has nothing else to do.
const SHELL: &str = "/bin/sh";

/// Checks that a command could be started with the configuration.
///
/// # Errors
///
/// If its strings have more than 256 KiB or a NUL byte, or an entry of the environment is not
/// `NAME=value`.
pub fn check(config: &ImageConfig) -> Result<()> {
    let labels = config.labels.iter().flat_map(|(name, value)| [name, value]);
    let texts = || {
        let lists = [
            &config.entrypoint,
            &config.cmd,
            &config.env,
            &config.exposed_ports,
        ];
        let optional = [&config.workdir, &config.user, &config.stop_signal];
        lists
            .into_iter()
            .flatten()
            .chain(optional.into_iter().flatten())
    };
    let bytes: usize = texts().chain(labels).map(|text| text.len() + 1).sum();
    if bytes > MAX_CONFIG {
        return Err(Error::invalid(format!(
            "The image's configuration has {bytes} bytes; at most {MAX_CONFIG} are allowed."
        )));
    }
    if texts().any(|text| text.contains('\0')) {
        return Err(Error::invalid(
            "The image's configuration contains a NUL byte.",
        ));
    }
    let nameless = |entry: &&String| {
        entry
            .split_once('=')
            .is_none_or(|(name, _)| name.is_empty())
    };
    if let Some(entry) = config.env.iter().find(nameless) {
        let shown: String = entry.chars().take(64).collect();
        return Err(Error::invalid(format!(
            "The image's environment entry {shown:?} is not of the form NAME=value."
        )));
    }
    Ok(())
}

/// The first command of a VM: the entrypoint (the request's, or else the image's), followed by
/// the request's words, or by the image's `cmd` if there are none. If the request has an
/// entrypoint, the image's `cmd` is ignored.
///
/// # Errors
///
/// If there is an entrypoint but no command, or nothing to run and `otherwise` is
/// [`NoCommand::Refuse`].
pub fn first_command(
    wanted: Option<Command>,
    entrypoint: Option<Vec<String>>,
    config: &ImageConfig,
    image: &str,
    otherwise: NoCommand,
) -> Result<Option<Command>> {
    let Some(mut command) = wanted else {
        if entrypoint.is_some() {
            return Err(Error::invalid("There is an entrypoint, but no command."));
        }
        return Ok(None);
    };
    let cmd = match (command.argv.is_empty(), &entrypoint) {
        (true, None) => config.cmd.clone(),
        (true, Some(_)) => Vec::new(),
        (false, _) => std::mem::take(&mut command.argv),
    };
    let mut argv = entrypoint.unwrap_or_else(|| config.entrypoint.clone());
    argv.extend(cmd);
    if argv.is_empty() {
        match otherwise {
            NoCommand::Refuse => {
                return Err(Error::invalid(format!(
                    "The command is empty, and the image {image} defines none."
                ))
                .hint("Give a command."));
            }
            NoCommand::Shell => argv.push(SHELL.to_owned()),
            NoCommand::Wait => return Ok(None),
        }
    }
    command.argv = argv;
    fill(&mut command, config);
    Ok(Some(command))
}

/// Fills in environment, working directory and user from the image where the command does not set
/// them.
pub fn fill(command: &mut Command, config: &ImageConfig) {
    let name_of = |entry: &str| {
        entry
            .split_once('=')
            .map_or("", |(name, _)| name)
            .to_owned()
    };
    let own: Vec<String> = command.env.iter().map(|entry| name_of(entry)).collect();
    let mut env: Vec<String> = Vec::new();
    // If a name occurs more than once, its last value counts.
    for entry in &config.env {
        let name = name_of(entry);
        env.retain(|other| name_of(other) != name);
        if !own.contains(&name) {
            env.push(entry.clone());
        }
    }
    env.append(&mut command.env);
    command.env = env;
    let unless_empty = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    if command.cwd.is_none() {
        command.cwd = unless_empty(&config.workdir);
    }
    if command.user.is_none() {
        command.user = unless_empty(&config.user);
    }
}

/// The image's configuration with a command's environment, working directory and user: those of the
/// programs that run in the same VM later. The type of a terminal is not part of it.
pub fn with_settings(config: &ImageConfig, command: &Command) -> ImageConfig {
    let is_kept = |entry: &&String| command.tty.is_none() || !entry.starts_with("TERM=");
    let mut settings = Command {
        env: command.env.iter().filter(is_kept).cloned().collect(),
        cwd: command.cwd.clone(),
        user: command.user.clone(),
        ..Command::default()
    };
    fill(&mut settings, config);
    ImageConfig {
        env: settings.env,
        workdir: settings.cwd,
        user: settings.user,
        ..config.clone()
    }
}

/// The signal that asks the image's command to end, if it is not SIGTERM.
pub fn stop_signal(config: &ImageConfig) -> Option<i32> {
    let number = signal::number(config.stop_signal.as_deref()?)?;
    (number != TERM).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn image(entrypoint: &str, cmd: &str) -> ImageConfig {
        ImageConfig {
            entrypoint: words(entrypoint),
            cmd: words(cmd),
            ..ImageConfig::default()
        }
    }

    /// Docker's table of combinations of entrypoint and command.
    #[test]
    fn entrypoint_and_command_combine_as_in_docker() {
        let argv = |config: &ImageConfig, entrypoint: Option<&str>, given: &str| {
            let command = Command {
                argv: words(given),
                ..Command::default()
            };
            let entrypoint = entrypoint.map(words);
            first_command(Some(command), entrypoint, config, "web", NoCommand::Wait)
                .unwrap()
                .map(|command| command.argv.join(" "))
        };
        let both = image("/entry -x", "serve all");
        assert_eq!(argv(&both, None, "").unwrap(), "/entry -x serve all");
        assert_eq!(argv(&both, None, "date").unwrap(), "/entry -x date");
        assert_eq!(argv(&both, Some("sh"), "").unwrap(), "sh");
        assert_eq!(argv(&both, Some("sh"), "-c ls").unwrap(), "sh -c ls");
        assert_eq!(argv(&both, Some(""), "date").unwrap(), "date");
        assert_eq!(argv(&both, Some(""), ""), None);
        assert_eq!(argv(&image("", "bash"), None, "").unwrap(), "bash");
        assert_eq!(argv(&image("", ""), None, ""), None);
        assert_eq!(argv(&image("", ""), None, "true").unwrap(), "true");
    }

    #[test]
    fn an_image_without_a_command_is_a_shell_nothing_or_an_error() {
        let plain = ImageConfig::default();
        let of = |otherwise| {
            first_command(Some(Command::default()), None, &plain, "web", otherwise)
                .map(|command| command.map(|command| command.argv))
        };
        assert_eq!(of(NoCommand::Shell).unwrap().unwrap(), ["/bin/sh"]);
        assert_eq!(of(NoCommand::Wait).unwrap(), None);
        assert!(of(NoCommand::Refuse).unwrap_err().0.message.contains("web"));
        assert!(
            first_command(None, None, &image("a", "b"), "web", NoCommand::Shell)
                .unwrap()
                .is_none()
        );
        assert!(first_command(None, Some(words("a")), &plain, "web", NoCommand::Wait).is_err());
    }

    #[test]
    fn settings_of_a_command_override_the_image() {
        let config = ImageConfig {
            env: words("PATH=/a A=1 B=2 A=3"),
            workdir: Some("/srv".into()),
            user: Some("web".into()),
            ..ImageConfig::default()
        };
        let mut plain = Command::default();
        fill(&mut plain, &config);
        assert_eq!(plain.env, words("PATH=/a B=2 A=3"));
        assert_eq!(plain.cwd.as_deref(), Some("/srv"));
        assert_eq!(plain.user.as_deref(), Some("web"));
        let mut own = Command {
            env: words("B=x C=y"),
            cwd: Some("/".into()),
            user: Some("0:0".into()),
            ..Command::default()
        };
        fill(&mut own, &config);
        assert_eq!(own.env, words("PATH=/a A=3 B=x C=y"));
        assert_eq!(
            (own.cwd.as_deref(), own.user.as_deref()),
            (Some("/"), Some("0:0"))
        );
        let mut empty = Command::default();
        let config = ImageConfig {
            workdir: Some(String::new()),
            user: Some(String::new()),
            ..ImageConfig::default()
        };
        fill(&mut empty, &config);
        assert_eq!((empty.cwd, empty.user), (None, None));
    }

    #[test]
    fn later_programs_get_the_settings_of_a_command_but_not_its_terminal() {
        let image = ImageConfig {
            cmd: words("serve"),
            env: words("PATH=/a A=1"),
            workdir: Some("/srv".into()),
            ..ImageConfig::default()
        };
        let mut command = Command {
            env: words("A=2 TERM=xterm"),
            user: Some("web".into()),
            ..Command::default()
        };
        let kept = with_settings(&image, &command);
        assert_eq!(kept.env, words("PATH=/a A=2 TERM=xterm"));
        assert_eq!(kept.workdir.as_deref(), Some("/srv"));
        assert_eq!(kept.user.as_deref(), Some("web"));
        assert_eq!(kept.cmd, image.cmd);
        command.tty = Some(jiffy_wire::agent::WindowSize {
            rows: 24,
            columns: 80,
        });
        assert_eq!(with_settings(&image, &command).env, words("PATH=/a A=2"));
        assert_eq!(with_settings(&image, &Command::default()), image);
    }

    #[test]
    fn stop_signals_have_names_and_numbers() {
        let of = |text: &str| {
            stop_signal(&ImageConfig {
                stop_signal: Some(text.into()),
                ..ImageConfig::default()
            })
        };
        assert_eq!(of("SIGINT"), Some(2));
        assert_eq!(of("quit"), Some(3));
        assert_eq!(of("10"), Some(10));
        assert_eq!(of("SIGRTMIN+3"), Some(37));
        assert_eq!(of("SIGRTMIN"), Some(34));
        for none in [
            "SIGTERM",
            "15",
            "",
            "SIGNOPE",
            "0",
            "65",
            "SIGRTMIN+99",
            "SIGRTMIN-1",
        ] {
            assert_eq!(of(none), None, "{none}");
        }
        assert_eq!(stop_signal(&ImageConfig::default()), None);
    }

    #[test]
    fn a_configuration_is_checked() {
        let bad = |change: fn(&mut ImageConfig)| {
            let mut config = ImageConfig::default();
            change(&mut config);
            check(&config).is_err()
        };
        assert!(!bad(|_| ()));
        assert!(!bad(|config| config.env = vec!["A=".into()]));
        assert!(bad(|config| config.env = vec!["A".into()]));
        assert!(bad(|config| config.env = vec!["=x".into()]));
        assert!(bad(|config| config.cmd = vec!["a\0".into()]));
        assert!(bad(|config| {
            config.labels.insert("l".into(), "x".repeat(MAX_CONFIG));
        }));
    }
}
