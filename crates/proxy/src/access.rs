//! Authenticates requests by the proxy's token.

use hyper::HeaderMap;
use hyper::header::{AUTHORIZATION, HeaderValue};
use jiffy_content::error::Error;
use jiffy_content::token::{Token, bearer};
use jiffy_wire::api::ErrorKind;

/// The header with the token. `Authorization` may be the VM's own.
const TOKEN: &str = "jiffy-token";

/// Accepts a request that has the token, and removes it from all headers: it is not for the VM.
pub(crate) fn check(token: &Token, headers: &mut HeaderMap) -> Result<(), Error> {
    let sent = match headers.get(TOKEN) {
        Some(value) => Some((TOKEN, value.as_bytes())),
        None => headers
            .get(AUTHORIZATION)
            .and_then(|value| Some((AUTHORIZATION.as_str(), bearer(value.as_bytes())?))),
    };
    match sent {
        Some((_, sent)) if token.is(sent) => {
            headers.remove(TOKEN);
            remove_from_authorization(token, headers);
            Ok(())
        }
        Some((header, _)) => Err(refused(format!(
            "The token in the request's header {header} is not this proxy's."
        ))),
        None => Err(refused("The request has no token.".into())),
    }
}

/// Removes the token and keeps all other values, which are for the VM.
fn remove_from_authorization(token: &Token, headers: &mut HeaderMap) {
    let is_token = |value: &HeaderValue| {
        let value = value.as_bytes();
        // The token may follow any scheme.
        let space = value.iter().position(u8::is_ascii_whitespace);
        let rest = value.get(space.unwrap_or(value.len())..);
        token.is(value) || rest.is_some_and(|rest| token.is(rest.trim_ascii()))
    };
    let values = headers.get_all(AUTHORIZATION).iter();
    let own: Vec<_> = values.filter(|it| !is_token(it)).cloned().collect();
    headers.remove(AUTHORIZATION);
    for value in own {
        headers.append(AUTHORIZATION, value);
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
    fn a_valid_token_is_accepted_and_removed() {
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
        // The VM gets its own credentials.
        let left = passed(&[("jiffy-token", "secret"), own]);
        assert_eq!(left, Ok(vec!["authorization".to_owned()]));
        // The VM gets the token nowhere.
        let bearer = ("authorization", "Bearer secret");
        for again in ["Bearer secret", "bearer  secret", "Basic secret", "secret"] {
            let both = [("jiffy-token", "secret"), ("authorization", again)];
            assert_eq!(passed(&both), Ok(Vec::new()), "{again}");
        }
        assert_eq!(
            passed(&[bearer, bearer, own]),
            Ok(vec!["authorization".to_owned()])
        );
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
