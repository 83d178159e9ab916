//! Requests that are repeated when the node goes away before it answers.

use super::body::RequestBody;
use crate::failure::{Failure, Kind, Result};
use hyper::{Method, Request, StatusCode};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// How long a node may take to come back.
const RESTART_TIME: Duration = Duration::from_secs(5);
/// How often it is tried whether it is back.
const PAUSE: Duration = Duration::from_millis(50);
/// Ends of paths: done twice, these come to the same as done once.
const IDEMPOTENT: [&str; 7] = [
    "/start", "/stop", "/wait", "/pause", "/resume", "/wake", "/attach",
];

/// What becomes of a request that gets no answer.
pub(super) struct Repeat {
    /// The request without its body, which is empty, if it may be repeated.
    empty: Option<Request<()>>,
    sent: bool,
    /// Since the first time that no answer came.
    until: Option<Instant>,
}

impl Repeat {
    pub(super) fn of(request: &Request<RequestBody>) -> Repeat {
        let path = request.uri().path();
        let may_be = match *request.method() {
            Method::GET | Method::DELETE => true,
            Method::POST => IDEMPOTENT.iter().any(|end| path.ends_with(end)),
            _ => false,
        };
        let is_empty = matches!(request.body(), RequestBody::Whole(None));
        let empty = (may_be && is_empty).then(|| {
            let mut copy = Request::new(());
            *copy.method_mut() = request.method().clone();
            *copy.uri_mut() = request.uri().clone();
            *copy.headers_mut() = request.headers().clone();
            copy
        });
        Repeat {
            empty,
            sent: false,
            until: None,
        }
    }

    /// Another one like it, if it may be repeated.
    pub(super) fn request(&self) -> Option<Request<RequestBody>> {
        let again = self.empty.clone()?;
        Some(again.map(|()| RequestBody::empty()))
    }

    /// The node may have heard of it.
    pub(super) fn is_sent(&mut self) {
        self.sent = true;
    }

    /// It failed so: waits a little and gives what to send next, or the failure
    /// that it comes to.
    pub(super) async fn after(
        &mut self,
        failure: Failure,
        again: Option<Request<RequestBody>>,
    ) -> Result<Request<RequestBody>> {
        // That no node is there at the first attempt is no restart.
        if failure.kind != Kind::Unreachable || !self.sent {
            return Err(failure);
        }
        let Some(again) = again else {
            return Err(Failure::new(
                "the connection to jiffyd was lost before it answered: what was asked for may have been begun",
            )
            .hint("look with `jiffy ps --all` before you try again; jiffyd.log in Jiffy's run folder may tell why")
            .kind(Kind::Unreachable));
        };
        let now = Instant::now();
        if now >= *self.until.get_or_insert(now + RESTART_TIME) {
            let seconds = RESTART_TIME.as_secs();
            return Err(Failure::new(format!(
                "the connection to jiffyd was lost before it answered, and for {seconds} s no other answered: {}",
                failure.message
            ))
            .hint("try again; jiffyd.log in Jiffy's run folder may tell why")
            .kind(Kind::Unreachable));
        }
        sleep(PAUSE).await;
        Ok(again)
    }

    /// Is what was to be removed gone because the first attempt removed it?
    pub(super) fn was_done_before(&self, status: StatusCode) -> bool {
        let removes = |request: &Request<()>| request.method() == Method::DELETE;
        self.until.is_some()
            && status == StatusCode::NOT_FOUND
            && self.empty.as_ref().is_some_and(removes)
    }
}
