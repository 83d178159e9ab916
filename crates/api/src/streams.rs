//! Requests that become streams of frames.

use crate::failure::Result;
use crate::http::{Upgrade, json, query, switch, upgrade};
use crate::queue::WaitQuery;
use crate::vms::agent_failed;
use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, Uri};
use axum::response::{IntoResponse, Response};
use hyper::upgrade::Parts;
use hyper_util::rt::TokioIo;
use jiffy_content::checks::check_command;
use jiffy_content::error::Error;
use jiffy_content::images::config;
use jiffy_node::{Caller, Node, on_behalf_of};
use jiffy_vmhost::activity::Use;
use jiffy_vmhost::attach::{self, Role};
use jiffy_vmhost::clients::Cursor;
use jiffy_vmhost::follow::{Log, MAX_TAIL, Source};
use jiffy_vmhost::handle::VmHandle;
use jiffy_vmhost::proxy::{self, Peer, ToClient};
use jiffy_wire::agent::{self as wire, CopyDone, CopyFrame, ExecOutput, OLDEST};
use jiffy_wire::api::{NoCommand, Priority, RunVm, VM_ID_HEADER, VmState};
use jiffy_wire::frame;
use serde::Deserialize;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

/// Longest path in a guest, bytes.
const MAX_PATH: usize = 4096;
/// How long to wait for a VM's end to be noticed after its agent is gone.
const END_TIME: Duration = Duration::from_secs(2);

type Shared = State<Arc<Node>>;

pub(super) async fn run(State(node): Shared, mut request: Request) -> Result<Response> {
    let stream = upgrade(&mut request);
    let mut wanted: RunVm = json(request.into_body()).await?;
    let caller = Caller::current().with(None, wanted.wait_s)?;
    if wanted.detach {
        let (vm, cursor) = on_behalf_of(caller, node.run(wanted.vm)).await?;
        drop(cursor);
        return Ok(Json(node.command_started(&vm).await?).into_response());
    }
    let stream = stream?;
    if wanted.vm.no_command == NoCommand::Wait {
        wanted.vm.no_command = NoCommand::Refuse;
    }
    if wanted.vm.command.is_none() && !node.has_captured_command(&wanted.vm)? {
        return Err(Error::invalid("There is no command to attach to.")
            .hint("Give a command, or use --detach.")
            .into());
    }
    let (vm, cursor) = on_behalf_of(caller, node.run(wanted.vm)).await?;
    let attached = vm.activity.begin(Use::Attach);
    let id = HeaderValue::from_str(&vm.id);
    let folder = node.folder(&vm);
    let mut response = switch(stream, move |stream| async move {
        let _attached = attached;
        attach::serve(stream, &vm, &folder, cursor, Role::Writes).await;
    });
    if let Ok(id) = id {
        response.headers_mut().insert(VM_ID_HEADER, id);
    }
    Ok(response)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AttachQuery {
    stdin: Option<bool>,
    priority: Option<Priority>,
    wait_s: Option<u32>,
}

/// What the client does, and how the request waits.
fn attach_query(uri: &Uri) -> Result<(Role, Caller)> {
    let AttachQuery {
        stdin,
        priority,
        wait_s,
    } = query(uri)?;
    let role = match stdin.unwrap_or(true) {
        true => Role::Writes,
        false => Role::Watches,
    };
    Ok((role, Caller::current().with(priority, wait_s)?))
}

pub(super) async fn attach(
    State(node): Shared,
    Path(vm): Path<String>,
    mut request: Request,
) -> Result<Response> {
    let (role, caller) = attach_query(request.uri())?;
    let stream = upgrade(&mut request)?;
    let vm = node.find(&vm)?;
    if vm.spec.command.is_none() {
        return Err(Error::wrong_state(format!(
            "The VM {} has no first command to attach to.",
            vm.name
        ))
        .hint(format!("Run one in it with `jiffy exec {}`.", vm.name))
        .into());
    }
    if vm.view.borrow().vm.state == VmState::Created {
        return Err(
            Error::wrong_state(format!("The VM {} was never started.", vm.name))
                .hint(format!("Start it with `jiffy start {}`.", vm.name))
                .into(),
        );
    }
    let attached = vm.activity.begin(Use::Attach);
    on_behalf_of(caller, node.wake_if_asleep(&vm)).await?;
    let cursor = Cursor::new(&vm.clients);
    let folder = node.folder(&vm);
    Ok(switch(stream, move |stream| async move {
        let _attached = attached;
        attach::serve(stream, &vm, &folder, cursor, role).await;
    }))
}

pub(super) async fn exec(
    State(node): Shared,
    Path(vm): Path<String>,
    mut request: Request,
) -> Result<Response> {
    let caller = WaitQuery::caller(request.uri())?;
    let stream = upgrade(&mut request)?;
    let mut command: wire::Command = json(request.into_body()).await?;
    let vm = node.find(&vm)?;
    config::fill(&mut command, &vm.spec.config);
    check_command(&command)?;
    let request = wire::Request::Exec {
        version: OLDEST,
        command,
    };
    proxied::<ExecOutput>(&node, caller, vm, stream, request, Use::Exec).await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CopyQuery {
    path: String,
    priority: Option<Priority>,
    wait_s: Option<u32>,
}

pub(super) async fn copy_in(
    State(node): Shared,
    Path(vm): Path<String>,
    mut request: Request,
) -> Result<Response> {
    let (path, caller) = copy_query(request.uri())?;
    let stream = upgrade(&mut request)?;
    let vm = node.find(&vm)?;
    let request = wire::Request::CopyIn {
        version: OLDEST,
        path,
    };
    proxied::<CopyDone>(&node, caller, vm, stream, request, Use::Copy).await
}

pub(super) async fn copy_out(
    State(node): Shared,
    Path(vm): Path<String>,
    mut request: Request,
) -> Result<Response> {
    let (path, caller) = copy_query(request.uri())?;
    let stream = upgrade(&mut request)?;
    let vm = node.find(&vm)?;
    let request = wire::Request::CopyOut {
        version: OLDEST,
        path,
    };
    proxied::<CopyFrame>(&node, caller, vm, stream, request, Use::Copy).await
}

/// The path in the VM, and how the request waits.
fn copy_query(uri: &Uri) -> Result<(String, Caller)> {
    let CopyQuery {
        path,
        priority,
        wait_s,
    } = query(uri)?;
    if path.is_empty() || path.len() > MAX_PATH || path.contains('\0') {
        return Err(
            Error::invalid("The path in the VM must have 1 to 4096 bytes and no NUL.").into(),
        );
    }
    Ok((path, Caller::current().with(priority, wait_s)?))
}

/// Sends a request to the VM's agent, then passes messages between it and the client.
async fn proxied<T: ToClient>(
    node: &Arc<Node>,
    caller: Caller,
    vm: Arc<VmHandle>,
    stream: Upgrade,
    request: wire::Request,
    what: Use,
) -> Result<Response> {
    let in_use = vm.activity.begin(what);
    let socket = on_behalf_of(caller, node.awake_socket(&vm)).await?;
    let agent = node
        .ask_agent(&vm, &socket, &request)
        .await
        .map_err(|error| agent_failed(&vm.name, &error))?;
    Ok(switch(stream, move |stream| async move {
        let _in_use = in_use;
        // The socket itself, because only it tells whether the peer has left.
        match stream.into_inner().downcast::<TokioIo<UnixStream>>() {
            Ok(unix) => pass::<T, _>(unix, agent, vm).await,
            Err(other) => match other.downcast::<TokioIo<TcpStream>>() {
                Ok(tcp) => pass::<T, _>(tcp, agent, vm).await,
                Err(_) => tracing::error!(
                    "an upgraded connection is neither a Unix socket nor a TCP socket"
                ),
            },
        }
    }))
}

async fn pass<T: ToClient, S>(client: Parts<TokioIo<S>>, agent: UnixStream, vm: Arc<VmHandle>)
where
    S: AsyncRead + AsyncWrite + AsFd,
{
    let stream = client.io.into_inner();
    let peer = match Peer::of(&stream) {
        Ok(peer) => peer,
        Err(error) => return tracing::warn!(%error, "a client's connection can't be watched"),
    };
    let (from, to) = tokio::io::split(stream);
    let from = (&client.read_buf[..]).chain(from);
    proxy::run::<T>(tokio::io::join(from, to), peer, agent, why_ended(vm)).await;
}

/// Why the VM has ended, in a sentence, if it ends within [`END_TIME`].
async fn why_ended(vm: Arc<VmHandle>) -> Option<String> {
    let ended = vm.when(|view| !view.is_active());
    let view = timeout(END_TIME, ended).await.ok()?;
    Some(match view.failure {
        Some(failure) => failure.message,
        None => format!("The VM {} ended.", vm.name),
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LogsQuery {
    #[serde(default)]
    follow: bool,
    tail: Option<usize>,
    source: Option<Source>,
}

pub(super) async fn logs(
    State(node): Shared,
    Path(vm): Path<String>,
    uri: Uri,
) -> Result<Response> {
    let LogsQuery {
        follow,
        tail,
        source,
    } = query(&uri)?;
    if tail.is_some_and(|lines| lines > MAX_TAIL) {
        return Err(Error::invalid(format!(
            "The last {MAX_TAIL} lines at most can be requested."
        ))
        .into());
    }
    let vm = node.find(&vm)?;
    let source = source.unwrap_or(Source::Command);
    if source == Source::Console && !vm.spec.console {
        return Err(
            Error::wrong_state(format!("The VM {} has no console.", vm.name))
                .hint("Create a VM with --console.")
                .into(),
        );
    }
    let folder = node.folder(&vm);
    let log = tokio::task::spawn_blocking(move || Log::open(vm, folder, source, follow, tail))
        .await
        .map_err(|error| Error::internal(format!("A log could not be opened: {error}.")))??;
    let pieces = futures_util::stream::try_unfold(log, |mut log| async move {
        let Some(chunk) = log.next().await? else {
            return Ok::<_, std::io::Error>(None);
        };
        let bytes = frame::to_vec(&chunk).map_err(std::io::Error::other)?;
        Ok(Some((Bytes::from(bytes), log)))
    });
    let mut response = Response::new(Body::from_stream(pieces));
    let kind = HeaderValue::from_static("application/octet-stream");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}
