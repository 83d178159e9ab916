//! Credentials for registries.
//!
//! * `docker`: the file that `docker login` and `podman login` write.
//! * `helper`: credential helpers.

mod docker;
mod helper;

use crate::error::Result;
pub use helper::{HelperOutput, RunHelper, run_helper};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// Where a user and password for a registry come from.
#[derive(Clone, Debug)]
pub struct Credentials {
    kind: Kind,
    /// Runs helpers; `None`: this process does it.
    helpers: Option<Arc<dyn RunHelper>>,
}

#[derive(Clone, Debug)]
enum Kind {
    Anonymous,
    Basic { registry: String, login: Login },
    Files(Vec<PathBuf>),
}

/// The credentials that are sent to a registry or its token server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Login {
    /// A user and a password.
    Password { user: String, password: Secret },
    /// An identity token (OAuth 2 refresh token), which is exchanged for access tokens.
    Identity(Secret),
}

/// A secret text, which never appears in messages and logs.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(String);

impl Secret {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

impl From<Kind> for Credentials {
    fn from(kind: Kind) -> Self {
        Self {
            kind,
            helpers: None,
        }
    }
}

impl Credentials {
    /// No credentials.
    pub fn anonymous() -> Self {
        Self::from(Kind::Anonymous)
    }

    /// A user and a password for this registry (`HOST[:PORT]`) only.
    pub fn basic(registry: &str, user: &str, password: &str) -> Self {
        Self::from(Kind::Basic {
            registry: registry.to_ascii_lowercase(),
            login: Login::Password {
                user: user.to_owned(),
                password: Secret::new(password),
            },
        })
    }

    /// An identity token (OAuth 2 refresh token) for this registry only.
    pub fn identity(registry: &str, token: &str) -> Self {
        Self::from(Kind::Basic {
            registry: registry.to_ascii_lowercase(),
            login: Login::Identity(Secret::new(token)),
        })
    }

    /// The credentials of `podman login` and `docker login`: `$REGISTRY_AUTH_FILE`, else
    /// `$XDG_RUNTIME_DIR/containers/auth.json` and then `${DOCKER_CONFIG:-~/.docker}/config.json`,
    /// as far as these exist.
    pub fn of_this_user() -> Self {
        let from = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        if let Some(file) = from("REGISTRY_AUTH_FILE") {
            return Self::from(Kind::Files(vec![file.into()]));
        }
        let mut files = Vec::new();
        if let Some(folder) = from("XDG_RUNTIME_DIR") {
            files.push(PathBuf::from(folder).join("containers/auth.json"));
        }
        let docker = match (from("DOCKER_CONFIG"), from("HOME")) {
            (Some(folder), _) => Some(PathBuf::from(folder)),
            (None, Some(home)) => Some(PathBuf::from(home).join(".docker")),
            (None, None) => None,
        };
        files.extend(docker.map(|folder| folder.join("config.json")));
        Self::from(Kind::Files(files))
    }

    /// A file in the format of Docker's `config.json`, with `auths`, `credsStore` and
    /// `credHelpers`. It is read when a registry asks for credentials; a missing file has none.
    pub fn docker_config(path: impl Into<PathBuf>) -> Self {
        Self::from(Kind::Files(vec![path.into()]))
    }

    /// The same, with helpers run by `helpers`.
    pub fn with_helpers(self, helpers: Arc<dyn RunHelper>) -> Self {
        Self {
            helpers: Some(helpers),
            ..self
        }
    }

    /// The credentials for a registry and one of its repositories.
    pub(crate) fn login(&self, registry: &str, repository: &str) -> Result<Option<Login>> {
        match &self.kind {
            Kind::Anonymous => Ok(None),
            Kind::Basic {
                registry: ours,
                login,
            } => Ok((ours == registry).then(|| login.clone())),
            Kind::Files(paths) => {
                for path in paths {
                    if let Some(login) =
                        docker::login(path, registry, repository, self.helpers.as_deref())?
                    {
                        return Ok(Some(login));
                    }
                }
                Ok(None)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_for_its_registry_and_never_shown() {
        let credentials = Credentials::basic("Registry.Example:5000", "me", "hunter2");
        let login = credentials.login("registry.example:5000", "a").unwrap();
        assert_eq!(
            login,
            Some(Login::Password {
                user: "me".into(),
                password: Secret::new("hunter2"),
            })
        );
        assert_eq!(credentials.login("registry.example", "a").unwrap(), None);
        assert_eq!(credentials.login("evil.example", "a").unwrap(), None);
        assert!(!format!("{credentials:?} {login:?}").contains("hunter2"));
    }
}
