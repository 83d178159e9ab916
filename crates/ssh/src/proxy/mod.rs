//! `jiffy ssh-proxy`: an SSH server on stdin and stdout.
//!
//! It serves only the client that started it and has the same rights. It accepts only the user's
//! own key.
//!
//! * [`server`]: authentication, and the requests that are accepted.
//! * [`session`], [`forward`]: a channel and its program in the VM.
//! * [`pump`]: passes data between the two.
//! * [`backlog`]: bounds the data that programs have not read yet.
//! * [`guest`]: copies `jiffy-ssh-guest` into the VM; [`login`]: an authenticated client.

mod backlog;
mod forward;
mod guest;
mod login;
mod pump;
mod server;
mod session;

use crate::config::vm_name;
use crate::keys::{Keys, known_hosts_line};
use backlog::{Backlog, Throttled};
use guest::Guest;
use jiffy_cli::client::{Client, vm_path};
use jiffy_cli::failure::{Failure, Outcome, Result};
use jiffy_cli::ssh::SshProxy;
use jiffy_cli::{Context, show};
use jiffy_wire::api::Vm;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::io::IsTerminal;
use std::sync::Arc;
use tokio::net::unix::pipe;

/// Prints the VM's host key as a line of known_hosts for this host name.
///
/// # Errors
///
/// If there is no such VM, its key can't be derived (see [`Keys::host`]), or stdout can't be
/// written.
pub async fn known_hosts(context: &Context, options: SshProxy, host: String) -> Result<Outcome> {
    let vm = find(&context.client()?, &options.vm).await?;
    let key = Keys::below(context.folders.data()?).host(&vm.id)?;
    show(&known_hosts_line(&host, key.public_key())?)?;
    Ok(Outcome::Done)
}

/// Serves SSH until the client disconnects.
///
/// # Errors
///
/// If stdin is a terminal, there is no such VM, the keys can't be read or created, jiffy-ssh-guest
/// can't be copied into the VM or run there, or the SSH connection fails.
pub async fn serve(context: &Context, options: SshProxy) -> Result<Outcome> {
    if std::io::stdin().is_terminal() {
        return Err(
            Failure::new("stdin is a terminal, not the connection of an SSH client")
                .hint(format!("`jiffy ssh {}` logs in", options.vm)),
        );
    }
    let client = context.client()?;
    let vm = find(&client, &options.vm).await?;
    let keys = Keys::below(context.folders.data()?);
    let (user_key, host_key) = (keys.client()?, keys.host(&vm.id)?);
    let program = context.folders.program("jiffy-ssh-guest")?;
    let guest = Guest::prepare(client, vm, &program, options.time).await?;
    let backlog = Arc::new(Backlog::default());
    let unusable = |error| Failure::io("stdin and stdout can't be used for SSH", error);
    let input = open(std::io::stdin().as_fd())
        .and_then(pipe::Receiver::from_owned_fd_unchecked)
        .map_err(unusable)?;
    let output = open(std::io::stdout().as_fd())
        .and_then(pipe::Sender::from_owned_fd_unchecked)
        .map_err(unusable)?;
    let transport = tokio::io::join(Throttled::new(input, &backlog), output);
    server::run(transport, host_key, user_key, guest, backlog).await?;
    Ok(Outcome::Done)
}

async fn find(client: &Client, name: &str) -> Result<Vm> {
    client.get(&vm_path(vm_name(name)?, "")).await
}

/// A non-blocking descriptor of the same pipe or socket.
fn open(stream: BorrowedFd<'_>) -> std::io::Result<OwnedFd> {
    let stream = stream.try_clone_to_owned()?;
    fcntl_setfl(&stream, fcntl_getfl(&stream)? | OFlags::NONBLOCK)?;
    Ok(stream)
}
