//! One request: it wakes its VM, is passed on, and its answer comes back. Bodies are passed on as
//! they come; a connection that switches protocols is carried to its end.

use crate::refusal::Refusal;
use crate::target::{self, Target};
use bytes::Bytes;
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{
    CONNECTION, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue, TE, TRAILER, TRANSFER_ENCODING,
    UPGRADE,
};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper::{Method, Request, Response, StatusCode, Uri, Version};
use hyper_util::rt::TokioIo;
use jiffy_content::error::Error;
use jiffy_node::Node;
use jiffy_vmhost::activity::{InUse, Use};
use jiffy_vmhost::handle::VmHandle;
use jiffy_wire::api::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;
use tracing::debug;

/// How long a VM's port may take to accept.
const CONNECT_TIME: Duration = Duration::from_secs(20);
/// Headers that are of one connection only (RFC 9110 §7.6.1), besides those that `Connection` names.
const OF_ONE_CONNECTION: [HeaderName; 8] = [
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
/// Most bytes of a request's header, and of each direction that are held at a time.
pub const BUFFER: usize = 64 << 10;

/// A connection's place, kept by all that comes of the connection.
pub(crate) type Place = Arc<OwnedSemaphorePermit>;

/// The VMs behind the proxy.
pub(crate) struct Front {
    node: Arc<Node>,
    domain: String,
}

/// What keeps a VM awake and a place taken, as long as a request lasts.
struct Lasting {
    vm: Arc<VmHandle>,
    _in_use: InUse,
    _place: Place,
}

/// What a client gets.
pub(crate) type Answer = Response<UnsyncBoxBody<Bytes, hyper::Error>>;

impl Front {
    pub(crate) fn new(node: Arc<Node>, domain: String) -> Front {
        Front { node, domain }
    }

    /// The VM's answer, or the reason why there is none.
    pub(crate) async fn answer(
        &self,
        request: Request<Incoming>,
        from: IpAddr,
        place: Place,
    ) -> Answer {
        let forwarded = self.forward(request, from, place).await;
        forwarded.unwrap_or_else(|refusal| {
            let response = refusal.response();
            response.map(|body| body.map_err(|never| match never {}).boxed_unsync())
        })
    }

    async fn forward(
        &self,
        mut request: Request<Incoming>,
        from: IpAddr,
        place: Place,
    ) -> Result<Answer, Refusal> {
        if request.method() == Method::CONNECT {
            let error = Error::not_found("The proxy opens no tunnels.");
            return Err(Refusal::not_found(error));
        }
        let target = target::find(request.uri(), request.headers(), &self.domain)
            .map_err(|why| Refusal::not_found(Error::not_found(why)))?;
        let vm = self.node.find(&target.vm).map_err(|error| {
            match matches!(error.0.kind, ErrorKind::NotFound | ErrorKind::Invalid) {
                true => Refusal::not_found(error),
                // Its record can't be read.
                false => Refusal::unavailable(error),
            }
        })?;
        let lasting = Arc::new(Lasting {
            _in_use: vm.activity.begin(Use::Connection),
            _place: place,
            vm,
        });
        let vm = &lasting.vm;
        self.node
            .awake_for_a_connection(vm)
            .await
            .map_err(Refusal::unavailable)?;
        let stream = self.connect(vm, target.port).await?;
        let bad = |error: hyper::Error| {
            Refusal::bad_gateway(format!(
                "Port {} of the VM {} does not answer in HTTP: {error}.",
                target.port, vm.name
            ))
        };
        let mut client = http1::Builder::new();
        let handshake = client.max_buf_size(BUFFER).handshake(TokioIo::new(stream));
        let (mut sender, connection) = handshake.await.map_err(bad)?;
        let ends = Arc::clone(vm);
        tokio::spawn(async move {
            // Without its VM it would wait for ever.
            tokio::select! {
                served = connection.with_upgrades() => if let Err(error) = served {
                    debug!(%error, "a VM's connection ended badly");
                },
                _ = ends.when(|view| !view.lives()) => {}
            }
        });
        let client = upgrade_of(&mut request);
        let passed = pass_on(request, &target, from, client.as_ref());
        let mut response = sender.send_request(passed).await.map_err(bad)?;
        let switched = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        let protocol = response.headers().get(UPGRADE).cloned();
        clean(response.headers_mut());
        if switched {
            let Some((client, _)) = client else {
                return Err(Refusal::bad_gateway(format!(
                    "Port {} of the VM {} switches protocols without being asked.",
                    target.port, vm.name
                )));
            };
            let upgrade = HeaderValue::from_static("upgrade");
            response.headers_mut().insert(CONNECTION, upgrade);
            if let Some(protocol) = protocol {
                response.headers_mut().insert(UPGRADE, protocol);
            }
            let server = hyper::upgrade::on(&mut response);
            tokio::spawn(carry(client, server, Arc::clone(&lasting)));
        }
        // The VM is in use until the last of the body was passed on.
        Ok(response.map(|body| {
            body.map_frame(move |frame| {
                let _ = &lasting;
                frame
            })
            .boxed_unsync()
        }))
    }

    async fn connect(&self, vm: &VmHandle, port: u16) -> Result<TcpStream, Refusal> {
        let name = &vm.name;
        let Some(address) = self.node.address_of(vm) else {
            return Err(Refusal::bad_gateway(format!(
                "The VM {name} has no network."
            )));
        };
        let connecting = TcpStream::connect(SocketAddr::new(address, port));
        let why = match timeout(CONNECT_TIME, connecting).await {
            Ok(Ok(stream)) => {
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Ok(Err(error)) => format!("can't be reached: {error}."),
            Err(_) => format!("did not accept in {} s.", CONNECT_TIME.as_secs()),
        };
        Err(Refusal::bad_gateway(format!(
            "Port {port} of the VM {name} {why}"
        )))
    }
}

/// The client's connection and the protocol, if it wants to switch to another.
fn upgrade_of(request: &mut Request<Incoming>) -> Option<(OnUpgrade, HeaderValue)> {
    let asks = request.headers().get_all(CONNECTION).iter().any(|value| {
        let value = value.to_str().unwrap_or_default();
        value
            .split(',')
            .any(|name| name.trim().eq_ignore_ascii_case("upgrade"))
    });
    let protocol = request.headers().get(UPGRADE).filter(|_| asks)?.clone();
    // HTTP/2 without TLS is not spoken here.
    (!protocol.as_bytes().eq_ignore_ascii_case(b"h2c"))
        .then(|| (hyper::upgrade::on(request), protocol))
}

/// The request that the VM gets.
fn pass_on(
    request: Request<Incoming>,
    target: &Target,
    from: IpAddr,
    upgrade: Option<&(OnUpgrade, HeaderValue)>,
) -> Request<Incoming> {
    let (mut parts, body) = request.into_parts();
    let host = match parts.uri.authority() {
        Some(authority) => HeaderValue::from_str(authority.as_str()).ok(),
        None => parts.headers.get(HOST).cloned(),
    };
    parts.uri = Uri::from(target.path.clone());
    parts.version = Version::HTTP_11;
    let headers = &mut parts.headers;
    clean(headers);
    if let Some((_, protocol)) = upgrade {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocol.clone());
    }
    headers.remove(target::VM);
    headers.remove(target::PORT);
    if let Ok(from) = HeaderValue::from_str(&from.to_string()) {
        headers.append(FORWARDED_FOR, from);
    }
    headers
        .entry(FORWARDED_PROTO)
        .or_insert(HeaderValue::from_static("http"));
    let host = host.unwrap_or(HeaderValue::from_static(""));
    headers.entry(FORWARDED_HOST).or_insert(host.clone());
    headers.insert(HOST, host);
    headers.remove(FORWARDED_PREFIX);
    if let Some(prefix) = target.prefix.as_deref().and_then(|it| it.parse().ok()) {
        headers.insert(FORWARDED_PREFIX, prefix);
    }
    Request::from_parts(parts, body)
}

/// Removes the headers of one connection.
fn clean(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named.iter().chain(&OF_ONE_CONNECTION) {
        headers.remove(name);
    }
}

/// Carries a connection that has switched protocols, until it or its VM ends.
async fn carry(client: OnUpgrade, server: OnUpgrade, lasting: Arc<Lasting>) {
    let carried = async {
        let (client, server): (Upgraded, Upgraded) = tokio::try_join!(client, server)?;
        let (mut client, mut server) = (TokioIo::new(client), TokioIo::new(server));
        copy_bidirectional(&mut client, &mut server).await?;
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
    };
    tokio::select! {
        carried = carried => if let Err(error) = carried {
            debug!(vm = %lasting.vm.name, %error, "a connection was cut");
        },
        _ = lasting.vm.when(|view| !view.lives()) => {}
    }
}
