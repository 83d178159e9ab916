//! The error type of all crates of the daemon: a kind, a sentence and an optional hint. The API
//! maps kinds to HTTP status codes.

use jiffy_registry::RegistryError;
use jiffy_sys::causes;
use jiffy_sys::durable::is_full;
use jiffy_wire::api::{ApiError, ErrorKind};
use std::io;
use std::path::Path;

/// An [`ApiError`] on its way to a client.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.message)]
pub struct Error(pub ApiError);

/// The result of an operation.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of any kind.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error(ApiError {
            kind,
            message: message.into(),
            hint: None,
            retry_after_s: None,
            exit_code: None,
        })
    }

    /// The same error with advice for the user.
    pub fn hint(mut self, hint: impl Into<String>) -> Error {
        self.0.hint = Some(hint.into());
        self
    }

    /// 400.
    pub fn invalid(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Invalid, message)
    }

    /// 404.
    pub fn not_found(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::NotFound, message)
    }

    /// 409, in use.
    pub fn conflict(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Conflict, message)
    }

    /// 409, not now.
    pub fn wrong_state(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::WrongState, message)
    }

    /// 507.
    pub fn no_room(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::NoRoom, message)
    }

    /// 502.
    pub fn vm_failed(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::VmFailed, message)
    }

    /// 502, a registry.
    pub fn registry(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Registry, message)
    }

    /// 500.
    pub fn internal(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Internal, message)
    }

    /// A file system error; its kind is `NoRoom` if the disk is full. `doing` completes "the node
    /// could not …".
    pub fn io(doing: &str, path: &Path, error: &io::Error) -> Error {
        if is_full(error) {
            return Error::no_room(format!(
                "The disk that holds {} is full: the node could not {doing}.",
                path.display()
            ))
            .hint("Free some space there, for example with `jiffy rm` and `jiffy image rm`.");
        }
        Error::internal(format!(
            "The node could not {doing}: {}: {error}.",
            path.display()
        ))
    }
}

/// Converts a registry error into one sentence and the kind that fits.
pub fn of_registry(error: &RegistryError, folder: &Path) -> Error {
    if let Some(error) = causes::find::<io::Error>(error)
        && is_full(error)
    {
        return Error::io("store the registry's data", folder, error);
    }
    let text = causes::sentence(error);
    let mut chars = text.chars();
    let text = match chars.next() {
        Some(first) => format!("{}{}.", first.to_uppercase(), chars.as_str()),
        None => text,
    };
    use RegistryError as R;
    let failed = match error {
        R::NotFound { .. } => Error::not_found(text)
            .hint("Check the name and tag. Some registries also give this answer to users who are not allowed to read a repository."),
        R::NoPlatform { .. } => {
            Error::not_found(text).hint("Choose one of them with --platform OS/ARCHITECTURE.")
        }
        R::Unauthorised { .. } => {
            Error::invalid(text).hint("Log in with `docker login`, or give --creds USER:PASSWORD.")
        }
        R::Insecure { source, .. } if source.to_string().contains("certificate") => Error::invalid(
            text,
        )
        .hint(
            "Give the file of the authority that signed the registry's certificate with --ca FILE.",
        ),
        R::Insecure { .. } => Error::invalid(text)
            .hint("If the registry has no TLS and you trust the network, give --plain-http."),
        R::Unreachable { .. } | R::Refused { .. } | R::Protocol { .. } | R::Damaged { .. } => {
            Error::registry(text)
        }
        R::File { .. } | R::Sink { .. } => Error::internal(text),
        _ => Error::invalid(text),
    };
    match error.hint() {
        Some(hint) if failed.0.hint.is_none() => failed.hint(hint),
        _ => failed,
    }
}
