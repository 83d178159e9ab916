//! The options with which the OpenSSH client reaches VMs.

use crate::keys::Keys;
use jiffy_cli::client::vm_path;
use jiffy_cli::failure::{Failure, Outcome, Result};
use jiffy_cli::ssh::SshConfig;
use jiffy_cli::{Context, WaitTime, show};
use jiffy_wire::api::Vm;
use std::path::{Path, PathBuf};

/// Suffix of a VM's name in its host name for ssh.
pub const SUFFIX: &str = ".jiffy";

/// Longest name of a VM, bytes.
const MAX_NAME: usize = 63;

/// The VM's name, or its id, in a host name for ssh.
///
/// # Errors
///
/// If it can be neither.
pub fn vm_name(host: &str) -> Result<&str> {
    let name = host.strip_suffix(SUFFIX).unwrap_or(host);
    let is_good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    let begins_well = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    match begins_well && name.len() <= MAX_NAME && name.chars().all(is_good) {
        true => Ok(name),
        false => Err(
            Failure::new(format!("{host:?} is not the name or the id of a VM"))
                .hint("names have up to 63 letters, digits, `_`, `.` and `-`"),
        ),
    }
}

/// `jiffy ssh-config`
///
/// # Errors
///
/// If the settings can't be made (see [`Settings::of`]), a VM is not known, or stdout can't be
/// written.
pub async fn print(context: &Context, options: SshConfig) -> Result<Outcome> {
    let settings = Settings::of(context, WaitTime { wait: None })?;
    if options.vms.is_empty() {
        show(&settings.block("*", &options.user))?;
        return Ok(Outcome::Done);
    }
    let client = context.client()?;
    let mut blocks = Vec::new();
    for vm in &options.vms {
        let vm: Vm = client.get(&vm_path(vm, "")).await?;
        blocks.push(settings.block(&vm.name, &options.user));
    }
    show(&blocks.join("\n"))?;
    Ok(Outcome::Done)
}

/// The settings of ssh_config(5) for all VMs.
pub struct Settings(Vec<(&'static str, String)>);

impl Settings {
    /// The settings of this installation; `time` is how long a connection waits until its VM has
    /// memory and vCPUs. Creates the user's key if it is missing.
    ///
    /// # Errors
    ///
    /// If there is no data folder, the key can't be created or read, or a path can't be written
    /// into ssh_config.
    pub fn of(context: &Context, time: WaitTime) -> Result<Settings> {
        let keys = Keys::below(context.folders.data()?);
        keys.client()?;
        let jiffy = Jiffy {
            program: program()?,
            machine: context.machine_option(),
        };
        Settings::with(&jiffy, &keys.identity(), time)
    }

    fn with(jiffy: &Jiffy, identity: &Path, time: WaitTime) -> Result<Settings> {
        let identity = quoted(identity)?;
        let proxy = match time.wait {
            Some(wait_s) => format!("ssh-proxy --wait={wait_s}s -- '%n'"),
            None => "ssh-proxy -- '%n'".to_owned(),
        };
        Ok(Settings(vec![
            ("ProxyCommand", jiffy.for_the_shell(&proxy)?),
            ("IdentityFile", identity),
            ("IdentitiesOnly", "yes".into()),
            ("IdentityAgent", "none".into()),
            ("PreferredAuthentications", "publickey".into()),
            ("HostKeyAlgorithms", "ssh-ed25519".into()),
            (
                "KnownHostsCommand",
                jiffy.for_ssh("ssh-proxy --known-hosts=%H -- %n")?,
            ),
            ("UserKnownHostsFile", "/dev/null".into()),
            ("GlobalKnownHostsFile", "/dev/null".into()),
            ("StrictHostKeyChecking", "yes".into()),
            ("UpdateHostKeys", "no".into()),
        ]))
    }

    /// Options for ssh's command line.
    pub fn arguments(&self) -> Vec<String> {
        let option = |(name, value): &(&str, String)| format!("-o{name}={value}");
        self.0.iter().map(option).collect()
    }

    /// A block of ssh_config for a VM's name or a pattern.
    fn block(&self, vm: &str, user: &str) -> String {
        let mut block = format!("Host {vm}{SUFFIX}\n  User {user}\n");
        for (name, value) in &self.0 {
            block.push_str(&format!("  {name} {value}\n"));
        }
        block
    }
}

/// The `jiffy` command that ssh starts.
struct Jiffy {
    program: PathBuf,
    /// `--machine=WHEN`, if it was given.
    machine: Option<String>,
}

impl Jiffy {
    /// For ProxyCommand, which the user's shell executes after ssh has replaced `%`.
    fn for_the_shell(&self, verb: &str) -> Result<String> {
        let program = text(&self.program)?
            .replace('\'', r"'\''")
            .replace('%', "%%");
        Ok(format!("'{program}'{} {verb}", self.machine()))
    }

    /// For KnownHostsCommand, which ssh splits itself.
    fn for_ssh(&self, verb: &str) -> Result<String> {
        let program = quoted(&self.program)?;
        Ok(format!("{program}{} {verb}", self.machine()))
    }

    fn machine(&self) -> String {
        let option = self.machine.as_ref().map(|option| format!(" {option}"));
        option.unwrap_or_default()
    }
}

/// The path of `jiffy`, which it passes to this process as `argv[0]`.
fn program() -> Result<PathBuf> {
    let first = std::env::args_os().next().map(PathBuf::from);
    match first.filter(|path| path.is_absolute()) {
        Some(path) => Ok(path),
        None => std::env::current_exe()
            .map_err(|error| Failure::io("the path of this program can't be read", error)),
    }
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| unusable(path))
}

/// A path as an argument of ssh_config.
///
/// # Errors
///
/// If the path is not UTF-8, or contains `"`, `\` or a line break.
pub fn quoted(path: &Path) -> Result<String> {
    match text(path)? {
        bad if bad.contains(['"', '\\', '\n']) => Err(unusable(path)),
        good => Ok(format!("\"{}\"", good.replace('%', "%%"))),
    }
}

fn unusable(path: &Path) -> Failure {
    Failure::new(format!(
        "the path {} can't be used in ssh_config",
        path.display()
    ))
    .hint("use folders without quotation marks and backslashes; JIFFY_DATA sets the data folder")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jiffy(program: &str) -> Jiffy {
        Jiffy {
            program: program.into(),
            machine: Some("--machine=always".into()),
        }
    }

    #[test]
    fn paths_are_quoted_for_the_shell_and_for_ssh_config() {
        let odd = jiffy("/o'pt 50%/jiffy");
        assert_eq!(
            odd.for_the_shell("ssh-proxy %n").unwrap(),
            r"'/o'\''pt 50%%/jiffy' --machine=always ssh-proxy %n"
        );
        assert_eq!(
            odd.for_ssh("x %H").unwrap(),
            "\"/o'pt 50%%/jiffy\" --machine=always x %H"
        );
        for bad in ["/a\"b", "/a\\b", "/a\nb"] {
            assert!(jiffy(bad).for_ssh("x").is_err(), "{bad}");
        }
    }

    #[test]
    fn the_host_block_has_every_command_line_option() {
        let settings = Settings::with(
            &jiffy("/bin/jiffy"),
            Path::new("/d/ssh/id"),
            WaitTime { wait: Some(30) },
        )
        .unwrap();
        assert!(
            settings.0[0].1.ends_with("ssh-proxy --wait=30s -- '%n'"),
            "{:?}",
            settings.0[0]
        );
        let block = settings.block("web", "me");
        assert!(block.starts_with("Host web.jiffy\n  User me\n"), "{block}");
        for argument in settings.arguments() {
            let (name, value) = argument[2..].split_once('=').unwrap();
            assert!(
                block.contains(&format!("\n  {name} {value}\n")),
                "{argument}"
            );
        }
    }

    #[test]
    fn only_names_of_vms_are_accepted() {
        let long = "a".repeat(MAX_NAME);
        for good in ["web", "0123456789ab", "a.b-c_d", &long] {
            assert_eq!(vm_name(good).unwrap(), good);
        }
        let too_long = "a".repeat(MAX_NAME + 1);
        for bad in [
            "",
            ".jiffy",
            "-x",
            "web;reboot",
            "we b",
            "we'b",
            "$(x)",
            "a/../b",
            "wéb",
            &too_long,
        ] {
            let failure = vm_name(bad).unwrap_err();
            assert!(failure.message.contains("is not the name"), "{bad}");
        }
    }

    #[test]
    fn the_suffix_is_optional() {
        assert_eq!(vm_name("web.jiffy").unwrap(), "web");
        assert_eq!(vm_name("web").unwrap(), "web");
    }
}
