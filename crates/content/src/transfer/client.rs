//! Access to a registry: its credentials and trusted certificate authorities.

use crate::error::{Error, Result, of_registry};
use jiffy_registry::{Client, ClientOptions, Credentials, PlainHttp, Platform, Reference};
use jiffy_wire::api::RegistryAccess;
use serde::Serialize;
use std::io::{self, Write};
use std::path::Path;
use tempfile::NamedTempFile;

/// A registry client and the files that it needs while it lives.
#[derive(Debug)]
pub struct Access {
    /// The registry client.
    pub client: Client,
    _authorities: Option<NamedTempFile>,
}

impl Access {
    /// A client for this registry; files it needs are in `scratch`.
    ///
    /// # Errors
    ///
    /// If the file of authorities can't be written, or is not one of certificates.
    pub fn new(wanted: &RegistryAccess, reference: &Reference, scratch: &Path) -> Result<Access> {
        let failed = |error: &io::Error| {
            Error::io(
                "write the registry's certificate authorities",
                scratch,
                error,
            )
        };
        let mut options = ClientOptions {
            credentials: match (&wanted.credentials, &wanted.identity_token) {
                (Some((user, password)), _) => {
                    Credentials::basic(reference.registry(), user, password)
                }
                (None, Some(token)) => Credentials::identity(reference.registry(), token),
                (None, None) => Credentials::of_this_user(),
            },
            plain_http: match wanted.plain_http {
                true => PlainHttp::Everywhere,
                false => PlainHttp::Loopback,
            },
            ..ClientOptions::default()
        };
        let mut authorities = None;
        if let Some(pem) = &wanted.ca {
            let mut file = NamedTempFile::new_in(scratch).map_err(|error| failed(&error))?;
            file.write_all(pem.as_bytes())
                .map_err(|error| failed(&error))?;
            options.authorities.push(file.path().to_owned());
            authorities = Some(file);
        }
        let client = Client::new(options).map_err(|error| of_registry(&error, scratch))?;
        Ok(Access {
            client,
            _authorities: authorities,
        })
    }
}

/// A digest that is equal for equal access. It is made of secrets, so it is never shown.
///
/// # Errors
///
/// If it can't be written as JSON.
pub fn key(access: &RegistryAccess) -> Result<String> {
    digest(access).map_err(|error| {
        Error::internal(format!(
            "The access to the registry can't be serialised: {error}."
        ))
    })
}

fn digest(access: &impl Serialize) -> serde_json::Result<String> {
    let text = serde_json::to_vec(access)?;
    Ok(blake3::hash(&text).to_hex().to_string())
}

/// The platform that was asked for, or the default of VMs.
///
/// # Errors
///
/// If the text is not `OS/ARCHITECTURE[/VARIANT]`.
pub fn platform(wanted: Option<&str>) -> Result<Platform> {
    match wanted {
        None => Ok(Platform::default()),
        Some(text) => text
            .parse()
            .map_err(|why| Error::invalid(format!("{why}."))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn each_registry_access_has_its_own_key() {
        let of = |user: &str, plain_http| {
            let access = RegistryAccess {
                credentials: Some((user.to_owned(), "secret".to_owned())),
                plain_http,
                ..RegistryAccess::default()
            };
            key(&access).unwrap()
        };
        assert_eq!(of("one", true), of("one", true));
        assert_ne!(of("one", true), of("other", true));
        assert_ne!(of("one", true), of("one", false));
        // JSON has no such keys.
        let unwritable = BTreeMap::from([((1, 2), 3)]);
        digest(&unwritable).unwrap_err();
    }
}
