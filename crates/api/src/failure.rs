//! Errors and empty results as HTTP responses.

use axum::Json;
use axum::body::Body;
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::{IntoResponse, Response};
use jiffy_content::error::Error;

/// An [`Error`] as a response.
#[derive(Debug)]
pub struct Failure(Error);

/// The result of a route.
pub type Result<T> = std::result::Result<T, Failure>;

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure(error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let Error(error) = self.0;
        let status =
            StatusCode::from_u16(error.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        if status == StatusCode::INTERNAL_SERVER_ERROR {
            tracing::error!(message = %error.message, "request failed");
        } else {
            tracing::debug!(kind = ?error.kind, message = %error.message, "request refused");
        }
        let after_s = error.retry_after_s;
        let mut response = (status, Json(error)).into_response();
        if let Some(after_s) = after_s {
            response.headers_mut().insert(RETRY_AFTER, after_s.into());
        }
        response
    }
}

/// Status 204, without a body.
pub fn no_content() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    response
}
