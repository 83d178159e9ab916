//! Entry points for fuzzing: what is done with a request's headers.

use crate::target::Target;
use crate::{access, forward, upgrade};
use bytes::Bytes;
use http_body_util::Empty;
use hyper::header::HeaderMap;
use hyper::{Request, Uri};
use jiffy_content::token::Token;
use std::net::{IpAddr, Ipv4Addr};

pub use crate::forward::HOP_BY_HOP;

/// The headers that a VM gets of a request; `None` if it does not have the token, or its header
/// `Jiffy-Wait` is not valid.
pub fn passed_on(token: &str, uri: &Uri, mut headers: HeaderMap, to: &Target) -> Option<HeaderMap> {
    access::check(&Token::new(token), &mut headers).ok()?;
    forward::caller(&headers).ok()?;
    let _ = upgrade::asked(&headers);
    let mut request = Request::new(Empty::<Bytes>::new());
    *request.uri_mut() = uri.clone();
    *request.headers_mut() = headers;
    let from = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let passed = forward::pass_on(request, to, from, false, None);
    Some(passed.into_parts().0.headers)
}
