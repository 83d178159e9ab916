//! The one error of the API: a kind, a sentence, perhaps a hint.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use jiffy_wire::api::{ApiError, ErrorKind};
use std::io;
use std::path::Path;

/// An [`ApiError`] on its way out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.message)]
pub struct Error(pub ApiError);

/// What operations of the node give.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of any kind.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error(ApiError {
            kind,
            message: message.into(),
            hint: None,
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

    /// A failure of the file system: `NoRoom` when that is the reason.
    /// `doing` completes "the node could not …".
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

/// Is the disk, or the quota on it, used up?
pub fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let status =
            StatusCode::from_u16(self.0.kind.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        if status == StatusCode::INTERNAL_SERVER_ERROR {
            tracing::error!(message = %self.0.message, "request failed");
        } else {
            tracing::debug!(kind = ?self.0.kind, message = %self.0.message, "request refused");
        }
        (status, Json(self.0)).into_response()
    }
}
