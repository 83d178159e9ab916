//! Clients that speak TLS, and HTTP/2 over it.

use super::PROXY;
use crate::client::TIMEOUT;
use crate::daemon::Daemon;
use crate::network::daemon_with;
use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http2::{self, SendRequest};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use jiffy_registry::testing::make_certificate;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::convert::Infallible;
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;
use tokio::runtime::Builder;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// A body that may be sent in pieces.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;
/// A connection over TLS.
pub type Secure = StreamOwned<ClientConnection, TcpStream>;

/// A self-signed certificate, and its key.
pub struct Certificate(TempDir);

impl Certificate {
    pub fn new() -> Certificate {
        let folder = tempfile::tempdir().unwrap();
        make_certificate(folder.path()).unwrap();
        Certificate(folder)
    }

    pub fn chain(&self) -> PathBuf {
        self.0.path().join("certificate.pem")
    }

    pub fn key(&self) -> PathBuf {
        self.0.path().join("key.pem")
    }

    /// Replaces the contents of these files by another certificate.
    pub fn replace_with_another(&mut self) {
        make_certificate(self.0.path()).unwrap();
    }

    /// A daemon whose proxy uses it.
    pub fn daemon(&self) -> Daemon {
        daemon_with(&[
            "--proxy",
            PROXY,
            "--proxy-domain",
            "vm.example",
            "--proxy-cert",
            self.chain().to_str().unwrap(),
            "--proxy-key",
            self.key().to_str().unwrap(),
        ])
    }

    /// The configuration of a client that trusts only this certificate.
    pub fn trusted(&self, protocols: &[&str]) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_file(self.chain()).unwrap())
            .unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let protocols = protocols.iter().map(|it| it.as_bytes().to_vec());
        config.alpn_protocols = protocols.collect();
        Arc::new(config)
    }

    /// A connection after its handshake, if that succeeds.
    pub fn try_connect(&self, protocols: &[&str]) -> std::io::Result<Secure> {
        let mut stream = super::connect();
        let client = ClientConnection::new(self.trusted(protocols), name());
        let mut client = client.unwrap();
        while client.is_handshaking() {
            client.complete_io(&mut stream)?;
        }
        Ok(StreamOwned::new(client, stream))
    }

    pub fn connect(&self) -> Secure {
        self.try_connect(&["http/1.1"]).unwrap()
    }

    /// An HTTP/2 connection.
    pub async fn http2(&self) -> SendRequest<Body> {
        let stream = tokio::net::TcpStream::connect(PROXY).await.unwrap();
        let connector = TlsConnector::from(self.trusted(&["h2", "http/1.1"]));
        let stream = connector.connect(name(), stream).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
        let (sender, connection) = handshake.await.unwrap();
        tokio::spawn(connection);
        sender
    }
}

fn name() -> ServerName<'static> {
    ServerName::try_from("localhost").unwrap()
}

/// Runs this in this thread, and thus in its network namespace.
pub fn run(what: impl Future<Output = ()>) {
    let runtime = Builder::new_current_thread().enable_all().build();
    let done = runtime
        .unwrap()
        .block_on(async { timeout(TIMEOUT, what).await });
    done.expect("it ends in time");
}

/// A request without a body.
pub fn request(url: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let mut request = Request::get(url);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Empty::new().boxed_unsync()).unwrap()
}

/// Status, and the whole body.
pub async fn whole(response: Response<hyper::body::Incoming>) -> (u16, String) {
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.into()).unwrap())
}
