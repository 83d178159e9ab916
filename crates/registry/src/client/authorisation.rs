//! Cached authorisation: passwords and tokens, by registry and scope.

use super::challenge::Challenge;
use super::url::{Origin, Url};
use crate::RegistryError;
use crate::credentials::{Login, Secret};
use crate::error::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiffy_oci::one_line;
use jiffy_sys::mutex::lock;
use serde::Deserialize;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use url::form_urlencoded;

/// The lifetime of a token whose server does not give one (Docker's token specification), seconds.
const DEFAULT_LIFE: u64 = 60;

/// The values of `Authorization` that registries accept.
#[derive(Default)]
pub(super) struct Authorisations {
    cached: Mutex<HashMap<Key, Cached>>,
}

/// The origin and scopes that a value is valid for. It is never sent to another origin.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) origin: Origin,
    /// Sorted: `repository:a/b:pull`.
    pub(super) scopes: Vec<String>,
}

#[derive(Clone)]
pub(super) struct Cached {
    pub(super) value: Secret,
    /// When it expires.
    expires: Option<Instant>,
}

impl Authorisations {
    /// The cached value for this key; `None` if it has expired.
    pub(super) fn get(&self, key: &Key) -> Option<Secret> {
        let mut cached = self.lock();
        let found = cached.get(key)?;
        if found
            .expires
            .is_some_and(|expires| Instant::now() >= expires)
        {
            cached.remove(key);
            return None;
        }
        Some(found.value.clone())
    }

    pub(super) fn put(&self, key: Key, value: Cached) {
        self.lock().insert(key, value);
    }

    /// Drops a value that was refused, unless it was replaced meanwhile.
    pub(super) fn refused(&self, key: &Key, value: &Secret) {
        let mut cached = self.lock();
        if cached.get(key).is_some_and(|cached| cached.value == *value) {
            cached.remove(key);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Cached>> {
        lock(&self.cached)
    }
}

/// A request to a token server.
pub(super) struct TokenRequest {
    pub(super) url: Url,
    /// `Authorization` for it.
    pub(super) authorisation: Option<Secret>,
    /// A form to be sent by POST; otherwise it is a GET.
    pub(super) form: Option<Secret>,
}

/// `Authorization` for a user and a password.
pub(super) fn basic(user: &str, password: &Secret) -> Cached {
    let pair = STANDARD.encode(format!("{user}:{}", password.reveal()));
    Cached {
        value: Secret::new(format!("Basic {pair}")),
        expires: None,
    }
}

/// The token server that a `Bearer` challenge names.
pub(super) fn realm(challenge: &Challenge) -> std::result::Result<Url, String> {
    let realm = challenge.parameters.get("realm");
    Url::parse(realm.ok_or("it names no token server")?)
}

/// The request to the token server of a `Bearer` challenge.
pub(super) fn token_request(
    challenge: &Challenge,
    realm: Url,
    scopes: &[String],
    login: Option<&Login>,
) -> TokenRequest {
    let parameter = |name: &str| challenge.parameters.get(name);
    let scopes = merge_scopes(scopes, parameter("scope"));
    if let Some(Login::Identity(token)) = login {
        let mut form = form_urlencoded::Serializer::new(String::new());
        form.append_pair("grant_type", "refresh_token")
            .append_pair("client_id", "jiffy")
            .append_pair("refresh_token", token.reveal())
            .append_pair("scope", &scopes.join(" "));
        if let Some(service) = parameter("service") {
            form.append_pair("service", service);
        }
        return TokenRequest {
            url: realm,
            authorisation: None,
            form: Some(Secret::new(form.finish())),
        };
    }
    let mut url = realm;
    if let Some(service) = parameter("service") {
        url = url.with_query("service", service);
    }
    for scope in &scopes {
        url = url.with_query("scope", scope);
    }
    let authorisation = match login {
        Some(Login::Password { user, password }) => {
            url = url.with_query("account", user);
            Some(basic(user, password).value)
        }
        _ => None,
    };
    TokenRequest {
        url,
        authorisation,
        form: None,
    }
}

/// The scopes of a call and of the registry's challenge, without duplicates.
fn merge_scopes(ours: &[String], asked: Option<&String>) -> Vec<String> {
    let mut all = ours.to_vec();
    for scope in asked.iter().flat_map(|asked| asked.split_whitespace()) {
        let covered = all.iter().any(|have| covers(have, scope));
        if !covered && all.len() < 16 {
            all.push(scope.to_owned());
        }
    }
    all
}

/// Whether one scope includes another: `repository:a:pull,push` includes `repository:a:pull`.
fn covers(have: &str, asked: &str) -> bool {
    let (Some((resource, actions)), Some((other, others))) =
        (have.rsplit_once(':'), asked.rsplit_once(':'))
    else {
        return have == asked;
    };
    resource == other
        && others
            .split(',')
            .all(|action| actions.split(',').any(|have| have == action))
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
    expires_in: Option<u64>,
}

/// Parses a token server's answer.
pub(super) fn token(answer: &[u8], what: &str, server: &str) -> Result<Cached> {
    let bad = |why: &str| RegistryError::protocol(what, format!("the token server {server} {why}"));
    let token: Token =
        serde_json::from_slice(answer).map_err(|_| bad("gave an answer that is not a token"))?;
    let text = [token.token, token.access_token]
        .into_iter()
        .flatten()
        .find(|text| !text.is_empty())
        .ok_or_else(|| bad("gave no token"))?;
    if !text.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(bad(
            "gave a token with characters that are not allowed in a header",
        ));
    }
    let life = token.expires_in.unwrap_or(DEFAULT_LIFE).clamp(1, 86_400);
    // Reduced by a tenth, because the request takes time to arrive.
    let life = Duration::from_secs(life).mul_f64(0.9);
    Ok(Cached {
        value: Secret::new(format!("Bearer {text}")),
        expires: Some(Instant::now() + life),
    })
}

/// The error of a refused request, with the registry's message.
pub(super) fn unauthorised(
    what: &str,
    host: &str,
    had_credentials: bool,
    detail: &str,
) -> RegistryError {
    let reason = if had_credentials {
        "the credentials are not accepted, or do not permit this"
    } else {
        "it requires credentials, or the repository does not exist"
    };
    let detail = one_line(detail);
    RegistryError::Unauthorised {
        what: what.to_owned(),
        host: host.to_owned(),
        detail: if detail.is_empty() {
            reason.to_owned()
        } else {
            format!("{reason} ({detail})")
        },
    }
}

/// The error when credentials for a registry must not be sent to its token server.
pub(super) fn credentials_withheld(what: &str, registry: &str, server: &str) -> RegistryError {
    RegistryError::Unauthorised {
        what: what.to_owned(),
        host: registry.to_owned(),
        detail: format!(
            "its credentials would be sent to {server}, which is in another domain; log in \
             to {server} as well to allow this"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::challenge;
    use super::*;

    fn request(header: &str, login: Option<&Login>) -> std::result::Result<TokenRequest, String> {
        let challenges = challenge::parse(header);
        let scopes = ["repository:a:pull,push".into()];
        let realm = realm(&challenges[0])?;
        Ok(token_request(&challenges[0], realm, &scopes, login))
    }

    #[test]
    fn a_token_request_has_our_scopes_and_the_registrys() {
        let header = r#"Bearer realm="https://t.example/token?x=1",service="s",scope="repository:a:pull repository:b:pull""#;
        let login = Login::Password {
            user: "me".into(),
            password: Secret::new("pw"),
        };
        let asked = request(header, Some(&login)).unwrap();
        assert_eq!(
            asked.url.to_string(),
            "https://t.example/token?x=1&service=s&scope=repository%3Aa%3Apull%2Cpush\
             &scope=repository%3Ab%3Apull&account=me"
        );
        assert_eq!(asked.authorisation.unwrap().reveal(), "Basic bWU6cHc=");
        assert!(asked.form.is_none());
        assert!(request(header, None).unwrap().authorisation.is_none());

        let asked = request(header, Some(&Login::Identity(Secret::new("i d")))).unwrap();
        assert!(asked.authorisation.is_none());
        let form = asked.form.unwrap();
        assert!(
            form.reveal().contains("refresh_token=i+d"),
            "{}",
            form.reveal()
        );

        assert!(request("Bearer service=x", None).is_err());
        assert!(request("Bearer realm=\"file:///etc/passwd\"", None).is_err());
    }

    #[test]
    fn tokens_are_read_and_expire() {
        let cached = token(br#"{"token":"abc","expires_in":300}"#, "x", "h").unwrap();
        assert_eq!(cached.value.reveal(), "Bearer abc");
        let cached = token(br#"{"access_token":"abc"}"#, "x", "h").unwrap();
        assert!(cached.expires.unwrap() <= Instant::now() + Duration::from_secs(60));
        for bad in ["", "{}", r#"{"token":""}"#, r#"{"token":"a\r\nb"}"#, "[]"] {
            assert!(token(bad.as_bytes(), "x", "h").is_err(), "{bad}");
        }

        let cached = Authorisations::default();
        let key = Key {
            origin: Url::parse("https://h.example/").unwrap().origin(),
            scopes: vec![],
        };
        let expires = Some(Instant::now());
        let value = Secret::new("old");
        cached.put(key.clone(), Cached { value, expires });
        assert!(cached.get(&key).is_none());
    }
}
