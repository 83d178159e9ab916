//! Redirects.

use crate::server::{Reply, Request, Server};
use crate::{Waits, client, reference};
use jiffy_registry::{Client, Credentials, Descriptor, PlainHttp, Reference, RegistryError};

const CONTENT: &[u8] = b"the bytes of a blob";

/// A server that asks for Basic credentials, then redirects to `location`.
fn gate(location: String) -> Server {
    Server::start(
        move |request: &Request| match request.header("authorization") {
            Some("Basic bWU6cHc=") => Reply::new(307, "").with("location", &location),
            _ => Reply::new(401, "").with("www-authenticate", "Basic realm=\"x\""),
        },
    )
}

fn known(server: &Server) -> Client {
    let mut options = Waits::default().options();
    options.credentials = Credentials::basic(&server.host(), "me", "pw");
    Client::new(options).unwrap()
}

fn fetch(client: &Client, from: &Reference) -> Result<Vec<u8>, RegistryError> {
    let mut bytes = Vec::new();
    client.blob(from, &Descriptor::of("", CONTENT), &mut bytes, &())?;
    Ok(bytes)
}

#[test]
fn credentials_stay_with_their_registry() {
    let elsewhere = Server::start(|request: &Request| match request.range() {
        Some(range) => Reply::part(CONTENT, range),
        None => Reply::new(200, CONTENT),
    });
    let server = gate(format!("http://{}/signed?key=x", elsewhere.host()));
    let client = known(&server);
    let from = reference(&server, "a:1");
    assert_eq!(fetch(&client, &from).unwrap(), CONTENT);
    let part = client
        .blob_range(&from, &Descriptor::of("", CONTENT), 4..9, &())
        .unwrap();
    assert_eq!(part, b"bytes");
    let seen = elsewhere.seen();
    assert_eq!(seen.len(), 2);
    assert_eq!(seen[0].path, "/signed?key=x");
    assert_eq!(seen[1].header("range"), Some("bytes=4-8"));
    for request in seen {
        assert_eq!(request.header("authorization"), None);
    }
}

#[test]
fn a_redirect_to_another_host_carries_no_credentials() {
    let elsewhere =
        Server::start(|_| Reply::new(401, "").with("www-authenticate", "Basic realm=\"x\""));
    let server = gate(format!("http://{}/x", elsewhere.host()));
    let error = fetch(&known(&server), &reference(&server, "a:1")).unwrap_err();
    assert!(
        matches!(error, RegistryError::Unauthorised { .. }),
        "{error}"
    );
    assert_eq!(elsewhere.seen().len(), 1);
    assert_eq!(elsewhere.seen()[0].header("authorization"), None);
}

#[test]
fn invalid_redirects_are_refused() {
    for (location, said) in [
        ("", "not an address"),
        ("file:///etc/passwd", "not an address"),
        ("http://user:pw@host.example/", "a user or a password"),
        ("http://[::1", "not an address"),
        ("/again", "too many redirects"),
    ] {
        let server = gate(location.to_owned());
        let error = fetch(&known(&server), &reference(&server, "a:1")).unwrap_err();
        assert!(error.to_string().contains(said), "{location}: {error}");
    }
    let server = Server::start(|_| Reply::new(302, ""));
    let (client, _) = client();
    let error = fetch(&client, &reference(&server, "a:1")).unwrap_err();
    assert!(error.to_string().contains("has no target"), "{error}");
}

#[test]
fn a_remote_registry_cannot_redirect_to_this_computer() {
    sent_to_this_computer(|host| host.to_owned());
}

#[test]
fn a_remote_registry_cannot_redirect_to_a_name_of_this_computer() {
    // glibc accepts more forms of an address than Jiffy's parser.
    sent_to_this_computer(|host| host.replace("127.0.0.1", "127.1"));
}

fn sent_to_this_computer(name_of: fn(&str) -> String) {
    let inside = Server::start(|_| Reply::new(200, CONTENT));
    let to = format!("http://{}/x", name_of(&inside.host()));
    let server = Server::start(move |_| Reply::new(307, "").with("location", &to));
    // Linux treats 0.0.0.0 as the loopback, but Jiffy treats it as a remote registry.
    let name = server.host().replace("127.0.0.1", "0.0.0.0");
    let from = Reference::parse(&format!("{name}/a:1"), None).unwrap();
    let mut options = Waits::default().options();
    options.plain_http = PlainHttp::Everywhere;
    let client = Client::new(options).unwrap();
    let error = fetch(&client, &from).unwrap_err();
    assert!(error.to_string().contains("this computer"), "{error}");
    assert!(inside.seen().is_empty());
}
