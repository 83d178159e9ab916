//! Routes of kernels and volumes.

use crate::client_slots::Place;
use crate::failure::no_content;
use crate::failure::{Failure, Result};
use crate::http::{blocking, blocking_body, json};
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::Response;
use axum::{Extension, Json};
use jiffy_node::Node;
use jiffy_wire::api::{KernelInfo, MakeVolume, ResizeVolume, ResizedVolume, Volume};
use std::sync::Arc;

type Shared = State<Arc<Node>>;

pub(super) async fn list_kernels(State(node): Shared) -> Result<Json<Vec<KernelInfo>>> {
    let list = blocking(move || Ok(node.kernels.list())).await?;
    Ok(Json(list))
}

pub(super) async fn put_kernel(
    State(node): Shared,
    Path(name): Path<String>,
    Extension(place): Extension<Arc<Place>>,
    body: Body,
) -> Result<Json<KernelInfo>> {
    let contents = blocking_body(&place, body)?;
    let kernel = blocking(move || node.kernels.put(&name, contents)).await?;
    Ok(Json(kernel))
}

pub(super) async fn list_volumes(State(node): Shared) -> Result<Json<Vec<Volume>>> {
    let list = blocking(move || node.list_volumes()).await?;
    Ok(Json(list))
}

pub(super) async fn make_volume(
    State(node): Shared,
    Path(name): Path<String>,
    body: Body,
) -> Result<Json<Volume>> {
    let wanted: MakeVolume = json(body).await?;
    let volume = blocking(move || node.make_volume(&name, &wanted)).await?;
    Ok(Json(volume))
}

pub(super) async fn resize_volume(
    State(node): Shared,
    Path(name): Path<String>,
    body: Body,
) -> Result<Json<ResizedVolume>> {
    let wanted: ResizeVolume = json(body).await?;
    Ok(Json(node.resize_volume(&name, wanted.size_mib).await?))
}

pub(super) async fn attach_disk(
    State(node): Shared,
    Path((vm, name)): Path<(String, String)>,
) -> Failure {
    node.refuse_hot_plug(&vm, &name, true).into()
}

pub(super) async fn detach_disk(
    State(node): Shared,
    Path((vm, name)): Path<(String, String)>,
) -> Failure {
    node.refuse_hot_plug(&vm, &name, false).into()
}

pub(super) async fn remove_volume(
    State(node): Shared,
    Path(name): Path<String>,
) -> Result<Response> {
    node.remove_volume(&name).await?;
    Ok(no_content())
}
