//! Routes of images, pulls and pushes.

use crate::client_slots::Place;
use crate::failure::Result;
use crate::failure::no_content;
use crate::http::{blocking_body, json, lines, query};
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::Uri;
use axum::response::Response;
use axum::{Extension, Json};
use futures_util::stream;
use jiffy_content::images::import::Which;
use jiffy_content::transfer::job::Watcher;
use jiffy_node::{Node, run_to_completion};
use jiffy_wire::api::{
    CommitVm, Committed, Image, ImageSource, ImportKind, Pruned, PullImage, PushArtifact,
};
use serde::Deserialize;
use std::sync::Arc;

type Shared = State<Arc<Node>>;

/// The registry of image names without one.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Lookup {
    registry: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ImportQuery {
    kind: Option<ImportKind>,
    reference: Option<String>,
    registry: Option<String>,
    /// Where the image comes from, shown to users.
    from: Option<String>,
}

pub(super) async fn list(State(node): Shared) -> Result<Json<Vec<Image>>> {
    Ok(Json(node.list_images().await?))
}

pub(super) async fn inspect(
    State(node): Shared,
    Path(name): Path<String>,
    uri: Uri,
) -> Result<Json<Image>> {
    let Lookup { registry } = query(&uri)?;
    Ok(Json(node.inspect_image(&name, registry.as_deref()).await?))
}

pub(super) async fn import(
    State(node): Shared,
    Path(name): Path<String>,
    Extension(place): Extension<Arc<Place>>,
    uri: Uri,
    body: Body,
) -> Result<Json<Image>> {
    let wanted: ImportQuery = query(&uri)?;
    let tar = blocking_body(&place, body)?;
    let source = wanted.from.map(|reference| ImageSource {
        reference: reference.chars().take(1024).collect(),
        manifest: None,
        signed_by: Vec::new(),
    });
    let registry = wanted.registry.as_deref();
    let which = Which {
        kind: wanted.kind,
        reference: wanted.reference,
    };
    let image = node.import_image(&name, registry, tar, which, source);
    Ok(Json(image.await?))
}

pub(super) async fn remove(
    State(node): Shared,
    Path(name): Path<String>,
    uri: Uri,
) -> Result<Response> {
    let Lookup { registry } = query(&uri)?;
    node.remove_image(&name, registry.as_deref()).await?;
    Ok(no_content())
}

pub(super) async fn prune(State(node): Shared) -> Result<Json<Pruned>> {
    Ok(Json(node.prune_images().await?))
}

pub(super) async fn pull(State(node): Shared, body: Body) -> Result<Response> {
    let wanted: PullImage = json(body).await?;
    let watcher = node.pull(wanted)?;
    Ok(watched(watcher))
}

pub(super) async fn push(State(node): Shared, body: Body) -> Result<Response> {
    let wanted: PushArtifact = json(body).await?;
    let watcher = node.push(wanted)?;
    Ok(watched(watcher))
}

pub(super) async fn commit(
    State(node): Shared,
    Path(vm): Path<String>,
    body: Body,
) -> Result<Json<Committed>> {
    let wanted: CommitVm = json(body).await?;
    let vm = node.find(&vm)?;
    Ok(Json(
        run_to_completion(Arc::clone(&node).commit(vm, wanted)).await?,
    ))
}

/// The steps of a job, one line of JSON each. A client that disconnects stops watching the job.
fn watched(watcher: Watcher) -> Response {
    lines(stream::unfold(watcher, |mut watcher| async move {
        let steps = watcher.next().await;
        (!steps.is_empty()).then_some((steps, watcher))
    }))
}
