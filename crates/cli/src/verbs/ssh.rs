//! `jiffy ssh`, `ssh-config` and `ssh-proxy`.

use super::Context;
use crate::args::ssh::{Ssh, SshConfig, SshProxy};
use crate::args::{Cli, Later, Verb};
use crate::failure::{Failure, Outcome, Result};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// A verb of SSH.
#[derive(Debug)]
pub enum SshVerb {
    /// `jiffy ssh`
    Ssh(Ssh),
    /// `jiffy ssh-config`
    Config(SshConfig),
    /// `jiffy ssh-proxy`
    Proxy(SshProxy),
}

/// The main function of jiffy-ssh: parses the command line of `jiffy`, has `perform` execute its
/// verb, and exits as `jiffy` does.
pub fn ssh_main(perform: impl FnOnce(&Context, SshVerb) -> Result<Outcome>) -> ! {
    let cli = Cli::of_this_process();
    let context = Context::new(cli.machine, jiffy_sys::clock::monotonic_ns());
    super::exit(match cli.verb {
        Verb::Ssh(Later(ssh)) => perform(&context, SshVerb::Ssh(ssh)),
        Verb::SshConfig(Later(config)) => perform(&context, SshVerb::Config(config)),
        Verb::SshProxy(Later(proxy)) => perform(&context, SshVerb::Proxy(proxy)),
        _ => Err(
            Failure::new("jiffy-ssh has only the verbs ssh, ssh-config and ssh-proxy")
                .hint("run `jiffy` instead"),
        ),
    })
}

/// Replaces this process by jiffy-ssh (execve), which parses the same command line: `jiffy` stays
/// small without cryptography. The program's first word is the path of `jiffy`, for what ssh is to
/// run.
///
/// # Errors
///
/// If jiffy-ssh is not installed, or can't be run. Otherwise it does not return.
pub fn ssh(context: &Context) -> Result<Outcome> {
    let program = context.folders.program("jiffy-ssh")?;
    let this = std::env::current_exe()
        .map_err(|error| Failure::io("the path of jiffy can't be read", error))?;
    let error = Command::new(&program)
        .arg0(this)
        .args(std::env::args_os().skip(1))
        .exec();
    Err(Failure::io(
        format_args!("{} can't be run", program.display()),
        error,
    ))
}
