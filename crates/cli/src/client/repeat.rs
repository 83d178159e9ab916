//! Requests that are repeated when the node goes away before it answers.

use super::body::RequestBody;
use crate::failure::{Failure, Kind, Result};
use hyper::{Method, Request, StatusCode};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// How long a node may take to be restarted.
const RESTART_TIME: Duration = Duration::from_secs(5);
/// Time between attempts.
const PAUSE: Duration = Duration::from_millis(50);
/// Ends of paths whose requests are idempotent.
const IDEMPOTENT: [&str; 7] = [
    "/start", "/stop", "/wait", "/pause", "/resume", "/wake", "/attach",
];

/// Repeats a request that got no answer.
pub(super) struct Repeat {
    /// The request without its body, which is empty, if it may be repeated.
    empty: Option<Request<()>>,
    sent: bool,
    /// End of the repetitions; set when no answer came for the first time.
    until: Option<Instant>,
}

impl Repeat {
    pub(super) fn of(request: &Request<RequestBody>) -> Repeat {
        let path = request.uri().path();
        let may_be = match *request.method() {
            Method::GET | Method::DELETE => true,
            // A signal may have an effect each time; without one, `kill` ends the VM.
            Method::POST if path.ends_with("/kill") => request.uri().query().is_none(),
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

    /// A copy of the request, if it may be repeated.
    pub(super) fn request(&self) -> Option<Request<RequestBody>> {
        let again = self.empty.clone()?;
        Some(again.map(|()| RequestBody::empty()))
    }

    /// The request was sent, so the node may act on it.
    pub(super) fn is_sent(&mut self) {
        self.sent = true;
    }

    /// After a failure: waits, then returns the request to send next, or the final
    /// failure.
    pub(super) async fn after(
        &mut self,
        failure: Failure,
        again: Option<Request<RequestBody>>,
    ) -> Result<Request<RequestBody>> {
        // If no node is there at the first attempt, it is not being restarted.
        if failure.kind != Kind::Unreachable || !self.sent {
            return Err(failure);
        }
        let Some(again) = again else {
            return Err(Failure::new(
                "the connection to jiffyd was lost before it answered: the request may have been started",
            )
            .hint("check with `jiffy ps --all` before you try again; jiffyd.log in Jiffy's run folder may say why")
            .kind(Kind::Unreachable));
        };
        let now = Instant::now();
        if now >= *self.until.get_or_insert(now + RESTART_TIME) {
            let seconds = RESTART_TIME.as_secs();
            return Err(Failure::new(format!(
                "the connection to jiffyd was lost before it answered, and no jiffyd answered for {seconds} s: {}",
                failure.message
            ))
            .hint("try again; jiffyd.log in Jiffy's run folder may say why")
            .kind(Kind::Unreachable));
        }
        sleep(PAUSE).await;
        Ok(again)
    }

    /// Whether the first attempt has removed what was to be removed.
    pub(super) fn was_done_before(&self, status: StatusCode) -> bool {
        let removes = |request: &Request<()>| request.method() == Method::DELETE;
        self.until.is_some()
            && status == StatusCode::NOT_FOUND
            && self.empty.as_ref().is_some_and(removes)
    }
}
