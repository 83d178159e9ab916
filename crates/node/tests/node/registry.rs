//! Debian's `docker-registry` on loopback, with images of the test's making.

use crate::daemon::tar_of;
use jiffy_registry::{Client, ClientOptions, Descriptor, ImageManifest, Reference, media_type};
use serde_json::json;
use std::fs;
use std::io::Cursor;
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longest wait for the registry to listen.
const PATIENCE: Duration = Duration::from_secs(60);

/// A registry; it goes when this is dropped.
pub struct Registry {
    pub host: String,
    _folder: TempDir,
    process: Child,
}

impl Registry {
    pub fn start() -> Registry {
        let folder = tempfile::tempdir().unwrap();
        let until = Instant::now() + PATIENCE;
        loop {
            // Somebody else may take the port in between: then another one.
            let port = TcpListener::bind("127.0.0.1:0")
                .unwrap()
                .local_addr()
                .unwrap()
                .port();
            let host = format!("127.0.0.1:{port}");
            let config = folder.path().join("config.yml");
            let storage = folder.path().join("storage");
            fs::write(
                &config,
                format!(
                    "version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: {}\n  delete:\n    enabled: true\nhttp:\n  addr: {host}\n",
                    storage.display()
                ),
            )
            .unwrap();
            let mut process = Command::new("docker-registry")
                .arg("serve")
                .arg(&config)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("docker-registry is installed (apt install docker-registry)");
            while process.try_wait().unwrap().is_none() {
                if TcpStream::connect(&host).is_ok() {
                    return Registry {
                        host,
                        _folder: folder,
                        process,
                    };
                }
                assert!(Instant::now() < until, "the registry does not listen");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }

    /// A reference in it.
    pub fn name(&self, rest: &str) -> String {
        format!("{}/{rest}", self.host)
    }

    /// Puts an image there; gives its manifest's digest.
    pub fn put(&self, rest: &str, files: &[(&str, &[u8])], run: serde_json::Value) -> String {
        let client = Client::new(ClientOptions::default()).unwrap();
        let reference = Reference::parse(&self.name(rest), None).unwrap();
        let layer = tar_of(files);
        let diff_id = jiffy_registry::Digest::of(&layer);
        let config = json!({
            "architecture": "amd64", "os": "linux", "config": run,
            "rootfs": {"type": "layers", "diff_ids": [diff_id.to_string()]},
        });
        let config = serde_json::to_vec(&config).unwrap();
        let upload = |kind: &str, bytes: &[u8]| {
            let blob = Descriptor::of(kind, bytes);
            client
                .upload_blob(&reference, &blob, None, &mut Cursor::new(bytes), &())
                .unwrap();
            blob
        };
        let manifest = ImageManifest {
            schema_version: 2,
            media_type: Some(media_type::OCI_MANIFEST.to_owned()),
            artifact_type: None,
            config: upload(media_type::OCI_CONFIG, &config),
            layers: vec![upload(media_type::OCI_LAYER, &layer)],
            annotations: Default::default(),
        };
        let bytes = serde_json::to_vec(&manifest).unwrap();
        client
            .put_manifest(&reference, media_type::OCI_MANIFEST, &bytes, &())
            .unwrap()
            .to_string()
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
