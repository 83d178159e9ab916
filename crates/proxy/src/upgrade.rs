//! Connections that switch to another protocol: with `Upgrade` in HTTP/1.1, and with an extended
//! CONNECT in HTTP/2 (RFC 8441), which reaches the VM as the former.

use crate::connection_options;
use crate::socket::Socket;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::body::Incoming;
use hyper::ext::Protocol;
use hyper::header::{
    CONNECTION, HeaderMap, HeaderName, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY,
    UPGRADE,
};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use jiffy_vmhost::handle::VmHandle;
use rustix::rand::{GetRandomFlags, getrandom};
use std::sync::Arc;
use tokio::io::copy_bidirectional;
use tracing::debug;

/// The only protocol for which HTTP/2 has an extended CONNECT.
const WEBSOCKET: &str = "websocket";

/// A client's request to switch.
pub(crate) struct Upgrade {
    client: OnUpgrade,
    protocol: HeaderValue,
    is_http2: bool,
}

impl Upgrade {
    /// The upgrade that this request asks for, if any.
    pub(crate) fn of(request: &mut Request<Incoming>) -> Option<Upgrade> {
        if is_tunnel(request) {
            return None;
        }
        let is_http2 = request.method() == Method::CONNECT;
        let protocol = match is_http2 {
            true => HeaderValue::from_static(WEBSOCKET),
            false => asked(request.headers())?,
        };
        Some(Upgrade {
            client: hyper::upgrade::on(request),
            protocol,
            is_http2,
        })
    }

    /// Requests the same upgrade from the VM.
    pub(crate) fn pass_on(&self, method: &mut Method, headers: &mut HeaderMap) {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, self.protocol.clone());
        if self.is_http2 {
            *method = Method::GET;
            headers.insert(SEC_WEBSOCKET_KEY, key());
        }
    }

    /// Has the VM refused to switch, with a status that the client would take for success?
    pub(crate) fn is_ignored(&self, status: StatusCode) -> bool {
        self.is_http2 && status.is_success()
    }

    /// Tells the client that the VM has switched, and relays the connection until it, the client's
    /// socket or the VM ends. Then drops what is held for it.
    pub(crate) fn switch(
        self,
        response: &mut Response<Incoming>,
        protocol: Option<HeaderValue>,
        vm: Arc<VmHandle>,
        socket: Socket,
        held: impl Send + 'static,
    ) {
        let server = hyper::upgrade::on(&mut *response);
        let mut set = |name: HeaderName, value| {
            response.headers_mut().insert(name, value);
        };
        if self.is_http2 {
            response.headers_mut().remove(SEC_WEBSOCKET_ACCEPT);
            *response.status_mut() = StatusCode::OK;
        } else {
            set(CONNECTION, HeaderValue::from_static("upgrade"));
            if let Some(protocol) = protocol {
                set(UPGRADE, protocol);
            }
        }
        tokio::spawn(carry(self.client, server, vm, socket, held));
    }
}

/// Does a request ask for a tunnel to another host?
pub(crate) fn is_tunnel(request: &Request<Incoming>) -> bool {
    let protocol = request.extensions().get::<Protocol>();
    request.method() == Method::CONNECT
        && protocol.is_none_or(|it| !it.as_str().eq_ignore_ascii_case(WEBSOCKET))
}

/// The protocol that an HTTP/1.1 request asks to switch to.
pub(crate) fn asked(headers: &HeaderMap) -> Option<HeaderValue> {
    let asks = connection_options(headers).any(|it| it.eq_ignore_ascii_case("upgrade"));
    let protocol = headers.get(UPGRADE).filter(|_| asks)?.clone();
    // HTTP/2 without TLS is not supported.
    (!protocol.as_bytes().eq_ignore_ascii_case(b"h2c")).then_some(protocol)
}

/// A new WebSocket key (RFC 6455 §4.1). It shows a server that the client speaks WebSocket, and is
/// no secret.
fn key() -> HeaderValue {
    let mut nonce = [0; 16];
    let _ = getrandom(&mut nonce, GetRandomFlags::empty());
    let key = HeaderValue::from_str(&STANDARD.encode(nonce));
    key.unwrap_or(HeaderValue::from_static("AAAAAAAAAAAAAAAAAAAAAA=="))
}

/// Relays a connection that has switched protocols, until it or its VM ends, or the client's socket
/// is broken. After a shutdown of the client's side, reads do not show that.
async fn carry(
    client: OnUpgrade,
    server: OnUpgrade,
    vm: Arc<VmHandle>,
    socket: Socket,
    _held: impl Send + 'static,
) {
    let carried = async {
        let (client, server): (Upgraded, Upgraded) = tokio::try_join!(client, server)?;
        let (mut client, mut server) = (TokioIo::new(client), TokioIo::new(server));
        copy_bidirectional(&mut client, &mut server).await?;
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
    };
    tokio::select! {
        carried = carried => if let Err(error) = carried {
            debug!(vm = %vm.name, %error, "relaying an upgraded connection failed");
        },
        _ = vm.when(|view| !view.lives()) => {}
        () = socket.broken() => debug!(vm = %vm.name, "the client of an upgraded connection disconnected"),
    }
}
