//! Error responses of the proxy.

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::header::{
    CONNECTION, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE,
};
use hyper::{Response, StatusCode};
use jiffy_content::error::Error;

/// Seconds until a client may retry, unless the error gives another time.
const RETRY_AFTER_SECONDS: u32 = 1;
/// How a client authenticates (RFC 6750 §3).
const BEARER: HeaderValue = HeaderValue::from_static("Bearer");
/// Closes an HTTP/1.1 connection after the answer; hyper drops this header in HTTP/2.
const CLOSE: HeaderValue = HeaderValue::from_static("close");

/// A response to a client.
pub(crate) type Answer = Response<UnsyncBoxBody<Bytes, hyper::Error>>;

/// A status and an error.
#[derive(Debug)]
pub(crate) struct Refusal {
    status: StatusCode,
    error: Error,
}

impl Refusal {
    /// 400: plain HTTP on a TLS port.
    pub(crate) fn plain_http() -> Refusal {
        Refusal {
            status: StatusCode::BAD_REQUEST,
            error: Error::invalid("The proxy serves HTTPS at this address, not plain HTTP.")
                .hint("Use a URL that begins with https://."),
        }
    }

    /// 400: the request asks for what is not possible.
    pub(crate) fn invalid(error: Error) -> Refusal {
        Refusal {
            status: StatusCode::BAD_REQUEST,
            error,
        }
    }

    /// 400: the client sent an invalid body.
    pub(crate) fn damaged_body() -> Refusal {
        Refusal {
            status: StatusCode::BAD_REQUEST,
            error: Error::invalid("The body of the request is damaged or incomplete."),
        }
    }

    /// 401: the request does not have the proxy's token.
    pub(crate) fn unauthorized(error: Error) -> Refusal {
        Refusal {
            status: StatusCode::UNAUTHORIZED,
            error,
        }
    }

    /// 403: the VM's port is closed to the proxy.
    pub(crate) fn forbidden(error: Error) -> Refusal {
        Refusal {
            status: StatusCode::FORBIDDEN,
            error,
        }
    }

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

    /// 503: the VM can't be woken, or does not run, or the proxy is overloaded.
    pub(crate) fn unavailable(error: Error) -> Refusal {
        Refusal {
            status: StatusCode::SERVICE_UNAVAILABLE,
            error,
        }
    }

    /// The refusal as a JSON response.
    pub(crate) fn response(self) -> Answer {
        let body = serde_json::to_vec(&self.error.0).unwrap_or_default();
        let body = Full::from(body).map_err(|never| match never {});
        let mut response = Response::new(body.boxed_unsync());
        *response.status_mut() = self.status;
        let mut set = |name: HeaderName, value| {
            response.headers_mut().insert(name, value);
        };
        set(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match self.status {
            StatusCode::SERVICE_UNAVAILABLE => {
                let after_s = self.error.0.retry_after_s.unwrap_or(RETRY_AFTER_SECONDS);
                set(RETRY_AFTER, after_s.into());
            }
            // A client without the token must not hold its place by sending more requests unread.
            StatusCode::UNAUTHORIZED => {
                set(WWW_AUTHENTICATE, BEARER);
                set(CONNECTION, CLOSE);
            }
            StatusCode::BAD_REQUEST => set(CONNECTION, CLOSE),
            _ => {}
        }
        response
    }
}
