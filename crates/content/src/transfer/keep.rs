//! Credentials and authorities of registries, kept beside an image of chunks for as long as parts
//! of it may have to be fetched; readable only by the daemon's user.

use crate::error::{Error, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiffy_wire::api::RegistryAccess;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Largest file that entries are added to, bytes.
const LARGEST: u64 = 1 << 20;

/// The credentials file beside an image of chunks, in Docker's format.
pub fn credentials_beside(image: &Path) -> PathBuf {
    image.with_extension("auth.json")
}

/// The file of this registry's authorities beside an image of chunks, PEM. Each registry has its
/// own file: an authority trusted for one must not be trusted for another.
pub fn authorities_beside(image: &Path, registry: &str) -> PathBuf {
    let name = blake3::hash(registry.as_bytes()).to_hex();
    image.with_extension(format!("{}.ca.pem", &name[..16]))
}

/// Saves the credentials for this registry, if there are any, beside those for other registries;
/// returns the file's path.
///
/// # Errors
///
/// If the file can't be written.
pub fn credentials(
    access: &RegistryAccess,
    registry: &str,
    image: &Path,
) -> Result<Option<PathBuf>> {
    let entry = match (&access.credentials, &access.identity_token) {
        (Some((user, password)), _) => {
            json!({ "auth": STANDARD.encode(format!("{user}:{password}")) })
        }
        (None, Some(token)) => json!({ "identitytoken": token }),
        (None, None) => return Ok(None),
    };
    let path = credentials_beside(image);
    let known = read(&path).and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let known: Value = known.unwrap_or_default();
    let mut auths: Map<String, Value> = known["auths"].as_object().cloned().unwrap_or_default();
    auths.insert(registry.to_owned(), entry);
    write(&path, json!({ "auths": auths }).to_string().as_bytes())?;
    Ok(Some(path))
}

/// Saves the authorities given for this registry, beside earlier ones; returns the paths.
///
/// # Errors
///
/// If the file can't be written.
pub fn authorities(access: &RegistryAccess, registry: &str, image: &Path) -> Result<Vec<PathBuf>> {
    let Some(pem) = &access.ca else {
        return Ok(Vec::new());
    };
    let path = authorities_beside(image, registry);
    let known = read(&path).and_then(|bytes| String::from_utf8(bytes).ok());
    let known = known.unwrap_or_default();
    if !known.contains(pem.trim()) {
        write(&path, format!("{known}{}\n", pem.trim()).as_bytes())?;
    }
    Ok(vec![path])
}

fn read(path: &Path) -> Option<Vec<u8>> {
    let small = fs::metadata(path).is_ok_and(|data| data.len() <= LARGEST);
    small.then(|| fs::read(path).ok()).flatten()
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    jiffy_sys::durable::replace_private(path, bytes).map_err(|error| {
        Error::io(
            "store credentials or authorities of a registry",
            path,
            &error,
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn saved_credentials_accumulate_and_are_private() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("0123.jimg");
        let nothing = RegistryAccess::default();
        assert_eq!(credentials(&nothing, "a:1", &image).unwrap(), None);
        assert!(authorities(&nothing, "a:1", &image).unwrap().is_empty());
        let user = |name: &str, ca: &str| RegistryAccess {
            credentials: Some((name.into(), "p:w".into())),
            ca: Some(ca.into()),
            ..RegistryAccess::default()
        };
        let token = RegistryAccess {
            identity_token: Some("t".into()),
            ca: Some("ONE\n".into()),
            ..RegistryAccess::default()
        };
        for (access, host) in [
            (user("me", "ONE"), "a:1"),
            (user("you", "TWO"), "b:2"),
            (token, "c"),
        ] {
            credentials(&access, host, &image).unwrap().unwrap();
            authorities(&access, host, &image).unwrap();
        }
        let path = credentials(&user("now", "ONE"), "a:1", &image)
            .unwrap()
            .unwrap();
        let kept: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let of = |text: &str| Value::from(STANDARD.encode(text));
        assert_eq!(kept["auths"]["a:1"]["auth"], of("now:p:w"));
        assert_eq!(kept["auths"]["b:2"]["auth"], of("you:p:w"));
        assert_eq!(kept["auths"]["c"]["identitytoken"], "t");
        let known = |host, ca| {
            let kept = authorities(&user("me", ca), host, &image).unwrap();
            fs::read_to_string(&kept[0]).unwrap()
        };
        // An authority trusted for one registry is not trusted for another.
        assert_eq!(known("a:1", "ONE"), "ONE\n");
        assert_eq!(known("b:2", "TWO"), "TWO\n");
        assert_eq!(known("a:1", "THREE"), "ONE\nTHREE\n");
        let pem = &authorities_beside(&image, "a:1");
        for path in [&path, pem] {
            let mode = fs::metadata(path).unwrap().permissions().mode();
            assert_eq!(mode & 0o077, 0, "{}", path.display());
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4);
    }
}
