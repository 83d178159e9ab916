//! For fuzzing: what a registry or its server for tokens says, read without one.

use super::url::Url;
use super::{authorisation, challenge, failure, manifests};
use crate::credentials::{Login, Secret};

/// Reads the header of a refusal, and makes the request for a token that follows.
///
/// # Panics
///
/// If the request is not one that HTTP takes.
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

/// Reads an answer of a server for tokens.
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

/// Reads the headers of an answer: where it leads, the next page, when to come again.
///
/// # Panics
///
/// If it leads to what is no address of HTTP.
pub fn headers(text: &str) {
    let from = Url::parse("https://example.com/v2/a/tags/list").expect("an address");
    let links = [Some(text), manifests::next_link(text)];
    for location in links.into_iter().flatten() {
        if let Ok(url) = from.join(location) {
            sent(&url.clone().with_query("digest", text));
            let _ = (url.shares_domain(&from), url.is_here(), url.is_plain());
            let _ = (url.host(), url.origin(), url.secure());
        }
    }
    let _ = failure::retry_after(text);
}

/// Reads the text of a refusal.
pub fn refusal(text: &[u8]) -> String {
    failure::detail_in(text)
}

fn sent(url: &Url) {
    let uri: Result<ureq::http::Uri, _> = url.to_string().parse();
    uri.expect("an address of HTTP");
}
