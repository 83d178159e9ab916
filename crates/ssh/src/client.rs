//! `jiffy ssh`: starts the OpenSSH client.

use crate::config::{SUFFIX, Settings, quoted};
use crate::keys::Keys;
use jiffy_cli::Context;
use jiffy_cli::client::vm_path;
use jiffy_cli::failure::{Failure, Outcome, Result};
use jiffy_cli::ssh::Ssh;
use jiffy_wire::api::{Vm, VmState};
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// `jiffy ssh`: replaces this process by ssh (execve), which sets the exit status.
///
/// # Errors
///
/// If there is no node, or no VM of this name that runs or hibernates; if `--address` is given and
/// the VM's address can't be reached from here; if the keys can't be made or read, or ssh can't be
/// run.
pub async fn ssh(context: &Context, ssh: Ssh) -> Result<Outcome> {
    let (user, name) = match ssh.vm.rsplit_once('@') {
        Some((user, name)) => (Some(user), name),
        None => (ssh.user.as_deref(), ssh.vm.as_str()),
    };
    let client = context.client()?;
    // ssh would report a missing VM in several lines.
    let vm: Vm = client.get(&vm_path(name, "")).await?;
    if matches!(vm.state, VmState::Created | VmState::Exited) {
        return Err(Failure::new(format!("{} does not run", vm.name))
            .hint(format!("`jiffy start {}` starts it", vm.name)));
    }
    if vm.state == VmState::Paused {
        return Err(Failure::new(format!("{} is paused", vm.name))
            .hint(format!("`jiffy resume {}` resumes it", vm.name)));
    }
    let mut command = Command::new("ssh");
    let host = match ssh.address {
        true => {
            check_reachable(context)?;
            let address = by_address(context, &vm, &mut command)?;
            // No connection to an address wakes a VM, which keeps it while it is hibernated. One that
            // runs may be falling asleep.
            let wake = vm_path(&vm.id, &format!("/wake{}", ssh.time.query()));
            client.post::<Vm>(&wake).await?;
            address
        }
        false => {
            command.args(Settings::of(context, ssh.time)?.arguments());
            format!("{}{SUFFIX}", vm.name)
        }
    };
    command.args(["-l", user.unwrap_or("root")]);
    for option in &ssh.option {
        command.args(["-o", option]);
    }
    for forward in &ssh.forward {
        command.args(["-L", forward]);
    }
    for (flag, given) in [("-t", ssh.tty), ("-T", ssh.no_tty), ("-N", ssh.no_command)] {
        if given {
            command.arg(flag);
        }
    }
    command.arg("--").arg(host).args(&ssh.argv);
    let error = command.exec();
    Err(match error.kind() {
        ErrorKind::NotFound => Failure::new("there is no program ssh on PATH").hint(format!(
            "install the package openssh-client; `jiffy exec -it {} sh` needs none",
            vm.name
        )),
        _ => Failure::io("ssh can't be run", error),
    })
}

fn check_reachable(context: &Context) -> Result<()> {
    if !context.in_machine() {
        return Ok(());
    }
    Err(
        Failure::new("addresses of VMs in the machine are not reachable from this host")
            .hint("leave --address out, or publish the port: `jiffy run -p 2222:22 …`"),
    )
}

/// Adds the options for the VM's own SSH server, and returns its address. Its host key is learned
/// at the first connection, under the VM's id: another VM may get the same address later.
fn by_address(context: &Context, vm: &Vm, command: &mut Command) -> Result<String> {
    let network = vm.network.as_ref();
    let Some(address) = network.and_then(|network| network.addresses.first()) else {
        return Err(Failure::new(format!("{} has no address", vm.name))
            .hint("leave --address out: jiffy serves SSH without a network"));
    };
    let keys = Keys::below(context.folders.data()?);
    keys.client()?;
    let known_hosts = quoted(&keys.known_hosts())?;
    let identity = quoted(&keys.identity())?;
    command
        .arg(format!("-oHostKeyAlias=jiffy-{}", vm.id))
        .arg(format!("-oUserKnownHostsFile={known_hosts}"))
        .arg("-oStrictHostKeyChecking=accept-new")
        .arg(format!("-oIdentityFile={identity}"));
    Ok(address.clone())
}
