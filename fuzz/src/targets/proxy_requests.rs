//! Requests of anybody to the proxy: which VM and port they name.

use crate::Target;
use hyper::header::{HOST, HeaderMap, HeaderName, HeaderValue};
use jiffy_proxy::target;

/// This target.
pub const TARGET: Target = Target {
    name: "proxy_requests",
    covers: &["crates/proxy/src"],
    seeds: all_seeds,
    run,
};

/// The request's target, and three headers, between zero bytes. An empty one is absent.
fn run(data: &[u8]) {
    let mut parts = data.split(|byte| *byte == 0);
    let Some(uri) = parts.next().and_then(|uri| uri.try_into().ok()) else {
        return;
    };
    let names = [
        HOST,
        HeaderName::from_static(target::VM),
        HeaderName::from_static(target::PORT),
    ];
    let mut headers = HeaderMap::new();
    for (name, value) in names.into_iter().zip(parts) {
        if let (false, Ok(value)) = (value.is_empty(), HeaderValue::from_bytes(value)) {
            headers.insert(name, value);
        }
    }
    match target::find(&uri, &headers, "vm.example") {
        Ok(found) => {
            assert_ne!(found.port, 0);
            assert!(!found.vm.is_empty());
            if let Some(prefix) = found.prefix {
                assert!(uri.path().starts_with(&prefix));
                assert!(found.path.path().starts_with('/'));
            }
        }
        Err(sentence) => assert!(sentence.ends_with('.')),
    }
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
    ]
    .map(|seed| seed.as_bytes().to_vec())
    .into()
}
