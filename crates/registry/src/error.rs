//! Errors of registry operations.

use crate::reference::ReferenceError;
use jiffy_oci::ManifestError;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why an operation with a registry failed.
///
/// `what` is the operation or its object, as the middle of a sentence: "manifest
/// localhost:5000/alpine:3". Texts from a registry are cut to one line and have no control
/// characters.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// A malformed name.
    #[error(transparent)]
    Reference(#[from] ReferenceError),

    /// The connection failed or broke, after all retries.
    #[error("{what}: the connection to {host} failed")]
    Unreachable {
        /// The operation.
        what: String,
        /// The host: the registry, or one to which it redirected.
        host: String,
        /// The connection's error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// TLS failed: the certificate is not trusted, or the server does not speak TLS.
    #[error("{what}: no secure connection to {host}")]
    Insecure {
        /// The operation.
        what: String,
        /// The host: the registry, or one to which it redirected.
        host: String,
        /// The TLS error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// Missing or invalid credentials, or not enough rights.
    #[error("{what}: {host} refuses: {detail}")]
    Unauthorised {
        /// The operation.
        what: String,
        /// The registry.
        host: String,
        /// The registry's reason, or this client's.
        detail: String,
    },

    /// It does not exist in the registry.
    #[error("{what} is not in the registry")]
    NotFound {
        /// The manifest, blob or other object.
        what: String,
    },

    /// The registry answered with an error, after all retries.
    #[error("{what}: {host} answered {status}{detail}")]
    Refused {
        /// The operation.
        what: String,
        /// The registry.
        host: String,
        /// The HTTP status.
        status: u16,
        /// The registry's message after ": ", or nothing.
        detail: String,
        /// How long the registry asked to wait.
        retry_after: Option<Duration>,
    },

    /// The bytes do not match their digest or size.
    #[error("{what} is damaged: {reason}")]
    Damaged {
        /// The manifest or blob.
        what: String,
        /// What is wrong with it.
        reason: String,
    },

    /// The answer violates the protocol.
    #[error("{what}: {reason}")]
    Protocol {
        /// The operation.
        what: String,
        /// What is wrong with the answer.
        reason: String,
    },

    /// Valid, but of a kind that Jiffy does not support.
    #[error("{what} can't be used: {reason}")]
    Unsupported {
        /// The manifest or blob.
        what: String,
        /// What it is.
        reason: String,
    },

    /// An index has no image for the platform.
    #[error("{what} has no image for {wanted}; it has {available}")]
    NoPlatform {
        /// The index.
        what: String,
        /// The platform that was asked for.
        wanted: String,
        /// The platforms in the index.
        available: String,
    },

    /// A Docker configuration or a credential helper that can't be used.
    #[error("credentials for {host}: {reason}")]
    Credentials {
        /// The registry.
        host: String,
        /// What is wrong.
        reason: String,
    },

    /// No signature by the key.
    #[error("{what} is not signed by this key: {reason}")]
    Unsigned {
        /// The manifest.
        what: String,
        /// The reason, such as other signatures.
        reason: String,
    },

    /// A key that can't be used.
    #[error("the key can't be used: {0}")]
    Key(String),

    /// An invalid option of the client.
    #[error("{0}")]
    Options(String),

    /// A local file could not be read or written.
    #[error("can't {action} {path}", path = path.display())]
    File {
        /// The action: "write".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },

    /// The source or destination of the bytes failed.
    #[error("{what}: can't read or write its bytes")]
    Sink {
        /// The blob.
        what: String,
        /// Its error.
        #[source]
        source: io::Error,
    },

    /// Cancelled by [`Progress::cancelled`](crate::Progress::cancelled).
    #[error("{what} was cancelled")]
    Cancelled {
        /// The operation.
        what: String,
    },
}

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, RegistryError>;

impl RegistryError {
    /// Whether the same request may succeed later: a broken connection, 408, 429, 5xx.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Refused { status, .. } => matches!(status, 408 | 429 | 500..=599),
            _ => false,
        }
    }

    /// A hint for the user, when there is one.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Unauthorised { .. } => {
                Some("log in with docker login or podman login, or give a user and a password")
            }
            Self::Insecure { source, .. } if source.to_string().contains("certificate") => {
                Some("give the file of the authority that signed the registry's certificate")
            }
            Self::Insecure { .. } => {
                Some("if the registry has no TLS and you trust the network, allow plain HTTP")
            }
            _ => None,
        }
    }

    pub(crate) fn file(action: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::File {
            action,
            path: path.into(),
            source,
        }
    }

    pub(crate) fn damaged(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Damaged {
            what: what.into(),
            reason: reason.into(),
        }
    }

    /// The manifest `what` can't be used.
    pub(crate) fn manifest(what: impl Into<String>, error: ManifestError) -> Self {
        let what = what.into();
        match error {
            ManifestError::Schema1 | ManifestError::OtherKind(_) => Self::Unsupported {
                what,
                reason: error.to_string(),
            },
            ManifestError::Json(ref source) => Self::damaged(what, format!("{error}: {source}")),
            ManifestError::TwoKinds { .. } | ManifestError::Both => {
                Self::damaged(what, error.to_string())
            }
        }
    }

    pub(crate) fn protocol(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Protocol {
            what: what.into(),
            reason: reason.into(),
        }
    }
}
