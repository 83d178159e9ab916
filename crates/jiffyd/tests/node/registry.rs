//! Debian's `docker-registry` on loopback, with images made by tests.

use crate::daemon::tar_of;
use jiffy_registry::testing::{LocalRegistry, RegistryOptions};
use jiffy_registry::{Client, ClientOptions, Descriptor, ImageManifest, Reference, media_type};
use serde_json::json;
use std::io::Cursor;

/// A registry; dropping it ends it.
pub struct Registry {
    pub host: String,
    _registry: LocalRegistry,
}

impl Registry {
    pub fn start() -> Registry {
        let registry = LocalRegistry::start(&RegistryOptions::default()).unwrap();
        Registry {
            host: registry.host().to_owned(),
            _registry: registry,
        }
    }

    /// A reference in it.
    pub fn name(&self, rest: &str) -> String {
        format!("{}/{rest}", self.host)
    }

    /// Uploads an image; returns its manifest's digest.
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
