//! Sockets and their connections.

use crate::auth;
use crate::failure::Failure;
use crate::request_ids::{self, Begun};
use axum::Router;
use axum::extract::Request;
use axum::response::IntoResponse;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use jiffy_content::error::{Error, Result};
use jiffy_content::token::Token;
use jiffy_node::{Caller, Node, on_behalf_of};
use jiffy_sys::backlog;
use std::convert::Infallible;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::unix::UCred;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::timeout;
use tracing::{debug, warn};

use crate::client_slots::{Client, Place, Places};

/// Most connections at a time that are only answered that there is no place; further ones are
/// closed.
const MAX_REFUSED: usize = 32;
/// How long a client has to send a request's header.
const HEADER_TIME: Duration = Duration::from_secs(30);
/// How long a refused client has to send it.
const REFUSED_HEADER_TIME: Duration = Duration::from_secs(5);
/// How long requests may take once the daemon ends.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// How long a daemon that has ended may keep its socket open; see [`is_answered`].
const CLOSING_TIME: Duration = Duration::from_secs(1);

/// The sockets of a daemon.
#[derive(Debug)]
pub struct Listeners {
    unix: UnixListener,
    _file: SocketFile,
    tcp: Option<(TcpListener, Token)>,
    /// Most connections at a time, over both sockets.
    connections: u32,
}

impl Listeners {
    /// Binds the sockets, which together accept at most `connections` at a time. A Unix socket that
    /// nobody listens on is replaced.
    ///
    /// # Errors
    ///
    /// If another daemon answers on the Unix socket, or `bind`, `listen` or `chmod` fails.
    pub async fn open(
        socket: &Path,
        tcp: Option<(SocketAddr, Token)>,
        connections: u32,
    ) -> Result<Listeners> {
        let failed = |what: String, error: std::io::Error| {
            Error::internal(format!("Listening on {what} failed: {error}"))
        };
        let tcp = match tcp {
            None => None,
            Some((address, token)) => {
                let on_address = |error| failed(format!("tcp:{address}"), error);
                let listener = TcpListener::bind(address).await.map_err(on_address)?;
                backlog::enlarge(&listener).map_err(on_address)?;
                Some((listener, token))
            }
        };
        let on_socket = |error| failed(socket.display().to_string(), error);
        if is_answered(socket).await {
            return Err(Error::conflict(format!(
                "Another jiffyd already answers on {}.",
                socket.display()
            )));
        }
        let _ = fs::remove_file(socket);
        // Others can't enter the folder, so nobody connects before the chmod.
        let unix = UnixListener::bind(socket).map_err(on_socket)?;
        let file = SocketFile {
            path: socket.to_owned(),
            inode: fs::metadata(socket).map_err(on_socket)?.ino(),
        };
        let private = fs::Permissions::from_mode(0o600);
        fs::set_permissions(socket, private).map_err(on_socket)?;
        Ok(Listeners {
            unix,
            _file: file,
            tcp,
            connections,
        })
    }

    /// The address of the TCP socket, if there is one.
    pub fn tcp_address(&self) -> Option<std::net::SocketAddr> {
        self.tcp.as_ref()?.0.local_addr().ok()
    }

    /// Serves until `end` resolves, then lets requests in progress finish.
    async fn serve(self, router: Router, begun: Arc<Begun>, end: impl Future<Output = ()>) {
        let (closing, closing_seen) = watch::channel(false);
        // Every connection holds a sender, so the channel closes when all connections are gone.
        let (open, mut all_closed) = mpsc::channel::<()>(1);
        let places = Places::of_connections(
            self.connections,
            rustix::process::getrlimit(rustix::process::Resource::Nofile).current,
        );
        let refused = Arc::new(Semaphore::new(MAX_REFUSED));
        // `None` if even the places for refusals are taken.
        let start = |client, owner, token: Option<Token>| {
            let purpose = match places.take(client) {
                Ok(place) => Purpose::Requests(place),
                Err(error) => {
                    let place = Arc::clone(&refused).try_acquire_owned().ok()?;
                    Purpose::Refusal {
                        why: error,
                        _place: place,
                    }
                }
            };
            Some(Connection {
                router: router.clone(),
                begun: Arc::clone(&begun),
                token,
                owner,
                closing: closing_seen.clone(),
                _open: open.clone(),
                purpose,
            })
        };
        tokio::pin!(end);
        loop {
            tokio::select! {
                accepted = self.unix.accept() => match accepted {
                    Ok((stream, _)) => {
                        let peer = stream.peer_cred().ok();
                        let pid = peer.as_ref().and_then(UCred::pid);
                        let client = Client::Process(pid.unwrap_or(0));
                        let owner = peer.map(|peer| format!("uid-{}", peer.uid()).into());
                        if let Some(connection) = start(client, owner, None) {
                            tokio::spawn(connection.serve(stream));
                        }
                    }
                    Err(error) => accept_failed(&error).await,
                },
                accepted = accept_tcp(self.tcp.as_ref()) => match accepted {
                    Ok((stream, token)) => {
                        let _ = stream.set_nodelay(true);
                        if let Some(connection) = start(Client::Network, None, Some(token)) {
                            tokio::spawn(connection.serve(stream));
                        }
                    }
                    Err(error) => accept_failed(&error).await,
                },
                () = &mut end => break,
            }
        }
        closing.send_replace(true);
        drop(open);
        let _ = timeout(LAST_ANSWERS, all_closed.recv()).await;
    }
}

/// Does somebody keep listening? A process that a killed daemon had just forked keeps the socket
/// open until it executes its program, so this waits up to [`CLOSING_TIME`].
async fn is_answered(socket: &Path) -> bool {
    let until = Instant::now() + CLOSING_TIME;
    while std::os::unix::net::UnixStream::connect(socket).is_ok() {
        if Instant::now() >= until {
            return true;
        }
        // Not too often: each attempt queues a connection in the backlog.
        tokio::time::sleep(CLOSING_TIME / 50).await;
    }
    false
}

/// The Unix socket's name. It is removed when this is dropped, unless another daemon has replaced
/// it.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if fs::metadata(&self.path).is_ok_and(|data| data.ino() == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

async fn accept_tcp(
    tcp: Option<&(TcpListener, Token)>,
) -> std::io::Result<(tokio::net::TcpStream, Token)> {
    match tcp {
        Some((listener, token)) => {
            let (stream, _) = listener.accept().await?;
            Ok((stream, token.clone()))
        }
        None => std::future::pending().await,
    }
}

async fn accept_failed(error: &std::io::Error) {
    warn!(%error, "a connection could not be accepted");
    // Most likely out of descriptors: waits for others to close some.
    tokio::time::sleep(Duration::from_millis(100)).await;
}

/// One client's connection.
struct Connection {
    router: Router,
    begun: Arc<Begun>,
    token: Option<Token>,
    /// The owner of its requests, if that is known.
    owner: Option<Arc<str>>,
    closing: watch::Receiver<bool>,
    _open: mpsc::Sender<()>,
    purpose: Purpose,
}

/// How a connection's requests are handled.
enum Purpose {
    /// They are served. Each carries the connection's place, because a request that becomes a
    /// stream outlives the connection's task.
    Requests(Arc<Place>),
    /// They are refused, because there is no place.
    Refusal {
        why: Error,
        _place: OwnedSemaphorePermit,
    },
}

impl Connection {
    async fn serve(mut self, stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) {
        let router = TowerToHyperService::new(self.router.clone());
        let (token, owner) = (self.token.clone(), self.owner.clone());
        let noted = Arc::clone(&self.begun);
        let header_time = match &self.purpose {
            Purpose::Requests(_) => HEADER_TIME,
            Purpose::Refusal { .. } => REFUSED_HEADER_TIME,
        };
        let purpose = self.purpose;
        let service = service_fn(move |mut request: Request<Incoming>| {
            let allowed = match &token {
                Some(token) => auth::check(token, request.headers()),
                None => Ok(()),
            };
            let allowed = allowed.and_then(|()| match &purpose {
                Purpose::Requests(place) => Ok(Arc::clone(place)),
                Purpose::Refusal { why, .. } => Err(why.clone()),
            });
            let answer = allowed.and_then(|place| {
                let id = request_ids::id_of(request.headers())?.map(Arc::from);
                if let Some(id) = &id {
                    noted.note(id)?;
                }
                let caller = Caller {
                    owner: owner.clone(),
                    request: id,
                    ..Caller::default()
                };
                request.extensions_mut().insert(place);
                Ok(on_behalf_of(caller, router.call(request)))
            });
            async move {
                match answer {
                    Ok(answer) => answer.await,
                    Err(error) => Ok::<_, Infallible>(Failure::from(error).into_response()),
                }
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(header_time)
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades();
        tokio::pin!(connection);
        let served = tokio::select! {
            served = &mut connection => served,
            () = async {
                let _ = self.closing.wait_for(|closing| *closing).await;
            } => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = served {
            debug!(%error, "a connection ended with an error");
        }
    }
}

/// Serves a node until it is asked to end. The file `requests` has the ids of requests that were
/// begun.
pub async fn serve(
    listeners: Listeners,
    node: Arc<Node>,
    requests: &Path,
    end: impl Future<Output = ()>,
) {
    let begun = Arc::new(Begun::open(requests));
    let router = crate::routes::router(Arc::clone(&node), Arc::clone(&begun));
    let either = async {
        tokio::select! {
            () = end => {}
            () = node.shutdown.notified() => {}
        }
    };
    listeners.serve(router, begun, either).await;
}
