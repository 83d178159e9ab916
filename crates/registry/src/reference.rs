//! Names of images: `HOST[:PORT]/REPO[:TAG][@DIGEST]`.
//!
//! The grammar is that of the OCI distribution specification 1.1 ("Pulling
//! manifests") for repositories and tags, and of Docker's reference package for which
//! names begin with a host.

use crate::Digest;
use jiffy_oci::DigestError;
use std::fmt;

/// The name of an image: a registry, a repository in it, and a tag or digest.
///
/// `Display` is its canonical text, which parses to the same reference.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reference {
    registry: String,
    repository: String,
    tag: Option<String>,
    digest: Option<Digest>,
}

/// Why a text is not a reference.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReferenceError {
    /// It has no registry, and there is no default registry.
    #[error("the name {0:?} has no registry, and no default registry is set; write HOST/{0}")]
    Unqualified(String),
    /// The default registry is not a host, or not one with a path of repositories.
    #[error("the default registry {0:?} is not HOST[:PORT][/PATH]")]
    Default(String),
    /// The syntax is wrong.
    #[error("{text:?} is not the name of an image: {reason}")]
    Form {
        /// The name, cut to 300 characters.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// Its digest is malformed.
    #[error(transparent)]
    Digest(#[from] DigestError),
}

/// The tag of a name that gives neither tag nor digest.
const DEFAULT_TAG: &str = "latest";

impl Reference {
    /// Reads a name. One without a host belongs to `default_registry`, `HOST[:PORT][/PATH]`.
    ///
    /// As with Docker, the part before the first `/` is a host if it has a dot or a
    /// colon or is `localhost`.
    ///
    /// # Errors
    ///
    /// If the name has more than 1,024 bytes, its host, repository, tag or digest is malformed, or
    /// it has no host and `default_registry` is `None` or malformed.
    pub fn parse(text: &str, default_registry: Option<&str>) -> Result<Self, ReferenceError> {
        if text.len() > 1024 {
            return Err(form(text, "it is longer than 1,024 bytes"));
        }
        if let Some((host, rest)) = text.split_once('/')
            && is_host(host)
        {
            return Self::in_registry(text, host, rest);
        }
        let Some(default) = default_registry else {
            // A name that is malformed with any registry gets the more specific error.
            Self::in_registry(text, "localhost", text)?;
            return Err(ReferenceError::Unqualified(shown(text)));
        };
        let (host, prefix) = default.split_once('/').unwrap_or((default, ""));
        let prefix = prefix.trim_end_matches('/');
        if !is_registry(host) || !(prefix.is_empty() || is_repository(prefix)) {
            return Err(ReferenceError::Default(shown(default)));
        }
        if prefix.is_empty() {
            Self::in_registry(text, host, text)
        } else {
            Self::in_registry(text, host, &format!("{prefix}/{text}"))
        }
    }

    fn in_registry(text: &str, host: &str, rest: &str) -> Result<Self, ReferenceError> {
        if !is_registry(host) {
            return Err(form(text, "the part before the first / is not HOST[:PORT]"));
        }
        let (rest, digest) = match rest.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest.parse()?)),
            None => (rest, None),
        };
        let (repository, tag) = match rest.split_once(':') {
            Some((repository, tag)) => (repository, Some(tag)),
            None => (rest, None),
        };
        if !is_repository(repository) {
            return Err(form(
                text,
                "a repository has at most 255 lower-case letters, digits and single . _ - between them, in parts divided by /",
            ));
        }
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return Err(form(
                text,
                "a tag has 1 to 128 letters, digits, _ . and -, and begins with neither . nor -",
            ));
        }
        let tag = match (tag, digest) {
            (Some(tag), _) => Some(tag.to_owned()),
            (None, Some(_)) => None,
            (None, None) => Some(DEFAULT_TAG.to_owned()),
        };
        Ok(Self {
            registry: host.to_ascii_lowercase(),
            repository: repository.to_owned(),
            tag,
            digest,
        })
    }

    /// `HOST[:PORT]`, in small letters.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// The repository: `library/alpine`.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The tag. Always there if there is no digest.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// The digest, which takes precedence over the tag.
    pub fn digest(&self) -> Option<Digest> {
        self.digest
    }

    /// The same repository, pinned to this manifest. The tag is kept for display.
    pub fn with_digest(&self, digest: Digest) -> Self {
        Self {
            digest: Some(digest),
            ..self.clone()
        }
    }

    /// The same repository, another tag and no digest.
    ///
    /// # Errors
    ///
    /// If `tag` is malformed.
    pub fn with_tag(&self, tag: &str) -> Result<Self, ReferenceError> {
        if !is_tag(tag) {
            return Err(form(tag, "it is not a tag"));
        }
        Ok(Self {
            tag: Some(tag.to_owned()),
            digest: None,
            ..self.clone()
        })
    }

    /// Whether the registry is this computer: `localhost`, a name below it, or a
    /// loopback address.
    pub fn is_loopback(&self) -> bool {
        is_loopback(&self.registry)
    }

    /// The part of a URL that selects the image: its digest, or its tag.
    pub(crate) fn selector(&self) -> String {
        match (&self.digest, &self.tag) {
            (Some(digest), _) => digest.to_string(),
            (None, Some(tag)) => tag.clone(),
            (None, None) => DEFAULT_TAG.to_owned(),
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        if let Some(digest) = &self.digest {
            write!(f, "@{digest}")?;
        }
        Ok(())
    }
}

/// Whether `HOST[:PORT]` is this computer.
pub(crate) fn is_loopback(registry: &str) -> bool {
    let host = host_of(registry);
    host == "localhost"
        || host.ends_with(".localhost")
        || host
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.to_canonical().is_loopback())
}

/// The host of `HOST[:PORT]`, an IPv6 address without its brackets.
pub(crate) fn host_of(registry: &str) -> &str {
    if let Some(rest) = registry.strip_prefix('[') {
        return rest.split(']').next().unwrap_or(rest);
    }
    registry.split(':').next().unwrap_or(registry)
}

fn form(text: &str, reason: &'static str) -> ReferenceError {
    ReferenceError::Form {
        text: shown(text),
        reason,
    }
}

fn shown(text: &str) -> String {
    text.chars().take(300).collect()
}

/// Whether the part before the first `/` is meant as a host.
fn is_host(part: &str) -> bool {
    part.contains(['.', ':', '[']) || part.eq_ignore_ascii_case("localhost")
}

/// `HOST`, `HOST:PORT`, `[IPv6]`, `[IPv6]:PORT`.
pub(crate) fn is_registry(text: &str) -> bool {
    let (host, port) = if let Some(rest) = text.strip_prefix('[') {
        let Some((address, behind)) = rest.split_once(']') else {
            return false;
        };
        if address.parse::<std::net::Ipv6Addr>().is_err() {
            return false;
        }
        match behind.strip_prefix(':') {
            Some(port) => (None, Some(port)),
            None if behind.is_empty() => (None, None),
            None => return false,
        }
    } else {
        match text.split_once(':') {
            Some((host, port)) => (Some(host), Some(port)),
            None => (Some(text), None),
        }
    };
    host.is_none_or(is_host_name) && port.is_none_or(is_port)
}

fn is_host_name(host: &str) -> bool {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    host.len() <= 253 && host.split('.').all(label)
}

fn is_port(port: &str) -> bool {
    port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port > 0)
}

/// `[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*`, parts divided by `/`, at most 255 bytes.
pub(crate) fn is_repository(text: &str) -> bool {
    text.len() <= 255 && text.split('/').all(is_repository_part)
}

fn is_repository_part(part: &str) -> bool {
    let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = part.as_bytes();
    let (Some(&first), Some(&last)) = (bytes.first(), bytes.last()) else {
        return false;
    };
    if !alphanumeric(first) || !alphanumeric(last) {
        return false;
    }
    bytes.split(|&b| alphanumeric(b)).all(|between| {
        matches!(between, b"" | b"." | b"_" | b"__") || between.iter().all(|&b| b == b'-')
    })
}

fn is_tag(tag: &str) -> bool {
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    (1..=128).contains(&tag.len())
        && tag.bytes().all(|b| word(b) || b == b'.' || b == b'-')
        && tag.bytes().next().is_some_and(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DIGEST: &str = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    fn parse(text: &str) -> Reference {
        Reference::parse(text, None).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn a_reference_is_parsed_into_its_parts() {
        let reference = parse(&format!("registry.example:5000/team/app:v1@{DIGEST}"));
        assert_eq!(reference.registry(), "registry.example:5000");
        assert_eq!(reference.repository(), "team/app");
        assert_eq!(reference.tag(), Some("v1"));
        assert_eq!(reference.digest(), Some(DIGEST.parse().unwrap()));
        assert_eq!(reference.selector(), DIGEST);

        assert_eq!(parse("localhost/app").tag(), Some("latest"));
        assert_eq!(parse(&format!("localhost/app@{DIGEST}")).tag(), None);
        assert_eq!(parse("[::1]:5000/app:x").registry(), "[::1]:5000");
        assert_eq!(parse("Registry.Example/app").registry(), "registry.example");
    }

    #[test]
    fn names_without_a_host_belong_to_the_default_registry() {
        let at = |default, text| Reference::parse(text, Some(default)).map(|r| r.to_string());
        assert_eq!(
            at("localhost:5000", "alpine").unwrap(),
            "localhost:5000/alpine:latest"
        );
        assert_eq!(at("mirror", "team/app:1").unwrap(), "mirror/team/app:1");
        assert_eq!(
            at("registry.example/library", "alpine:3").unwrap(),
            "registry.example/library/alpine:3"
        );
        assert_eq!(
            at("registry.example", "localhost/app").unwrap(),
            "localhost/app:latest"
        );
        assert!(matches!(
            at("http://x", "alpine"),
            Err(ReferenceError::Default(_))
        ));
        assert_eq!(
            Reference::parse("alpine", None).unwrap_err().to_string(),
            "the name \"alpine\" has no registry, and no default registry is set; write HOST/alpine"
        );
    }

    #[test]
    fn loopback_hosts_are_recognised() {
        for text in [
            "localhost/a",
            "localhost:1/a",
            "127.0.0.1/a",
            "127.9.9.9:5/a",
            "[::1]:5/a",
            "x.localhost/a",
        ] {
            assert!(parse(text).is_loopback(), "{text}");
        }
        for text in [
            "localhost.example/a",
            "127.0.0.1.example/a",
            "10.0.0.1/a",
            "[fe80::1]/a",
            "notlocalhost.x/a",
        ] {
            assert!(!parse(text).is_loopback(), "{text}");
        }
    }

    #[test]
    fn an_invalid_reference_is_refused() {
        let long = format!("localhost/{}", "a".repeat(256));
        for text in [
            "",
            "/",
            "localhost/",
            "localhost//a",
            "localhost/a/",
            "localhost/A",
            "localhost/../a",
            "localhost/a/../b",
            "localhost/.a",
            "localhost/a-",
            "localhost/a..b",
            "localhost/a___b",
            "localhost/a:",
            "localhost/a:-x",
            "localhost/a:b:c",
            "localhost/a@",
            "localhost/a@sha256:12",
            "localhost/a@sha512:12",
            "localhost:0/a",
            "localhost:99999/a",
            "localhost:+5/a",
            "[::1/a",
            "[localhost]/a",
            "a b.c/d",
            "user@host.x/a",
            "http://host.x/a",
            "-x.y/a",
            "x..y/a",
            "localhost/a?b",
            "localhost/a#b",
            "localhost/a%2f",
            "localhost/ä",
            &long,
        ] {
            assert!(Reference::parse(text, None).is_err(), "{text}");
            assert!(
                !matches!(
                    Reference::parse(text, None),
                    Err(ReferenceError::Unqualified(_))
                ),
                "{text} must not be reported as unqualified"
            );
        }
    }

    proptest! {
        #[test]
        fn any_text_is_refused_or_survives_a_round_trip(
            text in "[a-zA-Z0-9.:/@_\\-\\[\\]% ]{0,60}|\\PC{0,40}|[a-z.:0-9]{1,9}/[a-z0-9._/-]{1,12}(:[a-zA-Z0-9_.-]{1,9})?",
            default in proptest::option::of("[a-z.:0-9/]{0,12}"),
        ) {
            if let Ok(reference) = Reference::parse(&text, default.as_deref()) {
                let again = Reference::parse(&reference.to_string(), None);
                // A default registry may be a bare word, which is not a host by itself.
                if is_host(reference.registry()) {
                    prop_assert_eq!(again.as_ref(), Ok(&reference));
                }
                let path = format!("{}/{}", reference.repository(), reference.selector());
                prop_assert!(path.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-/:".contains(&b)));
                prop_assert!(!path.split('/').any(|part| matches!(part, "" | "." | "..")), "{}", path);
            }
        }
    }
}
