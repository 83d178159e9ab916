//! Signatures of manifests with a key, compatible with cosign.
//!
//! A signature is in the same repository as the manifest. Cosign 1 and 2 put it under the tag
//! `sha256-HEX.sig`: an image in which each layer is a small JSON document ("simple signing") with
//! the manifest's digest, and its annotation has the signature. Cosign 3 adds a referrer of the
//! manifest with a Sigstore [`bundle`]. Both kinds are verified; the first kind is written. Keys
//! are ECDSA on P-256 with SHA-256.
//!
//! Why cosign's format and not minisign's: the signatures are in the registry and are copied with
//! the image, and `cosign`, `skopeo`, `podman` and the admission controllers of Kubernetes read and
//! write them. `ring` is linked for TLS anyway and does the cryptography. Certificates and
//! transparency logs ("keyless") are ignored: only a key is trusted.
//!
//! As with `cosign verify`, only the digest is checked, not the repository's name: a mirror has the
//! same signatures.

mod bundle;

#[cfg(any(test, feature = "testing"))]
pub(crate) use bundle::check_any_bundle;

use crate::error::Result;
use crate::{
    Client, Content, Descriptor, Digest, ImageManifest, Progress, Reference, RegistryError,
    media_type,
};
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

/// Media type of a signed document.
const SIMPLE_SIGNING: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
/// Annotation with the signature in Base64.
const SIGNATURE: &str = "dev.cosignproject.cosign/signature";
/// Type in a signed document.
const TYPE: &str = "cosign container image signature";
/// Largest signed document, bytes.
const MAX_DOCUMENT: u64 = 64 << 10;
/// Most signatures of one manifest that are checked.
const MAX_SIGNATURES: usize = 64;

/// RFC 5480: the bytes before the point in the DER of a P-256 public key.
const P256_KEY: &[u8] = &[
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];

/// A public key that verifies signatures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicKey {
    /// An uncompressed point on P-256.
    point: Vec<u8>,
}

/// A private key that signs.
pub struct PrivateKey {
    pair: EcdsaKeyPair,
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivateKey(secret)")
    }
}

impl PublicKey {
    /// Reads a `PUBLIC KEY` in PEM, as `cosign generate-key-pair` and `openssl pkey -pubout` write
    /// it. It must be ECDSA on P-256.
    ///
    /// # Errors
    ///
    /// If there is no `PUBLIC KEY` in PEM, or it is another kind of key.
    pub fn from_pem(pem: &[u8]) -> Result<Self> {
        let key = SubjectPublicKeyInfoDer::from_pem_slice(pem)
            .map_err(|_| RegistryError::Key("it contains no PUBLIC KEY in PEM".to_owned()))?;
        let point = key
            .strip_prefix(P256_KEY)
            .filter(|point| point.len() == 65 && point[0] == 4)
            .ok_or_else(|| RegistryError::Key("it is not an ECDSA key on P-256".to_owned()))?;
        Ok(Self {
            point: point.to_vec(),
        })
    }

    /// SHA-256 of the key's DER (`openssl pkey -pubin -outform DER`), which identifies it.
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
    /// Reads an unencrypted `PRIVATE KEY` in PEM (PKCS #8), as `openssl genpkey -algorithm EC
    /// -pkeyopt ec_paramgen_curve:P-256` writes it.
    ///
    /// # Errors
    ///
    /// If there is no unencrypted `PRIVATE KEY` in PEM, or it is not ECDSA on P-256.
    pub fn from_pem(pem: &[u8]) -> Result<Self> {
        let key = PrivatePkcs8KeyDer::from_pem_slice(pem).map_err(|_| {
            let why = "it contains no PRIVATE KEY in PEM; encrypted keys are not supported";
            RegistryError::Key(why.to_owned())
        })?;
        let pair = EcdsaKeyPair::from_pkcs8(
            &ECDSA_P256_SHA256_ASN1_SIGNING,
            key.secret_pkcs8_der(),
            &SystemRandom::new(),
        )
        .map_err(|error| {
            RegistryError::Key(format!("it is not an ECDSA key on P-256 ({error})"))
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

/// Checks that the key signed the manifest with this digest. One valid signature is enough; other
/// signatures do not matter.
///
/// # Errors
///
/// `Unsigned` if no signature is valid. Otherwise if the signatures can't be fetched or are
/// damaged.
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
    for layer in layers.iter().take(MAX_SIGNATURES) {
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
        // Too large for a signature; another one may be valid.
        if layer.size > MAX_DOCUMENT {
            found.unsupported += 1;
            continue;
        }
        let document = client.small_blob(repository, layer, MAX_DOCUMENT, progress)?;
        // The signature is checked before the document is parsed, because it is untrusted until
        // then.
        if key.verifies(&document, &signature) && names_digest(&document, digest) {
            return Ok(());
        }
        found.other_keys += 1;
    }
    if bundle::verify(client, repository, digest, key, &mut found, progress)? {
        return Ok(());
    }
    Err(unsigned(found.to_string()))
}

/// Signatures of a manifest that are not by the key.
#[derive(Default)]
struct Found {
    /// By another key, or for another manifest.
    other_keys: usize,
    /// Of a kind that is not verified, such as with a certificate.
    unsupported: usize,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.other_keys, self.unsupported) {
            (0, 0) => f.write_str("it has no signature"),
            (others, 0) => write!(
                f,
                "{others} signatures are by other keys, or for other content"
            ),
            (others, kinds) => write!(
                f,
                "of {} signatures {kinds} are of kinds that are not verified, with certificates \
                 for example, and the others are by other keys, or for other content",
                others + kinds
            ),
        }
    }
}

/// Signs the manifest with this digest and keeps other signatures. Does nothing if the key has
/// signed it already.
///
/// # Errors
///
/// If the other signatures can't be fetched or are damaged, the key can't sign, or the registry
/// refuses the upload.
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
        .map_err(|_| RegistryError::Key("it can't sign".to_owned()))?;
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
    // The configuration is that of an image, so that tools which copy images copy it.
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
        .map_err(|error| RegistryError::Key(format!("it can't sign: {error}")))?;
    let tag = repository.with_tag(&tag_of(digest))?;
    client.put_manifest(&tag, media_type::OCI_MANIFEST, &manifest, progress)?;
    Ok(())
}

fn tag_of(digest: &Digest) -> String {
    format!("sha256-{}.sig", digest.hex())
}

/// The image with the simple-signing signatures, if it exists.
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
                "signatures are not an index",
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

/// Whether a document is a signature of this digest.
pub(crate) fn names_digest(document: &[u8], digest: &Digest) -> bool {
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
    fn a_document_must_name_what_it_signs() {
        let digest = Digest::of(b"");
        let document = |of: &str, kind: &str| {
            json!({"critical": {"image": {"docker-manifest-digest": of}, "type": kind}}).to_string()
        };
        assert!(names_digest(
            document(&digest.to_string(), TYPE).as_bytes(),
            &digest
        ));
        assert!(!names_digest(
            document(&digest.to_string(), "other").as_bytes(),
            &digest
        ));
        assert!(!names_digest(
            document("sha256:00", TYPE).as_bytes(),
            &digest
        ));
        assert!(!names_digest(b"[1]", &digest));
    }

    #[test]
    fn an_invalid_key_is_refused() {
        for pem in [
            "",
            "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        ] {
            assert!(PublicKey::from_pem(pem.as_bytes()).is_err());
            assert!(PrivateKey::from_pem(pem.as_bytes()).is_err());
        }
    }
}
