//! Requests that are repeated when the node goes away before it answers.
//!
//! A request that may be done twice is sent again. Any other has an id, by which the node says
//! whether it was begun ([`REQUEST_HEADER`]); it is sent again if it was not.

use super::body::RequestBody;
use crate::failure::{Failure, Kind, Result};
use hyper::body::Bytes;
use hyper::header::{HeaderMap, HeaderValue};
use hyper::{Method, Request, StatusCode};
use jiffy_wire::api::REQUEST_HEADER;
use rustix::rand::{GetRandomFlags, getrandom};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// How long a node may take to be restarted.
pub(super) const RESTART_TIME: Duration = Duration::from_secs(5);
/// Time between attempts.
pub(super) const PAUSE: Duration = Duration::from_millis(50);
/// A node remembers a request for at least this long, however many others come.
const REMEMBERED: Duration = Duration::from_secs(30);
/// Ends of paths of VMs' requests that are idempotent.
const IDEMPOTENT: [&str; 7] = [
    "/start", "/stop", "/wait", "/pause", "/resume", "/wake", "/attach",
];

/// Hint if the node may have done something.
const HINT_CHECK: &str = "check with `jiffy ps --all` before you try again; jiffyd.log in Jiffy's run folder may say why";
/// Hint if the request may be sent again.
pub(super) const HINT_RETRY: &str = "try again; jiffyd.log in Jiffy's run folder may say why";

/// Repeats a request that got no answer.
pub(super) struct Repeat {
    /// The request, unless its body is a stream, which can be sent only once.
    copy: Option<Request<Option<Bytes>>>,
    /// Its id, if it has one.
    id: Option<String>,
    /// It must not be done twice.
    once: bool,
    /// When it was sent first.
    sent: Option<Instant>,
    /// End of the repetitions; set when no answer came for the first time.
    until: Option<Instant>,
}

/// What to do after a failure.
pub(super) enum Next {
    /// Send this request.
    Send(Box<Request<RequestBody>>),
    /// Ask the node whether it has begun the request with this id; call [`Repeat::after_query`].
    Ask(String),
}

impl Repeat {
    /// Gives the request an id if it must not be done twice, or is `followed`.
    pub(super) fn of(request: &mut Request<RequestBody>, followed: bool) -> Repeat {
        let once = !is_idempotent(request);
        let id = (once || followed).then(new_id).flatten();
        set_id(request.headers_mut(), id.as_deref());
        let body = match request.body() {
            RequestBody::Whole(body) => Some(body.clone()),
            RequestBody::Stream(_) => None,
        };
        let copy = body.map(|body| {
            let mut copy = Request::new(body);
            *copy.method_mut() = request.method().clone();
            *copy.uri_mut() = request.uri().clone();
            *copy.headers_mut() = request.headers().clone();
            copy
        });
        Repeat {
            copy,
            id,
            once,
            sent: None,
            until: None,
        }
    }

    /// The id that the request was given.
    pub(super) fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    /// The request was sent, so the node may act on it.
    pub(super) fn mark_sent(&mut self) {
        self.sent.get_or_insert_with(Instant::now);
    }

    /// After a failure: waits, then says what to do, or returns the final failure.
    pub(super) async fn after_failure(&mut self, failure: Failure) -> Result<Next> {
        // If no node is there at the first attempt, it is not being restarted.
        if failure.kind != Kind::Unreachable || self.sent.is_none() {
            return Err(failure);
        }
        let now = Instant::now();
        let is_over = now >= *self.until.get_or_insert(now + RESTART_TIME);
        if self.once {
            let known = self.id.as_ref().filter(|_| self.is_remembered(now));
            let ask = |id: &String| Next::Ask(id.clone());
            return known.map(ask).ok_or_else(Repeat::unknown);
        }
        let Some(request_copy) = self.request_copy().filter(|_| !is_over) else {
            let seconds = RESTART_TIME.as_secs();
            return Err(lost(&format!(
                "before it answered, and no jiffyd answered for {seconds} s: {}",
                failure.message
            ))
            .hint(HINT_RETRY));
        };
        sleep(PAUSE).await;
        Ok(Next::Send(Box::new(request_copy)))
    }

    /// The node said whether it has begun the request: returns it if it is to be sent again.
    pub(super) fn after_query(&mut self, begun: Option<bool>) -> Result<Request<RequestBody>> {
        match begun {
            None => Err(Repeat::unknown()),
            Some(true) => Err(lost(
                "before it answered: it had begun the request, which may be incomplete",
            )
            .hint(HINT_CHECK)),
            Some(false) => {
                // The node refuses the old id from now on: the lost request may still arrive.
                self.renew_id();
                self.request_copy()
                    .filter(|_| self.until.is_some_and(|until| Instant::now() < until))
                    .ok_or_else(|| {
                        lost("before it had begun the request: nothing was done").hint(HINT_RETRY)
                    })
            }
        }
    }

    /// Does the node certainly still know the request, if it has begun it?
    fn is_remembered(&self, now: Instant) -> bool {
        self.sent.is_some_and(|sent| now - sent < REMEMBERED)
    }

    fn unknown() -> Failure {
        lost("before it answered: the request may have been started").hint(HINT_CHECK)
    }

    fn renew_id(&mut self) {
        self.id = new_id();
        if let Some(copy) = &mut self.copy {
            set_id(copy.headers_mut(), self.id.as_deref());
        }
    }

    fn request_copy(&self) -> Option<Request<RequestBody>> {
        self.copy.clone().map(|copy| copy.map(RequestBody::Whole))
    }

    /// Whether the first attempt has removed what was to be removed.
    pub(super) fn was_done_before(&self, status: StatusCode) -> bool {
        let removes = |request: &Request<_>| request.method() == Method::DELETE;
        self.until.is_some()
            && status == StatusCode::NOT_FOUND
            && self.copy.as_ref().is_some_and(removes)
    }
}

fn set_id(headers: &mut HeaderMap, id: Option<&str>) {
    headers.remove(REQUEST_HEADER);
    if let Some(id) = id.and_then(|id| HeaderValue::from_str(id).ok()) {
        headers.insert(REQUEST_HEADER, id);
    }
}

fn is_idempotent(request: &Request<RequestBody>) -> bool {
    let path = request.uri().path();
    match *request.method() {
        Method::GET | Method::DELETE => true,
        Method::POST if path.starts_with("/v1/vms/") => {
            IDEMPOTENT.iter().any(|end| path.ends_with(end))
        }
        _ => false,
    }
}

/// `None` without random numbers: then nobody can ask for the request.
fn new_id() -> Option<String> {
    let mut bytes = [0; 16];
    let length = getrandom(&mut bytes, GetRandomFlags::empty()).ok()?;
    let digits = || bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    (length == bytes.len()).then(digits)
}

fn lost(how: &str) -> Failure {
    Failure::new(format!("the connection to jiffyd was lost {how}")).kind(Kind::Unreachable)
}
