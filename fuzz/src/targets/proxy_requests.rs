//! Requests of anybody to the proxy: which VM and port they name, and what the VM gets of them.

use crate::Target;
use hyper::Uri;
use hyper::header::{
    AUTHORIZATION, CONNECTION, COOKIE, HOST, HeaderMap, HeaderName, HeaderValue, UPGRADE,
};
use jiffy_proxy::{target, testing};

/// This target.
pub const TARGET: Target = Target {
    name: "proxy_requests",
    covers: &[
        "crates/proxy/src/access.rs",
        "crates/proxy/src/forward.rs",
        "crates/proxy/src/target.rs",
    ],
    seeds: all_seeds,
    run,
};

/// A word that is no part of other headers by accident.
const TOKEN: &str = "jR5tqWv0";

/// The request's target, and its headers, between zero bytes. An empty one is absent.
fn run(data: &[u8]) {
    let mut parts = data.split(|byte| *byte == 0);
    let Some(uri) = parts.next().and_then(|uri| uri.try_into().ok()) else {
        return;
    };
    let names = [
        HOST,
        HeaderName::from_static(target::VM),
        HeaderName::from_static(target::PORT),
        HeaderName::from_static(target::WAIT),
        AUTHORIZATION,
        CONNECTION,
        UPGRADE,
        COOKIE,
        COOKIE,
    ];
    let mut headers = HeaderMap::new();
    for (name, value) in names.into_iter().zip(parts) {
        if let (false, Ok(value)) = (value.is_empty(), HeaderValue::from_bytes(value)) {
            headers.append(name, value);
        }
    }
    match target::find(&uri, &headers, "vm.example") {
        Ok(found) => {
            assert_ne!(found.port, 0);
            assert!(!found.vm.is_empty());
            if let Some(prefix) = &found.prefix {
                assert!(uri.path().starts_with(prefix.as_str()));
                assert!(found.path.path().starts_with('/'));
            }
            check_passed(&uri, headers, &found);
        }
        Err(sentence) => assert!(sentence.ends_with('.')),
    }
}

/// The VM gets no token, and no header that is for the proxy only.
fn check_passed(uri: &Uri, headers: HeaderMap, found: &target::Target) {
    let has_token = headers.contains_key(AUTHORIZATION);
    let Some(passed) = testing::passed_on(TOKEN, uri, headers, found) else {
        return;
    };
    assert!(has_token, "it has shown the token");
    let own = [target::VM, target::PORT, target::WAIT].map(HeaderName::from_static);
    for name in testing::HOP_BY_HOP.iter().chain(&own) {
        assert!(!passed.contains_key(name), "{name} is passed on");
    }
    assert_eq!(passed.get_all(HOST).iter().count(), 1);
    assert!(passed.get_all(COOKIE).iter().count() <= 1);
    let is_token = |value: &HeaderValue| {
        let value = value.as_bytes();
        value.strip_prefix(b"Bearer ").unwrap_or(value) == TOKEN.as_bytes()
    };
    assert!(!passed.get_all(AUTHORIZATION).iter().any(is_token));
}

fn all_seeds() -> Vec<Vec<u8>> {
    [
        "/a?b=c\x003000-dev.vm.example:9000",
        "/vm/dev/3000/a//b?c\x00localhost",
        "/vm/dev/3000?c",
        "http://80-a-b.c.vm.example/x",
        "/\x00any\x00dev\x003000",
        "*\x000-dev.vm.example",
        "example.org:443",
        "/\x003000-dev.vm.example\x00\x00\x005\x00Bearer jR5tqWv0\x00close, te\x00websocket\x00a=b\x00c=d",
    ]
    .map(|seed| seed.as_bytes().to_vec())
    .into()
}
