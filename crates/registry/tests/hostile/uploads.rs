//! Uploads to a registry that misbehaves.

use crate::server::{Reply, Request, Server};
use crate::{GivesUp, client, reference};
use jiffy_registry::{Client, Descriptor, Digest, Reference, RegistryError, Uploaded, media_type};
use std::io::Cursor;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

fn content() -> Vec<u8> {
    vec![7; 300_000]
}

fn upload(client: &Client, to: &Reference, from: Option<&str>) -> Result<Uploaded, RegistryError> {
    let content = content();
    let blob = Descriptor::of("", &content);
    client.upload_blob(to, &blob, from, &mut Cursor::new(&content), &())
}

/// A registry for one upload at a time, with faults.
fn registry(wrong: impl Fn(usize, &Request) -> Option<Reply> + Send + Sync + 'static) -> Server {
    let count = AtomicUsize::new(0);
    let there = Mutex::new(false);
    Server::start(move |request| {
        let number = count.fetch_add(1, Ordering::SeqCst);
        if let Some(reply) = wrong(number, request) {
            return reply;
        }
        let mut there = there.lock().unwrap();
        match request.method.as_str() {
            "HEAD" if *there => Reply::new(200, ""),
            "HEAD" => Reply::new(404, ""),
            "POST" => Reply::new(202, "").with("location", format!("/upload/{number}?state=x")),
            "PUT" => {
                assert!(
                    request.path.contains("?state=x&digest=sha256%3A"),
                    "{}",
                    request.path
                );
                assert!(request.body == content());
                *there = true;
                Reply::new(201, "")
            }
            "DELETE" => Reply::new(204, ""),
            other => panic!("{other}"),
        }
    })
}

#[test]
fn a_broken_upload_is_cancelled_and_restarted() {
    let puts = AtomicUsize::new(0);
    let server = registry(move |_, request| {
        let put = request.method == "PUT" && puts.fetch_add(1, Ordering::SeqCst) < 2;
        put.then(Reply::nothing)
    });
    let (client, waits) = client();
    assert_eq!(
        upload(&client, &reference(&server, "a:1"), None).unwrap(),
        Uploaded::Sent
    );
    assert_eq!(waits.all().len(), 2);
    let methods: Vec<String> = server
        .seen()
        .iter()
        .map(|request| request.method.clone())
        .collect();
    let attempt = ["HEAD", "POST", "PUT", "DELETE"];
    let expected = [&attempt[..], &attempt[..], &attempt[..3]].concat();
    assert_eq!(methods, expected);
}

#[test]
fn a_lost_answer_causes_no_second_upload() {
    // The first PUT succeeds, but its answer is lost.
    let done = Mutex::new(false);
    let server = registry(move |_, request| {
        let mut done = done.lock().unwrap();
        match request.method.as_str() {
            "PUT" => {
                *done = true;
                Some(Reply::nothing())
            }
            "HEAD" if *done => Some(Reply::new(200, "")),
            _ => None,
        }
    });
    let (client, _) = client();
    assert_eq!(
        upload(&client, &reference(&server, "a:1"), None).unwrap(),
        Uploaded::Existed
    );
}

#[test]
fn a_refused_mount_falls_back_to_an_upload() {
    for status in [401, 403, 404] {
        let server = registry(move |_, request| {
            request
                .path
                .contains("mount=")
                .then(|| Reply::new(status, "").with("www-authenticate", "Basic"))
        });
        let (client, _) = client();
        let how = upload(&client, &reference(&server, "a:1"), Some("b")).unwrap();
        assert_eq!(how, Uploaded::Sent);
    }
    let server =
        registry(|_, request| request.path.contains("mount=").then(|| Reply::new(201, "")));
    let (client, _) = client();
    let how = upload(&client, &reference(&server, "a:1"), Some("b")).unwrap();
    assert_eq!(how, Uploaded::Mounted);
}

#[test]
fn a_refused_upload_is_reported_with_the_registrys_message() {
    let server = registry(|_, request| {
        (request.method == "PUT").then(|| {
            Reply::new(
                413,
                r#"{"errors":[{"code":"SIZE_INVALID","message":"too big for us"}]}"#,
            )
        })
    });
    let (client, waits) = client();
    let error = upload(&client, &reference(&server, "a:1"), None).unwrap_err();
    assert!(
        error.to_string().contains("SIZE_INVALID: too big for us"),
        "{error}"
    );
    assert!(waits.all().is_empty());
}

#[test]
fn an_upload_to_nowhere_is_refused() {
    for reply in [
        Reply::new(202, ""),
        Reply::new(202, "").with("location", "ftp://x/"),
        Reply::new(202, "").with("location", "http://u:p@x/"),
    ] {
        let server = registry(move |_, request| (request.method == "POST").then(|| reply.clone()));
        let (client, _) = client();
        let error = upload(&client, &reference(&server, "a:1"), None).unwrap_err();
        assert!(matches!(error, RegistryError::Protocol { .. }), "{error}");
    }
}

#[test]
fn a_relative_location_is_followed() {
    let server = registry(|_, request| {
        let location = "../blobs/uploads/7?state=x";
        (request.method == "POST").then(|| Reply::new(202, "").with("location", location))
    });
    let (client, _) = client();
    upload(&client, &reference(&server, "a:1"), None).unwrap();
    let seen = server.seen();
    let put = seen.iter().find(|request| request.method == "PUT").unwrap();
    let path = "/v2/a/blobs/blobs/uploads/7?state=x&digest=";
    assert!(put.path.starts_with(path), "{}", put.path);
}

#[test]
fn an_abandoned_upload_is_cancelled() {
    let server = registry(|_, _| None);
    let (client, _) = client();
    let content = content();
    let error = client
        .upload_blob(
            &reference(&server, "a:1"),
            &Descriptor::of("", &content),
            None,
            &mut Cursor::new(&content),
            &GivesUp(Mutex::new(1)),
        )
        .unwrap_err();
    assert!(matches!(error, RegistryError::Cancelled { .. }), "{error}");
    assert_eq!(server.seen().last().unwrap().method, "DELETE");
}

#[test]
fn a_manifest_stored_with_another_digest_is_reported() {
    let digest = Digest::of(b"other");
    let server = Server::start(move |_| Reply::new(201, "").with("docker-content-digest", digest));
    let (client, _) = client();
    let error = client
        .put_manifest(
            &reference(&server, "a:1"),
            media_type::OCI_MANIFEST,
            b"{}",
            &(),
        )
        .unwrap_err();
    assert!(matches!(error, RegistryError::Damaged { .. }), "{error}");
    let pinned = reference(&server, "a").with_digest(digest);
    let error = client
        .put_manifest(&pinned, media_type::OCI_MANIFEST, b"{}", &())
        .unwrap_err();
    assert!(matches!(error, RegistryError::Damaged { .. }), "{error}");
}
