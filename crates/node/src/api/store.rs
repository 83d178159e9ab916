//! Kernels and volumes.

use super::no_content;
use super::parts::blocking_body;
use crate::error::{Error, Result};
use crate::node::Node;
use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::Response;
use jiffy_wire::api::{KernelInfo, Volume};
use std::sync::Arc;

type Shared = State<Arc<Node>>;

pub(super) async fn list_kernels(State(node): Shared) -> Result<Json<Vec<KernelInfo>>> {
    let list = blocking(move || node.kernels.list()).await?;
    Ok(Json(list))
}

pub(super) async fn put_kernel(
    State(node): Shared,
    Path(name): Path<String>,
    body: Body,
) -> Result<Json<KernelInfo>> {
    let contents = blocking_body(body);
    let kernel = blocking(move || node.kernels.put(&name, contents)).await?;
    Ok(Json(kernel))
}

pub(super) async fn list_volumes(State(node): Shared) -> Result<Json<Vec<Volume>>> {
    Ok(Json(node.volumes.list()?))
}

pub(super) async fn remove_volume(
    State(node): Shared,
    Path(name): Path<String>,
) -> Result<Response> {
    node.remove_volume(&name).await?;
    Ok(no_content())
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(Error::internal(format!("A task was cut short: {error}."))))
}
