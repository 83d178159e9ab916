//! URLs of a registry and of its redirects.

use crate::reference::is_loopback;
use std::fmt;
use std::net::IpAddr;
use ureq::http::Uri;
pub(super) use url::Origin;

/// `http` or `https`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    Http,
    Https,
}

/// An absolute HTTP URL, as parsed by [`url`]. Never has a user, a password or a fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Url(url::Url);

/// The longest URL that a registry may send, bytes. Signed URLs of object stores have some 2,000.
const LONGEST: usize = 16 << 10;

impl Url {
    /// `authority` is `HOST[:PORT]`, `path_and_query` begins with `/`.
    pub(super) fn new(
        scheme: Scheme,
        authority: &str,
        path_and_query: &str,
    ) -> Result<Self, String> {
        let scheme = match scheme {
            Scheme::Http => "http",
            Scheme::Https => "https",
        };
        Self::parse(&format!("{scheme}://{authority}{path_and_query}"))
    }

    /// Parses an absolute URL from an untrusted source.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        read(text, url::Url::parse)
    }

    /// The target of a `Location` or `Link` header in the answer to this URL: a relative one is
    /// resolved against it (RFC 9110 §10.2.2).
    pub(super) fn join(&self, location: &str) -> Result<Self, String> {
        if location.is_empty() {
            return Err("\"\" is not an address".to_owned());
        }
        read(location, |text| self.0.join(text))
    }

    /// The same URL with another query parameter appended.
    pub(super) fn with_query(mut self, name: &str, value: &str) -> Self {
        self.0.query_pairs_mut().append_pair(name, value);
        self
    }

    /// The origin, which credentials and tokens belong to.
    pub(super) fn origin(&self) -> Origin {
        self.0.origin()
    }

    /// `HOST[:PORT]`.
    pub(super) fn authority(&self) -> &str {
        self.0.authority()
    }

    /// The host alone; an IPv6 address without brackets.
    pub(super) fn host(&self) -> &str {
        let host = self.0.host_str().unwrap_or_default();
        host.trim_start_matches('[').trim_end_matches(']')
    }

    /// Whether this host is in the same domain as another: `auth.x.example` and `x.example` share
    /// the domain of `registry.x.example`. A domain has at least two labels, and addresses have
    /// none.
    pub(super) fn shares_domain(&self, other: &Url) -> bool {
        let (Some(ours), Some(theirs)) = (self.0.domain(), other.0.domain()) else {
            return false;
        };
        let Some((_, domain)) = theirs.split_once('.') else {
            return false;
        };
        let below = ours.strip_suffix(domain);
        domain.contains('.') && below.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    }

    pub(super) fn is_plain(&self) -> bool {
        self.0.scheme() == "http"
    }

    /// Whether it refers to this computer. Linux treats 0.0.0.0 as the loopback, too.
    pub(super) fn is_this_computer(&self) -> bool {
        let address = self.host().parse::<IpAddr>();
        is_loopback(self.authority())
            || address.is_ok_and(|address| address.to_canonical().is_unspecified())
    }

    /// The same URL with `https`.
    pub(super) fn secure(&self) -> Self {
        let mut url = self.0.clone();
        // Changing one special scheme to another never fails.
        let _ = url.set_scheme("https");
        Self(url)
    }
}

/// Parses a URL, and refuses those that no request may be sent to.
fn read(
    text: &str,
    parse: impl FnOnce(&str) -> Result<url::Url, url::ParseError>,
) -> Result<Url, String> {
    let refused = |why: &str| Err(format!("{:?} {why}", jiffy_oci::one_line(text)));
    if text.len() > LONGEST {
        return refused("is too long for an address");
    }
    // The parser would remove line ends and encode other characters.
    if !text.bytes().all(|b| b.is_ascii_graphic()) {
        return refused("is not an address");
    }
    let mut url = match parse(text) {
        Ok(url) => url,
        Err(error) => return refused(&format!("is not an address: {error}")),
    };
    if !matches!(url.scheme(), "http" | "https") {
        return refused("is not an address for HTTP or HTTPS");
    }
    if !url.username().is_empty() || url.password().is_some() {
        return refused("contains a user or a password");
    }
    url.set_fragment(None);
    match url.as_str().parse::<Uri>() {
        Ok(_) => Ok(Url(url)),
        Err(_) => refused("is not an address"),
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn locations_lead_to_absolute_addresses() {
        let base = Url::parse("http://localhost:5000/v2/a/blobs/uploads/?n=1").unwrap();
        let joined = |location| base.join(location).map(|url| url.to_string());
        for (location, leads_to) in [
            ("/x?y=1", "http://localhost:5000/x?y=1"),
            ("https://Other.example/x#f", "https://other.example/x"),
            ("//other.example", "http://other.example/"),
            ("x/y", "http://localhost:5000/v2/a/blobs/uploads/x/y"),
            (
                "../x?_state=a%3D",
                "http://localhost:5000/v2/a/blobs/x?_state=a%3D",
            ),
            (
                "?next=2",
                "http://localhost:5000/v2/a/blobs/uploads/?next=2",
            ),
            ("/a?b=\"c", "http://localhost:5000/a?b=%22c"),
        ] {
            assert_eq!(joined(location).unwrap(), leads_to, "{location}");
        }
        for bad in [
            "",
            "ftp://a/b",
            "file:///etc/passwd",
            "http://u:p@host/x",
            "http://u@host/x",
            "http://",
            "http://a b/",
            "http://[::1/",
            "http://host:99999/",
            "/a\r\nX: y",
        ] {
            assert!(joined(bad).is_err(), "{bad}");
        }
        let url = Url::parse("http://localhost:5000/v2/")
            .unwrap()
            .with_query("digest", "sha256:ab")
            .with_query("n", "a b&c");
        assert_eq!(
            url.to_string(),
            "http://localhost:5000/v2/?digest=sha256%3Aab&n=a+b%26c"
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
        let secure = Url::parse("http://a.example:5000/").unwrap().secure();
        assert_eq!(secure.to_string(), "https://a.example:5000/");
    }

    #[test]
    fn hosts_share_a_domain_with_siblings_and_parents() {
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
    fn all_names_of_this_computer_are_recognised() {
        let here = |host| {
            Url::parse(&format!("http://{host}/"))
                .unwrap()
                .is_this_computer()
        };
        for host in [
            "localhost:1",
            "127.0.0.1",
            "127.1.2.3:4",
            "127.1",
            "0x7f000001",
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
        fn any_location_is_refused_or_an_address_that_http_takes(location in "\\PC{0,60}|https?://[a-z.:@\\[\\]0-9]{0,20}[/?#a-z%]{0,9}|/[!-~]{0,30}|[!-~]{0,30}") {
            let base = Url::parse("https://registry.example/v2/").unwrap();
            if let Ok(url) = base.join(&location) {
                let _ = url.origin();
                prop_assert_eq!(Url::parse(&url.to_string()), Ok(url.clone()));
                prop_assert!(!url.authority().contains('@'));
            }
        }
    }
}
