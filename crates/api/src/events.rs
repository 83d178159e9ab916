//! The stream of events.

use crate::failure::Result;
use crate::http::{lines, query};
use axum::extract::State;
use axum::http::Uri;
use axum::response::Response;
use futures_util::stream;
use jiffy_node::Node;
use serde::Deserialize;
use std::sync::Arc;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    vm: Option<String>,
}

/// What happens from now on, one line of JSON each.
pub(super) async fn follow(State(node): State<Arc<Node>>, uri: Uri) -> Result<Response> {
    let Wanted { vm } = query(&uri)?;
    let events = node.events(vm.as_deref())?;
    Ok(lines(stream::unfold(events, |mut events| async move {
        let event = events.next().await?;
        Some((vec![event], events))
    })))
}
