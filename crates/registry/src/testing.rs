//! A real registry for tests: Debian's `docker-registry` on loopback. For fuzzing: parsers of
//! manifests and signatures.

pub use crate::client::testing::{challenges, headers, refusal, token};
use crate::{Client, ClientOptions, Content, Digest, Platform, Reference, media_type};
use jiffy_oci::{guess_media_type, parse};
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;

/// User of a registry with a password.
pub const USER: &str = "ali";
/// That user's password.
pub const PASSWORD: &str = "open sesame";

/// `USER` and `PASSWORD` in a `htpasswd` file (bcrypt).
const HTPASSWD: &str = "ali:$2b$04$reFGhRMx7L5CuprUbHKQGeF908A/gs2hE8rKVVAWXFh0tnNROhIcW\n";

/// Options of a registry.
#[derive(Clone, Debug, Default)]
pub struct RegistryOptions {
    /// It requires [`USER`] and [`PASSWORD`].
    pub password: bool,
    /// It uses TLS with a self-signed certificate, [`LocalRegistry::certificate`].
    pub tls: bool,
}

/// A running registry, empty at first. Stops when it is dropped.
#[derive(Debug)]
pub struct LocalRegistry {
    child: Child,
    host: String,
    folder: tempfile::TempDir,
}

impl LocalRegistry {
    /// Starts a registry on a free port of `127.0.0.1`.
    ///
    /// # Errors
    ///
    /// If its files can't be written, or `docker-registry` can't be started (the error says so if
    /// it is not installed) or ends.
    pub fn start(options: &RegistryOptions) -> io::Result<Self> {
        let folder = tempfile::tempdir()?;
        let config = folder.path().join("config.yml");
        fs::create_dir(folder.path().join("storage"))?;
        fs::write(&config, configuration(folder.path(), options)?)?;
        let log = folder.path().join("log");
        let mut child = Command::new("docker-registry")
            .arg("serve")
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| io::Error::new(error.kind(), missing("docker-registry", &error)))?;
        let stderr = child.stderr.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut lines = BufReader::new(stderr).lines();
        let mut seen = String::new();
        let host = loop {
            let Some(line) = lines.next() else {
                let _ = child.kill();
                let _ = child.wait();
                return Err(io::Error::other(format!("docker-registry ended: {seen}")));
            };
            let line = line?;
            if let Some(host) = listening_on(&line) {
                break host;
            }
            seen.push_str(&line);
        };
        // The pipe must be drained, or the registry would block on its log.
        std::thread::spawn(move || {
            let lines: Vec<String> = lines.map_while(Result::ok).collect();
            let _ = fs::write(log, lines.join("\n"));
        });
        Ok(Self {
            child,
            host,
            folder,
        })
    }

    /// `127.0.0.1:PORT`.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The certificate's file, if the registry uses TLS.
    pub fn certificate(&self) -> PathBuf {
        self.folder.path().join("certificate.pem")
    }

    /// The folder of its contents; blobs are in `docker/registry/v2/blobs`.
    pub fn storage(&self) -> PathBuf {
        self.folder.path().join("storage")
    }

    /// Removes blobs that no manifest refers to, as an administrator would. Returns the output.
    ///
    /// # Errors
    ///
    /// If `docker-registry` can't be started or fails; the error is then its standard error.
    pub fn collect_garbage(&self) -> io::Result<String> {
        let output = Command::new("docker-registry")
            .arg("garbage-collect")
            .arg(self.folder.path().join("config.yml"))
            .output()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(io::Error::other(said));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl Drop for LocalRegistry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The message for a missing program that tests need.
pub fn missing(program: &str, error: &io::Error) -> String {
    format!("{program} can't be started ({error}); scripts/setup installs what tests need")
}

fn configuration(folder: &Path, options: &RegistryOptions) -> io::Result<String> {
    let mut config = format!(
        "version: 0.1\n\
         log: {{ level: info }}\n\
         storage:\n  filesystem: {{ rootdirectory: {} }}\n  delete: {{ enabled: true }}\n\
         http:\n  addr: 127.0.0.1:0\n",
        folder.join("storage").display()
    );
    if options.tls {
        make_certificate(folder)?;
        config.push_str(&format!(
            "  tls: {{ certificate: {0}/certificate.pem, key: {0}/key.pem }}\n",
            folder.display()
        ));
    }
    if options.password {
        let path = folder.join("htpasswd");
        fs::write(&path, HTPASSWD)?;
        config.push_str(&format!(
            "auth:\n  htpasswd: {{ realm: test, path: {} }}\n",
            path.display()
        ));
    }
    Ok(config)
}

/// Writes `certificate.pem`, for 127.0.0.1 and localhost, and its `key.pem` into a folder.
///
/// # Errors
///
/// If a file can't be written, or `openssl` can't be started or fails.
pub fn make_certificate(folder: &Path) -> io::Result<()> {
    let config = folder.join("openssl.cnf");
    fs::write(
        &config,
        "[req]\nprompt=no\ndistinguished_name=name\nx509_extensions=more\n\
         [name]\nCN=A registry for tests\n\
         [more]\nsubjectAltName=IP:127.0.0.1,DNS:localhost\nbasicConstraints=critical,CA:FALSE\n",
    )?;
    let output = Command::new("openssl")
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
        ])
        .args(["-nodes", "-days", "3650", "-config"])
        .arg(config)
        .arg("-keyout")
        .arg(folder.join("key.pem"))
        .arg("-out")
        .arg(folder.join("certificate.pem"))
        .output()
        .map_err(|error| io::Error::new(error.kind(), missing("openssl", &error)))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(io::Error::other(said))
}

/// The address in the log line that says where the registry listens.
fn listening_on(line: &str) -> Option<String> {
    let rest = line.split_once("listening on ")?.1;
    let end = rest
        .find(|c: char| !(c.is_ascii_digit() || c == '.' || c == ':'))
        .unwrap_or(rest.len());
    Some(rest[..end].to_owned())
}

static CLIENT: LazyLock<Client> =
    LazyLock::new(|| Client::new(ClientOptions::default()).expect("a client"));

/// Parses a manifest, its packs if it is an artifact's, and chooses a platform of an index.
///
/// # Panics
///
/// If a manifest that is written and parsed again differs.
pub fn manifest(bytes: &[u8]) {
    let Some(kind) = guess_media_type(bytes) else {
        return;
    };
    match parse(bytes, &kind) {
        Ok(Content::Image(manifest)) => {
            let written = serde_json::to_vec(&manifest).expect("a manifest is written");
            let again = parse(&written, media_type::OCI_MANIFEST);
            if manifest
                .media_type
                .as_deref()
                .unwrap_or(media_type::OCI_MANIFEST)
                == media_type::OCI_MANIFEST
            {
                assert_eq!(again.ok(), Some(Content::Image(manifest.clone())));
            }
            let reference = Reference::parse("localhost/a", None).expect("a name");
            let files = crate::artifact::remote::files(&CLIENT, &reference, &manifest.layers);
            for file in files.into_iter().flatten() {
                let size: u64 = file.packs().iter().map(|pack| pack.blob.size).sum();
                assert_eq!(size, file.size(), "no gaps between packs");
                let _ = file.range_of("boot");
            }
        }
        Ok(Content::Index(index)) => {
            let wanted = Platform::default();
            let runs = |platform: &Platform| wanted.runs(platform);
            let chosen = index.choose(&wanted);
            assert!(chosen.is_none_or(|one| one.platform.as_ref().is_none_or(runs)));
            let shown = index.platforms();
            assert!(!shown.contains(char::is_control), "one line");
        }
        Err(_) => {}
    }
}

/// Parses a signed document and a bundle.
pub fn signed(document: &[u8]) -> bool {
    crate::signature::check_any_bundle(document);
    crate::signature::names_digest(document, &Digest::of(b"abc"))
}
