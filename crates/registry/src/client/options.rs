//! Time limits, retries, credentials, certificates.

use crate::Credentials;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The settings of a [`Client`](crate::Client).
///
/// Proxies are taken from the environment (`HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY`, `NO_PROXY`);
/// this computer is always reached without a proxy.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Credentials. Default: none.
    pub credentials: Credentials,
    /// Which registries are accessed without TLS.
    pub plain_http: PlainHttp,
    /// PEM files of certificate authorities that are trusted in addition to the system's.
    pub authorities: Vec<PathBuf>,
    /// Time limit for a connection, TLS included. Default: 10 s.
    pub connect_timeout: Duration,
    /// How long a connection may be idle. There is no limit for a whole transfer. Default: 30 s.
    pub stall_timeout: Duration,
    /// Retries after temporary failures.
    pub retries: Retries,
    /// The `User-Agent` header.
    pub user_agent: String,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            credentials: Credentials::anonymous(),
            plain_http: PlainHttp::Loopback,
            authorities: Vec::new(),
            connect_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(30),
            retries: Retries::default(),
            user_agent: concat!("jiffy/", env!("CARGO_PKG_VERSION")).to_owned(),
        }
    }
}

impl ClientOptions {
    /// The options of a recorded source: credentials in a file like Docker's, else those of this
    /// user; plain HTTP or not; and these certificate authorities.
    pub fn from_recorded(
        docker_config: Option<&Path>,
        plain_http: bool,
        authorities: &[PathBuf],
    ) -> ClientOptions {
        ClientOptions {
            credentials: match docker_config {
                Some(path) => Credentials::docker_config(path),
                None => Credentials::of_this_user(),
            },
            plain_http: match plain_http {
                true => PlainHttp::Everywhere,
                false => PlainHttp::Loopback,
            },
            authorities: authorities.to_vec(),
            ..ClientOptions::default()
        }
    }
}

/// Which registries are accessed without TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlainHttp {
    /// Those on this computer, unless they require TLS.
    #[default]
    Loopback,
    /// All of them. Passwords then cross the network in the clear.
    Everywhere,
}

/// Retries after temporary failures: broken connections, timeouts, 408, 429, 5xx. A 429 or 503 may
/// say how long to wait (`Retry-After`), which is obeyed up to
/// [`longest_wait`](Self::longest_wait).
///
/// The wait before the *n*-th retry is random between half and all of min(`first_wait` × 2ⁿ⁻¹,
/// `longest_wait`).
#[derive(Clone)]
pub struct Retries {
    /// Most retries without progress. Default: 5.
    pub limit: u32,
    /// Default: 250 ms.
    pub first_wait: Duration,
    /// Default: 30 s.
    pub longest_wait: Duration,
    /// Called instead of sleeping: for tests.
    pub sleep: Option<Arc<dyn Fn(Duration) + Send + Sync>>,
}

impl Default for Retries {
    fn default() -> Self {
        Self {
            limit: 5,
            first_wait: Duration::from_millis(250),
            longest_wait: Duration::from_secs(30),
            sleep: None,
        }
    }
}

impl fmt::Debug for Retries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Retries")
            .field("limit", &self.limit)
            .field("first_wait", &self.first_wait)
            .field("longest_wait", &self.longest_wait)
            .finish_non_exhaustive()
    }
}
