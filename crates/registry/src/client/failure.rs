//! Converts error answers and broken connections to errors.

use super::answer::Answer;
use super::authorisation;
use super::resolver::ThisComputer;
use super::transport::is_tls_error;
use crate::RegistryError;
use jiffy_oci::one_line;
use std::io::Read;
use std::time::{Duration, Instant, SystemTime};
use ureq::http::header;

/// Most bytes that are read of an error answer.
const MAX_ERROR: u64 = 64 << 10;
/// How long reading an error answer may take.
const MAX_ERROR_TIME: Duration = Duration::from_secs(10);

/// Converts an error answer to an error.
pub(super) fn refusal(what: &str, answer: Answer) -> RegistryError {
    let status = answer.status().as_u16();
    let host = answer.url.authority().to_owned();
    let retry_after = answer.header(&header::RETRY_AFTER).and_then(retry_after);
    match status {
        404 => RegistryError::NotFound {
            what: what.to_owned(),
        },
        401 | 403 => authorisation::unauthorised(what, &host, status == 403, &detail_of(answer)),
        _ => {
            let detail = detail_of(answer);
            RegistryError::Refused {
                what: what.to_owned(),
                host,
                status,
                detail: if detail.is_empty() {
                    detail
                } else {
                    format!(": {detail}")
                },
                retry_after,
            }
        }
    }
}

/// Seconds, or a date. RFC 9110 §10.2.3.
pub(super) fn retry_after(text: &str) -> Option<Duration> {
    if let Ok(seconds) = text.trim().parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(SystemTime::now()).unwrap_or_default())
}

/// The registry's own description of an error, as far as it can be read.
pub(super) fn detail_of(answer: Answer) -> String {
    let mut text = Vec::new();
    let mut body = answer.response.into_body().into_reader().take(MAX_ERROR);
    let mut piece = [0; 4096];
    let until = Instant::now() + MAX_ERROR_TIME;
    loop {
        match body.read(&mut piece) {
            Ok(0) => break,
            Ok(count) if Instant::now() < until => text.extend_from_slice(&piece[..count]),
            _ => return String::new(),
        }
    }
    detail_in(&text)
}

/// Like [`detail_of`], for the body of an answer.
pub(super) fn detail_in(text: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    struct Errors {
        #[serde(default)]
        errors: Vec<ErrorEntry>,
        details: Option<String>,
    }
    #[derive(serde::Deserialize)]
    struct ErrorEntry {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let Ok(errors) = serde_json::from_slice::<Errors>(text) else {
        return String::new();
    };
    let said: Vec<String> = errors
        .errors
        .into_iter()
        .map(|one| match (one.code.is_empty(), one.message.is_empty()) {
            (true, _) => one.message,
            (_, true) => one.code,
            _ => format!("{}: {}", one.code, one.message),
        })
        .chain(errors.details)
        .collect();
    one_line(&said.join("; "))
}

/// Converts a failed or broken connection to an error.
pub(super) fn broken(what: &str, host: &str, error: ureq::Error) -> RegistryError {
    if is_tls_error(&error) {
        return RegistryError::Insecure {
            what: what.to_owned(),
            host: host.to_owned(),
            source: cause(error),
        };
    }
    match error {
        ureq::Error::Other(error) if error.is::<ThisComputer>() => {
            RegistryError::protocol(what, format!("no connection to {host}: {error}"))
        }
        ureq::Error::LargeResponseHeader(..) => {
            RegistryError::protocol(what, "the header of the answer is too long")
        }
        ureq::Error::BadUri(_) | ureq::Error::Http(_) => {
            RegistryError::protocol(what, format!("the request can't be made: {error}"))
        }
        error => RegistryError::Unreachable {
            what: what.to_owned(),
            host: host.to_owned(),
            source: cause(error),
        },
    }
}

pub(super) fn unreachable(what: &str, host: &str, why: &str) -> RegistryError {
    RegistryError::Unreachable {
        what: what.to_owned(),
        host: host.to_owned(),
        source: why.into(),
    }
}

fn cause(error: ureq::Error) -> Box<dyn std::error::Error + Send + Sync> {
    match error {
        ureq::Error::Io(error) => Box::new(error),
        ureq::Error::Timeout(_) => "the connection was idle for too long".into(),
        ureq::Error::HostNotFound => "the host name can't be resolved".into(),
        error => Box::new(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_given_in_seconds_or_as_a_date() {
        assert_eq!(retry_after(" 7 "), Some(Duration::from_secs(7)));
        assert_eq!(
            retry_after("Wed, 21 Oct 2015 07:28:00 GMT"),
            Some(Duration::ZERO)
        );
        assert!(
            retry_after("Tue, 21 Oct 2098 07:28:00 GMT").unwrap() > Duration::from_secs(86_400)
        );
        assert_eq!(retry_after("soon"), None);
        assert_eq!(retry_after("-1"), None);
    }
}
