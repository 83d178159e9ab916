//! Manifests signed with a key, as cosign does it.

use crate::error::Result;
use crate::{Client, Digest, Progress, Reference};

/// A public key that signatures are checked with.
#[derive(Clone, Debug)]
pub struct PublicKey(Vec<u8>);

/// A private key to sign with.
pub struct PrivateKey(());

impl PublicKey {
    /// Reads a PEM file with `PUBLIC KEY`, as `cosign generate-key-pair` and
    /// `openssl ec -pubout` write it: ECDSA on P-256.
    pub fn from_pem(_pem: &[u8]) -> Result<Self> {
        unimplemented!()
    }
}

impl PrivateKey {
    /// Reads a PEM file with an unencrypted `PRIVATE KEY` (PKCS #8), as
    /// `openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256` writes it.
    pub fn from_pem(_pem: &[u8]) -> Result<Self> {
        unimplemented!()
    }
}

/// Checks that the manifest with this digest is signed by the key.
pub fn verify(
    _client: &Client,
    _repository: &Reference,
    _digest: &Digest,
    _key: &PublicKey,
    _progress: &dyn Progress,
) -> Result<()> {
    unimplemented!()
}

/// Signs the manifest with this digest, beside signatures that are there.
pub fn sign(
    _client: &Client,
    _repository: &Reference,
    _digest: &Digest,
    _key: &PrivateKey,
    _progress: &dyn Progress,
) -> Result<()> {
    unimplemented!()
}
