//! Sockets and the lock: one daemon per data folder, one per socket.

use crate::api::auth::Token;
use crate::api::failure::Failure;
use crate::node::Node;
use crate::options::Options;
use anyhow::{Context, bail};
use axum::Router;
use axum::extract::Request;
use axum::response::IntoResponse;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use jiffy_content::error::Error;
use jiffy_content::paths::Paths;
use jiffy_vmhost::process::is_alive;
use rustix::fs::FlockOperation;
use std::convert::Infallible;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::timeout;
use tracing::{debug, warn};

use crate::places::{Client, Place, Places};

/// Most connections at a time that only hear that there is no place for them; one
/// more is closed.
const MAX_REFUSED: usize = 32;
/// What a client has to send a request's header.
const HEADER_TIME: Duration = Duration::from_secs(30);
/// The same of a client that is refused.
const REFUSED_HEADER_TIME: Duration = Duration::from_secs(5);
/// What requests have to be answered once the daemon ends.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// What the last child of a daemon that was killed has to let go of its lock.
const DYING_TIME: Duration = Duration::from_secs(10);
/// What a daemon that was told to end has for it: whoever looks after daemons may start
/// the next meanwhile.
const ENDING_TIME: Duration = Duration::from_secs(5);
/// What it has to close its socket, which is next to the lock.
const CLOSING_TIME: Duration = Duration::from_secs(1);
/// How often it is looked whether it has.
const DYING_POLL: Duration = Duration::from_millis(2);

/// Held while a daemon owns a data folder.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// Takes the data folder; says who has it if somebody does.
pub fn lock(paths: &Paths) -> anyhow::Result<Lock> {
    let path = paths.data.join("jiffyd.lock");
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .with_context(|| format!("opening {}", path.display()))?;
    let begun = Instant::now();
    while rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        let mut holder = String::new();
        let _ = file
            .rewind()
            .and_then(|()| file.read_to_string(&mut holder));
        let holder = holder.trim();
        // A daemon that was killed while it spawned a process: that process
        // has the lock until it executes its program.
        let is_dead = !holder.is_empty() && holder.parse().ok().is_none_or(|pid| !is_alive(pid));
        let patience = if is_dead { DYING_TIME } else { ENDING_TIME };
        if begun.elapsed() < patience {
            std::thread::sleep(DYING_POLL);
            continue;
        }
        let holder = match holder {
            "" => String::new(),
            pid => format!(" (process {pid})"),
        };
        bail!(
            "Another jiffyd{holder} already keeps {}.",
            paths.data.display()
        );
    }
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())?;
    Ok(Lock { _file: file })
}

/// The sockets of a daemon.
#[derive(Debug)]
pub struct Listeners {
    unix: UnixListener,
    /// The inode of the socket, to remove no other than ours.
    inode: u64,
    tcp: Option<(TcpListener, Token)>,
    /// Most connections at a time, over all of them.
    connections: u32,
}

impl Listeners {
    /// Opens them. A socket that nobody answers on is replaced.
    pub async fn open(options: &Options, paths: &Paths) -> anyhow::Result<Listeners> {
        let tcp = match (options.listen, &options.token_file) {
            (None, _) => None,
            (Some(_), None) => {
                bail!("Listening on TCP needs a token: name its file with --token-file.")
            }
            (Some(address), Some(file)) => {
                let token = read_token(file)?;
                let listener = TcpListener::bind(address.0)
                    .await
                    .with_context(|| format!("Listening on tcp:{} failed", address.0))?;
                Some((listener, token))
            }
        };
        let socket = &paths.socket;
        if is_answered(socket).await {
            bail!("Another jiffyd already answers on {}.", socket.display());
        }
        let _ = fs::remove_file(socket);
        // The folder is closed to others, so nobody gets in before the chmod.
        let unix = UnixListener::bind(socket)
            .with_context(|| format!("Listening on {} failed", socket.display()))?;
        fs::set_permissions(socket, fs::Permissions::from_mode(0o600))?;
        let inode = fs::metadata(socket)?.ino();
        Ok(Listeners {
            unix,
            inode,
            tcp,
            connections: options.connections,
        })
    }

    /// Where TCP is listened on, if anywhere.
    pub fn tcp_address(&self) -> Option<std::net::SocketAddr> {
        self.tcp.as_ref()?.0.local_addr().ok()
    }

    /// Serves until `end` is done, then lets requests under way finish.
    pub async fn serve(self, router: Router, end: impl Future<Output = ()>) {
        let (closing, closing_seen) = watch::channel(false);
        // Every connection holds a sender: when all are gone, so are they.
        let (open, mut all_closed) = mpsc::channel::<()>(1);
        let places = Places::new(
            self.connections,
            rustix::process::getrlimit(rustix::process::Resource::Nofile).current,
        );
        let refused = Arc::new(Semaphore::new(MAX_REFUSED));
        // None if there is not even a place to be refused on.
        let start = |client, token: Option<Token>| {
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
                token,
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
                        let pid = stream.peer_cred().ok().and_then(|peer| peer.pid());
                        let client = Client::Process(pid.unwrap_or(0));
                        if let Some(connection) = start(client, None) {
                            tokio::spawn(connection.serve(stream));
                        }
                    }
                    Err(error) => accept_failed(&error).await,
                },
                accepted = accept_tcp(self.tcp.as_ref()) => match accepted {
                    Ok((stream, token)) => {
                        let _ = stream.set_nodelay(true);
                        if let Some(connection) = start(Client::Network, Some(token)) {
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

    /// The inode of the Unix socket, for [`remove_socket`].
    pub fn inode(&self) -> u64 {
        self.inode
    }
}

/// Whether somebody listens, and goes on to. As with the lock, a process that a
/// daemon spawned when it was killed has its socket until it executes its program.
async fn is_answered(socket: &Path) -> bool {
    let until = Instant::now() + CLOSING_TIME;
    while std::os::unix::net::UnixStream::connect(socket).is_ok() {
        if Instant::now() >= until {
            return true;
        }
        // Not too often: each of these waits to be accepted.
        tokio::time::sleep(CLOSING_TIME / 50).await;
    }
    false
}

/// Removes the socket at the daemon's end, unless it is another's by now.
pub fn remove_socket(socket: &Path, inode: u64) {
    if fs::metadata(socket).is_ok_and(|data| data.ino() == inode) {
        let _ = fs::remove_file(socket);
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
    warn!(%error, "a connection could not be taken");
    // Out of descriptors, most likely: give others time to close some.
    tokio::time::sleep(Duration::from_millis(100)).await;
}

fn read_token(path: &Path) -> anyhow::Result<Token> {
    let text = fs::read_to_string(path)
        .with_context(|| format!("Reading the token file {} failed", path.display()))?;
    match text.trim() {
        "" => bail!("The token file {} is empty.", path.display()),
        token => Ok(Token::new(token)),
    }
}

/// One client's connection.
struct Connection {
    router: Router,
    token: Option<Token>,
    closing: watch::Receiver<bool>,
    _open: mpsc::Sender<()>,
    purpose: Purpose,
}

/// What becomes of a connection's requests.
enum Purpose {
    /// They are answered. Each has the connection's place with it, for if it becomes
    /// a stream it outlives the connection's task.
    Requests(Arc<Place>),
    /// There is no place: that is what they are told.
    Refusal {
        why: Error,
        _place: OwnedSemaphorePermit,
    },
}

impl Connection {
    async fn serve(mut self, stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) {
        let router = TowerToHyperService::new(self.router.clone());
        let token = self.token.clone();
        let header_time = match &self.purpose {
            Purpose::Requests(_) => HEADER_TIME,
            Purpose::Refusal { .. } => REFUSED_HEADER_TIME,
        };
        let purpose = self.purpose;
        let service = service_fn(move |mut request: Request<Incoming>| {
            let allowed = match &token {
                Some(token) => token.check(request.headers()),
                None => Ok(()),
            };
            let allowed = allowed.and_then(|()| match &purpose {
                Purpose::Requests(place) => Ok(Arc::clone(place)),
                Purpose::Refusal { why, .. } => Err(why.clone()),
            });
            let answer = allowed.map(|place| {
                request.extensions_mut().insert(place);
                router.call(request)
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
            debug!(%error, "a connection ended badly");
        }
    }
}

/// Serves a node until it is asked to end.
pub async fn serve(listeners: Listeners, node: Arc<Node>, end: impl Future<Output = ()>) {
    let router = crate::api::router(Arc::clone(&node));
    let either = async {
        tokio::select! {
            () = end => {}
            () = node.shutdown.notified() => {}
        }
    };
    listeners.serve(router, either).await;
}

/// Tells whoever started the daemon that it listens. The descriptor is opened
/// by its name in /proc: a number in an option proves no ownership.
pub fn announce(descriptor: u32) {
    use std::io::Write;
    let path = format!("/proc/self/fd/{descriptor}");
    let told = std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|mut file| file.write_all(b"1"));
    if let Err(error) = told {
        tracing::warn!(%path, %error, "whoever started jiffyd can't be told that it listens");
    }
}
