//! One request, with its authorisation and redirects.

use super::answer::Answer;
use super::authorisation::{self, Authorisations, Key};
use super::challenge::{self, Challenge};
use super::failure::{broken, detail_of, refusal, unreachable};
use super::options::{ClientOptions, PlainHttp};
use super::retry::Retrier;
use super::source::Source;
use super::transport::{Route, Transport, is_tls_error};
use super::url::{Scheme, Url};
use crate::credentials::{Login, Secret};
use crate::error::Result;
use crate::reference::host_of;
use crate::{Descriptor, Progress, Reference, RegistryError};
use jiffy_oci::one_line;
use jiffy_sys::mutex::lock;
use std::collections::HashSet;
use std::io::{self, Read, SeekFrom};
use std::sync::Mutex;
use std::time::Instant;
use ureq::http::header::{self, HeaderName, HeaderValue};
use ureq::http::{Method, Request, Response, StatusCode};
use ureq::{Body, SendBody};

/// Most redirects of one request.
const MAX_REDIRECTS: usize = 5;

/// The largest answer of a token server, bytes.
const MAX_TOKEN: u64 = 1 << 20;

/// State shared by all clones of a client.
pub(super) struct Exchange {
    pub(super) options: ClientOptions,
    transport: Transport,
    authorisations: Authorisations,
    /// Held while a token is requested, so that several threads request it once.
    requesting_token: Mutex<()>,
    /// Registries on this computer that require TLS.
    secure: Mutex<HashSet<String>>,
}

/// A request to a registry.
pub(super) struct Call<'a> {
    /// Its purpose, for errors.
    pub(super) what: &'a str,
    /// The repository it is about.
    pub(super) repository: &'a Reference,
    pub(super) method: Method,
    pub(super) url: Url,
    pub(super) headers: Vec<(HeaderName, String)>,
    /// The rights it needs: `repository:a/b:pull`.
    pub(super) scopes: Vec<String>,
    pub(super) payload: Payload<'a>,
    /// When the whole answer must have arrived.
    pub(super) deadline: Option<Instant>,
}

/// The body of a request.
pub(super) enum Payload<'a> {
    Nothing,
    Bytes(&'a [u8]),
    /// A blob, from this position of a source.
    Blob {
        source: &'a mut dyn Source,
        start: u64,
        blob: &'a Descriptor,
        progress: &'a dyn Progress,
    },
}

impl Exchange {
    pub(super) fn new(options: ClientOptions) -> Result<Self> {
        if HeaderValue::from_str(&options.user_agent).is_err() {
            return Err(RegistryError::Options(format!(
                "{:?} can't be a user agent",
                one_line(&options.user_agent)
            )));
        }
        Ok(Self {
            transport: Transport::new(&options)?,
            options,
            authorisations: Authorisations::default(),
            requesting_token: Mutex::new(()),
            secure: Mutex::default(),
        })
    }

    pub(super) fn retrier<'a>(&'a self, what: &'a str, progress: &'a dyn Progress) -> Retrier<'a> {
        Retrier::new(&self.options.retries, what, progress)
    }

    /// An address in a repository: `tail` is what follows its name.
    pub(super) fn url(&self, repository: &Reference, tail: &str) -> Result<Url> {
        let path = format!("/v2/{}/{tail}", repository.repository());
        let url = Url::new(self.scheme(repository), repository.registry(), &path);
        url.map_err(|why| RegistryError::protocol(repository.to_string(), why))
    }

    fn scheme(&self, repository: &Reference) -> Scheme {
        let plain = match self.options.plain_http {
            PlainHttp::Everywhere => true,
            PlainHttp::Loopback => {
                repository.is_loopback() && !self.secure().contains(repository.registry())
            }
        };
        if plain { Scheme::Http } else { Scheme::Https }
    }

    fn secure(&self) -> std::sync::MutexGuard<'_, HashSet<String>> {
        lock(&self.secure)
    }

    /// Sends a request once. Anything but a 2xx is an error.
    pub(super) fn send(&self, mut call: Call<'_>) -> Result<Answer> {
        let mut answer = self.authorised(&mut call)?;
        if answer.status() == StatusCode::BAD_REQUEST && self.wants_tls(&call) {
            call.url = call.url.secure();
            answer = self.authorised(&mut call)?;
        }
        if answer.status().is_success() {
            return Ok(answer);
        }
        Err(refusal(call.what, answer))
    }

    /// Whether a registry on this computer requires TLS: such servers answer plain HTTP with 400.
    /// The probe contains no secrets.
    fn wants_tls(&self, call: &Call<'_>) -> bool {
        let registry = call.repository.registry();
        if !call.url.is_plain()
            || !call.repository.is_loopback()
            || self.options.plain_http != PlainHttp::Loopback
        {
            return false;
        }
        // Another request has found this out since this one was sent.
        if self.secure().contains(registry) {
            return true;
        }
        let Ok(url) = Url::new(Scheme::Https, registry, "/v2/") else {
            return false;
        };
        let Ok(request) = Request::get(url.to_string()).body(()) else {
            return false;
        };
        let route = self.route(call, &url);
        // An untrusted certificate also proves TLS; the request itself will report it.
        let tls = match self.transport.send(&url, &route, request) {
            Ok(_) => true,
            Err(error) => is_tls_error(&error) && error.to_string().contains("certificate"),
        };
        if tls {
            self.secure().insert(registry.to_owned());
        }
        tls
    }

    /// Sends a request, and repeats it once with (new) authorisation if it is refused.
    fn authorised(&self, call: &mut Call<'_>) -> Result<Answer> {
        let mut scopes = call.scopes.clone();
        scopes.sort();
        let key = Key {
            origin: call.url.origin(),
            scopes,
        };
        let registry = self.url(call.repository, "")?;
        // An upload may go to another host, which must not get the registry's credentials.
        let ours = key.origin == registry.origin() || key.origin == registry.secure().origin();
        // A value that was just obtained is used even if it has expired by now.
        let mut given = None;
        loop {
            let asked = given.is_some();
            let value = match given.take() {
                None if ours => self.authorisations.get(&key),
                other => other,
            };
            let answer = self.follow(call, value.as_ref())?;
            let here = answer.url.origin() == key.origin;
            if answer.status() != StatusCode::UNAUTHORIZED || !ours || !here {
                return Ok(answer);
            }
            if let Some(value) = &value {
                self.authorisations.refused(&key, value);
            }
            let challenges = challenges(&answer);
            let detail = detail_of(answer);
            if asked {
                let host = call.url.authority();
                return Err(authorisation::unauthorised(call.what, host, true, &detail));
            }
            given = Some(self.authorise(&key, call, &challenges, &detail)?);
        }
    }

    /// Gets a value for `Authorization`, unless another thread just did.
    fn authorise(
        &self,
        key: &Key,
        call: &Call<'_>,
        challenges: &[Challenge],
        detail: &str,
    ) -> Result<Secret> {
        let _one_at_a_time = lock(&self.requesting_token);
        if let Some(value) = self.authorisations.get(key) {
            return Ok(value);
        }
        let host = call.url.authority();
        let repository = call.repository;
        let login = self
            .options
            .credentials
            .login(repository.registry(), repository.repository())?;
        let by = |scheme: &str| challenges.iter().find(|known| known.scheme == scheme);
        let held = if let Some(bearer) = by("bearer") {
            self.token(call, bearer, login)?
        } else if by("basic").is_some() {
            match &login {
                Some(Login::Password { user, password }) => authorisation::basic(user, password),
                Some(Login::Identity(_)) | None => {
                    return Err(authorisation::unauthorised(call.what, host, false, detail));
                }
            }
        } else {
            let ways: Vec<&str> = challenges.iter().map(|known| &*known.scheme).collect();
            let ways = one_line(&ways.join(", "));
            return Err(RegistryError::Unauthorised {
                what: call.what.to_owned(),
                host: host.to_owned(),
                detail: format!("it requires neither Basic nor Bearer, but {ways:?}"),
            });
        };
        let value = held.value.clone();
        self.authorisations.put(key.clone(), held);
        Ok(value)
    }

    /// Requests a token.
    fn token(
        &self,
        call: &Call<'_>,
        bearer: &Challenge,
        login: Option<Login>,
    ) -> Result<authorisation::Cached> {
        let what = call.what;
        let unusable = |why| RegistryError::protocol(what, format!("can't request a token: {why}"));
        let realm = authorisation::realm(bearer).map_err(unusable)?;
        let server = realm.authority().to_owned();
        let refused = |why: &str| {
            RegistryError::protocol(what, format!("the registry's token server {server} {why}"))
        };
        let is_other_host = realm.origin() != call.url.origin();
        if is_other_host && realm.is_this_computer() && !call.repository.is_loopback() {
            return Err(refused("is this computer"));
        }
        let plain_is_fine =
            self.options.plain_http == PlainHttp::Everywhere || realm.is_this_computer();
        if realm.is_plain() && !plain_is_fine {
            return Err(refused("is addressed without TLS"));
        }
        let login = match login {
            Some(_) if !self.may_get_credentials(call, &realm) => {
                let server = realm.authority();
                // The user may have credentials for that host, too.
                let own = self.options.credentials.login(server, "")?;
                Some(own.ok_or_else(|| {
                    authorisation::credentials_withheld(what, call.url.authority(), server)
                })?)
            }
            login => login,
        };
        let login = login.as_ref();
        let asked = authorisation::token_request(bearer, realm, &call.scopes, login);
        let route = self.route(call, &asked.url);
        let mut builder = Request::get(asked.url.to_string());
        if let Some(value) = &asked.authorisation {
            builder = builder.header(header::AUTHORIZATION, sensitive(value));
        }
        let answer = match &asked.form {
            None => builder
                .body(())
                .map_err(ureq::Error::from)
                .and_then(|request| self.transport.send(&asked.url, &route, request)),
            Some(form) => builder
                .method(Method::POST)
                .header(header::CONTENT_TYPE, "application/x-www-form-urlencoded")
                .body(form.reveal().as_bytes())
                .map_err(ureq::Error::from)
                .and_then(|request| self.transport.send(&asked.url, &route, request)),
        };
        let response = answer.map_err(|error| broken(what, &server, error))?;
        let answer = Answer {
            response,
            url: asked.url,
        };
        if answer.status().is_redirection() {
            return Err(refused("redirects the request"));
        }
        if matches!(answer.status().as_u16(), 400 | 401 | 403) {
            let detail = detail_of(answer);
            return Err(authorisation::unauthorised(
                what,
                &server,
                login.is_some(),
                &detail,
            ));
        }
        if !answer.status().is_success() {
            return Err(refusal(what, answer));
        }
        let text = self.read_small(what, answer, MAX_TOKEN)?;
        authorisation::token(&text, what, &server)
    }

    /// The user named only the registry's own host; the registry named all others.
    fn route(&self, call: &Call<'_>, url: &Url) -> Route {
        let named = host_of(call.repository.registry()) == url.host();
        Route::new(!named && !call.repository.is_loopback(), call.deadline)
    }

    /// Whether credentials for the registry may be sent to the token server that it names: on this
    /// computer if the registry is too, on the registry's own host, or by TLS in its domain.
    fn may_get_credentials(&self, call: &Call<'_>, realm: &Url) -> bool {
        let local = call.repository.is_loopback() && realm.is_this_computer();
        local
            || realm.host() == call.url.host()
            || !realm.is_plain() && realm.shares_domain(&call.url)
    }

    /// Sends a request and follows redirects. The authorisation is sent to the first host only.
    fn follow(&self, call: &mut Call<'_>, value: Option<&Secret>) -> Result<Answer> {
        let what = call.what;
        let first = call.url.origin();
        let mut url = call.url.clone();
        for _ in 0..=MAX_REDIRECTS {
            let value = value.filter(|_| url.origin() == first);
            let route = self.route(call, &url);
            let response = self.send_once(call, &url, &route, value)?;
            let answer = Answer { response, url };
            let redirect = matches!(answer.status().as_u16(), 301 | 302 | 303 | 307 | 308);
            if !redirect || !matches!(call.method, Method::GET | Method::HEAD) {
                return Ok(answer);
            }
            let to = answer
                .header(&header::LOCATION)
                .ok_or_else(|| RegistryError::protocol(what, "a redirect has no target"))?;
            let to = answer.url.join(to).map_err(|why| {
                RegistryError::protocol(what, format!("a redirect can't be followed: {why}"))
            })?;
            let refused = |why: &str| {
                let host = to.authority();
                Err(RegistryError::protocol(
                    what,
                    format!("a redirect to {host} is not followed: {why}"),
                ))
            };
            if to.origin() != first && to.is_this_computer() && !call.repository.is_loopback() {
                return refused("it is this computer");
            }
            if to.is_plain()
                && !answer.url.is_plain()
                && self.options.plain_http == PlainHttp::Loopback
            {
                return refused("it has no TLS");
            }
            url = to;
        }
        Err(RegistryError::protocol(
            what,
            "there are too many redirects",
        ))
    }

    fn send_once(
        &self,
        call: &mut Call<'_>,
        url: &Url,
        route: &Route,
        value: Option<&Secret>,
    ) -> Result<Response<Body>> {
        let what = call.what;
        let mut builder = Request::builder()
            .method(call.method.clone())
            .uri(url.to_string());
        for (name, text) in &call.headers {
            builder = builder.header(name, text);
        }
        if let Some(value) = value {
            builder = builder.header(header::AUTHORIZATION, sensitive(value));
        }
        let sent = match &mut call.payload {
            Payload::Nothing => builder
                .body(())
                .map_err(ureq::Error::from)
                .and_then(|request| self.transport.send(url, route, request)),
            Payload::Bytes(bytes) => builder
                .body(*bytes)
                .map_err(ureq::Error::from)
                .and_then(|request| self.transport.send(url, route, request)),
            Payload::Blob {
                source,
                start,
                blob,
                progress,
            } => {
                let sink_failed = |source| RegistryError::Sink {
                    what: what.to_owned(),
                    source,
                };
                source.seek(SeekFrom::Start(*start)).map_err(sink_failed)?;
                let mut sending = UploadBody {
                    source: &mut **source,
                    blob,
                    progress: *progress,
                    done: 0,
                    failed: None,
                    cancelled: false,
                };
                let sent = builder
                    .header(header::CONTENT_LENGTH, blob.size)
                    .body(SendBody::from_reader(&mut sending))
                    .map_err(ureq::Error::from)
                    .and_then(|request| self.transport.send(url, route, request));
                if sending.cancelled {
                    return Err(RegistryError::Cancelled {
                        what: what.to_owned(),
                    });
                }
                if let Some(error) = sending.failed {
                    return Err(sink_failed(error));
                }
                sent
            }
        };
        sent.map_err(|error| broken(what, url.authority(), error))
    }

    /// The whole body of an answer that must not be longer than `limit` bytes.
    pub(super) fn read_small(&self, what: &str, answer: Answer, limit: u64) -> Result<Vec<u8>> {
        let too_long =
            || RegistryError::protocol(what, format!("the answer is longer than {limit} bytes"));
        if answer.length().is_some_and(|length| length > limit) {
            return Err(too_long());
        }
        let host = answer.url.authority().to_owned();
        // The time of a single read is limited already; this limits the time of many small ones.
        let deadline = Instant::now() + self.options.stall_timeout * 10;
        let mut body = answer.response.into_body().into_reader();
        let mut bytes = Vec::new();
        let mut piece = vec![0; 16 << 10];
        loop {
            let count = body
                .read(&mut piece)
                .map_err(|error| broken(what, &host, ureq::Error::from(error)))?;
            if count == 0 {
                return Ok(bytes);
            }
            bytes.extend_from_slice(&piece[..count]);
            if bytes.len() as u64 > limit {
                return Err(too_long());
            }
            if Instant::now() > deadline {
                return Err(unreachable(what, &host, "the answer is too slow"));
            }
        }
    }
}

/// The body of an upload, as it is read.
struct UploadBody<'a> {
    source: &'a mut dyn Source,
    blob: &'a Descriptor,
    progress: &'a dyn Progress,
    done: u64,
    failed: Option<io::Error>,
    cancelled: bool,
}

impl Read for UploadBody<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.progress.cancelled() {
            self.cancelled = true;
            return Err(io::Error::other("cancelled"));
        }
        let left = usize::try_from(self.blob.size - self.done).unwrap_or(usize::MAX);
        let wanted = buffer.len().min(left);
        if wanted == 0 {
            return Ok(0);
        }
        let count = match self.source.read(&mut buffer[..wanted]) {
            Ok(0) => Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("it ends after {} of {} bytes", self.done, self.blob.size),
            )),
            other => other,
        };
        match count {
            Ok(count) => {
                self.done += count as u64;
                self.progress.moved(self.blob, self.done);
                Ok(count)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Err(error),
            Err(error) => {
                self.failed = Some(error);
                Err(io::Error::other("can't be read"))
            }
        }
    }
}

fn sensitive(value: &Secret) -> HeaderValue {
    // Values that no header can hold were refused when they were read. The registry refuses an
    // empty value.
    let mut value =
        HeaderValue::from_str(value.reveal()).unwrap_or_else(|_| HeaderValue::from_static(""));
    value.set_sensitive(true);
    value
}

fn challenges(answer: &Answer) -> Vec<Challenge> {
    answer
        .response
        .headers()
        .get_all(header::WWW_AUTHENTICATE)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(challenge::parse)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_request_uses_tls_once_another_request_found_it() {
        let exchange = Exchange::new(ClientOptions::default()).unwrap();
        let repository = Reference::parse("127.0.0.1:1/a:1", None).unwrap();
        let url = exchange.url(&repository, "blobs/uploads/").unwrap();
        assert!(url.is_plain());
        // Another request has found out meanwhile that the registry has TLS.
        exchange.secure().insert("127.0.0.1:1".to_owned());
        let mut call = Call {
            what: "x",
            repository: &repository,
            method: Method::POST,
            url,
            headers: Vec::new(),
            scopes: Vec::new(),
            payload: Payload::Nothing,
            deadline: None,
        };
        assert!(exchange.wants_tls(&call));
        call.url = call.url.secure();
        assert!(!exchange.wants_tls(&call));
    }
}
