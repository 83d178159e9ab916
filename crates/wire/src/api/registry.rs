//! Pulls from registries and pushes to them.

use super::{ApiError, Image, Snapshot};
use serde::{Deserialize, Serialize};

/// Access to a registry.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RegistryAccess {
    /// User name and password.
    pub credentials: Option<(String, String)>,
    /// Token from a credential helper.
    pub identity_token: Option<String>,
    /// Use HTTP without TLS. Loopback registries are tried without TLS in any case.
    pub plain_http: bool,
    /// Certificates to trust besides the system's, PEM.
    pub ca: Option<String>,
    /// Public key, PEM; only manifests signed by it are accepted.
    pub verify_key: Option<String>,
    /// Registry of references without one.
    pub registry: Option<String>,
}

impl core::fmt::Debug for RegistryAccess {
    /// Leaves secrets out.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let user = self.credentials.as_ref().map(|(user, _)| user);
        f.debug_struct("RegistryAccess")
            .field("user", &user)
            .field("plain_http", &self.plain_http)
            .field("registry", &self.registry)
            .finish_non_exhaustive()
    }
}

/// Body of `POST /v1/pulls`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PullImage {
    /// `HOST/REPO:TAG`, `HOST/REPO@DIGEST`, or a name of the default registry.
    pub reference: String,
    /// Ask the registry even if an image of this reference is stored here.
    #[serde(default)]
    pub renew: bool,
    /// Platform, such as `linux/amd64`; `None` means the host's.
    #[serde(default)]
    pub platform: Option<String>,
    /// Access to the registry.
    #[serde(default)]
    pub access: RegistryAccess,
}

/// Body of `POST /v1/pushes`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PushArtifact {
    /// Name of the image or snapshot.
    pub name: String,
    /// Kind of artifact; `None` looks for an image, then a snapshot.
    #[serde(default)]
    pub kind: Option<ArtifactKind>,
    /// `HOST/REPO:TAG`.
    pub reference: String,
    /// Access to the registry.
    #[serde(default)]
    pub access: RegistryAccess,
}

/// Kind of artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArtifactKind {
    /// A root file system.
    Image,
    /// A captured VM.
    Snapshot,
}

/// Progress of a pull or push. The last one is `Pulled`, `PulledSnapshot`, `Pushed` or `Failed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PullStep {
    /// Current step, in a few words.
    Doing(String),
    /// Progress of one blob.
    Blob {
        /// Its digest, `sha256:…`.
        digest: String,
        /// Bytes transferred.
        done: u64,
        /// Size in bytes.
        total: u64,
    },
    /// An image was pulled.
    Pulled {
        /// The image.
        image: Image,
        /// Bytes fetched over the network.
        fetched: u64,
    },
    /// A snapshot was pulled.
    PulledSnapshot {
        /// The snapshot.
        snapshot: Snapshot,
        /// Bytes fetched over the network.
        fetched: u64,
    },
    /// The artifact was pushed.
    Pushed {
        /// Digest of its manifest, `sha256:…`.
        manifest: String,
        /// Bytes uploaded.
        sent: u64,
        /// Bytes that the registry had already.
        had: u64,
    },
    /// It failed; nothing was changed.
    Failed(ApiError),
}
