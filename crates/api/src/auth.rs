//! The bearer token of the TCP listener.

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use jiffy_content::error::Error;
use jiffy_content::token::{Token, bearer};
use jiffy_wire::api::ErrorKind;

/// Accepts a request that carries the token.
pub(crate) fn check(token: &Token, headers: &HeaderMap) -> Result<(), Error> {
    let sent = headers
        .get(AUTHORIZATION)
        .and_then(|value| bearer(value.as_bytes()));
    match sent {
        Some(sent) if token.is(sent) => Ok(()),
        Some(_) => Err(refused("The token of the request is not this node's.")),
        None => Err(refused("The request carries no token.")),
    }
}

fn refused(message: &str) -> Error {
    Error::new(ErrorKind::Unauthorized, message)
        .hint("Send `Authorization: Bearer` and the contents of the node's token file.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_exact_token_is_accepted() {
        let token = Token::new("secret");
        let check = |value: Option<&str>| {
            let mut headers = HeaderMap::new();
            if let Some(value) = value {
                headers.insert(AUTHORIZATION, value.parse().unwrap());
            }
            super::check(&token, &headers)
        };
        check(Some("Bearer secret")).unwrap();
        for wrong in [
            None,
            Some("secret"),
            Some("Bearer secre"),
            Some("Bearer secret2"),
            Some("Bearer "),
            Some("Basic secret"),
        ] {
            let error = check(wrong).unwrap_err();
            assert_eq!(error.0.kind, ErrorKind::Unauthorized, "{wrong:?}");
        }
    }
}
