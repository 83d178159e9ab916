//! Manifests from a registry that misbehaves.

use crate::server::{Reply, Server};
use crate::{Waits, client, reference};
use jiffy_registry::{Client, Digest, Platform, RegistryError, media_type};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const IMAGE: &str = r#"{"schemaVersion":2,"config":{"mediaType":"c","size":2,
    "digest":"sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},"layers":null}"#;

fn image() -> Reply {
    Reply::new(200, IMAGE).with("content-type", media_type::OCI_MANIFEST)
}

/// A server that fails this often, then works.
fn after(failures: usize, failure: Reply) -> Server {
    let count = AtomicUsize::new(0);
    Server::start(move |_| {
        if count.fetch_add(1, Ordering::SeqCst) < failures {
            failure.clone()
        } else {
            image()
        }
    })
}

#[test]
fn transient_failures_are_retried() {
    for failure in [
        Reply::new(500, "oops"),
        Reply::new(502, "oops").endless(),
        Reply::new(
            503,
            r#"{"errors":[{"code":"UNAVAILABLE","message":"soon"}]}"#,
        ),
        Reply::nothing(),
        image().cut(10),
        image().with("content-length", IMAGE.len() + 1),
    ] {
        let server = after(3, failure.clone());
        let (client, waits) = client();
        let fetched = client.manifest(&reference(&server, "a:1"), &());
        assert_eq!(
            fetched.unwrap().digest,
            Digest::of(IMAGE.as_bytes()),
            "{failure:?}"
        );
        assert_eq!(waits.all().len(), 3, "{failure:?}");
    }
}

#[test]
fn a_registry_says_how_long_to_wait() {
    let server = after(2, Reply::new(429, "").with("retry-after", "7"));
    let (client, waits) = client();
    client.manifest(&reference(&server, "a:1"), &()).unwrap();
    assert_eq!(waits.all(), [Duration::from_secs(7); 2]);

    let server = after(1, Reply::new(503, "").with("retry-after", "1000000000000"));
    client.manifest(&reference(&server, "a:1"), &()).unwrap();
    assert_eq!(waits.all()[2], Duration::from_secs(30));
}

#[test]
fn retries_end_with_the_registrys_message() {
    let words = r#"{"errors":[{"code":"TOOMANYREQUESTS","message":"slow\ndown\u001b[31m"}]}"#;
    let server = after(usize::MAX, Reply::new(429, words));
    let (client, waits) = client();
    let to = reference(&server, "a:1");
    let error = client.manifest(&to, &()).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "manifest {to}: {} answered 429: TOOMANYREQUESTS: slow down [31m",
            server.host()
        )
    );
    assert_eq!(waits.all().len(), 5);
    assert_eq!(server.seen().len(), 6);
}

#[test]
fn a_registry_that_does_not_answer_is_retried() {
    let count = AtomicUsize::new(0);
    let server = Server::start(move |_| match count.fetch_add(1, Ordering::SeqCst) {
        0 => Reply::new(200, "").then_stall(),
        1 => image().with("content-length", 1_000).then_stall(),
        _ => image(),
    });
    let mut options = Waits::default().options();
    options.stall_timeout = Duration::from_millis(100);
    // A busy host may stall the server for longer.
    options.retries.limit = 1_000;
    let client = Client::new(options).unwrap();
    client.manifest(&reference(&server, "a:1"), &()).unwrap();
    assert!(server.seen().len() >= 3);
}

#[test]
fn wrong_manifests_are_refused_without_a_retry() {
    let wrong = Digest::of(b"something else");
    for (reply, said) in [
        (
            image().with("docker-content-digest", wrong),
            "the registry says",
        ),
        (
            image().with("docker-content-digest", "x"),
            "the registry says",
        ),
        (
            Reply::new(200, "{").with("content-type", media_type::OCI_MANIFEST),
            "not a manifest",
        ),
        (
            Reply::new(200, "<html>").with("content-type", "text/html"),
            "text/html",
        ),
        (Reply::new(200, vec![b' '; 5 << 20]), "longer than"),
        (
            Reply::new(200, vec![b' '; 1 << 16]).endless(),
            "longer than",
        ),
        (
            image().with("x", "y".repeat(1 << 20)),
            "header of the answer is too long",
        ),
        (
            Reply::new(200, r#"{"schemaVersion":1,"fsLayers":[]}"#)
                .with("content-type", media_type::DOCKER_SCHEMA_1[0]),
            "schema 1",
        ),
    ] {
        let server = Server::start(move |_| reply.clone());
        let (client, waits) = client();
        let error = client
            .manifest(&reference(&server, "a:1"), &())
            .unwrap_err();
        assert!(error.to_string().contains(said), "{said}: {error}");
        assert_eq!(waits.all().len(), 0, "{error}");
    }
}

#[test]
fn a_manifest_with_another_digest_than_asked_is_refused() {
    let server = Server::start(|_| image());
    let (client, _) = client();
    let right = reference(&server, "a:1").with_digest(Digest::of(IMAGE.as_bytes()));
    client.manifest(&right, &()).unwrap();
    let wrong = right.with_digest(Digest::of(b""));
    let error = client.manifest(&wrong, &()).unwrap_err();
    assert!(matches!(error, RegistryError::Damaged { .. }), "{error}");
}

#[test]
fn an_index_in_an_index_is_refused() {
    let index = |of: &str| {
        format!(
            r#"{{"schemaVersion":2,"manifests":[{{"mediaType":"{}","size":1,"digest":"{}",
                "platform":{{"os":"linux","architecture":"amd64"}}}}]}}"#,
            media_type::OCI_INDEX,
            Digest::of(of.as_bytes())
        )
    };
    let inner = index("");
    let outer = index(&inner);
    let server = Server::start(move |request| {
        let body = if request.path.ends_with("/1") {
            &outer
        } else {
            &inner
        };
        Reply::new(200, body.as_str()).with("content-type", media_type::OCI_INDEX)
    });
    let (client, _) = client();
    let error = client
        .image(&reference(&server, "a:1"), &Platform::default(), &())
        .unwrap_err();
    assert!(error.to_string().contains("index in an index"), "{error}");
}

#[test]
fn pages_of_tags_are_followed_and_end() {
    let server = Server::start(|request| {
        let host = request.header("host").unwrap().to_owned();
        match request.path.as_str() {
            "/v2/a/tags/list?n=1000" => Reply::new(200, r#"{"name":"a","tags":["1","2"]}"#)
                .with("link", r#"</v2/a/tags/list?last=2>; rel="next""#),
            "/v2/a/tags/list?last=2" => Reply::new(200, r#"{"tags":["3"]}"#).with(
                "link",
                format!("<http://{host}/v2/a/tags/list?last=3>; rel=next"),
            ),
            "/v2/a/tags/list?last=3" => Reply::new(200, r#"{"tags":null}"#)
                .with("link", r#"</v2/a/tags/list?last=3>; rel="next""#),
            _ => {
                let tags: Vec<String> = (0..20_000).map(|n| format!("\"{n}\"")).collect();
                Reply::new(200, format!("{{\"tags\":[{}]}}", tags.join(",")))
                    .with("link", "</v2/b/tags/list?again>; rel=next")
            }
        }
    });
    let (client, _) = client();
    assert_eq!(
        client.tags(&reference(&server, "a"), &()).unwrap(),
        ["1", "2", "3"]
    );
    assert_eq!(
        client.tags(&reference(&server, "b"), &()).unwrap().len(),
        100_000
    );
}

#[test]
fn a_list_of_tags_stays_with_its_registry_and_ends() {
    let elsewhere = Server::start(|_| Reply::new(200, r#"{"tags":["x"]}"#));
    let link = format!("<http://{}/v2/a/tags/list>; rel=next", elsewhere.host());
    let server = Server::start(move |_| Reply::new(200, r#"{"tags":["1"]}"#).with("link", &link));
    let (client, _) = client();
    let error = client.tags(&reference(&server, "a"), &()).unwrap_err();
    assert!(error.to_string().contains("another host"), "{error}");
    assert!(elsewhere.seen().is_empty());
    // An endless list of pages with one tag each.
    let server = Server::start(|_| {
        Reply::new(200, r#"{"tags":["1"]}"#).with("link", "</v2/a/tags/list?n=1>; rel=next")
    });
    let tags = client.tags(&reference(&server, "a"), &()).unwrap();
    assert_eq!(tags.len(), server.seen().len());
}
