//! Signatures of cosign 3: Sigstore bundles that refer to a manifest.
//!
//! The bundle is the only layer of a referrer with the type of bundles. It is JSON with a DSSE
//! envelope, whose payload is an in-toto statement with the signed digests. A signature with a key
//! covers the envelope's payload. Certificates, timestamps and entries of transparency logs are
//! ignored.
//!
//! Sources: cosign's `BUNDLE_SPEC.md`, Sigstore's `sigstore_bundle.proto`, DSSE's
//! `protocol.md` and `envelope.md`, in-toto's `statement.md` (version 1).

use super::{Found, MAX_SIGNATURES, PublicKey};
use crate::error::Result;
use crate::{Client, Content, Descriptor, Digest, Progress, Reference, RegistryError};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use std::collections::BTreeMap;

/// Prefix of the media type of bundles; the version follows.
const BUNDLE: &str = "application/vnd.dev.sigstore.bundle";
/// Payload type of an envelope with an in-toto statement.
const IN_TOTO: &str = "application/vnd.in-toto+json";
/// Predicate type of an image's signature. Statements of other types are attestations.
const SIGNED: &str = "https://sigstore.dev/cosign/sign/v1";
/// Largest bundle that is read, bytes.
const MAX_BUNDLE: u64 = 1 << 20;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Bundle {
    verification_material: Option<Material>,
    dsse_envelope: Option<Envelope>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Material {
    /// Present in signatures with a key.
    public_key: Option<serde_json::Value>,
}

/// DSSE, "Envelope".
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    payload: String,
    payload_type: String,
    signatures: Vec<EnvelopeSignature>,
}

#[derive(Deserialize)]
struct EnvelopeSignature {
    sig: String,
}

/// An in-toto statement.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Statement {
    #[serde(rename = "_type")]
    kind: String,
    subject: Vec<Subject>,
    predicate_type: String,
}

#[derive(Deserialize)]
struct Subject {
    digest: BTreeMap<String, String>,
}

/// Result of checking a bundle with a key.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// The key signed the manifest.
    Signed,
    /// The bundle is signed by another key, or for another manifest.
    OtherKey,
    /// The bundle can't be verified, for example because it uses a certificate.
    Unsupported,
    /// The bundle is an attestation, not a signature of the image.
    Attestation,
}

/// Whether a bundle that refers to this manifest has a signature by the key. Other signatures are
/// counted in `found`.
pub(super) fn verify(
    client: &Client,
    repository: &Reference,
    digest: &Digest,
    key: &PublicKey,
    found: &mut Found,
    progress: &dyn Progress,
) -> Result<bool> {
    let referrers = client.referrers(repository, digest, progress)?;
    let bundles = referrers.iter().filter(|referrer| is_bundle(referrer));
    for referrer in bundles.take(MAX_SIGNATURES) {
        let Some(bytes) = bundle(client, repository, referrer, found, progress)? else {
            continue;
        };
        match check_bundle(&bytes, digest, key) {
            Verdict::Signed => return Ok(true),
            Verdict::OtherKey => found.other_keys += 1,
            Verdict::Unsupported => found.unsupported += 1,
            Verdict::Attestation => {}
        }
    }
    Ok(false)
}

/// Registries older than OCI 1.1 leave the artifact type out of the list.
fn is_bundle(referrer: &Descriptor) -> bool {
    let kind = referrer.artifact_type.as_deref();
    kind.is_none_or(|kind| kind.starts_with(BUNDLE))
}

/// Fetches the bundle of a referrer; `None` if it has none or is gone, or if the bundle is too large
/// for a signature: attestations with a list of packages may have megabytes.
fn bundle(
    client: &Client,
    repository: &Reference,
    referrer: &Descriptor,
    found: &mut Found,
    progress: &dyn Progress,
) -> Result<Option<Vec<u8>>> {
    let fetched = match client.manifest(&repository.with_digest(referrer.digest), progress) {
        Err(RegistryError::NotFound { .. }) => return Ok(None),
        fetched => fetched?,
    };
    let Content::Image(manifest) = fetched.content else {
        return Ok(None);
    };
    let layer = manifest.layers.first();
    let Some(layer) = layer.filter(|layer| layer.media_type.starts_with(BUNDLE)) else {
        return Ok(None);
    };
    if layer.size > MAX_BUNDLE {
        found.unsupported += 1;
        return Ok(None);
    }
    let bytes = client.small_blob(repository, layer, MAX_BUNDLE, progress)?;
    Ok(Some(bytes))
}

fn check_bundle(bundle: &[u8], digest: &Digest, key: &PublicKey) -> Verdict {
    let Ok(bundle) = serde_json::from_slice::<Bundle>(bundle) else {
        return Verdict::Unsupported;
    };
    let (Some(envelope), Some(material)) = (bundle.dsse_envelope, bundle.verification_material)
    else {
        return Verdict::Unsupported;
    };
    if envelope.payload_type != IN_TOTO {
        return Verdict::Unsupported;
    }
    let Ok(payload) = STANDARD.decode(&envelope.payload) else {
        return Verdict::Unsupported;
    };
    let signed = pre_authentication_encoding(&envelope.payload_type, &payload);
    let signatures = envelope.signatures.iter().take(MAX_SIGNATURES);
    let is_ours = signatures
        .filter_map(|signature| STANDARD.decode(&signature.sig).ok())
        .any(|signature| key.verifies(&signed, &signature));
    // The payload is not verified yet. Without a valid signature it only affects the error message.
    let statement = serde_json::from_slice::<Statement>(&payload).ok();
    match statement {
        Some(statement) if statement.predicate_type != SIGNED => Verdict::Attestation,
        Some(statement) if is_ours && statement.names_digest(digest) => Verdict::Signed,
        _ if material.public_key.is_none() => Verdict::Unsupported,
        _ => Verdict::OtherKey,
    }
}

impl Statement {
    fn names_digest(&self, digest: &Digest) -> bool {
        let is_it = |subject: &Subject| subject.digest.get("sha256") == Some(&digest.hex());
        self.kind.starts_with("https://in-toto.io/Statement/v") && self.subject.iter().any(is_it)
    }
}

/// The signed bytes of an envelope: DSSE's pre-authentication encoding.
fn pre_authentication_encoding(payload_type: &str, payload: &[u8]) -> Vec<u8> {
    let head = format!(
        "DSSEv1 {} {payload_type} {} ",
        payload_type.len(),
        payload.len()
    );
    [head.as_bytes(), payload].concat()
}

/// Checks arbitrary bytes as a bundle, for fuzzing.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_any_bundle(bytes: &[u8]) {
    let point = [&[4][..], &[1; 64]].concat();
    let verdict = check_bundle(bytes, &Digest::of(b""), &PublicKey { point });
    assert_ne!(verdict, Verdict::Signed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signature::PrivateKey;
    use ring::rand::SystemRandom;
    use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair};
    use serde_json::{Value, json};

    fn private_key() -> PrivateKey {
        let random = SystemRandom::new();
        let algorithm = &ECDSA_P256_SHA256_ASN1_SIGNING;
        let der = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap();
        let pair = EcdsaKeyPair::from_pkcs8(algorithm, der.as_ref(), &random).unwrap();
        PrivateKey { pair }
    }

    fn statement(digest: &Digest, predicate: &str) -> Value {
        json!({
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [{"digest": {"sha256": digest.hex()}, "annotations": {}}],
            "predicateType": predicate,
            "predicate": {},
        })
    }

    fn bundle(key: &PrivateKey, statement: &Value) -> Value {
        let payload = statement.to_string();
        let signed = pre_authentication_encoding(IN_TOTO, payload.as_bytes());
        let signature = key.pair.sign(&SystemRandom::new(), &signed).unwrap();
        json!({
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": {"publicKey": {"hint": "abc"}, "tlogEntries": []},
            "dsseEnvelope": {
                "payload": STANDARD.encode(&payload),
                "payloadType": IN_TOTO,
                "signatures": [{"sig": STANDARD.encode(signature.as_ref()), "keyid": ""}],
            },
        })
    }

    #[test]
    fn the_encoding_is_that_of_the_specification() {
        // DSSE's protocol.md, "Test Vectors".
        let encoded = pre_authentication_encoding("http://example.com/HelloWorld", b"hello world");
        assert_eq!(
            encoded,
            b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
        );
    }

    #[test]
    fn a_bundle_is_valid_only_for_its_key_and_digest() {
        let (ours, others) = (private_key(), private_key());
        let digest = Digest::of(b"manifest");
        let judged = |bundle: &Value, digest: &Digest, key: &PrivateKey| {
            check_bundle(bundle.to_string().as_bytes(), digest, &key.public())
        };
        let good = bundle(&ours, &statement(&digest, SIGNED));
        assert_eq!(judged(&good, &digest, &ours), Verdict::Signed);
        assert_eq!(judged(&good, &digest, &others), Verdict::OtherKey);
        assert_eq!(judged(&good, &Digest::of(b"x"), &ours), Verdict::OtherKey);

        let mut changed = good.clone();
        let payload = statement(&Digest::of(b"x"), SIGNED).to_string();
        changed["dsseEnvelope"]["payload"] = STANDARD.encode(payload).into();
        assert_eq!(
            judged(&changed, &Digest::of(b"x"), &ours),
            Verdict::OtherKey
        );
        let attestation = bundle(&ours, &statement(&digest, "https://slsa.dev/provenance/v1"));
        assert_eq!(judged(&attestation, &digest, &ours), Verdict::Attestation);

        let mut keyless = good.clone();
        keyless["verificationMaterial"] = json!({"certificate": {"rawBytes": "AA=="}});
        assert_eq!(judged(&keyless, &digest, &others), Verdict::Unsupported);
        let of_bytes = json!({
            "verificationMaterial": {"publicKey": {"hint": ""}},
            "messageSignature": {"signature": "AA=="},
        });
        assert_eq!(judged(&of_bytes, &digest, &ours), Verdict::Unsupported);
        for bytes in [&b""[..], b"[]", b"{}", b"{\"dsseEnvelope\":7}"] {
            assert_eq!(
                check_bundle(bytes, &digest, &ours.public()),
                Verdict::Unsupported
            );
            check_any_bundle(bytes);
        }
        check_any_bundle(good.to_string().as_bytes());
    }
}
