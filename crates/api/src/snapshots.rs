//! Routes of snapshots, pause, fork, hibernate and wake.

use crate::failure::Result;
use crate::failure::no_content;
use crate::http::{blocking, json, query};
use crate::queue::WaitQuery;
use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, Uri};
use axum::response::Response;
use jiffy_node::{Caller, Node, on_behalf_of, run_to_completion};
use jiffy_wire::api::{
    ForkVm, Forked, Hibernated, MakeSnapshot, MemoryReport, Pruned, Snapshot, SnapshotMade, Vm,
};
use serde::Deserialize;
use std::sync::Arc;

type Shared = State<Arc<Node>>;

pub(super) async fn pause(State(node): Shared, Path(vm): Path<String>) -> Result<Json<Vm>> {
    let vm = node.find(&vm)?;
    Ok(Json(run_to_completion(node.pause(vm)).await?))
}

pub(super) async fn resume(State(node): Shared, Path(vm): Path<String>) -> Result<Json<Vm>> {
    let vm = node.find(&vm)?;
    Ok(Json(run_to_completion(node.resume(vm)).await?))
}

pub(super) async fn fork(
    State(node): Shared,
    Path(vm): Path<String>,
    body: Body,
) -> Result<Json<Forked>> {
    let wanted: ForkVm = json(body).await?;
    let caller = Caller::current().with(wanted.priority, wanted.wait_s)?;
    let vm = node.find(&vm)?;
    let forked = on_behalf_of(caller, run_to_completion(node.fork(vm, wanted)));
    Ok(Json(forked.await?))
}

pub(super) async fn hibernate(
    State(node): Shared,
    Path(vm): Path<String>,
) -> Result<Json<Hibernated>> {
    let vm = node.find(&vm)?;
    Ok(Json(run_to_completion(node.hibernate(vm)).await?))
}

pub(super) async fn wake(
    State(node): Shared,
    Path(vm): Path<String>,
    uri: Uri,
) -> Result<Json<Vm>> {
    let caller = WaitQuery::caller(&uri)?;
    let vm = node.find(&vm)?;
    let woken = on_behalf_of(caller, run_to_completion(node.wake_and_wait(vm)));
    Ok(Json(woken.await?))
}

pub(super) async fn create(
    State(node): Shared,
    Path(vm): Path<String>,
    body: Body,
) -> Result<Json<SnapshotMade>> {
    let wanted: MakeSnapshot = json(body).await?;
    let vm = node.find(&vm)?;
    Ok(Json(run_to_completion(node.snapshot(vm, wanted)).await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    #[serde(default)]
    all: bool,
}

pub(super) async fn list(State(node): Shared, uri: Uri) -> Result<Json<Vec<Snapshot>>> {
    let ListQuery { all } = query(&uri)?;
    let list = blocking(move || node.list_snapshots(all)).await?;
    Ok(Json(list))
}

pub(super) async fn inspect(
    State(node): Shared,
    Path(name): Path<String>,
) -> Result<Json<Snapshot>> {
    let found = blocking(move || node.inspect_snapshot(&name)).await?;
    Ok(Json(found))
}

pub(super) async fn remove(State(node): Shared, Path(name): Path<String>) -> Result<Response> {
    node.remove_snapshot(&name).await?;
    Ok(no_content())
}

pub(super) async fn prune(State(node): Shared) -> Json<Pruned> {
    Json(node.prune_snapshots().await)
}

pub(super) async fn optimise(
    State(node): Shared,
    Path(name): Path<String>,
) -> Result<Json<Snapshot>> {
    Ok(Json(run_to_completion(node.optimise_snapshot(name)).await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MemoryQuery {
    #[serde(default)]
    map: bool,
}

pub(super) async fn memory(
    State(node): Shared,
    Path(name): Path<String>,
    uri: Uri,
) -> Result<Json<MemoryReport>> {
    let MemoryQuery { map } = query(&uri)?;
    Ok(Json(node.memory_report(&name, map).await?))
}

pub(super) async fn picture(State(node): Shared, Path(name): Path<String>) -> Result<Response> {
    let png = node.memory_picture(&name).await?;
    let mut response = Response::new(Body::from(png));
    let kind = HeaderValue::from_static("image/png");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}
