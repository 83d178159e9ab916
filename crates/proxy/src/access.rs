//! Who may send requests: whoever has the token.

use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use jiffy_content::error::Error;
use jiffy_content::token::{Token, bearer};
use jiffy_wire::api::ErrorKind;

/// The header with the token. `Authorization` may be the VM's own.
const TOKEN: &str = "jiffy-token";

/// Accepts a request that has the token, and takes the token away, which is not for the VM.
pub(crate) fn check(token: &Token, headers: &mut HeaderMap) -> Result<(), Error> {
    let sent = match headers.get(TOKEN) {
        Some(value) => Some((TOKEN, value.as_bytes())),
        None => headers
            .get(AUTHORIZATION)
            .and_then(|value| Some((AUTHORIZATION.as_str(), bearer(value.as_bytes())?))),
    };
    match sent {
        Some((header, sent)) if token.is(sent) => {
            headers.remove(header);
            Ok(())
        }
        Some((header, _)) => Err(refused(format!(
            "The token in the request's header {header} is not this proxy's."
        ))),
        None => Err(refused("The request has no token.".into())),
    }
}

fn refused(message: String) -> Error {
    Error::new(ErrorKind::Unauthorized, message).hint(
        "Send the token of the proxy as `Jiffy-Token: TOKEN` or `Authorization: Bearer TOKEN`.",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_passes_and_is_removed() {
        let token = Token::new("secret");
        let passed = |sent: &[(&'static str, &str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in sent {
                headers.append(*name, value.parse().unwrap());
            }
            check(&token, &mut headers).map(|()| {
                let left = headers.keys().map(|name| name.as_str().to_owned());
                left.collect::<Vec<_>>()
            })
        };
        let own = ("authorization", "Bearer its-own");
        assert_eq!(
            passed(&[("authorization", "Bearer secret")]),
            Ok(Vec::new())
        );
        assert_eq!(passed(&[("jiffy-token", "secret")]), Ok(Vec::new()));
        // The VM gets what is its own.
        let left = passed(&[("jiffy-token", "secret"), own]);
        assert_eq!(left, Ok(vec!["authorization".to_owned()]));
        for wrong in [
            &[][..],
            &[own],
            &[("authorization", "Basic secret")],
            &[("authorization", "secret")],
            &[("jiffy-token", "")],
            &[("jiffy-token", "Bearer secret")],
            &[("jiffy-token", "secre"), ("authorization", "Bearer secret")],
        ] {
            let error = passed(wrong).unwrap_err();
            assert_eq!(error.0.kind, ErrorKind::Unauthorized, "{wrong:?}");
            assert!(!error.0.message.contains("secre"), "{error:?}");
        }
    }
}
