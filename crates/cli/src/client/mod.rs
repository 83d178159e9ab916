//! The node's API over HTTP/1.1, on a Unix socket or on TCP with a token.

mod body;
mod frames;
mod ignore_closed;
mod lines;
mod queue;
mod repeat;
mod wait;

pub use body::BodySender;
pub use frames::{FrameReader, FrameWriter, Frames};
pub use lines::JsonLines;

use crate::failure::{Failure, Kind, Result, reason};
use body::RequestBody;
use http_body_util::{BodyExt, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{ACCEPT, AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST, HeaderValue, UPGRADE};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use ignore_closed::IgnoreClosed;
use jiffy_sys::causes;
use jiffy_wire::api::{ApiError, RequestState, VM_ID_HEADER};
use repeat::{Next, PAUSE, RESTART_TIME, Repeat};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{sleep, timeout};

/// The largest JSON answer that is read, in bytes.
const MAX_ANSWER: usize = 64 * 1024 * 1024;

/// Where a node listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// A Unix socket on this host.
    Unix(PathBuf),
    /// The node in the machine.
    Tcp {
        /// A forwarded port on loopback.
        address: SocketAddr,
        /// The token that is sent with every request.
        token: String,
    },
}

/// A client of a node. Every request has a connection of its own.
#[derive(Clone)]
pub struct Client {
    endpoint: Endpoint,
    when_slow: Option<Arc<dyn Fn() -> Result<()> + Send + Sync>>,
    /// Whether its requests' places in the queue are shown.
    shows_places: bool,
    /// A connection that was opened while looking for the node; the first request uses it.
    connection: Arc<Mutex<Option<std::os::unix::net::UnixStream>>>,
}

/// An upgraded connection, and the id of its VM if the node sent it.
pub struct Upgraded {
    /// The frames.
    pub frames: Frames,
    /// The VM's id, from [`VM_ID_HEADER`].
    pub vm: Option<String>,
}

impl Client {
    /// A client of the node at `endpoint`; nothing is sent yet.
    pub fn new(endpoint: Endpoint) -> Client {
        Client {
            endpoint,
            when_slow: None,
            shows_places: false,
            connection: Arc::default(),
        }
    }

    /// Calls `why` if an answer takes longer than 3 s; its error replaces the answer.
    pub fn when_slow(self, why: impl Fn() -> Result<()> + Send + Sync + 'static) -> Client {
        Client {
            when_slow: Some(Arc::new(why)),
            ..self
        }
    }

    /// Shows the place in the queue of a request that waits for memory and vCPUs, if stderr is a
    /// terminal.
    pub fn with_places(&self) -> Client {
        self.with_shows_places(std::io::stderr().is_terminal())
    }

    fn with_shows_places(&self, shows_places: bool) -> Client {
        Client {
            shows_places,
            ..self.clone()
        }
    }

    /// As [`Client::new`]; the first request uses this connection.
    ///
    /// # Errors
    ///
    /// If the connection can't be made non-blocking.
    pub fn connected(
        endpoint: Endpoint,
        connection: std::os::unix::net::UnixStream,
    ) -> Result<Client> {
        connection
            .set_nonblocking(true)
            .map_err(|error| Failure::io("the connection to jiffyd can't be used", error))?;
        let client = Client::new(endpoint);
        if let Ok(mut first) = client.connection.lock() {
            *first = Some(connection);
        }
        Ok(client)
    }

    /// `GET` of a JSON document.
    ///
    /// # Errors
    ///
    /// If the node can't be reached ([`Kind::Unreachable`]), returns an error, or its answer is not
    /// the JSON of a `T`.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.json(Method::GET, path, RequestBody::empty()).await
    }

    /// `GET` in this media type, or in JSON if the node does not support it.
    ///
    /// # Errors
    ///
    /// If the node can't be reached ([`Kind::Unreachable`]), or returns an error.
    pub async fn get_as(&self, media_type: &'static str, path: &str) -> Result<Answer> {
        let mut request = self.request(Method::GET, path, RequestBody::empty())?;
        let accept = HeaderValue::from_static(media_type);
        request.headers_mut().insert(ACCEPT, accept);
        self.request_whole_answer(request).await
    }

    /// `POST` without a body.
    ///
    /// # Errors
    ///
    /// As for [`get`](Client::get).
    pub async fn post<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.json(Method::POST, path, RequestBody::empty()).await
    }

    /// `POST` of a JSON document.
    ///
    /// # Errors
    ///
    /// As for [`get`](Client::get).
    pub async fn post_json<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        body: &B,
    ) -> Result<T> {
        self.json(Method::POST, path, RequestBody::json(body)?)
            .await
    }

    /// `DELETE`; the answer has no body.
    ///
    /// # Errors
    ///
    /// If the node can't be reached ([`Kind::Unreachable`]), or returns an error.
    pub async fn delete(&self, path: &str) -> Result<()> {
        let request = self.request(Method::DELETE, path, RequestBody::empty())?;
        self.send(request).await.map(|_| ())
    }

    /// Sends a streamed body, which the other end of `body` writes.
    ///
    /// # Errors
    ///
    /// As for [`get`](Client::get); or if the other end of `body` sends an error, which is returned.
    pub async fn upload<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: tokio::sync::mpsc::Receiver<std::io::Result<Bytes>>,
    ) -> Result<T> {
        self.json(method, path, RequestBody::Stream(body)).await
    }

    /// `GET` of a stream of bytes.
    ///
    /// # Errors
    ///
    /// If the node can't be reached ([`Kind::Unreachable`]), or returns an error.
    pub async fn stream(&self, path: &str) -> Result<Incoming> {
        let request = self.request(Method::GET, path, RequestBody::empty())?;
        Ok(self.send(request).await?.into_body())
    }

    /// `POST` of a JSON document that is answered with a stream of bytes.
    ///
    /// # Errors
    ///
    /// If the node can't be reached ([`Kind::Unreachable`]), or returns an error.
    pub async fn post_stream<B: Serialize>(&self, path: &str, body: &B) -> Result<Incoming> {
        let request = self.request(Method::POST, path, RequestBody::json(body)?)?;
        Ok(self.send(request).await?.into_body())
    }

    /// `POST` that turns the connection into frames.
    ///
    /// # Errors
    ///
    /// If the node can't be reached ([`Kind::Unreachable`]), returns an error, or does not upgrade
    /// the connection.
    pub async fn upgrade<B: Serialize>(&self, path: &str, body: Option<&B>) -> Result<Upgraded> {
        let body = match body {
            Some(body) => RequestBody::json(body)?,
            None => RequestBody::empty(),
        };
        let mut request = self.request(Method::POST, path, body)?;
        let headers = request.headers_mut();
        headers.insert(
            CONNECTION,
            UPGRADE.as_str().parse().expect("a header value"),
        );
        headers.insert(
            UPGRADE,
            jiffy_wire::api::UPGRADE.parse().expect("a header value"),
        );
        let response = self.send(request).await?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(not_understood(response.status()));
        }
        let vm = response
            .headers()
            .get(VM_ID_HEADER)
            .and_then(|value| value.to_str().ok())
            .map(str::to_owned);
        let upgraded = hyper::upgrade::on(response)
            .await
            .map_err(connection_lost)?;
        Ok(Upgraded {
            frames: Frames::new(TokioIo::new(upgraded)),
            vm,
        })
    }

    async fn json<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: RequestBody,
    ) -> Result<T> {
        let request = self.request(method, path, body)?;
        self.request_whole_answer(request).await?.json()
    }

    async fn request_whole_answer(&self, request: Request<RequestBody>) -> Result<Answer> {
        let response = self.send(request).await?;
        Ok(Answer {
            status: response.status(),
            media_type: response.headers().get(CONTENT_TYPE).cloned(),
            bytes: read_body(response).await?,
        })
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        body: RequestBody,
    ) -> Result<Request<RequestBody>> {
        let mut request = Request::builder().method(method).uri(path);
        if matches!(body, RequestBody::Whole(Some(_))) {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        request = match &self.endpoint {
            Endpoint::Unix(_) => request.header(HOST, "jiffyd"),
            Endpoint::Tcp { address, token } => request
                .header(HOST, address.to_string())
                .header(AUTHORIZATION, format!("Bearer {token}")),
        };
        request
            .body(body)
            .map_err(|_| Failure::new(format!("'{path}' is not a valid path of jiffyd's API")))
    }

    /// Sends a request and returns any answer that is not an error. If the node goes away before
    /// it answers, the request may be repeated for a while ([`repeat`]): a service manager may
    /// restart the node.
    async fn send(&self, mut request: Request<RequestBody>) -> Result<Response<Incoming>> {
        let mut repeat = Repeat::of(&mut request, self.shows_places);
        let response = loop {
            let failure = match self.connect().await {
                Err(failure) => failure,
                Ok(mut sender) => {
                    repeat.mark_sent();
                    let answer = self.answer(sender.send_request(request));
                    // Without a terminal there is no timer, which would be further system calls.
                    let answer = match repeat.id().filter(|_| self.shows_places) {
                        Some(id) => queue::answer_or_show_place(self, id, answer).await,
                        None => answer.await,
                    };
                    match answer? {
                        Ok(response) => break response,
                        Err(error) => connection_lost(error),
                    }
                }
            };
            request = match repeat.after_failure(failure).await? {
                Next::Send(request) => *request,
                // Boxed: it sends a request itself, and is rare.
                Next::Ask(id) => repeat.after_query(Box::pin(self.has_begun(&id)).await)?,
            };
        };
        let status = response.status();
        if status.is_success()
            || status == StatusCode::SWITCHING_PROTOCOLS
            || repeat.was_done_before(status)
        {
            return Ok(response);
        }
        let bytes = read_body(response).await?;
        match serde_json::from_slice::<ApiError>(&bytes) {
            Ok(error) => Err(error.into()),
            Err(_) => Err(not_understood(status)),
        }
    }

    /// Whether a node, which may be restarting, has begun the request with this id. `None` if it
    /// does not know.
    async fn has_begun(&self, id: &str) -> Option<bool> {
        let path = format!("/v1/requests/{id}");
        let client = self.with_shows_places(false);
        let asked = async {
            loop {
                match client.get::<RequestState>(&path).await {
                    Ok(state) => return state.begun,
                    Err(failure) if failure.kind == Kind::Unreachable => sleep(PAUSE).await,
                    // A node of an earlier version does not know the path.
                    Err(_) => return None,
                }
            }
        };
        timeout(RESTART_TIME, asked).await.ok().flatten()
    }

    async fn connect(&self) -> Result<SendRequest<RequestBody>> {
        match &self.endpoint {
            Endpoint::Unix(path) => {
                let first = self
                    .connection
                    .lock()
                    .ok()
                    .and_then(|mut first| first.take());
                let stream = match first {
                    Some(stream) => UnixStream::from_std(stream),
                    None => UnixStream::connect(path).await,
                };
                http_handshake(stream.map_err(|error| self.unreachable(&error))?).await
            }
            Endpoint::Tcp { address, .. } => {
                let stream = TcpStream::connect(address)
                    .await
                    .map_err(|error| self.unreachable(&error))?;
                // No Nagle delay for keystrokes and short answers.
                let _ = stream.set_nodelay(true);
                http_handshake(stream).await
            }
        }
    }

    fn unreachable(&self, error: &std::io::Error) -> Failure {
        let failure = match &self.endpoint {
            Endpoint::Unix(path) => Failure::new(format!(
                "jiffyd does not answer at {}: {}",
                path.display(),
                reason(error)
            )),
            Endpoint::Tcp { address, .. } => Failure::new(format!(
                "jiffyd in the machine does not answer at {address}: {}",
                reason(error)
            ))
            .hint("`jiffy machine status` shows whether the machine runs"),
        };
        failure.kind(Kind::Unreachable)
    }
}

/// An answer that has arrived.
pub struct Answer {
    status: StatusCode,
    media_type: Option<HeaderValue>,
    bytes: Bytes,
}

impl Answer {
    /// Parses its JSON.
    ///
    /// # Errors
    ///
    /// If it is not the JSON of a `T`.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_slice(&self.bytes).map_err(|_| not_understood(self.status))
    }

    /// Its text, if it is of this media type.
    pub fn text(&self, media_type: &str) -> Option<&str> {
        let is = self.media_type.as_ref().is_some_and(|of| of == media_type);
        is.then(|| std::str::from_utf8(&self.bytes).ok()).flatten()
    }
}

/// Starts HTTP on a fresh connection.
async fn http_handshake<S>(stream: S) -> Result<SendRequest<RequestBody>>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = handshake(TokioIo::new(IgnoreClosed::new(stream)))
        .await
        .map_err(connection_lost)?;
    // The caller that waits for the answer gets its errors.
    tokio::spawn(async move {
        let _ = connection.with_upgrades().await;
    });
    Ok(sender)
}

/// Reads the whole body of a short answer.
async fn read_body(response: Response<Incoming>) -> Result<Bytes> {
    match Limited::new(response.into_body(), MAX_ANSWER)
        .collect()
        .await
    {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) => match error.downcast::<hyper::Error>() {
            Ok(error) => Err(connection_lost(*error)),
            Err(_) => Err(Failure::new("jiffyd's answer is longer than 64 MiB")),
        },
    }
}

/// The error of a broken connection to the node.
fn connection_lost(error: hyper::Error) -> Failure {
    if let Some(failed) = causes::find::<body::Unreadable>(&error) {
        return Failure::new(failed.to_string());
    }
    Failure::new("the connection to jiffyd was lost before it answered")
        .hint(repeat::HINT_RETRY)
        .kind(Kind::Unreachable)
}

fn not_understood(status: StatusCode) -> Failure {
    Failure::new(format!(
        "jiffyd gave an answer that this jiffy does not understand (HTTP {})",
        status.as_u16()
    ))
    .hint("`jiffy version` shows whether they are of different versions")
}

/// The API path of a VM, followed by `rest`.
pub fn vm_path(vm: &str, rest: &str) -> String {
    format!("/v1/vms/{}{rest}", encoded(vm))
}

/// `text`, percent-encoded as one segment of a path or one value of a query.
pub fn encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(byte as char);
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    // URL parsers resolve these two as path steps.
    match out.as_str() {
        "." => "%2E".to_owned(),
        ".." => "%2E%2E".to_owned(),
        _ => out,
    }
}

#[cfg(test)]
mod tests {
    use super::encoded;

    #[test]
    fn names_are_percent_encoded_as_one_path_segment() {
        assert_eq!(encoded("web-1.x_~"), "web-1.x_~");
        assert_eq!(encoded("a/b?c#d e%é"), "a%2Fb%3Fc%23d%20e%25%C3%A9");
        assert_eq!(encoded(".."), "%2E%2E");
    }
}
