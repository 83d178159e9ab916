//! `jiffy exec` and `jiffy attach`.

use super::Context;
use super::command::{command, stdio};
use crate::args::{Attach, Exec};
use crate::client::{Client, vm_path};
use crate::failure::{Outcome, Result};
use crate::session::{self, Leaving, Stdio};
use jiffy_wire::api::Vm;

/// `jiffy exec`
///
/// # Errors
///
/// If there is no node, it refuses, or the session fails (see [`session::run`]).
pub async fn exec(context: &Context, exec: Exec) -> Result<Outcome> {
    let stdio = stdio(&exec.stdio);
    let client = context.client()?;
    let command = command(exec.argv, exec.command, stdio);
    let upgraded = client
        .upgrade(
            &vm_path(&exec.vm, &format!("/exec{}", exec.time.query())),
            Some(&command),
        )
        .await?;
    session::run(&client, upgraded, stdio, Leaving::HangsUp, None).await
}

/// `jiffy attach`
///
/// # Errors
///
/// If there is no node, it refuses, or the session fails (see [`session::run`]).
pub async fn attach(context: &Context, attach: Attach) -> Result<Outcome> {
    let client = context.client()?;
    let (leaving, query) = match attach.no_stdin {
        true => (Leaving::Watches, "?stdin=false"),
        false => (Leaving::LeavesIt, ""),
    };
    let query = attach.time.after(query);
    attach_to(&client, &attach.vm, !attach.no_stdin, leaving, &query).await
}

/// Connects to a VM's first command, with this query.
///
/// # Errors
///
/// If the node refuses, or the session fails (see [`session::run`]).
pub async fn attach_to(
    client: &Client,
    vm: &str,
    stdin: bool,
    leaving: Leaving,
    query: &str,
) -> Result<Outcome> {
    let tty = session::foreground_terminals() && has_terminal(client, vm).await?;
    let path = vm_path(vm, &format!("/attach{query}"));
    let mut upgraded = client.upgrade::<()>(&path, None).await?;
    upgraded.vm.get_or_insert_with(|| vm.to_owned());
    let stdio = Stdio { stdin, tty };
    session::run(client, upgraded, stdio, leaving, None).await
}

/// Does a VM's first command run on a terminal?
async fn has_terminal(client: &Client, vm: &str) -> Result<bool> {
    let vm: Vm = client.get(&vm_path(vm, "")).await?;
    Ok(vm.tty)
}
