//! Routes of the queue for memory and vCPUs, and how requests say that they wait in it.

use crate::failure::Result;
use crate::http::{lines, query};
use crate::request_ids;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::Uri;
use axum::response::Response;
use futures_util::stream;
use jiffy_content::error::{Error, Result as Checked};
use jiffy_node::{Caller, Node};
use jiffy_wire::api::{Priority, Queued};
use serde::Deserialize;
use std::sync::Arc;

type Shared = State<Arc<Node>>;

/// How a request waits for memory and vCPUs, in its query.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WaitQuery {
    priority: Option<Priority>,
    wait_s: Option<u32>,
}

impl WaitQuery {
    /// The caller of this request, which waits as its query says.
    pub(super) fn caller(uri: &Uri) -> Checked<Caller> {
        let WaitQuery { priority, wait_s } = query(uri)?;
        Caller::current().with(priority, wait_s)
    }
}

pub(super) async fn list(State(node): Shared) -> Json<Vec<Queued>> {
    Json(node.queue())
}

/// The places of a request, one line of JSON each, until it waits no more.
pub(super) async fn follow(State(node): Shared, Path(request): Path<String>) -> Result<Response> {
    request_ids::check(&request)?;
    let Some(first) = node.next_place(&request, None).await else {
        return Err(Error::not_found(format!(
            "No request with the id {request} waits in the queue."
        ))
        .into());
    };
    let places = stream::unfold((Some(first), None), move |(next, last)| {
        let (node, request) = (Arc::clone(&node), request.clone());
        async move {
            let queued: Queued = match next {
                Some(first) => first,
                None => node.next_place(&request, last).await?,
            };
            let place = queued.place;
            Some((vec![queued], (None, Some(place))))
        }
    });
    Ok(lines(places))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn priority_and_wait_are_read_from_the_query() {
        let caller = |query: &str| {
            let uri: Uri = format!("/v1/vms/a/start{query}").parse().unwrap();
            WaitQuery::caller(&uri)
        };
        let plain = caller("").unwrap();
        assert_eq!((plain.priority, plain.wait), (None, None));
        let wants = caller("?priority=high&wait_s=0").unwrap();
        assert_eq!(wants.priority, Some(Priority::High));
        assert_eq!(wants.wait, Some(Duration::ZERO));
        assert!(caller("?wait_s=86400").is_ok());
        for wrong in [
            "?priority=urgent",
            "?wait_s=86401",
            "?wait_s=-1",
            "?other=1",
        ] {
            assert!(caller(wrong).is_err(), "{wrong}");
        }
    }
}
