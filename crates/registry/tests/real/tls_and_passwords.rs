//! TLS with a self-signed certificate, and passwords.

use crate::{bytes, skopeo};
use jiffy_registry::testing::{LocalRegistry, PASSWORD, RegistryOptions, USER};
use jiffy_registry::{
    Client, ClientOptions, Credentials, Descriptor, PlainHttp, Reference, RegistryError,
};
use std::io::Cursor;

fn start(password: bool, tls: bool) -> LocalRegistry {
    LocalRegistry::start(&RegistryOptions { password, tls })
        .unwrap_or_else(|error| panic!("{error}"))
}

fn at(registry: &LocalRegistry) -> Reference {
    Reference::parse(&format!("{}/private:1", registry.host()), None).unwrap()
}

/// Uploads a small blob.
fn upload(options: ClientOptions, to: &Reference) -> Result<(), RegistryError> {
    let content = bytes(9, 1000);
    let blob = Descriptor::of("", &content);
    let client = Client::new(options)?;
    client.upload_blob(to, &blob, None, &mut Cursor::new(&content), &())?;
    assert!(client.has_blob(to, &blob, &())?);
    Ok(())
}

#[test]
fn a_loopback_registry_with_tls_is_reached_over_tls() {
    let registry = start(false, true);
    let to = at(&registry);
    let trusting = || ClientOptions {
        authorities: vec![registry.certificate()],
        ..Default::default()
    };
    upload(trusting(), &to).unwrap();
    let by_name =
        Reference::parse(&to.to_string().replace("127.0.0.1", "localhost"), None).unwrap();
    upload(trusting(), &by_name).unwrap();

    let error = upload(ClientOptions::default(), &to).unwrap_err();
    assert!(matches!(error, RegistryError::Insecure { .. }), "{error:?}");
    assert!(error.hint().unwrap().contains("authority"), "{error:?}");
    let plain = ClientOptions {
        plain_http: PlainHttp::Everywhere,
        ..trusting()
    };
    let error = upload(plain, &to).unwrap_err();
    assert!(
        matches!(error, RegistryError::Refused { status: 400, .. }),
        "{error:?}"
    );
}

#[test]
fn a_remote_registry_without_tls_is_used_only_on_request() {
    let registry = start(false, false);
    // Linux treats 0.0.0.0 as the loopback, but Jiffy treats it as a remote registry.
    let name = registry.host().replace("127.0.0.1", "0.0.0.0");
    let to = Reference::parse(&format!("{name}/a:1"), None).unwrap();
    let error = upload(ClientOptions::default(), &to).unwrap_err();
    assert!(matches!(error, RegistryError::Insecure { .. }), "{error:?}");
    assert!(error.hint().unwrap().contains("plain HTTP"), "{error:?}");
    let plain = ClientOptions {
        plain_http: PlainHttp::Everywhere,
        ..Default::default()
    };
    upload(plain, &to).unwrap();
}

#[test]
fn files_that_have_no_certificates_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.pem");
    for content in [
        "",
        "-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----\n",
    ] {
        std::fs::write(&file, content).unwrap();
        let error = Client::new(ClientOptions {
            authorities: vec![file.clone()],
            ..Default::default()
        })
        .unwrap_err();
        assert!(error.to_string().contains("no certificates"), "{error}");
    }
}

#[test]
fn passwords_from_every_source_are_accepted() {
    let registry = start(true, false);
    let to = at(&registry);
    let with = |credentials| ClientOptions {
        credentials,
        ..Default::default()
    };
    for credentials in [
        Credentials::anonymous(),
        Credentials::basic(registry.host(), USER, "wrong"),
        Credentials::basic("elsewhere.example", USER, PASSWORD),
    ] {
        let error = upload(with(credentials), &to).unwrap_err();
        assert!(
            matches!(error, RegistryError::Unauthorised { .. }),
            "{error:?}"
        );
        assert!(error.hint().unwrap().contains("log in"));
    }
    upload(
        with(Credentials::basic(registry.host(), USER, PASSWORD)),
        &to,
    )
    .unwrap();

    // skopeo's login writes the credentials file.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("auth.json");
    skopeo::run([
        "login".as_ref(),
        "--tls-verify=false".as_ref(),
        "--authfile".as_ref(),
        file.as_os_str(),
        "-u".as_ref(),
        USER.as_ref(),
        "-p".as_ref(),
        PASSWORD.as_ref(),
        registry.host().as_ref(),
    ]);
    upload(with(Credentials::docker_config(file)), &to).unwrap();
}
