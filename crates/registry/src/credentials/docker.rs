//! The file that `docker login` and `podman login` write (Docker's `config.json`).

use super::{Login, RunHelper, Secret, helper};
use crate::RegistryError;
use crate::error::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// The largest file that is read, bytes.
const LARGEST: u64 = 4 << 20;

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Config {
    auths: BTreeMap<String, Entry>,
    creds_store: Option<String>,
    cred_helpers: BTreeMap<String, String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Entry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
}

/// The login for a registry in the file. A helper for the registry goes before the default helper,
/// which goes before a password in the file itself.
pub(super) fn login(
    path: &Path,
    registry: &str,
    repository: &str,
    helpers: Option<&dyn RunHelper>,
) -> Result<Option<Login>> {
    let bad = |reason: String| RegistryError::Credentials {
        host: registry.to_owned(),
        reason: format!("{}: {reason}", path.display()),
    };
    let text = match read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(bad(error.to_string())),
    };
    // The error has the position but not the text, which may be a password.
    let config: Config = serde_json::from_slice(&text).map_err(|error| {
        bad(format!(
            "it is not a configuration of Docker (line {}, column {})",
            error.line(),
            error.column()
        ))
    })?;

    let own = config
        .cred_helpers
        .iter()
        .find(|(key, _)| normal(key) == registry)
        .map(|(_, name)| name);
    if let Some(name) = own.or(config.creds_store.as_ref())
        && !name.is_empty()
    {
        let login = helper::get(helpers, name, registry)?;
        if login.is_some() {
            return Ok(login);
        }
    }

    let Some((key, entry)) = best_entry(&config.auths, registry, repository) else {
        return Ok(None);
    };
    entry
        .login()
        .map_err(|reason| bad(format!("the entry {key:?} {reason}")))
}

fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    use std::io::Read;
    let mut text = Vec::new();
    std::fs::File::open(path)?
        .take(LARGEST)
        .read_to_end(&mut text)?;
    Ok(text)
}

/// The entry for the repository, for its longest parent path, or for the registry: podman writes
/// `HOST/FOLDER`, Docker `HOST` or `https://HOST/v1/`.
fn best_entry<'a>(
    auths: &'a BTreeMap<String, Entry>,
    registry: &str,
    repository: &str,
) -> Option<(&'a String, &'a Entry)> {
    let full = format!("{registry}/{repository}");
    let mut name = full.as_str();
    loop {
        if let Some(found) = auths.iter().find(|(key, _)| normal(key) == name) {
            return Some(found);
        }
        name = name.rsplit_once('/')?.0;
    }
}

/// A key without its scheme, version and trailing slash.
fn normal(key: &str) -> String {
    let key = key.to_ascii_lowercase();
    let key = key
        .strip_prefix("https://")
        .or_else(|| key.strip_prefix("http://"))
        .unwrap_or(&key);
    let key = key.trim_end_matches('/');
    let key = key
        .strip_suffix("/v1")
        .or_else(|| key.strip_suffix("/v2"))
        .unwrap_or(key);
    key.trim_end_matches('/').to_owned()
}

impl Entry {
    fn login(&self) -> std::result::Result<Option<Login>, &'static str> {
        let filled = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        if let Some(token) = filled(&self.identitytoken) {
            return Ok(Some(Login::Identity(Secret(token))));
        }
        if let Some(auth) = filled(&self.auth) {
            let decoded = STANDARD
                .decode(auth.trim())
                .ok()
                .and_then(|bytes| String::from_utf8(bytes).ok())
                .ok_or("has an auth that is not Base64")?;
            // Docker appends a NUL to the password.
            let (user, password) = decoded
                .split_once(':')
                .ok_or("has an auth that is not USER:PASSWORD in Base64")?;
            return Ok(Some(Login::Password {
                user: user.to_owned(),
                password: Secret::new(password.trim_end_matches('\0')),
            }));
        }
        match (filled(&self.username), filled(&self.password)) {
            (Some(user), Some(password)) => Ok(Some(Login::Password {
                user,
                password: Secret(password),
            })),
            _ => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn password(user: &str, password: &str) -> Option<Login> {
        Some(Login::Password {
            user: user.into(),
            password: Secret::new(password),
        })
    }

    #[test]
    fn entries_are_found_by_registry_and_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        let auth = |text: &str| STANDARD.encode(text);
        let text = serde_json::json!({
            "auths": {
                "localhost:5000": { "auth": auth("a:b:c") },
                "https://Old.example/v1/": { "username": "u", "password": "p" },
                "new.example": { "auth": auth("host:x\0") },
                "new.example/team": { "auth": auth("team:x") },
                "token.example": { "auth": auth("t:"), "identitytoken": "idt" },
                "empty.example": {},
                "broken.example": { "auth": "!!!" },
            },
            "HttpHeaders": { "x": "y" },
        });
        std::fs::write(&path, text.to_string()).unwrap();
        let login = |registry, repository| login(&path, registry, repository, None);
        assert_eq!(login("localhost:5000", "x").unwrap(), password("a", "b:c"));
        assert_eq!(login("old.example", "x").unwrap(), password("u", "p"));
        assert_eq!(login("new.example", "x").unwrap(), password("host", "x"));
        assert_eq!(
            login("new.example", "team/x/y").unwrap(),
            password("team", "x")
        );
        assert_eq!(
            login("token.example", "x").unwrap(),
            Some(Login::Identity(Secret::new("idt")))
        );
        assert_eq!(login("empty.example", "x").unwrap(), None);
        assert_eq!(login("localhost:5001", "x").unwrap(), None);
        let error = login("broken.example", "x").unwrap_err().to_string();
        assert!(error.contains("not Base64"), "{error}");
    }

    #[test]
    fn an_invalid_file_is_reported_without_its_contents() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        assert_eq!(login(&path, "h.example", "x", None).unwrap(), None);
        std::fs::write(&path, r#"{"auths":{"h.example":{"password":["hunter2"]}}}"#).unwrap();
        let error = login(&path, "h.example", "x", None)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("line 1") && !error.contains("hunter2"),
            "{error}"
        );
    }

    #[test]
    fn helpers_take_precedence_over_entries() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        let text = r#"{"auths":{"h.example":{"username":"u","password":"p"}},
            "credHelpers":{"h.example":"jiffy-test-that-does-not-exist"}}"#;
        std::fs::write(&path, text).unwrap();
        let error = login(&path, "h.example", "x", None)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("docker-credential-jiffy-test-that-does-not-exist"),
            "{error}"
        );
    }
}
