//! Manifests, indexes and signed documents that a registry sends.

use crate::Target;
use crate::input::Input;
use jiffy_registry::signature::{PrivateKey, PublicKey};
use jiffy_registry::testing;

/// This target.
pub const TARGET: Target = Target {
    name: "registry_manifest",
    covers: &[
        "crates/oci/src",
        "crates/registry/src/artifact",
        "crates/registry/src/signature",
    ],
    seeds: all_seeds,
    run,
};

const MANIFEST: u8 = 0;
const SIGNED: u8 = 1;
const KEY: u8 = 2;

fn run(data: &[u8]) {
    let mut input = Input(data);
    match input.u8() % 3 {
        MANIFEST => testing::manifest(input.rest()),
        SIGNED => {
            testing::signed(input.rest());
        }
        _ => {
            let pem = input.rest();
            let _ = PublicKey::from_pem(pem);
            let _ = PrivateKey::from_pem(pem).map(|key| key.public());
        }
    }
}

const PUBLIC: &str = "-----BEGIN PUBLIC KEY-----
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEaxfR8uEsQkf4vOblY6RA8ncDfYEt
6zOg9KE5RdiYwpZP40Li/hp/m47n60p8D54WK84zV2sxXs7LtkBoN79R9Q==
-----END PUBLIC KEY-----
";

fn all_seeds() -> Vec<Vec<u8>> {
    let of = |kind: u8, text: &str| [&[kind], text.as_bytes()].concat();
    let digest = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    let pack = |offset: u64, size: u64| {
        format!(
            r#"{{"mediaType":"application/vnd.jiffy.pack.v1","digest":"{digest}","size":{size},"annotations":{{"dev.jiffy.file":"a.jimg","dev.jiffy.offset":"{offset}","dev.jiffy.role":"boot"}}}}"#
        )
    };
    let config = format!(r#"{{"mediaType":"c","digest":"{digest}","size":2}}"#);
    let image = format!(
        r#"{{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{config},"layers":[{},{}],"annotations":null}}"#,
        pack(0, 10),
        pack(10, 5)
    );
    let index = format!(
        r#"{{"schemaVersion":2,"manifests":[{{"mediaType":"m","digest":"{digest}","size":3,"platform":{{"os":"linux","architecture":"amd64","variant":"v1"}}}},{config}]}}"#
    );
    let signed = format!(
        r#"{{"critical":{{"type":"cosign container image signature","image":{{"docker-manifest-digest":"{digest}"}}}},"optional":null}}"#
    );
    vec![
        of(MANIFEST, &image),
        of(MANIFEST, &index),
        of(SIGNED, &signed),
        of(KEY, PUBLIC),
    ]
}
