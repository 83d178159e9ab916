//! Routes of VMs.

use crate::failure::Result;
use crate::failure::no_content;
use crate::http::{json, query};
use crate::queue::WaitQuery;
use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, Uri};
use axum::response::{IntoResponse, Response};
use jiffy_content::clock::{monotonic_ns, unix_seconds};
use jiffy_content::error::Error;
use jiffy_node::{Node, on_behalf_of, run_to_completion};
use jiffy_sys::causes;
use jiffy_vmhost::agent;
use jiffy_vmhost::handle::Command;
use jiffy_vmhost::task::DEFAULT_GRACE;
use jiffy_wire::agent::{OLDEST, Request, Stat};
use jiffy_wire::api::{CreateVm, Vm, VmState};
use jiffy_wire::text::list::{self, List};
use jiffy_wire::timeline::Timeline;
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;

/// Longest grace period after SIGTERM, milliseconds: a day.
const MAX_GRACE: u32 = 86_400_000;
/// How long an agent has to answer a simple request.
const ANSWER_TIME: Duration = Duration::from_secs(30);

type Shared = State<Arc<Node>>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    #[serde(default)]
    all: bool,
}

pub(super) async fn list(State(node): Shared, uri: Uri, headers: HeaderMap) -> Result<Response> {
    let ListQuery { all } = query(&uri)?;
    let vms = node.list(all);
    node.check_sleepers(&vms).await?;
    if headers
        .get(ACCEPT)
        .is_some_and(|accept| accept == list::MEDIA_TYPE)
    {
        let mut list = List::new(vms.len(), unix_seconds());
        for vm in vms.iter().rev() {
            // Most VMs are shown as they are: a copy of each would take most of the time.
            match node.has_more_to_show(vm) {
                true => list.add(&node.shown(vm)),
                false => list.add(&vm.view.borrow().vm),
            }
        }
        return Ok(([(CONTENT_TYPE, list::MEDIA_TYPE)], list.text()).into_response());
    }
    let vms: Vec<Vm> = vms.iter().map(|vm| node.shown(vm)).collect();
    Ok(Json(vms).into_response())
}

pub(super) async fn create(State(node): Shared, body: Body) -> Result<Json<Vm>> {
    let wanted: CreateVm = json(body).await?;
    let vm = node.create(wanted).await?;
    Ok(Json(vm.vm()))
}

pub(super) async fn limits(
    State(node): Shared,
    Path(vm): Path<String>,
    uri: Uri,
    body: Body,
) -> Result<Json<Vm>> {
    let caller = WaitQuery::caller(&uri)?;
    let limits = json(body).await?;
    let changed = node.change_limits(vm, limits);
    Ok(Json(
        on_behalf_of(caller, run_to_completion(changed)).await?,
    ))
}

pub(super) async fn inspect(State(node): Shared, Path(vm): Path<String>) -> Result<Json<Vm>> {
    Ok(Json(node.inspect(&vm).await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RemoveQuery {
    #[serde(default)]
    force: bool,
}

pub(super) async fn remove(
    State(node): Shared,
    Path(vm): Path<String>,
    uri: Uri,
) -> Result<Response> {
    let RemoveQuery { force } = query(&uri)?;
    node.find_any(&vm)?
        .ask(|reply| Command::Remove(force, reply))
        .await??;
    Ok(no_content())
}

pub(super) async fn start(
    State(node): Shared,
    Path(vm): Path<String>,
    uri: Uri,
) -> Result<Json<Vm>> {
    let received = monotonic_ns();
    let caller = WaitQuery::caller(&uri)?;
    let vm = node.find(&vm)?;
    // It does not run for long if it falls asleep. The end of its command is told before it has
    // ended.
    vm.hibernation_settled().await;
    vm.when(|view| view.vm.state != VmState::Stopping).await;
    // As with `docker start`, a VM that runs already is no error, and a paused one is refused.
    let runs = {
        let view = vm.view.borrow();
        view.is_active() && view.vm.state != VmState::Paused
    };
    if !runs {
        let (node, vm) = (Arc::clone(&node), Arc::clone(&vm));
        let start = async move { node.start(&vm, received).await };
        on_behalf_of(caller, run_to_completion(start)).await?;
    }
    Ok(Json(node.command_started(&vm).await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StopQuery {
    grace_ms: Option<u32>,
}

pub(super) async fn stop(
    State(node): Shared,
    Path(vm): Path<String>,
    uri: Uri,
) -> Result<Json<Vm>> {
    let StopQuery { grace_ms } = query(&uri)?;
    let grace = grace_ms.map_or(DEFAULT_GRACE, |grace| {
        Duration::from_millis(grace.min(MAX_GRACE).into())
    });
    let vm = node.find(&vm)?;
    // Its memory is on disk until then, and its programs can't end in order.
    vm.wake_settled().await;
    if vm.view.borrow().vm.state == VmState::Hibernated {
        let name = &vm.name;
        return Err(Error::wrong_state(format!("The VM {name} is hibernated."))
            .hint(format!(
                "Wake it with `jiffy wake {name}`, or end it as it is with `jiffy kill {name}`."
            ))
            .into());
    }
    if vm.view.borrow().vm.state == VmState::Paused {
        // Its programs must run to end in order.
        run_to_completion(Arc::clone(&node).resume(Arc::clone(&vm))).await?;
    }
    // As with `docker stop`, a VM that has ended already is no error.
    if vm.view.borrow().is_active() {
        let asked = vm.ask(|reply| Command::Stop(grace, reply)).await?;
        if vm.view.borrow().is_active() {
            asked?;
        }
    }
    let view = vm.when(|view| !view.is_active()).await;
    Ok(Json(view.vm))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KillQuery {
    signal: Option<i32>,
}

pub(super) async fn kill(
    State(node): Shared,
    Path(vm): Path<String>,
    uri: Uri,
) -> Result<Json<Vm>> {
    let KillQuery { signal } = query(&uri)?;
    let Some(signal) = signal else {
        let vm = node.find_any(&vm)?;
        vm.ask(Command::Kill).await??;
        let view = vm.when(|view| !view.lives()).await;
        return Ok(Json(view.vm));
    };
    let vm = node.find(&vm)?;
    if !(1..=64).contains(&signal) {
        return Err(Error::invalid(format!("There is no signal {signal}; choose 1 to 64.")).into());
    }
    if vm.spec.command.is_none() {
        return Err(Error::wrong_state(format!(
            "The VM {} has no first command to send a signal to.",
            vm.name
        ))
        .hint("Without a signal, the VM itself ends.")
        .into());
    }
    let socket = node.agent_socket(&vm).await?;
    let request = Request::SignalMain {
        version: OLDEST,
        signal,
    };
    agent::tell(&socket, &request, ANSWER_TIME)
        .await
        .map_err(|why| {
            Error::vm_failed(format!(
                "The signal did not reach the command of the VM {}: {why}.",
                vm.name
            ))
        })?;
    Ok(Json(vm.vm()))
}

pub(super) async fn wait(State(node): Shared, Path(vm): Path<String>) -> Result<Json<Vm>> {
    let vm = match node.find_any(&vm) {
        Ok(vm) => vm,
        Err(_) => return Ok(Json(node.last_seen(&vm)?)),
    };
    let view = vm.when(|view| view.vm.state == VmState::Exited).await;
    Ok(Json(view.vm))
}

pub(super) async fn stat(State(node): Shared, Path(vm): Path<String>) -> Result<Json<Stat>> {
    let vm = node.find(&vm)?;
    let socket = node.agent_socket(&vm).await?;
    let request = Request::Stat { version: OLDEST };
    let stat = agent::ask_once(&socket, &request, ANSWER_TIME)
        .await
        .map_err(|error| agent_failed(&vm.name, &error))?;
    Ok(Json(stat))
}

pub(super) async fn timeline(
    State(node): Shared,
    Path(vm): Path<String>,
) -> Result<Json<Timeline>> {
    Ok(Json(node.timeline(&vm).await?))
}

/// The error for an agent that failed to answer.
pub(super) fn agent_failed(vm: &str, error: &agent::AgentError) -> Error {
    Error::vm_failed(format!(
        "A request to the agent of the VM {vm} failed: {}.",
        causes::sentence(error)
    ))
    .hint(format!(
        "`jiffy logs {vm}` may say why; `jiffy kill {vm}` ends it."
    ))
}
