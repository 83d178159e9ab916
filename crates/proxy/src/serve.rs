//! Connections of clients.

use crate::forward::{BUFFER, Front, Place};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use jiffy_node::Node;
use rustix::net::sockopt;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tracing::{debug, warn};

/// Most connections at a time; further ones wait in the kernel. Each may need a second descriptor,
/// so they are never more than an eighth of the files that the process may open.
const MOST: usize = 8192;
/// How long a client has to send a request's header.
const HEADER_TIME: Duration = Duration::from_secs(30);
/// Silence after which a client is asked whether it is still there.
const KEEPALIVE: Duration = Duration::from_secs(60);
/// Pause after an error that may persist, such as no free descriptors.
const AFTER_ERROR: Duration = Duration::from_millis(100);

/// The proxy's socket.
#[derive(Debug)]
pub struct Proxy {
    listener: TcpListener,
    domain: String,
}

impl Proxy {
    /// Listens on this address. Hosts `PORT-NAME.DOMAIN` name VMs.
    pub async fn bind(address: SocketAddr, domain: String) -> io::Result<Proxy> {
        let listener = TcpListener::bind(address).await?;
        Ok(Proxy { listener, domain })
    }

    /// Serves until this is dropped.
    pub async fn serve(self, node: Arc<Node>) {
        let front = Arc::new(Front::new(node, self.domain));
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let most = files.map_or(MOST, |files| MOST.min(files as usize / 8));
        let places = Arc::new(Semaphore::new(most));
        loop {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else {
                return;
            };
            match self.listener.accept().await {
                Ok((stream, from)) => {
                    let front = Arc::clone(&front);
                    tokio::spawn(async move {
                        // An upgraded connection outlives this task, and has a place as long.
                        connection(front, stream, from, Arc::new(place)).await;
                    });
                }
                Err(error) => {
                    warn!(%error, "a connection to the proxy could not be taken");
                    tokio::time::sleep(AFTER_ERROR).await;
                }
            }
        }
    }
}

async fn connection(front: Arc<Front>, stream: TcpStream, from: SocketAddr, place: Place) {
    let _ = stream.set_nodelay(true);
    // A client that is gone without a word would keep its VM awake.
    let _ = sockopt::set_socket_keepalive(&stream, true);
    let _ = sockopt::set_tcp_keepidle(&stream, KEEPALIVE);
    let service = service_fn(move |request| {
        let (front, place) = (Arc::clone(&front), Arc::clone(&place));
        async move { Ok::<_, Infallible>(front.answer(request, from.ip(), place).await) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME)
        .max_buf_size(BUFFER)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades()
        .await;
    if let Err(error) = served {
        debug!(%error, "a connection to the proxy ended badly");
    }
}
