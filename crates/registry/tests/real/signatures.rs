//! Signatures. OpenSSL checks them independently, skopeo copies them.

use crate::{client, reference, registry, skopeo};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiffy_registry::signature::{PrivateKey, PublicKey, sign, verify};
use jiffy_registry::testing::missing;
use jiffy_registry::{Client, Descriptor, Digest, Reference, RegistryError, media_type};
use std::fs;
use std::io::Cursor;
use std::path::Path;
use std::process::Command;

fn openssl(arguments: &[&str]) -> Vec<u8> {
    let output = Command::new("openssl")
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{}", missing("openssl", &error)));
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    output.stdout
}

/// A key made by OpenSSL, and its public half in PEM.
fn key(folder: &Path, name: &str) -> (PrivateKey, Vec<u8>) {
    let private = openssl(&[
        "genpkey",
        "-algorithm",
        "EC",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
    ]);
    let path = folder.join(name);
    fs::write(&path, &private).unwrap();
    let public = openssl(&["pkey", "-pubout", "-in", path.to_str().unwrap()]);
    (PrivateKey::from_pem(&private).unwrap(), public)
}

/// Pushes a small image and returns its digest.
fn image(client: &Client, to: &Reference) -> Digest {
    let config =
        br#"{"os":"linux","architecture":"amd64","rootfs":{"type":"layers","diff_ids":[]}}"#;
    let blob = Descriptor::of(media_type::OCI_CONFIG, config);
    client
        .upload_blob(to, &blob, None, &mut Cursor::new(config), &())
        .unwrap();
    let manifest = serde_json::json!({
        "schemaVersion": 2, "mediaType": media_type::OCI_MANIFEST, "config": blob, "layers": [],
    });
    let manifest = manifest.to_string();
    client
        .put_manifest(to, media_type::OCI_MANIFEST, manifest.as_bytes(), &())
        .unwrap()
}

/// Configures skopeo to copy cosign's signatures. (Debian's skopeo neither makes nor checks them.)
fn attachments(folder: &Path, registries: &[&str]) -> String {
    let path = folder.join("registries.d");
    fs::create_dir_all(&path).unwrap();
    let mut text = "docker:\n".to_owned();
    for registry in registries {
        text.push_str(&format!(
            "  \"{registry}\":\n    use-sigstore-attachments: true\n"
        ));
    }
    fs::write(path.join("all.yaml"), text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_signature_is_accepted_only_for_its_key() {
    let registry = registry();
    let client = client();
    let folder = tempfile::tempdir().unwrap();
    let to = reference(&registry, "signed:1");
    let digest = image(&client, &to);
    let (ours, public) = key(folder.path(), "ours");
    let (others, _) = key(folder.path(), "others");
    let believed = PublicKey::from_pem(&public).unwrap();
    assert_eq!(believed, ours.public());

    let error = verify(&client, &to, &digest, &believed, &()).unwrap_err();
    assert!(error.to_string().contains("it has no signature"), "{error}");
    sign(&client, &to, &digest, &others, &()).unwrap();
    let error = verify(&client, &to, &digest, &believed, &()).unwrap_err();
    assert!(error.to_string().contains("by other keys"), "{error}");
    sign(&client, &to, &digest, &ours, &()).unwrap();
    verify(&client, &to, &digest, &believed, &()).unwrap();
    verify(&client, &to, &digest, &others.public(), &()).unwrap();
    // Signing again changes nothing.
    let tag = to
        .with_tag(&format!("sha256-{}.sig", digest.hex()))
        .unwrap();
    let before = client.digest(&tag, &()).unwrap();
    sign(&client, &to, &digest, &ours, &()).unwrap();
    assert_eq!(client.digest(&tag, &()).unwrap(), before);
}

#[test]
fn signatures_are_compatible_with_skopeo_and_openssl() {
    let (registry, other) = (registry(), registry());
    let client = client();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let from = reference(&registry, "signed:1");
    let digest = image(&client, &from);
    let (ours, public) = key(folder.path(), "ours");
    sign(&client, &from, &digest, &ours, &()).unwrap();
    let registries = attachments(folder.path(), &[registry.host(), other.host()]);
    let copy = |from: &str, to: &str| {
        skopeo::run([
            "--insecure-policy",
            "--registries.d",
            &registries,
            "copy",
            "--src-tls-verify=false",
            "--dest-tls-verify=false",
            from,
            to,
        ])
    };

    let kept = format!("dir:{}", path("kept"));
    copy(&format!("docker://{from}"), &kept);
    let signature = fs::read(folder.path().join("kept/signature-1")).unwrap();
    let signature = signature.strip_prefix(b"\0sigstore-json\n").unwrap();
    let signature: serde_json::Value = serde_json::from_slice(signature).unwrap();
    let decoded = |text: &serde_json::Value| STANDARD.decode(text.as_str().unwrap()).unwrap();
    let annotation = &signature["annotations"]["dev.cosignproject.cosign/signature"];
    fs::write(path("document"), decoded(&signature["payload"])).unwrap();
    fs::write(path("signature"), decoded(annotation)).unwrap();
    fs::write(path("public"), &public).unwrap();
    let said = openssl(&[
        "dgst",
        "-sha256",
        "-verify",
        &path("public"),
        "-signature",
        &path("signature"),
        &path("document"),
    ]);
    assert_eq!(said, b"Verified OK\n");

    let to = reference(&other, "elsewhere/signed:2");
    copy(&kept, &format!("docker://{to}"));
    let believed = PublicKey::from_pem(&public).unwrap();
    verify(&client, &to, &digest, &believed, &()).unwrap();
    // A second signature leaves the first one valid.
    let (second, _) = key(folder.path(), "second");
    sign(&client, &to, &digest, &second, &()).unwrap();
    verify(&client, &to, &digest, &believed, &()).unwrap();
    verify(&client, &to, &digest, &second.public(), &()).unwrap();
}

#[test]
fn a_signature_of_another_image_does_not_count() {
    let registry = registry();
    let client = client();
    let folder = tempfile::tempdir().unwrap();
    let (ours, _) = key(folder.path(), "ours");
    let to = reference(&registry, "moved:1");
    let digest = image(&client, &to);
    sign(&client, &to, &digest, &ours, &()).unwrap();
    // Someone who may push can put a valid signature under another image's name.
    let signature = to
        .with_tag(&format!("sha256-{}.sig", digest.hex()))
        .unwrap();
    let fetched = client.manifest(&signature, &()).unwrap();
    let victim = Digest::of(b"another image");
    let moved = to
        .with_tag(&format!("sha256-{}.sig", victim.hex()))
        .unwrap();
    client
        .put_manifest(&moved, &fetched.media_type, &fetched.bytes, &())
        .unwrap();
    let error = verify(&client, &to, &victim, &ours.public(), &()).unwrap_err();
    assert!(matches!(error, RegistryError::Unsigned { .. }), "{error}");
}

const BUNDLE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";

/// A bundle as `cosign sign --key` of version 3 writes it, signed by OpenSSL.
fn bundle(folder: &Path, key: &str, digest: &Digest) -> Vec<u8> {
    let statement = serde_json::json!({
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"digest": {"sha256": digest.hex()}, "annotations": {}}],
        "predicateType": "https://sigstore.dev/cosign/sign/v1",
        "predicate": {},
    })
    .to_string();
    let kind = "application/vnd.in-toto+json";
    let signed = format!("DSSEv1 28 {kind} {} {statement}", statement.len());
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    fs::write(path("signed"), signed).unwrap();
    let signature = openssl(&["dgst", "-sha256", "-sign", &path(key), &path("signed")]);
    let bundle = serde_json::json!({
        "mediaType": BUNDLE,
        "verificationMaterial": {
            "publicKey": {"hint": "Zm9v"},
            "tlogEntries": [],
            "timestampVerificationData": null,
        },
        "dsseEnvelope": {
            "payload": STANDARD.encode(statement),
            "payloadType": kind,
            "signatures": [{"sig": STANDARD.encode(signature), "keyid": ""}],
        },
    });
    bundle.to_string().into_bytes()
}

/// Attaches a bundle to a manifest as `BUNDLE_SPEC.md` says. The registry has no referrers API, so
/// the referrers tag of the specification is written instead.
fn attach(client: &Client, to: &Reference, digest: &Digest, bundle: &[u8]) {
    attach_all(client, to, digest, &[bundle]);
}

fn attach_all(client: &Client, to: &Reference, digest: &Digest, bundles: &[&[u8]]) {
    let upload = |media_type: &str, bytes: &[u8]| {
        let blob = Descriptor::of(media_type, bytes);
        let mut source = Cursor::new(bytes);
        client
            .upload_blob(to, &blob, None, &mut source, &())
            .unwrap();
        blob
    };
    let subject = client.manifest(&to.with_digest(*digest), &()).unwrap();
    let put = |to: &Reference, media_type: &str, text: &str| {
        client
            .put_manifest(to, media_type, text.as_bytes(), &())
            .unwrap();
    };
    let mut listed = Vec::new();
    for &bundle in bundles {
        let manifest = serde_json::json!({
            "schemaVersion": 2,
            "mediaType": media_type::OCI_MANIFEST,
            "artifactType": BUNDLE,
            "config": upload(media_type::OCI_EMPTY, b"{}"),
            "layers": [upload(BUNDLE, bundle)],
            "subject": Descriptor::of(media_type::OCI_MANIFEST, &subject.bytes),
            "annotations": {
                "dev.sigstore.bundle.content": "dsse-envelope",
                "dev.sigstore.bundle.predicateType": "https://sigstore.dev/cosign/sign/v1",
            },
        })
        .to_string();
        let own = Digest::of(manifest.as_bytes());
        put(&to.with_digest(own), media_type::OCI_MANIFEST, &manifest);
        let mut one = Descriptor::of(media_type::OCI_MANIFEST, manifest.as_bytes());
        one.artifact_type = Some(BUNDLE.to_owned());
        listed.push(one);
    }
    let index = serde_json::json!({
        "schemaVersion": 2, "mediaType": media_type::OCI_INDEX, "manifests": listed,
    });
    let tag = to.with_tag(&format!("sha256-{}", digest.hex())).unwrap();
    put(&tag, media_type::OCI_INDEX, &index.to_string());
}

#[test]
fn a_bundle_of_cosign_3_is_found_and_verified() {
    let registry = registry();
    let client = client();
    let folder = tempfile::tempdir().unwrap();
    let (_, public) = key(folder.path(), "ours");
    let (others, _) = key(folder.path(), "others");
    let believed = PublicKey::from_pem(&public).unwrap();
    let to = reference(&registry, "bundled:1");
    let digest = image(&client, &to);
    let said = |key: &PublicKey| {
        let error = verify(&client, &to, &digest, key, &()).unwrap_err();
        assert!(matches!(error, RegistryError::Unsigned { .. }), "{error}");
        error.to_string()
    };
    assert!(said(&believed).contains("it has no signature"));
    attach(
        &client,
        &to,
        &digest,
        &bundle(folder.path(), "ours", &digest),
    );
    verify(&client, &to, &digest, &believed, &()).unwrap();
    assert!(said(&others.public()).contains("1 signatures are by other keys"));

    // Beside an attestation that is too large to be read.
    let ours = bundle(folder.path(), "ours", &digest);
    let large = vec![b' '; (1 << 20) + 1];
    attach_all(&client, &to, &digest, &[&large, &ours]);
    verify(&client, &to, &digest, &believed, &()).unwrap();
    attach(&client, &to, &digest, &large);
    assert!(said(&believed).contains("of kinds that are not verified"));

    // A valid signature of another manifest, and one with a certificate.
    let other = bundle(folder.path(), "ours", &Digest::of(b"something else"));
    attach(&client, &to, &digest, &other);
    assert!(said(&believed).contains("by other keys, or for other content"));
    let keyless = String::from_utf8(bundle(folder.path(), "others", &digest)).unwrap();
    let keyless = keyless.replace("publicKey", "x509CertificateChain");
    attach(&client, &to, &digest, keyless.as_bytes());
    assert!(said(&believed).contains("of kinds that are not verified"));
    // In addition to a signature of the older kind.
    let (third, _) = key(folder.path(), "third");
    sign(&client, &to, &digest, &third, &()).unwrap();
    verify(&client, &to, &digest, &third.public(), &()).unwrap();
    assert!(said(&believed).contains("of 2 signatures 1 are of kinds"));
}

#[test]
fn keys_of_other_kinds_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for curve in ["P-384", "secp256k1"] {
        let curve = format!("ec_paramgen_curve:{curve}");
        let private = openssl(&["genpkey", "-algorithm", "EC", "-pkeyopt", &curve]);
        let path = folder.path().join("key");
        fs::write(&path, &private).unwrap();
        let public = openssl(&["pkey", "-pubout", "-in", path.to_str().unwrap()]);
        assert!(PublicKey::from_pem(&public).is_err());
        assert!(PrivateKey::from_pem(&private).is_err());
    }
}
