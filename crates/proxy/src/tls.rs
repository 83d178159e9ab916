//! Certificate and key of the proxy, and TLS handshakes with clients.

use crate::socket::Socket;
use jiffy_content::error::{Error, Result};
use jiffy_sys::mutex::lock;
use jiffy_sys::{contents, regular};
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{InconsistentKeys, ServerConfig};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// The protocols that the proxy speaks (ALPN, RFC 7301), the preferred one first.
const HTTP2: &[u8] = b"h2";
const HTTP1: &[u8] = b"http/1.1";
/// Most bytes of a file.
const MAX_FILE: u64 = 1 << 20;
/// Permissions that a key's file must not have: any of others, and write permission of its group.
const FORBIDDEN: u32 = 0o027;

/// TLS with a certificate from files.
#[derive(Debug)]
pub struct Tls {
    certificate: PathBuf,
    key: PathBuf,
    /// The configuration of new connections.
    config: Mutex<Arc<ServerConfig>>,
}

impl Tls {
    /// Reads a chain of certificates, the server's own first, and its private key.
    ///
    /// # Errors
    ///
    /// If a file can't be read or has no valid PEM, others have access to the key file, the key is
    /// encrypted or of an unknown kind, or it is not that of the first certificate.
    pub fn open(certificate: &Path, key: &Path) -> Result<Tls> {
        Ok(Tls {
            config: Mutex::new(Arc::new(configuration(certificate, key)?)),
            certificate: certificate.into(),
            key: key.into(),
        })
    }

    /// Reads both files again, for new connections.
    ///
    /// # Errors
    ///
    /// If [`Tls::open`] would fail; then the previous certificate stays.
    pub fn reload(&self) -> Result<()> {
        let config = Arc::new(configuration(&self.certificate, &self.key)?);
        *lock(&self.config) = config;
        Ok(())
    }

    fn config(&self) -> Arc<ServerConfig> {
        let config = lock(&self.config);
        Arc::clone(&config)
    }

    /// A client's connection after its handshake.
    pub(crate) async fn accept(&self, socket: Socket) -> io::Result<TlsStream<Socket>> {
        TlsAcceptor::from(self.config()).accept(socket).await
    }
}

/// Have client and proxy negotiated HTTP/2?
pub(crate) fn is_http2(stream: &TlsStream<Socket>) -> bool {
    stream.get_ref().1.alpn_protocol() == Some(HTTP2)
}

/// Does a client that sends this byte first speak TLS? Then it is a handshake record (RFC 8446
/// §5.1).
pub(crate) fn begins_tls(byte: u8) -> bool {
    byte == 22
}

fn configuration(certificate: &Path, key: &Path) -> Result<ServerConfig> {
    let chain = read_chain(certificate)?;
    let private = read_key(key)?;
    let provider = Arc::new(ring::default_provider());
    let built = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|it| it.with_no_client_auth().with_single_cert(chain, private));
    let (certificate, key) = (certificate.display(), key.display());
    let mut config = built.map_err(|error| match error {
        rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => Error::invalid(format!(
            "The private key in {key} is not that of the first certificate in {certificate}."
        ))
        .hint("The server's own certificate comes first, then those of its authorities."),
        rustls::Error::InvalidCertificate(why) => Error::invalid(format!(
            "The first certificate in {certificate} is not valid: {why}."
        )),
        error => Error::invalid(format!("The private key in {key} can't be used: {error}."))
            .hint("Use a key of RSA (2048 bits or more), ECDSA (P-256 or P-384) or Ed25519."),
    })?;
    config.alpn_protocols = vec![HTTP2.to_vec(), HTTP1.to_vec()];
    Ok(config)
}

fn read_chain(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let (_, text) = read("certificate", path)?;
    let chain: std::result::Result<Vec<_>, pem::Error> =
        CertificateDer::pem_slice_iter(&text).collect();
    match chain {
        Ok(chain) if chain.is_empty() => Err(Error::invalid(format!(
            "The certificate file {} contains no certificate in PEM.",
            path.display()
        ))),
        Ok(chain) => Ok(chain),
        Err(_) => Err(Error::invalid(format!(
            "The certificate file {} is damaged: its PEM can't be decoded.",
            path.display()
        ))),
    }
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>> {
    let (mode, text) = read("key", path)?;
    let path = path.display();
    if mode & FORBIDDEN != 0 {
        return Err(Error::invalid(format!(
            "The key file {path} has the mode {mode:04o}, which gives others access."
        ))
        .hint(format!("Run `chmod 600 {path}`.")));
    }
    match PrivateKeyDer::from_pem_slice(&text) {
        Ok(key) => Ok(key),
        Err(pem::Error::NoItemsFound) if is_encrypted(&text) => Err(Error::invalid(format!(
            "The private key in {path} is encrypted."
        ))
        .hint(format!("Decrypt it: `openssl pkey -in {path} -out FILE`."))),
        Err(pem::Error::NoItemsFound) => Err(Error::invalid(format!(
            "The key file {path} contains no private key in PEM."
        ))),
        Err(_) => Err(Error::invalid(format!(
            "The key file {path} is damaged: its PEM can't be decoded."
        ))),
    }
}

fn is_encrypted(text: &[u8]) -> bool {
    let mark = b"BEGIN ENCRYPTED PRIVATE KEY";
    text.windows(mark.len()).any(|part| part == mark)
}

/// A file's permissions and contents.
fn read(what: &str, path: &Path) -> Result<(u32, Vec<u8>)> {
    let of_file = || -> io::Result<(u32, Vec<u8>)> {
        let file = regular::open(path)?;
        let mode = file.metadata()?.permissions().mode() & 0o7777;
        Ok((mode, contents::of(&file, MAX_FILE)?))
    };
    of_file().map_err(|error| {
        Error::invalid(format!(
            "The {what} file {} can't be read: {error}.",
            path.display()
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::process::Command;

    #[test]
    fn only_regular_files_of_bounded_size_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let made = Command::new("mkfifo").arg(path("fifo")).status();
        assert!(made.unwrap().success());
        let long = File::create(path("long")).unwrap();
        long.set_len(MAX_FILE + 1).unwrap();
        for (name, why) in [("fifo", "it is a FIFO"), ("long", "the limit of 1048576")] {
            let certificate = Tls::open(&path(name), &path("key")).unwrap_err();
            let key = read_key(&path(name)).unwrap_err();
            for error in [certificate, key] {
                assert!(error.0.message.contains(why), "{error:?}");
            }
        }
    }
}
