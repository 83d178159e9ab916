//! Helpers of several tests: builders of tars and OCI layouts, and unpacked images.
#![allow(dead_code)] // each test uses some of it

use jiffy_rootfs::{Limits, import_tar};
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A builder of a tar.
pub struct Tar(tar::Builder<Vec<u8>>);

impl Tar {
    pub fn new() -> Tar {
        Tar(tar::Builder::new(Vec::new()))
    }

    fn header(kind: tar::EntryType, mode: u32) -> tar::Header {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(1234);
        header.set_gid(70_000);
        header.set_mtime(1_700_000_000);
        header.set_size(0);
        header
    }

    pub fn file(mut self, path: &str, bytes: &[u8]) -> Tar {
        let mut header = Tar::header(tar::EntryType::Regular, 0o640);
        header.set_size(bytes.len() as u64);
        self.0.append_data(&mut header, path, bytes).unwrap();
        self
    }

    pub fn folder(mut self, path: &str) -> Tar {
        let mut header = Tar::header(tar::EntryType::Directory, 0o2755);
        self.0.append_data(&mut header, path, &[][..]).unwrap();
        self
    }

    pub fn link(mut self, kind: tar::EntryType, path: &str, target: &str) -> Tar {
        let mut header = Tar::header(kind, 0o777);
        self.0.append_link(&mut header, path, target).unwrap();
        self
    }

    pub fn device(mut self, path: &str, major: u32, minor: u32) -> Tar {
        let mut header = Tar::header(tar::EntryType::Char, 0o666);
        header.set_device_major(major).unwrap();
        header.set_device_minor(minor).unwrap();
        self.0.append_data(&mut header, path, &[][..]).unwrap();
        self
    }

    pub fn xattr(mut self, name: &str, value: &[u8]) -> Tar {
        let key = format!("SCHILY.xattr.{name}");
        self.0
            .append_pax_extensions([(key.as_str(), value)])
            .unwrap();
        self
    }

    /// Adds a folder with that mode.
    pub fn folder_of_mode(mut self, path: &str, mode: u32) -> Tar {
        let mut header = Tar::header(tar::EntryType::Directory, mode);
        self.0.append_data(&mut header, path, &[][..]).unwrap();
        self
    }

    /// Adds a file whose header has no owner and no time.
    pub fn anonymous(mut self, path: &str) -> Tar {
        let mut header = tar::Header::new_gnu();
        header.set_size(0);
        header.set_mode(0o600);
        self.0.append_data(&mut header, path, &[][..]).unwrap();
        self
    }

    /// Adds a path as it is, without the tar crate's checks.
    pub fn raw_path(mut self, path: &[u8]) -> Tar {
        let mut header = Tar::header(tar::EntryType::Regular, 0o644);
        header.as_mut_bytes()[..path.len()].copy_from_slice(path);
        header.set_cksum();
        self.0.append(&header, &[][..]).unwrap();
        self
    }

    pub fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

/// An image, and the folder into which fsck.erofs unpacked it.
pub struct Unpacked {
    _scratch: tempfile::TempDir,
    pub root: PathBuf,
}

/// Imports a tar; fsck.erofs checks and unpacks the image.
pub fn unpack(tar: &[u8]) -> Unpacked {
    let scratch = tempfile::tempdir().unwrap();
    let image = scratch.path().join("image.erofs");
    import_tar(tar, &image, Limits::default()).unwrap();
    extract(&image)
}

/// Lets fsck.erofs check and unpack an image.
pub fn extract(image: &Path) -> Unpacked {
    let scratch = tempfile::tempdir().unwrap();
    let root = scratch.path().join("root");
    let output = Command::new("fsck.erofs")
        .arg(format!("--extract={}", root.display()))
        .args(["--preserve", "--force"])
        .arg(image)
        .output()
        .expect("fsck.erofs runs (Debian package erofs-utils)");
    assert!(
        output.status.success(),
        "fsck.erofs: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Unpacked {
        _scratch: scratch,
        root,
    }
}

/// An error with all its causes, as a user reads it.
pub fn sentence(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Compression of a layer.
#[derive(Debug, Clone, Copy)]
pub enum Compression {
    Plain,
    Gzip,
    Zstd,
    Xz,
}

/// Compresses bytes.
pub fn compress(bytes: &[u8], how: Compression) -> Vec<u8> {
    match how {
        Compression::Plain => bytes.to_vec(),
        Compression::Gzip => {
            let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            out.write_all(bytes).unwrap();
            out.finish().unwrap()
        }
        Compression::Zstd => zstd::encode_all(bytes, 3).unwrap(),
        Compression::Xz => {
            let mut out = liblzma::write::XzEncoder::new(Vec::new(), 1);
            out.write_all(bytes).unwrap();
            out.finish().unwrap()
        }
    }
}

/// `sha256:HEX` of these bytes.
pub fn digest(bytes: &[u8]) -> String {
    jiffy_rootfs::Digest::of(bytes).to_string()
}

/// A builder of an OCI layout.
pub struct Layout {
    pub folder: PathBuf,
    manifests: Vec<Value>,
}

impl Layout {
    pub fn new(folder: &Path) -> Layout {
        fs::create_dir_all(folder.join("blobs/sha256")).unwrap();
        fs::write(
            folder.join("oci-layout"),
            r#"{"imageLayoutVersion":"1.0.0"}"#,
        )
        .unwrap();
        Layout {
            folder: folder.to_owned(),
            manifests: Vec::new(),
        }
    }

    pub fn blob(&self, media_type: &str, bytes: &[u8]) -> Value {
        let digest = digest(bytes);
        let name = digest.strip_prefix("sha256:").unwrap();
        fs::write(self.folder.join("blobs/sha256").join(name), bytes).unwrap();
        json!({"mediaType": media_type, "digest": digest, "size": bytes.len()})
    }

    /// Adds an image with these layers.
    pub fn image(
        self,
        layers: &[Vec<u8>],
        how: Compression,
        architecture: &str,
        name: &str,
    ) -> Layout {
        let config = json!({
            "architecture": architecture, "os": "linux",
            "config": {"Cmd": ["sh"], "Env": ["A=1"], "StopSignal": "SIGINT"},
            "rootfs": {"type": "layers", "diff_ids": layers.iter().map(|tar| digest(tar)).collect::<Vec<_>>()},
        });
        self.image_with(&config, layers, how, architecture, name)
    }

    /// Adds an image with that configuration.
    pub fn image_with(
        mut self,
        config: &Value,
        layers: &[Vec<u8>],
        how: Compression,
        architecture: &str,
        name: &str,
    ) -> Layout {
        let media_type = match how {
            Compression::Gzip => "application/vnd.oci.image.layer.v1.tar+gzip",
            Compression::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
            _ => "application/vnd.oci.image.layer.v1.tar",
        };
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": self.blob("application/vnd.oci.image.config.v1+json", config.to_string().as_bytes()),
            "layers": layers.iter().map(|tar| self.blob(media_type, &compress(tar, how))).collect::<Vec<_>>(),
        });
        let mut descriptor = self.blob(
            "application/vnd.oci.image.manifest.v1+json",
            manifest.to_string().as_bytes(),
        );
        descriptor["platform"] = json!({"os": "linux", "architecture": architecture});
        if !name.is_empty() {
            descriptor["annotations"] = json!({"org.opencontainers.image.ref.name": name});
        }
        self.manifests.push(descriptor);
        self.index();
        self
    }

    fn index(&self) {
        let index = json!({"schemaVersion": 2, "manifests": self.manifests});
        fs::write(self.folder.join("index.json"), index.to_string()).unwrap();
    }
}
