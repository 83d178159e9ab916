//! Forwards one request: wakes its VM, sends the request, and returns the answer. Bodies are
//! streamed.

use crate::access;
use crate::answer::AnswerBody;
use crate::connection_options;
use crate::outgoing::Outgoing;
use crate::refusal::{Answer, Refusal};
use crate::servers::{self, Answered, Servers, no_network};
use crate::shares::{Share, Shares};
use crate::socket::Socket;
use crate::target::{self, Target};
use crate::upgrade::{self, Upgrade};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use hyper::header::{
    CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue, TE,
    TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use hyper::http::uri::Authority;
use hyper::{Request, StatusCode, Uri, Version};
use jiffy_content::error::Error;
use jiffy_content::token::Token;
use jiffy_node::{Caller, Node, on_behalf_of};
use jiffy_vmhost::activity::{InUse, Use};
use jiffy_vmhost::handle::VmHandle;
use jiffy_vmhost::network::is_open_to_the_proxy;
use jiffy_wire::api::ErrorKind;
use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// Hop-by-hop headers (RFC 9110 §7.6.1), besides those that `Connection` names.
pub const HOP_BY_HOP: [HeaderName; 8] = [
    CONNECTION,
    UPGRADE,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    EXPECT,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const FORWARDED_PREFIX: HeaderName = HeaderName::from_static("x-forwarded-prefix");
/// Most requests in progress, including those that wait for their VM or for a connection to it.
const MAX_REQUESTS: usize = 16_384;

/// One client's connection; every request and upgrade on it holds a reference.
pub(crate) struct Client {
    pub(crate) address: IpAddr,
    /// Whether it has TLS.
    pub(crate) secure: bool,
    pub(crate) socket: Socket,
    pub(crate) _place: OwnedSemaphorePermit,
}

/// The VMs behind the proxy.
pub(crate) struct Forwarder {
    node: Arc<Node>,
    domain: String,
    token: Option<Token>,
    /// Limits requests, including those that wait for their VM. An HTTP/2 connection has many.
    requests: Shares,
    /// Limits clients' connections with a request, below HTTP/2, where each has one request.
    clients: Shares,
    servers: Servers,
}

/// Keeps a VM awake and the places taken, as long as a request lasts.
struct RequestGuard {
    vm: Arc<VmHandle>,
    _in_use: InUse,
    _client: Arc<Client>,
    _places: [Option<Share>; 2],
}

impl Forwarder {
    /// At most `most` connections of clients, and as many to VMs, at a time.
    pub(crate) fn new(
        node: Arc<Node>,
        domain: String,
        token: Option<Token>,
        most: usize,
    ) -> Forwarder {
        Forwarder {
            servers: Servers::new(Arc::clone(&node), most),
            node,
            domain,
            token,
            requests: Shares::new(MAX_REQUESTS),
            clients: Shares::new(most),
        }
    }

    /// The VM's answer, or an error response.
    pub(crate) async fn answer(&self, request: Request<Incoming>, client: Arc<Client>) -> Answer {
        let forwarded = self.forward(request, client).await;
        forwarded.unwrap_or_else(Refusal::response)
    }

    async fn forward(
        &self,
        mut request: Request<Incoming>,
        client: Arc<Client>,
    ) -> Result<Answer, Refusal> {
        if let Some(token) = &self.token {
            access::check(token, request.headers_mut()).map_err(Refusal::unauthorized)?;
        }
        let (from, secure) = (client.address, client.secure);
        let socket = client.socket.clone();
        let (target, lasting) = self.wake_target(&request, client).await?;
        let upgrade = Upgrade::of(&mut request);
        let request = request.map(Outgoing::from);
        let passed = pass_on(request, &target, from, secure, upgrade.as_ref());
        let sent = self
            .servers
            .send(&lasting.vm, target.port, passed, upgrade.is_some());
        let Answered {
            mut response,
            answering,
        } = sent.await?;
        let persists = servers::persists(&response);
        let protocol = response.headers().get(UPGRADE).cloned();
        remove_hop_by_hop(response.headers_mut());
        // The proxy's own version (RFC 9110 §2.5); hyper replaces it if the client's is another.
        *response.version_mut() = Version::HTTP_11;
        let wrong = |how: &str| {
            let (port, name) = (target.port, &lasting.vm.name);
            Refusal::bad_gateway(format!("Port {port} of the VM {name} {how}."))
        };
        match upgrade {
            Some(upgrade) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                let (vm, held) = (Arc::clone(&lasting.vm), Arc::clone(&lasting));
                upgrade.switch(
                    &mut response,
                    protocol,
                    vm,
                    socket,
                    (held, answering.into_place()),
                );
                return Ok(response.map(|body| AnswerBody::new(body, None, lasting).boxed_unsync()));
            }
            None if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                return Err(wrong("switches protocols without being asked"));
            }
            Some(upgrade) if upgrade.is_ignored(response.status()) => {
                return Err(wrong("does not switch to WebSocket"));
            }
            _ => {}
        }
        let from = persists.then_some(answering);
        Ok(response.map(|body| AnswerBody::new(body, from, lasting).boxed_unsync()))
    }

    /// Finds the target of a request, and wakes its VM.
    async fn wake_target(
        &self,
        request: &Request<Incoming>,
        client: Arc<Client>,
    ) -> Result<(Target, Arc<RequestGuard>), Refusal> {
        if upgrade::is_tunnel(request) {
            let error = Error::not_found("The proxy does not support CONNECT tunnels.");
            return Err(Refusal::not_found(error));
        }
        let target = target::find(request.uri(), request.headers(), &self.domain)
            .map_err(|why| Refusal::not_found(Error::not_found(why)))?;
        let vm = self.node.find(&target.vm).map_err(|error| {
            match matches!(error.0.kind, ErrorKind::NotFound | ErrorKind::Invalid) {
                true => Refusal::not_found(error),
                // The VM's record can't be read.
                false => Refusal::unavailable(error),
            }
        })?;
        let (name, port) = (&vm.name, target.port);
        let Some(network) = &vm.spec.network else {
            return Err(no_network(name));
        };
        if !is_open_to_the_proxy(network, port) {
            let error = Error::invalid(format!(
                "Port {port} of the VM {name} is closed to the proxy."
            ));
            let hint = "`jiffy run --proxy-ports` says which ports of a VM are open.";
            return Err(Refusal::forbidden(error.hint(hint)));
        }
        let is_alone = request.version() < Version::HTTP_2;
        let places = [
            Some(self.requests.try_take(&vm.id)),
            is_alone.then(|| self.clients.try_take(&vm.id)),
        ];
        if places.iter().flatten().any(Option::is_none) {
            return Err(Refusal::unavailable(Error::no_room(format!(
                "The proxy has reached its limit of requests in progress, in all or to the VM {name}."
            ))));
        }
        let lasting = Arc::new(RequestGuard {
            _in_use: vm.activity.begin(Use::Connection),
            _client: client,
            _places: places.map(Option::flatten),
            vm,
        });
        let caller = caller(request.headers()).map_err(Refusal::invalid)?;
        let awake = self.node.wake_for_connection(&lasting.vm);
        let awake = on_behalf_of(caller, awake).await;
        awake.map_err(Refusal::unavailable)?;
        Ok((target, lasting))
    }
}

/// Who sends a request, and how it waits.
pub(crate) fn caller(headers: &HeaderMap) -> Result<Caller, Error> {
    let Some(wait) = headers.get(target::WAIT) else {
        return Ok(Caller::default());
    };
    let seconds = wait.to_str().ok().and_then(|wait| wait.parse().ok());
    let seconds = seconds.ok_or_else(|| {
        Error::invalid("The header Jiffy-Wait must be a number of whole seconds.")
    })?;
    Caller::default().with(None, Some(seconds))
}

/// Builds the request for the VM.
pub(crate) fn pass_on<B: Body>(
    request: Request<B>,
    target: &Target,
    from: IpAddr,
    secure: bool,
    upgrade: Option<&Upgrade>,
) -> Request<B> {
    let (mut parts, body) = request.into_parts();
    let host = match parts.uri.authority() {
        Some(authority) => HeaderValue::from_str(&without_user(authority)).ok(),
        None => parts.headers.get(HOST).cloned(),
    };
    parts.uri = Uri::from(target.path.clone());
    parts.version = Version::HTTP_11;
    let headers = &mut parts.headers;
    remove_hop_by_hop(headers);
    if !body.is_end_stream() && body.size_hint().exact().is_none() {
        // Otherwise hyper sends no body with some methods, such as GET.
        headers.remove(CONTENT_LENGTH);
        headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    if let Some(upgrade) = upgrade {
        upgrade.pass_on(&mut parts.method, headers);
    }
    headers.remove(target::VM);
    headers.remove(target::PORT);
    headers.remove(target::WAIT);
    if let Ok(from) = HeaderValue::from_str(&from.to_string()) {
        headers.append(FORWARDED_FOR, from);
    }
    headers
        .entry(FORWARDED_PROTO)
        .or_insert(HeaderValue::from_static(match secure {
            true => "https",
            false => "http",
        }));
    join_cookies(headers);
    let host = host.unwrap_or(HeaderValue::from_static(""));
    headers.entry(FORWARDED_HOST).or_insert(host.clone());
    headers.insert(HOST, host);
    headers.remove(FORWARDED_PREFIX);
    if let Some(prefix) = target.prefix.as_deref().and_then(|it| it.parse().ok()) {
        headers.insert(FORWARDED_PREFIX, prefix);
    }
    Request::from_parts(parts, body)
}

/// The host and port of an authority.
fn without_user(authority: &Authority) -> Cow<'_, str> {
    match authority.port() {
        Some(port) => format!("{}:{port}", authority.host()).into(),
        None => authority.host().into(),
    }
}

/// HTTP/2 may split a header that HTTP/1.1 sends as one (RFC 9113 §8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let cookies: Vec<&[u8]> = headers
        .get_all(COOKIE)
        .iter()
        .map(HeaderValue::as_bytes)
        .collect();
    if cookies.len() > 1
        && let Ok(whole) = HeaderValue::from_bytes(&cookies.join(&b"; "[..]))
    {
        headers.insert(COOKIE, whole);
    }
}

/// Removes the hop-by-hop headers.
fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = connection_options(headers)
        .filter_map(|name| name.parse().ok())
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use http_body_util::{Empty, Full};
    use hyper::header::CONTENT_TYPE;

    /// The headers that the VM gets for this request.
    fn passed<B: Body>(request: hyper::http::request::Builder, body: B) -> HeaderMap {
        let target = Target {
            vm: "web".into(),
            port: 80,
            path: "/".parse().unwrap(),
            prefix: None,
        };
        let from = "192.0.2.1".parse().unwrap();
        let request = request.body(body).unwrap();
        let passed = pass_on(request, &target, from, true, None);
        passed.headers().clone()
    }

    #[test]
    fn the_host_header_has_no_user_info() {
        for (url, host) in [
            (
                "http://me:secret@80-web.localhost:9000/",
                "80-web.localhost:9000",
            ),
            ("http://me@[::1]/", "[::1]"),
            ("http://[::1]:9000/", "[::1]:9000"),
            ("http://80-web.localhost/", "80-web.localhost"),
        ] {
            let headers = passed(Request::get(url), Empty::<Bytes>::new());
            assert_eq!(headers[HOST], host);
            assert_eq!(headers[FORWARDED_HOST], host);
        }
    }

    #[test]
    fn a_body_of_unknown_length_is_sent_chunked() {
        // A mapped body does not know its length.
        let unknown = || Full::<Bytes>::from("body").map_frame(|frame| frame);
        let request = || Request::get("/").header(CONTENT_TYPE, "text/plain");
        let headers = passed(request().header(CONTENT_LENGTH, "1"), unknown());
        assert_eq!(headers[TRANSFER_ENCODING], "chunked");
        assert!(!headers.contains_key(CONTENT_LENGTH));
        let known = passed(
            request().header(CONTENT_LENGTH, "4"),
            Full::<Bytes>::from("body"),
        );
        assert_eq!(known[CONTENT_LENGTH], "4");
        let none = passed(request(), Empty::<Bytes>::new());
        for headers in [known, none] {
            assert!(!headers.contains_key(TRANSFER_ENCODING));
        }
    }
}
