//! Connections to servers in VMs: a request is sent over one that is kept, or over a new one.

use crate::outgoing::Outgoing;
use crate::pool::{IDLE_TIME, Key, Pool, Server};
use crate::refusal::Refusal;
use crate::shares::{Share, Shares};
use crate::{BUFFER, connection_options};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::{Request, Response, Version};
use hyper_util::rt::TokioIo;
use jiffy_content::error::Error;
use jiffy_node::Node;
use jiffy_sys::mutex::lock;
use jiffy_vmhost::handle::VmHandle;
use std::error::Error as _;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tracing::debug;

/// How long a VM's port may take to accept.
const CONNECT_TIME: Duration = Duration::from_secs(20);
/// How long a request waits for one of the connections to VMs: as long as many others may need on
/// a busy host.
const PLACE_TIME: Duration = Duration::from_secs(60);
/// A server that serves one connection after another reads the next request when the idle one is
/// closed: so that is closed after this time without an answer, then after twice the time, and so on.
const STUCK: Duration = Duration::from_millis(50);

/// The connections to all VMs.
pub(crate) struct Servers {
    node: Arc<Node>,
    /// Limits connections with a request.
    places: Shares,
    pool: Arc<Pool>,
}

/// An answer, and the connection that it comes from.
pub(crate) struct Answered {
    pub(crate) response: Response<Incoming>,
    pub(crate) answering: Answering,
}

/// A connection with a request.
pub(crate) struct Answering {
    server: Server,
    vm: Arc<VmHandle>,
    key: Key,
    pool: Arc<Pool>,
    /// Whether the request had a body.
    has_body: bool,
}

impl Answering {
    /// The connection waits for its next request, once the body of the answer has ended. After a request
    /// with a body it is closed: a server that has not read the body would take it for the next request.
    pub(crate) fn ended(mut self) {
        if self.has_body {
            return;
        }
        if self.server.sender.is_ready() {
            return self.keep();
        }
        if !self.server.sender.is_closed() {
            // Its task is about to notice the end.
            tokio::spawn(async move {
                if self.server.sender.ready().await.is_ok() {
                    self.keep();
                }
            });
        }
    }

    fn keep(self) {
        self.pool.keep(&self.vm, self.key, self.server);
    }

    /// The connection's place, which a switched connection keeps.
    pub(crate) fn into_place(self) -> Arc<Mutex<Option<Share>>> {
        self.server.place
    }
}

impl Servers {
    /// At most `most` connections with a request at a time.
    pub(crate) fn new(node: Arc<Node>, most: usize) -> Servers {
        Servers {
            node,
            places: Shares::new(most),
            // Each takes a descriptor, too.
            pool: Arc::new(Pool::new(most / 4)),
        }
    }

    /// Sends a request to a VM's port; returns when the header of the answer is there. A request that
    /// may switch protocols gets a new connection.
    pub(crate) async fn send(
        &self,
        vm: &Arc<VmHandle>,
        port: u16,
        mut request: Request<Outgoing>,
        may_switch: bool,
    ) -> Result<Answered, Refusal> {
        let key = (vm.id.clone(), port);
        let mut place = self.place(vm).await?;
        let has_body = !matches!(request.body(), Outgoing::None);
        // May it be sent again when it may have reached the server? Its method must be safe (RFC 9110
        // §9.2.1), and a body is gone once it was sent.
        let can_repeat = !has_body && request.method().is_safe();
        // The address is looked up after each wait for a place: meanwhile it may be another VM's.
        let kept = || match may_switch {
            true => Ok(None),
            false => {
                let address = self.address(vm, port)?;
                Ok(self.pool.take(vm, &key, address, can_repeat))
            }
        };
        while let Some(mut server) = kept()? {
            *lock(&server.place) = Some(place);
            let copy = can_repeat.then(|| copy_of(&request));
            let mut error = match server.sender.try_send_request(request).await {
                Ok(response) => return Ok(self.answered(vm, key, server, response, has_body)),
                Err(error) => error,
            };
            let unsent = error.take_message();
            let is_unsent = unsent.is_some();
            let error = error.into_error();
            debug!(vm = %vm.name, port, %error, is_unsent, "a kept connection failed");
            // What was wrong may be of the connection, such as a body after the answer to HEAD.
            let again = unsent.or(copy);
            request = again.ok_or_else(|| upstream_error(vm, port, &error))?;
            let freed = lock(&server.place).take();
            place = match freed {
                Some(place) => place,
                None => self.place(vm).await?,
            };
            if !is_unsent {
                // The others may be as old.
                self.pool.close(&key);
                break;
            }
        }
        let address = self.address(vm, port)?;
        let mut server = self.connect(vm, port, address, place).await?;
        let response = self.answer_of_new(&key, &mut server, request).await;
        let response = response.map_err(|error| upstream_error(vm, port, &error))?;
        Ok(self.answered(vm, key, server, response, has_body))
    }

    /// Sends the first request over a new connection.
    async fn answer_of_new(
        &self,
        key: &Key,
        server: &mut Server,
        request: Request<Outgoing>,
    ) -> hyper::Result<Response<Incoming>> {
        let mut answer = std::pin::pin!(server.sender.send_request(request));
        let mut wait = STUCK;
        while wait < IDLE_TIME {
            tokio::select! {
                biased;
                answer = &mut answer => return answer,
                () = sleep(wait) => self.pool.close(key),
            }
            wait *= 2;
        }
        answer.await
    }

    fn answered(
        &self,
        vm: &Arc<VmHandle>,
        key: Key,
        mut server: Server,
        response: Response<Incoming>,
        has_body: bool,
    ) -> Answered {
        server.answers += 1;
        let answering = Answering {
            server,
            vm: Arc::clone(vm),
            key,
            pool: Arc::clone(&self.pool),
            has_body,
        };
        Answered {
            response,
            answering,
        }
    }

    async fn place(&self, vm: &VmHandle) -> Result<Share, Refusal> {
        let place = timeout(PLACE_TIME, self.places.take(&vm.id)).await;
        place.map_err(|_| {
            Refusal::unavailable(Error::no_room(format!(
                "The proxy has reached its limit of connections, in all or to the VM {}.",
                vm.name
            )))
        })
    }

    fn address(&self, vm: &VmHandle, port: u16) -> Result<SocketAddr, Refusal> {
        let name = &vm.name;
        let address = self.node.server(vm, port);
        address.ok_or_else(|| match self.node.network_note() {
            None => no_network(name),
            Some(note) => Refusal::bad_gateway(format!(
                "Port {port} of the VM {name} is not published, so the proxy can't reach it. {note}"
            )),
        })
    }

    /// Connects to a VM's port. The connection must be closed at the VM's end: the VM can't do it.
    async fn connect(
        &self,
        vm: &Arc<VmHandle>,
        port: u16,
        address: SocketAddr,
        place: Share,
    ) -> Result<Server, Refusal> {
        let operations = vm.operations_begun();
        let stream = open(vm, port, address).await?;
        let mut client = http1::Builder::new();
        let handshake = client.max_buf_size(BUFFER).handshake(TokioIo::new(stream));
        let (sender, connection) = handshake
            .await
            .map_err(|error| upstream_error(vm, port, &error))?;
        let place = Arc::new(Mutex::new(Some(place)));
        let (ends, held) = (Arc::clone(vm), Arc::clone(&place));
        tokio::spawn(async move {
            let _held = held;
            tokio::select! {
                served = connection.with_upgrades() => if let Err(error) = served {
                    debug!(%error, "a connection to a VM ended with an error");
                },
                _ = ends.when(|view| !view.lives()) => {}
            }
        });
        Ok(Server {
            sender,
            place,
            address,
            operations,
            answers: 0,
        })
    }
}

async fn open(vm: &VmHandle, port: u16, address: SocketAddr) -> Result<TcpStream, Refusal> {
    let why = tokio::select! {
        connected = timeout(CONNECT_TIME, TcpStream::connect(address)) => match connected {
            Ok(Ok(stream)) => {
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Ok(Err(error)) => format!("can't be reached: {error}."),
            Err(_) => format!("did not accept in {} s.", CONNECT_TIME.as_secs()),
        },
        _ = vm.when(|view| !view.lives()) => "had not accepted when the VM ended.".to_owned(),
    };
    Err(Refusal::bad_gateway(format!(
        "Port {port} of the VM {} {why}",
        vm.name
    )))
}

/// May a connection be used again after this answer?
pub(crate) fn persists(response: &Response<Incoming>) -> bool {
    response.version() == Version::HTTP_11
        && !connection_options(response.headers()).any(|it| it.eq_ignore_ascii_case("close"))
}

/// A copy of a request without a body.
fn copy_of(request: &Request<Outgoing>) -> Request<Outgoing> {
    let mut copy = Request::new(Outgoing::None);
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.version_mut() = request.version();
    *copy.headers_mut() = request.headers().clone();
    copy
}

pub(crate) fn no_network(name: &str) -> Refusal {
    Refusal::bad_gateway(format!("The VM {name} has no network."))
}

fn upstream_error(vm: &VmHandle, port: u16, error: &hyper::Error) -> Refusal {
    // User errors without a body error as their source mean that the VM ended meanwhile.
    let is_of_body = error.source().is_some_and(|it| it.is::<hyper::Error>());
    if error.is_user() && is_of_body {
        return Refusal::damaged_body();
    }
    let cause = error.source().map(|source| format!(": {source}"));
    Refusal::bad_gateway(format!(
        "Port {port} of the VM {} does not answer in HTTP: {error}{}.",
        vm.name,
        cause.unwrap_or_default()
    ))
}
