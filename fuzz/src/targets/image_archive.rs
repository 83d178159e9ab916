//! Archives of images (OCI, `docker save`, tars of a root), packed or not, with any bytes:
//! as they are, or with the checksums of the headers made right.

use crate::Target;
use crate::input::Input;
use crate::scratch;
use jiffy_rootfs::testing::{reseal_tar, tars};
use jiffy_rootfs::{Choice, Limits, Source, import};
use std::ops::ControlFlow;

/// This target.
pub const TARGET: Target = Target {
    name: "image_archive",
    covers: &["crates/rootfs/src/layer", "crates/rootfs/src/source"],
    seeds: all_seeds,
    run,
};

const LIMITS: Limits = Limits {
    image_bytes: 8 << 20,
    entries: 2_000,
    metadata_bytes: 4 << 20,
    unpacked_bytes: 4 << 20,
    ratio: 200,
};

const RESEALED: u8 = 1;
const NAMED: u8 = 2;

fn run(data: &[u8]) {
    let mut input = Input(data);
    let how = input.u8();
    let mut bytes = input.rest().to_vec();
    if how & RESEALED != 0 {
        reseal_tar(&mut bytes);
    }
    let mut choice = Choice::new(scratch::folder());
    choice.limits = LIMITS;
    choice.reference = (how & NAMED != 0).then(|| "a".to_owned());
    let Ok(source) = Source::stream(&bytes[..], &choice) else {
        return;
    };
    let _ = source.config();
    let out = scratch::folder().join("image");
    let made = import(source, &out, &LIMITS, &mut |_| ControlFlow::Continue(()));
    assert_eq!(out.exists(), made.is_ok(), "an image is whole or absent");
    let _ = std::fs::remove_file(&out);
    let left = std::fs::read_dir(scratch::folder())
        .expect("a folder")
        .count();
    assert!(left < 8, "temporary files are left");
}

const CONFIG: &str = r#"{"architecture":"amd64","os":"linux","config":{"Cmd":["sh"]},"rootfs":{"type":"layers","diff_ids":[]}}"#;

/// A tar of files; no padding at its end, which would only be longer.
fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (name, bytes) in files {
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o644);
        header.set_size(bytes.len() as u64);
        tar.append_data(&mut header, name, *bytes).expect("memory");
    }
    let mut bytes = tar.into_inner().expect("memory");
    bytes.truncate(bytes.len() - 1024);
    bytes
}

fn blob(bytes: &[u8]) -> (String, String) {
    let hex = jiffy_rootfs::Digest::of(bytes).hex();
    (format!("blobs/sha256/{hex}"), format!("sha256:{hex}"))
}

fn oci(layer: &[u8]) -> Vec<u8> {
    let (config_path, config) = blob(CONFIG.as_bytes());
    let (layer_path, layer_digest) = blob(layer);
    let manifest = format!(
        r#"{{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"{config}","size":{}}},"layers":[{{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":"{layer_digest}","size":{}}}]}}"#,
        CONFIG.len(),
        layer.len()
    );
    let (manifest_path, digest) = blob(manifest.as_bytes());
    let index = format!(
        r#"{{"schemaVersion":2,"manifests":[{{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"{digest}","size":{},"annotations":{{"org.opencontainers.image.ref.name":"a"}}}}]}}"#,
        manifest.len()
    );
    archive(&[
        ("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#),
        ("index.json", index.as_bytes()),
        (&config_path, CONFIG.as_bytes()),
        (&manifest_path, manifest.as_bytes()),
        (&layer_path, layer),
    ])
}

fn docker(layer: &[u8]) -> Vec<u8> {
    let manifest = r#"[{"Config":"c.json","RepoTags":["a:latest"],"Layers":["l.tar"]}]"#;
    archive(&[
        ("manifest.json", manifest.as_bytes()),
        ("c.json", CONFIG.as_bytes()),
        ("l.tar", layer),
    ])
}

fn all_seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    let mut add = |how: u8, bytes: &[u8]| seeds.push([&[how], bytes].concat());
    for layer in tars() {
        let layer = &layer[..layer.len() - 1024];
        add(0, layer);
        add(RESEALED, &docker(layer));
        add(NAMED, &docker(layer));
        add(RESEALED | NAMED, &oci(layer));
        let packed = zstd::encode_all(layer, 3).expect("memory");
        add(0, &packed);
        add(0, &docker(&packed));
        add(0, &oci(&packed));
    }
    seeds
}
