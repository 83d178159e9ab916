//! Manifests signed with a key, as cosign does it.
//!
//! A signature is in the same repository as what it signs. Cosign 1 and 2 put it under the
//! tag `sha256-HEX.sig`: an image of which each layer is a small JSON document ("simple
//! signing") that names the manifest's digest, with the signature in an annotation. Cosign 3
//! adds a referrer of the manifest, which is a Sigstore [`bundle`]. Both are read, and the
//! first is written. Keys are ECDSA on P-256 with SHA-256.
//!
//! Why cosign's and not minisign's: its signatures are in the registry, so that they
//! travel with the image, and `cosign`, `skopeo`, `podman` and the admission
//! controllers of Kubernetes read and write them. `ring` is linked for TLS anyway and
//! does the cryptography. Certificates and transparency logs ("keyless") are not
//! looked at: a key is what one believes.
//!
//! As with `cosign verify`, the digest counts and the name of the repository does not:
//! a mirror has the same signatures.

mod bundle;

#[cfg(any(test, feature = "testing"))]
pub(crate) use bundle::judge_any;

use crate::error::Result;
use crate::manifest::{Content, media_type};
use crate::{Client, Descriptor, Digest, ImageManifest, Progress, Reference, RegistryError};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair,
    UnparsedPublicKey,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{PrivatePkcs8KeyDer, SubjectPublicKeyInfoDer};
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt;
use std::io::Cursor;

/// The media type of what is signed.
const SIMPLE_SIGNING: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
/// The annotation that has the signature, in Base64.
const SIGNATURE: &str = "dev.cosignproject.cosign/signature";
/// What the document says it is.
const TYPE: &str = "cosign container image signature";
/// The largest document, bytes.
const MAX_DOCUMENT: u64 = 64 << 10;
/// The most signatures of one manifest that are looked at.
const MOST_SIGNATURES: usize = 64;

/// RFC 5480: what is before the point in the DER of a public key on P-256.
const P256_KEY: &[u8] = &[
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];

/// A public key that signatures are checked with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicKey {
    /// An uncompressed point on P-256.
    point: Vec<u8>,
}

/// A private key to sign with.
pub struct PrivateKey {
    pair: EcdsaKeyPair,
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivateKey(secret)")
    }
}

impl PublicKey {
    /// Reads a PEM file with `PUBLIC KEY`, as `cosign generate-key-pair` and
    /// `openssl pkey -pubout` write it: ECDSA on P-256.
    pub fn from_pem(pem: &[u8]) -> Result<Self> {
        let key = SubjectPublicKeyInfoDer::from_pem_slice(pem)
            .map_err(|_| RegistryError::Key("there is no PUBLIC KEY in PEM in it".to_owned()))?;
        let point = key
            .strip_prefix(P256_KEY)
            .filter(|point| point.len() == 65 && point[0] == 4)
            .ok_or_else(|| RegistryError::Key("it is not one of ECDSA on P-256".to_owned()))?;
        Ok(Self {
            point: point.to_vec(),
        })
    }

    /// SHA-256 of the key as DER (`openssl pkey -pubin -outform DER`), which tells it from
    /// others.
    pub fn id(&self) -> Digest {
        Digest::of(&[P256_KEY, &self.point].concat())
    }

    fn verifies(&self, document: &[u8], signature: &[u8]) -> bool {
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &self.point)
            .verify(document, signature)
            .is_ok()
    }
}

impl PrivateKey {
    /// Reads a PEM file with an unencrypted `PRIVATE KEY` (PKCS #8), as
    /// `openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256` writes it.
    pub fn from_pem(pem: &[u8]) -> Result<Self> {
        let key = PrivatePkcs8KeyDer::from_pem_slice(pem).map_err(|_| {
            let why = "there is no PRIVATE KEY in PEM in it; encrypted keys are not read";
            RegistryError::Key(why.to_owned())
        })?;
        let pair = EcdsaKeyPair::from_pkcs8(
            &ECDSA_P256_SHA256_ASN1_SIGNING,
            key.secret_pkcs8_der(),
            &SystemRandom::new(),
        )
        .map_err(|error| {
            RegistryError::Key(format!("it is not one of ECDSA on P-256 ({error})"))
        })?;
        Ok(Self { pair })
    }

    /// The public key that belongs to it.
    pub fn public(&self) -> PublicKey {
        PublicKey {
            point: self.pair.public_key().as_ref().to_vec(),
        }
    }
}

/// Checks that the manifest with this digest is signed by the key. One good signature
/// is enough, whoever else signed it.
pub fn verify(
    client: &Client,
    repository: &Reference,
    digest: &Digest,
    key: &PublicKey,
    progress: &dyn Progress,
) -> Result<()> {
    let unsigned = |reason: String| RegistryError::Unsigned {
        what: format!("manifest {digest} of {}", repository.with_digest(*digest)),
        reason,
    };
    let mut found = Found::default();
    let simple = signatures(client, repository, digest, progress)?;
    let layers = simple.map_or_else(Vec::new, |manifest| manifest.layers);
    for layer in layers.iter().take(MOST_SIGNATURES) {
        if layer.media_type != SIMPLE_SIGNING {
            continue;
        }
        let signature = layer
            .annotations
            .get(SIGNATURE)
            .and_then(|text| STANDARD.decode(text).ok());
        let Some(signature) = signature else {
            continue;
        };
        let document = client.small_blob(repository, layer, MAX_DOCUMENT, progress)?;
        // The signature first: until then the document is a stranger's.
        if key.verifies(&document, &signature) && names(&document, digest) {
            return Ok(());
        }
        found.by_others += 1;
    }
    if bundle::verify(client, repository, digest, key, &mut found, progress)? {
        return Ok(());
    }
    Err(unsigned(found.to_string()))
}

/// Signatures of a manifest that say nothing of the key.
#[derive(Default)]
struct Found {
    /// By other keys, or of something else.
    by_others: usize,
    /// Of a kind that is not verified: with a certificate, say.
    of_other_kinds: usize,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.by_others, self.of_other_kinds) {
            (0, 0) => f.write_str("nobody signed it"),
            (others, 0) => write!(f, "{others} signatures are by others, or of something else"),
            (others, kinds) => write!(
                f,
                "of {} signatures {kinds} are of kinds that are not verified, with certificates \
                 for example, and the others by other keys, or of something else",
                others + kinds
            ),
        }
    }
}

/// Signs the manifest with this digest, beside signatures that are there; does nothing
/// if the key has signed it already.
pub fn sign(
    client: &Client,
    repository: &Reference,
    digest: &Digest,
    key: &PrivateKey,
    progress: &dyn Progress,
) -> Result<()> {
    match verify(client, repository, digest, &key.public(), progress) {
        Ok(()) => return Ok(()),
        Err(RegistryError::Unsigned { .. }) => {}
        Err(error) => return Err(error),
    }
    let name = format!("{}/{}", repository.registry(), repository.repository());
    let document = json!({
        "critical": {
            "identity": { "docker-reference": name },
            "image": { "docker-manifest-digest": digest },
            "type": TYPE,
        },
        "optional": null,
    })
    .to_string();
    let signature = key
        .pair
        .sign(&SystemRandom::new(), document.as_bytes())
        .map_err(|_| RegistryError::Key("it could not sign".to_owned()))?;
    let mut layer = upload(
        client,
        repository,
        SIMPLE_SIGNING,
        document.as_bytes(),
        progress,
    )?;
    layer.annotations =
        BTreeMap::from([(SIGNATURE.to_owned(), STANDARD.encode(signature.as_ref()))]);

    let mut layers = match signatures(client, repository, digest, progress)? {
        Some(signatures) => signatures.layers,
        None => Vec::new(),
    };
    layers.push(layer);
    // Like an image, so that everything that copies images copies it.
    let diff_ids: Vec<Digest> = layers.iter().map(|layer| layer.digest).collect();
    let config = json!({
        "architecture": "",
        "os": "",
        "config": {},
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
    })
    .to_string();
    let manifest = ImageManifest {
        schema_version: 2,
        media_type: Some(media_type::OCI_MANIFEST.to_owned()),
        artifact_type: None,
        config: upload(
            client,
            repository,
            media_type::OCI_CONFIG,
            config.as_bytes(),
            progress,
        )?,
        layers,
        annotations: BTreeMap::new(),
    };
    let manifest = serde_json::to_vec(&manifest)
        .map_err(|error| RegistryError::Key(format!("it could not sign: {error}")))?;
    let tag = repository.with_tag(&tag_of(digest))?;
    client.put_manifest(&tag, media_type::OCI_MANIFEST, &manifest, progress)?;
    Ok(())
}

fn tag_of(digest: &Digest) -> String {
    format!("sha256-{}.sig", digest.hex())
}

/// The manifest of signatures, if there is one.
fn signatures(
    client: &Client,
    repository: &Reference,
    digest: &Digest,
    progress: &dyn Progress,
) -> Result<Option<ImageManifest>> {
    let tag = repository.with_tag(&tag_of(digest))?;
    match client.manifest(&tag, progress) {
        Ok(fetched) => match fetched.content {
            Content::Image(manifest) => Ok(Some(manifest)),
            Content::Index(_) => Err(RegistryError::damaged(
                format!("manifest {tag}"),
                "signatures are no index",
            )),
        },
        Err(RegistryError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

fn upload(
    client: &Client,
    repository: &Reference,
    media_type: &str,
    bytes: &[u8],
    progress: &dyn Progress,
) -> Result<Descriptor> {
    let blob = Descriptor::of(media_type, bytes);
    client.upload_blob(repository, &blob, None, &mut Cursor::new(bytes), progress)?;
    Ok(blob)
}

/// Whether a document says that this digest is signed.
pub(crate) fn names(document: &[u8], digest: &Digest) -> bool {
    let Ok(document) = serde_json::from_slice::<serde_json::Value>(document) else {
        return false;
    };
    let critical = &document["critical"];
    critical["type"] == TYPE && critical["image"]["docker-manifest-digest"] == digest.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_must_say_what_it_signs() {
        let digest = Digest::of(b"");
        let document = |of: &str, kind: &str| {
            json!({"critical": {"image": {"docker-manifest-digest": of}, "type": kind}}).to_string()
        };
        assert!(names(
            document(&digest.to_string(), TYPE).as_bytes(),
            &digest
        ));
        assert!(!names(
            document(&digest.to_string(), "other").as_bytes(),
            &digest
        ));
        assert!(!names(document("sha256:00", TYPE).as_bytes(), &digest));
        assert!(!names(b"[1]", &digest));
    }

    #[test]
    fn what_is_no_key_is_refused() {
        for pem in [
            "",
            "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        ] {
            assert!(PublicKey::from_pem(pem.as_bytes()).is_err());
            assert!(PrivateKey::from_pem(pem.as_bytes()).is_err());
        }
    }
}
