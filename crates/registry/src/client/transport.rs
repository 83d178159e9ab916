//! Connections: time limits, certificates, proxies.

use super::options::ClientOptions;
use super::resolver::{HostResolver, RegistryIsHere};
use super::url::Url;
use crate::RegistryError;
use crate::error::Result;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use ureq::config::{AutoHeaderValue, Config};
use ureq::http::{Request, Response};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::unversioned::transport::DefaultConnector;
use ureq::{Agent, AsSendBody, Body, Proxy};

/// Sends one request and returns the head of the answer; does not redirect or retry.
///
/// The system's certificate authorities are loaded at the first use of TLS, because a lazy start
/// from this computer must not wait for them.
pub(super) struct Transport {
    options: ClientOptions,
    /// The user's authorities.
    authorities: Vec<CertificateDer<'static>>,
    /// For this computer, without TLS.
    local_plain: Agent,
    /// For this computer, with TLS.
    local_tls: OnceLock<Agent>,
    /// For other hosts, through the proxy of the environment, if there is one.
    remote: OnceLock<Agent>,
    /// For hosts that the registry named; refuses this computer.
    restricted: OnceLock<Agent>,
    registry: Arc<RegistryIsHere>,
}

/// How a request is sent.
pub(super) struct Route {
    /// Its host was named by the registry, and must not be this computer.
    restricted: bool,
    /// When the whole answer must have arrived.
    deadline: Option<Instant>,
}

impl Route {
    pub(super) fn new(restricted: bool, deadline: Option<Instant>) -> Route {
        Route {
            restricted,
            deadline,
        }
    }
}

impl Transport {
    pub(super) fn new(options: &ClientOptions) -> Result<Self> {
        let mut authorities = Vec::new();
        for path in &options.authorities {
            authorities.extend(certificates(path)?);
        }
        let registry = Arc::default();
        let resolver = HostResolver::new(&registry);
        Ok(Self {
            options: options.clone(),
            authorities,
            local_plain: agent(options, None, TlsConfig::default(), resolver),
            local_tls: OnceLock::new(),
            remote: OnceLock::new(),
            restricted: OnceLock::new(),
            registry,
        })
    }

    pub(super) fn send(
        &self,
        to: &Url,
        route: &Route,
        request: Request<impl AsSendBody>,
    ) -> std::result::Result<Response<Body>, ureq::Error> {
        let secure = |proxy, resolver| {
            let roots = roots(&self.authorities);
            let tls = TlsConfig::builder().root_certs(roots).build();
            agent(&self.options, proxy, tls, resolver)
        };
        let agent = match (to.is_this_computer(), to.is_plain()) {
            _ if route.restricted => self.restricted.get_or_init(|| {
                let resolver = HostResolver::refuse_local(&self.registry);
                secure(Proxy::try_from_env(), resolver)
            }),
            (true, true) => &self.local_plain,
            (true, false) => self
                .local_tls
                .get_or_init(|| secure(None, HostResolver::new(&self.registry))),
            (false, _) => self
                .remote
                .get_or_init(|| secure(Proxy::try_from_env(), HostResolver::new(&self.registry))),
        };
        let Some(deadline) = route.deadline else {
            return agent.run(request);
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ureq::Error::Timeout(ureq::Timeout::Global));
        }
        let request = agent
            .configure_request(request)
            .timeout_global(Some(left))
            .build();
        agent.run(request)
    }
}

fn agent(
    options: &ClientOptions,
    proxy: Option<Proxy>,
    tls: TlsConfig,
    resolver: HostResolver,
) -> Agent {
    let config = Config::builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .proxy(proxy)
        .tls_config(tls)
        .user_agent(options.user_agent.clone())
        .accept_encoding(AutoHeaderValue::None)
        .timeout_resolve(Some(options.connect_timeout))
        .timeout_connect(Some(options.connect_timeout))
        .timeout_per_read(Some(options.stall_timeout))
        .timeout_per_write(Some(options.stall_timeout))
        // Limits a head that arrives byte by byte.
        .timeout_recv_response(Some(options.stall_timeout * 4))
        .max_idle_connections_per_host(8)
        .max_idle_age(Duration::from_secs(60))
        .build();
    Agent::with_parts(config, DefaultConnector::default(), resolver)
}

/// Whether a failure is caused by TLS: errors of certificates and protocols are permanent.
pub(super) fn is_tls_error(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::Rustls(_) | ureq::Error::Tls(_) | ureq::Error::TlsRequired => true,
        // rustls errors during the handshake are wrapped in I/O errors.
        ureq::Error::Io(error) => error.kind() == std::io::ErrorKind::InvalidData,
        _ => false,
    }
}

/// The system's authorities, or Mozilla's where the system has none, and the user's.
fn roots(users: &[CertificateDer<'static>]) -> RootCerts {
    let mut all = rustls_native_certs::load_native_certs().certs;
    if all.is_empty() {
        tracing::debug!("no certificates of authorities on this system");
        if users.is_empty() {
            return RootCerts::WebPki;
        }
    }
    all.extend_from_slice(users);
    let all: Vec<_> = all
        .iter()
        .map(|certificate| Certificate::from_der(certificate).to_owned())
        .collect();
    RootCerts::Specific(Arc::new(all))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let pem = std::fs::read(path).map_err(|error| RegistryError::file("read", path, error))?;
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&pem)
        .collect::<std::result::Result<_, _>>()
        .map_err(|error| no_certificates(path, &error.to_string()))?;
    if certificates.is_empty() {
        return Err(no_certificates(path, "it contains no CERTIFICATE"));
    }
    Ok(certificates)
}

fn no_certificates(path: &Path, why: &str) -> RegistryError {
    RegistryError::Options(format!(
        "{} has no certificates of authorities: {why}",
        path.display()
    ))
}
