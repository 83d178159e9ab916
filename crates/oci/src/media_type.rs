//! Media types.

/// An image or artifact.
pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// An index: manifests by platform.
pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// An image's configuration.
pub const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// An empty configuration: `{}`.
pub const OCI_EMPTY: &str = "application/vnd.oci.empty.v1+json";
/// A layer: a tar.
pub const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// A layer: a tar compressed with gzip.
pub const OCI_LAYER_GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
/// A layer: a tar compressed with zstd.
pub const OCI_LAYER_ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
/// Docker's manifest.
pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
/// Docker's index.
pub const DOCKER_INDEX: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
/// Docker's configuration.
pub const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
/// Docker's layer: a tar compressed with gzip.
pub const DOCKER_LAYER_GZIP: &str = "application/vnd.docker.image.rootfs.diff.tar.gzip";
/// Docker's schema 1, signed and unsigned. Not supported.
pub const DOCKER_SCHEMA_1: &[&str] = &[
    "application/vnd.docker.distribution.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v1+prettyjws",
];

/// Types of layers before the suffix that names their compression.
const LAYERS: &[&str] = &[
    OCI_LAYER,
    "application/vnd.oci.image.layer.nondistributable.v1.tar",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.foreign.diff.tar",
];

/// Whether it is that of a layer: a tar, plain or compressed, but not encrypted.
pub fn is_layer(media_type: &str) -> bool {
    LAYERS
        .iter()
        .filter_map(|known| media_type.strip_prefix(*known))
        .any(|compression| ["", "+gzip", "+zstd", ".gzip", ".zstd"].contains(&compression))
}

/// Whether it is that of an image's configuration, OCI's or Docker's.
pub fn is_config(media_type: &str) -> bool {
    [OCI_CONFIG, DOCKER_CONFIG].contains(&media_type)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_and_configurations_are_told_from_other_blobs() {
        for layer in [OCI_LAYER, OCI_LAYER_GZIP, OCI_LAYER_ZSTD, DOCKER_LAYER_GZIP] {
            assert!(is_layer(layer) && !is_config(layer), "{layer}");
        }
        for other in ["", OCI_EMPTY, &format!("{OCI_LAYER_GZIP}+encrypted")] {
            assert!(!is_layer(other) && !is_config(other), "{other}");
        }
        assert!(is_config(OCI_CONFIG) && is_config(DOCKER_CONFIG));
    }
}
