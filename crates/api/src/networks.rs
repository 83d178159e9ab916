//! Routes of networks and network policies.

use crate::failure::{Result, no_content};
use crate::http::{blocking, json};
use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::Response;
use jiffy_node::Node;
use jiffy_wire::api::{Network, NetworkPolicy, Vm};
use std::sync::Arc;

type Shared = State<Arc<Node>>;

pub(super) async fn list(State(node): Shared) -> Json<Vec<Network>> {
    Json(node.networks())
}

pub(super) async fn inspect(
    State(node): Shared,
    Path(name): Path<String>,
) -> Result<Json<Network>> {
    Ok(Json(node.network_named(&name)?))
}

pub(super) async fn create(State(node): Shared, Path(name): Path<String>) -> Result<Json<Network>> {
    let made = blocking(move || node.create_network(&name)).await?;
    Ok(Json(made))
}

pub(super) async fn remove(State(node): Shared, Path(name): Path<String>) -> Result<Response> {
    blocking(move || node.remove_network(&name)).await?;
    Ok(no_content())
}

pub(super) async fn policy(
    State(node): Shared,
    Path(vm): Path<String>,
    body: Body,
) -> Result<Json<Vm>> {
    let policy: NetworkPolicy = json(body).await?;
    Ok(Json(node.change_policy(&vm, policy).await?))
}
