//! [`Client`], which implements the distribution protocol.
//!
//! OCI distribution specification 1.1. A client is cheap to clone and may be used from many
//! threads; clones share connections and tokens.
//!
//! * [`options`]: time limits, retries, credentials, certificates.
//! * `exchange`: one request, with its authorisation and redirects.
//! * `authorisation`, `challenge`: passwords and tokens.
//! * `manifests`, `blobs`: downloads; `push`: uploads.
//! * `transport`, `resolver`, `url`: connections and addresses.
//! * `failure`, `retry`: errors and retries.

mod answer;
mod authorisation;
mod blobs;
mod challenge;
mod exchange;
mod failure;
mod manifests;
pub mod options;
mod push;
mod resolver;
mod retry;
mod source;
#[cfg(feature = "testing")]
pub mod testing;
mod transport;
mod url;

pub use manifests::{Fetched, Image};
pub use options::{ClientOptions, PlainHttp, Retries};
pub use push::Uploaded;
pub use source::Source;

use crate::error::Result;
use std::sync::Arc;

/// A client of OCI registries.
#[derive(Clone)]
pub struct Client {
    inner: Arc<exchange::Exchange>,
}

impl Client {
    /// A client with these options. Reads the files of certificates; connects to
    /// nothing.
    ///
    /// # Errors
    ///
    /// If a file of certificates can't be read or has none, or the user agent is not valid.
    pub fn new(options: ClientOptions) -> Result<Self> {
        Ok(Self {
            inner: Arc::new(exchange::Exchange::new(options)?),
        })
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}
