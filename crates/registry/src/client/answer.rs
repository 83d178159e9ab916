//! A registry's answer.

use super::url::Url;
use ureq::Body;
use ureq::http::header::{self, HeaderName};
use ureq::http::{Response, StatusCode};

/// An answer of a registry.
pub(super) struct Answer {
    pub(super) response: Response<Body>,
    /// The URL that sent it, after redirects.
    pub(super) url: Url,
}

impl Answer {
    pub(super) fn status(&self) -> StatusCode {
        self.response.status()
    }

    pub(super) fn header(&self, name: &HeaderName) -> Option<&str> {
        self.response.headers().get(name)?.to_str().ok()
    }

    /// `Content-Length`, if it is present and valid.
    pub(super) fn length(&self) -> Option<u64> {
        self.header(&header::CONTENT_LENGTH)?.trim().parse().ok()
    }
}
