//! Connections of clients.

use crate::BUFFER;
use crate::forward::{Client, Forwarder};
use crate::refusal::{Answer, Refusal};
use crate::socket::Socket;
use crate::tls::{self, Tls};
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use jiffy_content::token::Token;
use jiffy_node::Node;
use jiffy_sys::backlog;
use rustix::net::sockopt;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tracing::{debug, warn};

/// Most connections of clients, and most to VMs, at a time; further ones wait. Each takes a
/// descriptor, so each kind is limited to an eighth of the files that the process may open.
const MAX_CONNECTIONS: usize = 8192;
/// How long a client has for its TLS handshake.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// How long a client has to send a request's header.
const HEADER_TIME: Duration = Duration::from_secs(30);
/// Idle time before a keep-alive probe, and the time that the client has to answer it.
const KEEPALIVE: Duration = Duration::from_secs(60);
const KEEPALIVE_ANSWER: Duration = Duration::from_secs(20);
/// Number of TCP keep-alive probes.
const KEEPALIVE_PROBES: u32 = 3;
/// How long an HTTP/2 connection may be without a request.
const IDLE_TIME: Duration = Duration::from_secs(60);
/// Most concurrent requests of an HTTP/2 connection.
const STREAMS: u32 = 100;
/// Most bytes of request bodies that an HTTP/2 connection has in transit to VMs, of one request and
/// of all.
const STREAM_WINDOW: u32 = 128 << 10;
const CONNECTION_WINDOW: u32 = 256 << 10;
/// Most requests that a client has reset and that are not freed yet. A client with more is
/// disconnected (CVE-2023-44487).
const RESET_STREAMS: usize = 20;
/// Pause after an error that may persist, such as no free descriptors.
const AFTER_ERROR: Duration = Duration::from_millis(100);

/// Settings of the proxy.
#[derive(Debug)]
pub struct Settings {
    /// The address that it listens on.
    pub address: SocketAddr,
    /// Hosts `PORT-NAME.DOMAIN` name VMs.
    pub domain: String,
    /// The token that requests must have, if any.
    pub token: Option<Token>,
    /// TLS, if the proxy accepts only that.
    pub tls: Option<Arc<Tls>>,
}

/// The proxy's socket.
#[derive(Debug)]
pub struct Proxy {
    listener: TcpListener,
    settings: Settings,
}

impl Proxy {
    /// Binds and listens.
    ///
    /// # Errors
    ///
    /// If the address can't be used: `bind` or `listen` fails.
    pub async fn bind(settings: Settings) -> io::Result<Proxy> {
        let listener = TcpListener::bind(settings.address).await?;
        backlog::enlarge(&listener)?;
        Ok(Proxy { listener, settings })
    }

    /// Serves until this is dropped.
    pub async fn serve(self, node: Arc<Node>) {
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let most = files.map_or(MAX_CONNECTIONS, |files| {
            MAX_CONNECTIONS.min(files as usize / 8)
        });
        let Settings {
            domain, token, tls, ..
        } = self.settings;
        let forwarder = Arc::new(Forwarder::new(node, domain, token, most));
        let places = Arc::new(Semaphore::new(most));
        loop {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else {
                return;
            };
            match self.listener.accept().await {
                Ok((stream, from)) => {
                    let (forwarder, tls) = (Arc::clone(&forwarder), tls.clone());
                    tokio::spawn(connection(forwarder, tls, stream, from, place));
                }
                Err(error) => {
                    warn!(%error, "a connection to the proxy could not be accepted");
                    tokio::time::sleep(AFTER_ERROR).await;
                }
            }
        }
    }
}

async fn connection(
    forwarder: Arc<Forwarder>,
    tls: Option<Arc<Tls>>,
    stream: TcpStream,
    from: SocketAddr,
    place: OwnedSemaphorePermit,
) {
    let _ = stream.set_nodelay(true);
    // Without keep-alive, a client that vanished would keep its VM awake.
    let _ = sockopt::set_socket_keepalive(&stream, true);
    let _ = sockopt::set_tcp_keepidle(&stream, KEEPALIVE);
    let _ = sockopt::set_tcp_keepintvl(&stream, KEEPALIVE_ANSWER);
    let _ = sockopt::set_tcp_keepcnt(&stream, KEEPALIVE_PROBES);
    let socket = Socket::new(stream);
    let client = Arc::new(Client {
        address: from.ip().to_canonical(),
        secure: tls.is_some(),
        socket: socket.clone(),
        _place: place,
    });
    let Some(tls) = tls else {
        return over_http1(socket.clone(), socket, request_service(forwarder, client)).await;
    };
    let begun = timeout(HANDSHAKE_TIME, async {
        match socket.first_byte().await? {
            Some(first) if !tls::begins_tls(first) => Ok(None),
            _ => tls.accept(socket.clone()).await.map(Some),
        }
    });
    match begun.await {
        Ok(Ok(Some(stream))) if tls::is_http2(&stream) => {
            over_http2(stream, forwarder, client).await
        }
        Ok(Ok(Some(stream))) => {
            over_http1(stream, socket, request_service(forwarder, client)).await
        }
        Ok(Ok(None)) => over_http1(socket.clone(), socket, service_fn(refuse_plain_http)).await,
        Ok(Err::<_, io::Error>(error)) => debug!(%error, "a TLS handshake failed"),
        Err(_) => debug!("a client did not complete its TLS handshake in time"),
    }
}

/// A service that answers a client's requests.
fn request_service(
    forwarder: Arc<Forwarder>,
    client: Arc<Client>,
) -> impl Service<
    Request<Incoming>,
    Response = Answer,
    Error = Infallible,
    Future = impl Future<Output = Result<Answer, Infallible>> + Send + 'static,
> + Send {
    service_fn(move |request| {
        let (forwarder, client) = (Arc::clone(&forwarder), Arc::clone(&client));
        async move { Ok(forwarder.answer(request, client).await) }
    })
}

async fn refuse_plain_http(_: Request<Incoming>) -> Result<Answer, Infallible> {
    Ok(Refusal::plain_http().response())
}

/// Serves HTTP/1.1 on this stream over the socket.
async fn over_http1<S>(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    socket: Socket,
    service: S,
) where
    S: Service<Request<Incoming>, Response = Answer, Error = Infallible> + Send,
    S::Future: Send + 'static,
{
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME)
        .max_buf_size(BUFFER)
        // A client may shut down its side and wait for the answer.
        .half_close(true)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    tokio::select! {
        served = served => if let Err(error) = served {
            debug!(?error, "a connection to the proxy ended with an error");
        },
        // hyper does not watch the socket while a request waits for its answer.
        () = socket.broken() => debug!("a client disconnected"),
    }
}

async fn over_http2(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    forwarder: Arc<Forwarder>,
    client: Arc<Client>,
) {
    let begun = Arc::new(AtomicU64::new(0));
    let service = {
        let (begun, service) = (
            Arc::clone(&begun),
            request_service(forwarder, Arc::clone(&client)),
        );
        service_fn(move |request| {
            begun.fetch_add(1, Ordering::Relaxed);
            service.call(request)
        })
    };
    // References of the service and of this function.
    let idle_holders = Arc::strong_count(&client);
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(BUFFER as u32)
        .max_send_buf_size(BUFFER)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .enable_connect_protocol()
        .max_pending_accept_reset_streams(RESET_STREAMS)
        .keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE_ANSWER);
    let mut served = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let (mut seen, mut is_ending) = (0, false);
    let result = loop {
        match timeout(IDLE_TIME, &mut served).await {
            Ok(result) => break result,
            Err(_) => {
                let now = begun.load(Ordering::Relaxed);
                // Every request and upgrade holds a reference to the client.
                let is_idle = now == seen && Arc::strong_count(&client) == idle_holders;
                seen = now;
                match (is_idle, is_ending) {
                    (false, _) => {}
                    // The client does not complete a request, or does not close its side.
                    (true, true) => break Ok(()),
                    (true, false) => {
                        served.as_mut().graceful_shutdown();
                        is_ending = true;
                    }
                }
            }
        }
    };
    if let Err(error) = result {
        debug!(?error, "a connection to the proxy ended with an error");
    }
}
