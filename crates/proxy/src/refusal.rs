//! Why a request is not forwarded, as a response.

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};
use jiffy_content::error::Error;

/// Seconds after which a client may try again.
const AGAIN: HeaderValue = HeaderValue::from_static("1");

/// A status and an error.
#[derive(Debug)]
pub(crate) struct Refusal {
    status: StatusCode,
    error: Error,
}

impl Refusal {
    /// 404: there is no such VM, or the request names none.
    pub(crate) fn not_found(error: Error) -> Refusal {
        Refusal {
            status: StatusCode::NOT_FOUND,
            error,
        }
    }

    /// 502: the VM's port does not answer, or not in HTTP.
    pub(crate) fn bad_gateway(message: String) -> Refusal {
        Refusal {
            status: StatusCode::BAD_GATEWAY,
            error: Error::vm_failed(message),
        }
    }

    /// 503: the VM can't be woken, or does not run.
    pub(crate) fn unavailable(error: Error) -> Refusal {
        Refusal {
            status: StatusCode::SERVICE_UNAVAILABLE,
            error,
        }
    }

    /// As a response in JSON.
    pub(crate) fn response(self) -> Response<Full<Bytes>> {
        let body = serde_json::to_vec(&self.error.0).unwrap_or_default();
        let mut response = Response::new(Full::new(body.into()));
        *response.status_mut() = self.status;
        let json = HeaderValue::from_static("application/json");
        response.headers_mut().insert(CONTENT_TYPE, json);
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(RETRY_AFTER, AGAIN);
        }
        response
    }
}
