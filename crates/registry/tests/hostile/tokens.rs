//! Token servers.

use crate::server::{Reply, Request, Server};
use crate::{Waits, client, reference};
use jiffy_registry::{Client, Credentials, Descriptor, PlainHttp, Reference, RegistryError};
use std::sync::atomic::{AtomicUsize, Ordering};

fn content() -> Vec<u8> {
    vec![7; 300_000]
}

fn fetch(client: &Client, from: &Reference) -> Result<(), RegistryError> {
    let mut bytes = Vec::new();
    client.blob(from, &Descriptor::of("", &content()), &mut bytes, &())?;
    assert!(bytes == content());
    Ok(())
}

fn answer(request: &Request) -> Reply {
    match request.range() {
        Some(range) => Reply::part(&content(), range),
        None => Reply::new(200, content()),
    }
}

/// Asks for a token; the registry is its own token server.
fn challenge(request: &Request) -> Reply {
    let host = request.header("host").unwrap();
    let header =
        format!("Bearer realm=\"http://{host}/token\",service=\"it\",scope=\"repository:a:pull\"");
    Reply::new(
        401,
        r#"{"errors":[{"code":"UNAUTHORIZED","message":"no"}]}"#,
    )
    .with("www-authenticate", header)
}

fn options(server: &Server, password: &str) -> jiffy_registry::ClientOptions {
    let mut options = Waits::default().options();
    options.credentials = Credentials::basic(&server.host(), "me", password);
    options
}

#[test]
fn a_token_is_requested_once_and_reused() {
    let server = Server::start(|request| {
        if request.path.starts_with("/token?") {
            assert_eq!(
                request.path,
                "/token?service=it&scope=repository%3Aa%3Apull&account=me"
            );
            return match request.header("authorization") {
                Some("Basic bWU6cHc=") => Reply::new(200, r#"{"token":"t0k","expires_in":300}"#),
                _ => Reply::new(401, ""),
            };
        }
        match request.header("authorization") {
            Some("Bearer t0k") => answer(request),
            _ => challenge(request),
        }
    });
    let from = reference(&server, "a:1");
    let client = Client::new(options(&server, "pw")).unwrap();
    for _ in 0..3 {
        fetch(&client, &from).unwrap();
    }
    let asked = server.seen();
    let asked = asked
        .iter()
        .filter(|request| request.path.starts_with("/token"));
    assert_eq!(asked.count(), 1);

    let wrong = Client::new(options(&server, "wrong")).unwrap();
    let error = fetch(&wrong, &from).unwrap_err();
    assert!(
        matches!(error, RegistryError::Unauthorised { .. }),
        "{error}"
    );
}

#[test]
fn a_token_that_expires_in_the_middle_is_renewed() {
    let issued = AtomicUsize::new(0);
    let used = AtomicUsize::new(0);
    // Each token is valid for one request, and each answer is cut off.
    let server = Server::start(move |request| {
        if request.path.starts_with("/token") {
            let number = issued.fetch_add(1, Ordering::SeqCst) + 1;
            return Reply::new(
                200,
                format!(r#"{{"access_token":"{number}","expires_in":300}}"#),
            );
        }
        let number = issued.load(Ordering::SeqCst);
        let good = request.header("authorization") == Some(&format!("Bearer {number}"));
        if number > 0 && good && used.swap(number, Ordering::SeqCst) < number {
            return answer(request).cut(100_000);
        }
        challenge(request)
    });
    let client = Client::new(options(&server, "pw")).unwrap();
    fetch(&client, &reference(&server, "a:1")).unwrap();
    let asked = server.seen();
    let asked = asked
        .iter()
        .filter(|request| request.path.starts_with("/token"));
    assert_eq!(asked.count(), 3);
}

#[test]
fn a_token_that_is_always_refused_ends_soon() {
    let server = Server::start(|request| {
        if request.path.starts_with("/token") {
            Reply::new(200, r#"{"token":"x"}"#)
        } else {
            challenge(request)
        }
    });
    let client = Client::new(options(&server, "pw")).unwrap();
    let error = fetch(&client, &reference(&server, "a:1")).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "blob {} of {}/a: {} refuses: the credentials are not accepted, or do not permit \
             this (UNAUTHORIZED: no)",
            Descriptor::of("", &content()).digest.short(),
            server.host(),
            server.host()
        )
    );
    assert_eq!(server.seen().len(), 3);
}

#[test]
fn misbehaving_token_servers_are_refused() {
    for (reply, said) in [
        (Reply::new(200, "{}"), "gave no token"),
        (Reply::new(200, "<html>"), "not a token"),
        (
            Reply::new(200, r#"{"token":"a\r\nb: c"}"#),
            "not allowed in a header",
        ),
        (
            Reply::new(200, vec![b' '; 1 << 16]).endless(),
            "longer than",
        ),
        (
            Reply::new(302, "").with("location", "http://elsewhere.example/"),
            "redirects the request",
        ),
        (Reply::new(403, r#"{"details":"blocked"}"#), "blocked"),
        (Reply::new(418, ""), "418"),
    ] {
        let server = Server::start(move |request| {
            if request.path.starts_with("/token") {
                reply.clone()
            } else {
                challenge(request)
            }
        });
        let client = Client::new(options(&server, "pw")).unwrap();
        let error = fetch(&client, &reference(&server, "a:1")).unwrap_err();
        assert!(error.to_string().contains(said), "{said}: {error}");
    }
}

#[test]
fn a_token_server_that_fails_for_a_while_is_retried() {
    let count = AtomicUsize::new(0);
    let server = Server::start(move |request| {
        if request.path.starts_with("/token") {
            return match count.fetch_add(1, Ordering::SeqCst) {
                0 => Reply::new(503, ""),
                1 => Reply::nothing(),
                _ => Reply::new(200, r#"{"token":"x"}"#),
            };
        }
        match request.header("authorization") {
            Some("Bearer x") => answer(request),
            _ => challenge(request),
        }
    });
    let (client, waits) = client();
    fetch(&client, &reference(&server, "a:1")).unwrap();
    assert_eq!(waits.all().len(), 2);
}

#[test]
fn a_password_is_not_sent_in_the_clear_to_a_token_server() {
    // By this name the registry counts as remote: it may neither name this computer nor a token
    // server without TLS.
    for (realm, said) in [
        ("http://127.0.0.1:1/token", "this computer"),
        ("http://127.1:1/token", "this computer"),
        ("ftp://x/", "not an address"),
    ] {
        let server = Server::start(move |_| {
            Reply::new(401, "").with("www-authenticate", format!("Bearer realm=\"{realm}\""))
        });
        let name = server.host().replace("127.0.0.1", "0.0.0.0");
        let from = Reference::parse(&format!("{name}/a:1"), None).unwrap();
        let mut options = options(&server, "pw");
        options.plain_http = PlainHttp::Everywhere;
        let error = fetch(&Client::new(options).unwrap(), &from).unwrap_err();
        assert!(error.to_string().contains(said), "{realm}: {error}");
    }
    let server = Server::start(|_| {
        Reply::new(401, "").with(
            "www-authenticate",
            "Bearer realm=\"http://t.example/token\"",
        )
    });
    let client = Client::new(options(&server, "pw")).unwrap();
    let error = fetch(&client, &reference(&server, "a:1")).unwrap_err();
    assert!(error.to_string().contains("without TLS"), "{error}");
}

#[test]
fn unknown_authentication_schemes_are_named() {
    let server = Server::start(|_| Reply::new(401, "").with("www-authenticate", "Negotiate, NTLM"));
    let (client, _) = client();
    let error = fetch(&client, &reference(&server, "a:1")).unwrap_err();
    assert!(error.to_string().contains("negotiate, ntlm"), "{error}");
}

#[test]
fn a_password_is_not_sent_to_another_domain_unless_that_is_known_too() {
    let server = Server::start(|_| {
        let realm = "Bearer realm=\"https://t.example/token\"";
        Reply::new(401, "").with("www-authenticate", realm)
    });
    let client = Client::new(options(&server, "pw")).unwrap();
    let error = fetch(&client, &reference(&server, "a:1")).unwrap_err();
    assert!(
        matches!(&error, RegistryError::Unauthorised { detail, .. }
            if detail.contains("t.example") && detail.contains("another domain")),
        "{error}"
    );
    // On one computer any port is allowed.
    let tokens = Server::start(|_| Reply::new(200, r#"{"token":"x"}"#));
    let realm = format!("http://{}/token", tokens.host());
    let server = Server::start(move |request| match request.header("authorization") {
        Some("Bearer x") => answer(request),
        _ => Reply::new(401, "").with("www-authenticate", format!("Bearer realm=\"{realm}\"")),
    });
    let client = Client::new(options(&server, "pw")).unwrap();
    fetch(&client, &reference(&server, "a:1")).unwrap();
    assert!(tokens.seen()[0].header("authorization").is_some());
}
