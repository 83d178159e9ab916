//! The bearer token of the TCP listener.

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use jiffy_content::error::Error;
use jiffy_wire::api::ErrorKind;

/// The hash of the token that requests must carry.
#[derive(Debug, Clone)]
pub struct Token(blake3::Hash);

impl Token {
    /// From the token in plain text.
    pub fn new(token: &str) -> Token {
        Token(blake3::hash(token.as_bytes()))
    }

    /// Accepts a request that carries the token.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), Error> {
        let shown = headers
            .get(AUTHORIZATION)
            .and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        // Hashes are compared, so the time does not depend on how much of the token matches.
        match shown {
            Some(shown) if blake3::hash(shown) == self.0 => Ok(()),
            Some(_) => Err(refused("The token of the request is not this node's.")),
            None => Err(refused("The request carries no token.")),
        }
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
    fn only_the_token_itself_passes() {
        let token = Token::new("secret");
        let check = |value: Option<&str>| {
            let mut headers = HeaderMap::new();
            if let Some(value) = value {
                headers.insert(AUTHORIZATION, value.parse().unwrap());
            }
            token.check(&headers)
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
