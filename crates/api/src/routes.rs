//! The routing table.

use crate::failure::{Failure, Result, no_content};
use crate::http::query;
use crate::request_ids::Begun;
use crate::{events, images, networks, queue, snapshots, store, streams, vms};
use axum::Router;
use axum::extract::{Path, State};
use axum::http::{Method, Uri};
use axum::routing::{get, post, put};
use axum::{Extension, Json, response::Response};
use jiffy_content::error::Error;
use jiffy_node::Node;
use jiffy_wire::api::{NodeInfo, RequestState, SchedTrace};
use jiffy_wire::cpu::Profile;
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;

/// All routes.
pub fn router(node: Arc<Node>, begun: Arc<Begun>) -> Router {
    Router::new()
        .route("/v1/info", get(info))
        .route("/v1/cpu", get(processor))
        .route("/v1/requests/{id}", get(request))
        .route("/v1/sched/trace", post(trace_scheduling).delete(end_trace))
        .route("/v1/shutdown", post(shutdown))
        .route("/v1/events", get(events::follow))
        .route("/v1/run", post(streams::run))
        .route("/v1/queue", get(queue::list))
        .route("/v1/queue/{request}", get(queue::follow))
        .route("/v1/vms", get(vms::list).post(vms::create))
        .route("/v1/vms/{vm}", get(vms::inspect).delete(vms::remove))
        .route("/v1/vms/{vm}/start", post(vms::start))
        .route("/v1/vms/{vm}/stop", post(vms::stop))
        .route("/v1/vms/{vm}/kill", post(vms::kill))
        .route("/v1/vms/{vm}/wait", post(vms::wait))
        .route("/v1/vms/{vm}/stat", get(vms::stat))
        .route("/v1/vms/{vm}/timeline", get(vms::timeline))
        .route("/v1/vms/{vm}/logs", get(streams::logs))
        .route("/v1/vms/{vm}/exec", post(streams::exec))
        .route("/v1/vms/{vm}/attach", post(streams::attach))
        .route("/v1/vms/{vm}/copy-in", post(streams::copy_in))
        .route("/v1/vms/{vm}/copy-out", post(streams::copy_out))
        .route("/v1/vms/{vm}/pause", post(snapshots::pause))
        .route("/v1/vms/{vm}/resume", post(snapshots::resume))
        .route("/v1/vms/{vm}/fork", post(snapshots::fork))
        .route("/v1/vms/{vm}/hibernate", post(snapshots::hibernate))
        .route("/v1/vms/{vm}/wake", post(snapshots::wake))
        .route("/v1/vms/{vm}/commit", post(images::commit))
        .route("/v1/vms/{vm}/snapshots", post(snapshots::create))
        .route("/v1/snapshots", get(snapshots::list))
        .route("/v1/snapshots/prune", post(snapshots::prune))
        .route(
            "/v1/snapshots/{name}",
            get(snapshots::inspect).delete(snapshots::remove),
        )
        .route("/v1/snapshots/{name}/optimise", post(snapshots::optimise))
        .route("/v1/snapshots/{name}/memory", get(snapshots::memory))
        .route("/v1/snapshots/{name}/picture", get(snapshots::picture))
        .route("/v1/images", get(images::list))
        .route("/v1/prune/images", post(images::prune))
        .route("/v1/pulls", post(images::pull))
        .route("/v1/pushes", post(images::push))
        .route(
            "/v1/images/{name}",
            get(images::inspect)
                .post(images::import)
                .delete(images::remove),
        )
        .route("/v1/vms/{vm}/policy", post(networks::policy))
        .route("/v1/vms/{vm}/limits", post(vms::limits))
        .route("/v1/networks", get(networks::list))
        .route(
            "/v1/networks/{name}",
            get(networks::inspect)
                .post(networks::create)
                .delete(networks::remove),
        )
        .route("/v1/kernels", get(store::list_kernels))
        .route("/v1/kernels/{name}", put(store::put_kernel))
        .route("/v1/volumes", get(store::list_volumes))
        .route(
            "/v1/volumes/{name}",
            post(store::make_volume).delete(store::remove_volume),
        )
        .route("/v1/volumes/{name}/resize", post(store::resize_volume))
        .route(
            "/v1/vms/{vm}/disks/{name}",
            post(store::attach_disk).delete(store::detach_disk),
        )
        .fallback(unknown)
        .method_not_allowed_fallback(unknown)
        .layer(Extension(begun))
        .with_state(node)
}

async fn info(State(node): State<Arc<Node>>) -> Json<NodeInfo> {
    Json(node.info())
}

async fn processor(State(node): State<Arc<Node>>) -> Result<Json<Profile>> {
    Ok(Json(node.processor().await?))
}

async fn request(
    Extension(begun): Extension<Arc<Begun>>,
    Path(id): Path<String>,
) -> Result<Json<RequestState>> {
    let begun = begun.has(&id)?;
    Ok(Json(RequestState { begun }))
}

/// How long a recording may take, seconds.
const LONGEST_TRACE: u64 = 60;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TraceQuery {
    seconds: u64,
}

async fn trace_scheduling(State(node): State<Arc<Node>>, uri: Uri) -> Result<Json<SchedTrace>> {
    let TraceQuery { seconds } = query(&uri)?;
    if !(1..=LONGEST_TRACE).contains(&seconds) {
        return Err(Error::invalid(format!(
            "A recording of the scheduler takes 1 to {LONGEST_TRACE} seconds, not {seconds}."
        ))
        .into());
    }
    let trace = node.trace_scheduling(Duration::from_secs(seconds)).await?;
    Ok(Json(trace))
}

async fn end_trace(State(node): State<Arc<Node>>) -> Response {
    node.end_trace();
    no_content()
}

async fn shutdown(State(node): State<Arc<Node>>) -> Response {
    node.shutdown.notify_one();
    no_content()
}

async fn unknown(method: Method, uri: Uri) -> Failure {
    let path: String = uri.path().chars().take(200).collect();
    Error::not_found(format!("The API has no {method} {path}."))
        .hint("The client may be of another version; compare `jiffy version`.")
        .into()
}
