//! Addresses on a registry, and where it sends us.

use crate::reference::{host_of, is_loopback, is_registry};
use std::fmt;
use std::net::IpAddr;
use ureq::http::Uri;

/// `http` or `https`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Scheme {
    Http,
    Https,
}

impl Scheme {
    fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
        }
    }

    fn port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Https => 443,
        }
    }
}

/// Who is spoken to: what credentials and tokens belong to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Origin {
    scheme: Scheme,
    host: String,
    port: u16,
}

/// An absolute address. Never has a user, a password or a fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Url {
    scheme: Scheme,
    /// `HOST[:PORT]`.
    authority: String,
    /// Begins with `/`.
    path_and_query: String,
}

/// The longest address a registry may send, bytes. Signed addresses of object stores
/// have some 2,000.
const LONGEST: usize = 16 << 10;

impl Url {
    pub(super) fn new(scheme: Scheme, authority: &str, path_and_query: String) -> Self {
        Self {
            scheme,
            authority: authority.to_owned(),
            path_and_query,
        }
    }

    /// Reads an absolute address of a stranger.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let refused = |why: &str| Err(format!("{:?} {why}", crate::error::one_line(text)));
        if text.len() > LONGEST {
            return refused("is too long an address");
        }
        if !text.bytes().all(|b| b.is_ascii_graphic()) {
            return refused("is not an address");
        }
        let lower = text.get(..8).unwrap_or(text).to_ascii_lowercase();
        let (scheme, rest) = if lower.starts_with("https://") {
            (Scheme::Https, &text[8..])
        } else if lower.starts_with("http://") {
            (Scheme::Http, &text[7..])
        } else {
            return refused("is not an address of HTTP");
        };
        let rest = rest.split('#').next().unwrap_or(rest);
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        if !is_registry(authority) {
            return refused("has no valid host");
        }
        let slash = if path.starts_with('/') { "" } else { "/" };
        let url = Self {
            scheme,
            authority: authority.to_ascii_lowercase(),
            path_and_query: format!("{slash}{path}"),
        };
        // Nothing could be sent there: a query with a quotation mark, for one.
        match url.to_string().parse::<Uri>() {
            Ok(_) => Ok(url),
            Err(_) => refused("is not an address"),
        }
    }

    /// Where a `Location` or `Link` of an answer to this address leads.
    pub(super) fn join(&self, location: &str) -> Result<Self, String> {
        if location.starts_with("//") {
            return Self::parse(&format!("{}:{location}", self.scheme.name()));
        }
        if location.starts_with('/') {
            let origin = format!("{}://{}", self.scheme.name(), self.authority);
            return Self::parse(&format!("{origin}{location}"));
        }
        Self::parse(location)
    }

    /// The same address with another parameter behind.
    pub(super) fn with_query(mut self, name: &str, value: &str) -> Self {
        let mark = if self.path_and_query.contains('?') {
            '&'
        } else {
            '?'
        };
        self.path_and_query.push(mark);
        self.path_and_query.push_str(name);
        self.path_and_query.push('=');
        self.path_and_query.push_str(&percent_encoded(value));
        self
    }

    pub(super) fn origin(&self) -> Origin {
        let port = self
            .authority
            .rsplit_once(':')
            .filter(|(host, _)| !host.contains(':') || host.ends_with(']'))
            .and_then(|(_, port)| port.parse().ok());
        Origin {
            scheme: self.scheme,
            host: host_of(&self.authority).to_owned(),
            port: port.unwrap_or(self.scheme.port()),
        }
    }

    pub(super) fn authority(&self) -> &str {
        &self.authority
    }

    /// The host alone.
    pub(super) fn host(&self) -> &str {
        host_of(&self.authority)
    }

    /// Whether this host has a name in the domain that another's is in: `auth.x.example`
    /// and `x.example` share that of `registry.x.example`. A domain has two labels at
    /// least, and addresses are in none.
    pub(super) fn shares_domain(&self, other: &Url) -> bool {
        let is_address = |url: &Url| url.host().parse::<IpAddr>().is_ok();
        if is_address(self) || is_address(other) {
            return false;
        }
        let Some((_, domain)) = other.host().split_once('.') else {
            return false;
        };
        let below = self.host().strip_suffix(domain);
        domain.contains('.') && below.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    }

    pub(super) fn is_plain(&self) -> bool {
        self.scheme == Scheme::Http
    }

    /// Whether it leads to this computer. Linux takes 0.0.0.0 for that, too.
    pub(super) fn is_here(&self) -> bool {
        let address = self.host().parse::<IpAddr>();
        is_loopback(&self.authority)
            || address.is_ok_and(|address| address.to_canonical().is_unspecified())
    }

    /// The same address by TLS.
    pub(super) fn secure(&self) -> Self {
        Self {
            scheme: Scheme::Https,
            ..self.clone()
        }
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}://{}{}",
            self.scheme.name(),
            self.authority,
            self.path_and_query
        )
    }
}

/// A value as part of a query or a form.
pub(super) fn percent_encoded(value: &str) -> String {
    let mut encoded = String::with_capacity(value.len());
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn locations_lead_to_absolute_addresses() {
        let base = Url::parse("http://localhost:5000/v2/a/blobs/uploads/").unwrap();
        let joined = |location| base.join(location).map(|url| url.to_string());
        assert_eq!(joined("/x?y=1").unwrap(), "http://localhost:5000/x?y=1");
        assert_eq!(
            joined("https://Other.example/x#f").unwrap(),
            "https://other.example/x"
        );
        assert_eq!(joined("//other.example").unwrap(), "http://other.example/");
        for bad in [
            "",
            "x/y",
            "ftp://a/b",
            "http://u:p@host/x",
            "http://",
            "http://a b/",
            "http:///x",
            "/a\r\nX: y",
            "/a?b=\"c",
        ] {
            assert!(joined(bad).is_err(), "{bad}");
        }
        let url = base
            .with_query("digest", "sha256:ab")
            .with_query("n", "a b&c");
        assert_eq!(
            url.to_string(),
            "http://localhost:5000/v2/a/blobs/uploads/?digest=sha256%3Aab&n=a%20b%26c"
        );
    }

    #[test]
    fn an_origin_has_its_default_port() {
        let origin = |text| Url::parse(text).unwrap().origin();
        assert_eq!(
            origin("https://a.example/x"),
            origin("https://A.example:443/y")
        );
        assert_ne!(origin("https://a.example"), origin("http://a.example"));
        assert_ne!(origin("http://[::1]:5000/"), origin("http://[::1]/"));
        assert_eq!(origin("http://[::1]:80/"), origin("http://[::1]/"));
    }

    #[test]
    fn a_domain_is_shared_by_neighbours_and_what_is_above_them() {
        let shares = |one: &str, other: &str| {
            let url = |host: &str| Url::parse(&format!("https://{host}/")).unwrap();
            url(one).shares_domain(&url(other))
        };
        for (realm, registry) in [
            ("auth.x.example", "registry-1.x.example"),
            ("x.example", "registry.x.example:5000"),
            ("a.b.x.example", "registry.x.example"),
        ] {
            assert!(shares(realm, registry), "{realm} {registry}");
        }
        for (realm, registry) in [
            ("auth.y.example", "registry.x.example"),
            ("evilx.example", "registry.x.example"),
            ("other.example", "registry.example"),
            ("10.0.0.1", "11.0.0.1"),
            ("example", "registry"),
        ] {
            assert!(!shares(realm, registry), "{realm} {registry}");
        }
    }

    #[test]
    fn this_computer_has_many_names() {
        let here = |host| Url::parse(&format!("http://{host}/")).unwrap().is_here();
        for host in [
            "localhost:1",
            "127.0.0.1",
            "127.1.2.3:4",
            "[::1]",
            "0.0.0.0:80",
            "[::]",
            "[::ffff:127.0.0.1]",
        ] {
            assert!(here(host), "{host}");
        }
        assert!(!here("10.0.0.1") && !here("registry.example") && !here("[fe80::1]"));
    }

    proptest! {
        #[test]
        fn any_location_is_refused_or_an_address_that_http_takes(location in "\\PC{0,60}|https?://[a-z.:@\\[\\]0-9]{0,20}[/?#a-z%]{0,9}|/[!-~]{0,30}") {
            let base = Url::parse("https://registry.example/v2/").unwrap();
            if let Ok(url) = base.join(&location) {
                let _ = url.origin();
                prop_assert_eq!(Url::parse(&url.to_string()), Ok(url.clone()));
                prop_assert!(!url.authority().contains('@'));
            }
        }
    }
}
