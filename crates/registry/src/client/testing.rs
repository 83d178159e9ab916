//! For fuzzing: parses a registry's or token server's answers without a connection.

use super::url::Url;
use super::{authorisation, challenge, failure, manifests};
use crate::credentials::{Login, Secret};

/// Parses the challenge of a refusal and builds the token request.
///
/// # Panics
///
/// If the request is not valid HTTP.
pub fn challenges(header: &str, login: bool) {
    let login = login.then(|| Login::Password {
        user: "ali".into(),
        password: Secret::new("open sesame"),
    });
    for challenge in challenge::parse(header) {
        let Ok(realm) = authorisation::realm(&challenge) else {
            continue;
        };
        let scopes = ["repository:a/b:pull".to_owned()];
        let request = authorisation::token_request(&challenge, realm, &scopes, login.as_ref());
        sent(&request.url);
    }
}

/// Parses the answer of a token server.
///
/// # Panics
///
/// If the token can't be put into a header.
pub fn token(answer: &[u8]) {
    if let Ok(held) = authorisation::token(answer, "a", "b") {
        let value = ureq::http::HeaderValue::from_str(held.value.reveal());
        value.expect("a token fits a header");
    }
}

/// Parses headers of an answer: a redirect, the next page, the time of a retry.
///
/// # Panics
///
/// If a redirect is not a valid HTTP address.
pub fn headers(text: &str) {
    let from = Url::parse("https://example.com/v2/a/tags/list").expect("an address");
    let links = [Some(text), manifests::next_link(text)];
    for location in links.into_iter().flatten() {
        if let Ok(url) = from.join(location) {
            sent(&url.clone().with_query("digest", text));
            let _ = (
                url.shares_domain(&from),
                url.is_this_computer(),
                url.is_plain(),
            );
            let _ = (url.host(), url.origin(), url.secure());
        }
    }
    let _ = failure::retry_after(text);
}

/// Parses the text of a refusal.
pub fn refusal(text: &[u8]) -> String {
    failure::detail_in(text)
}

fn sent(url: &Url) {
    let uri: Result<ureq::http::Uri, _> = url.to_string().parse();
    uri.expect("an HTTP address");
}
