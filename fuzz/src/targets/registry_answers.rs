//! Answers of a registry other than manifests: challenges, tokens, links, refusals.

use crate::Target;
use crate::input::Input;
use jiffy_registry::testing;

/// This target.
pub const TARGET: Target = Target {
    name: "registry_answers",
    covers: &["crates/registry/src/client"],
    seeds: all_seeds,
    run,
};

const CHALLENGE: u8 = 0;
const CHALLENGE_WITH_LOGIN: u8 = 1;
const HEADER: u8 = 2;
const TOKEN: u8 = 3;
const REFUSAL: u8 = 4;

fn run(data: &[u8]) {
    let mut input = Input(data);
    let kind = input.u8() % 5;
    let bytes = input.rest();
    let text = String::from_utf8_lossy(bytes);
    match kind {
        CHALLENGE => testing::challenges(&text, false),
        CHALLENGE_WITH_LOGIN => testing::challenges(&text, true),
        HEADER => testing::headers(&text),
        TOKEN => testing::token(bytes),
        _ => {
            let sentence = testing::refusal(bytes);
            assert!(
                !sentence.contains(char::is_control),
                "one line, for a terminal"
            );
        }
    }
}

fn all_seeds() -> Vec<Vec<u8>> {
    let of = |kind: u8, text: &str| [&[kind], text.as_bytes()].concat();
    let bearer = r#"Bearer realm="https://auth.example.com/token",service="registry.example.com",scope="repository:a/b:pull,push""#;
    let mut seeds = vec![
        of(
            TOKEN,
            r#"{"token":"abc","expires_in":300,"issued_at":"2024-01-01T00:00:00Z"}"#,
        ),
        of(TOKEN, r#"{"access_token":"abc.d-e","refresh_token":"x"}"#),
        of(
            REFUSAL,
            r#"{"errors":[{"code":"DENIED","message":"no","detail":{"a":1}}]}"#,
        ),
        of(REFUSAL, r#"{"details":"too many\n requests"}"#),
    ];
    for kind in [CHALLENGE, CHALLENGE_WITH_LOGIN] {
        seeds.push(of(kind, bearer));
        seeds.push(of(kind, &format!("Basic realm=\"a \\\" b\", {bearer}")));
        seeds.push(of(kind, "Bearer realm=http://127.0.0.1:5000/token?a=b#c"));
    }
    for text in [
        "/v2/a/blobs/uploads/1?_state=abc",
        "https://cdn.example.com:8443/x?y=%20z",
        "//elsewhere.example.com/a",
        "</v2/a/tags/list?last=b&n=100>; rel=\"next\"",
        "http://[::1]:5000",
        "120",
        "Wed, 21 Oct 2015 07:28:00 GMT",
    ] {
        seeds.push(of(HEADER, text));
    }
    seeds
}
