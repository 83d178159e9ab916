//! How a registry is spoken to: who we are, what we trust, and what its
//! failures are for our users.

use crate::error::{Error, Result, is_full};
use jiffy_registry::{
    Client, ClientOptions, Credentials, PlainHttp, Platform, Reference, RegistryError,
};
use jiffy_wire::api::RegistryAccess;
use std::io::{self, Write};
use std::path::Path;
use tempfile::NamedTempFile;

/// What a client needs as files, for as long as it lives.
#[derive(Debug)]
pub struct Access {
    /// Speaks to registries.
    pub client: Client,
    _authorities: Option<NamedTempFile>,
}

impl Access {
    /// A client for this registry; files it needs are in `scratch`.
    pub fn new(wanted: &RegistryAccess, reference: &Reference, scratch: &Path) -> Result<Access> {
        let failed = |error: &io::Error| Error::io("prepare for the registry", scratch, error);
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

/// What tells two ways to speak to a registry apart. Not shown to anyone.
pub fn key(access: &RegistryAccess) -> String {
    let text = serde_json::to_string(access).unwrap_or_default();
    blake3::hash(text.as_bytes()).to_hex().to_string()
}

/// The platform that was asked for, or that of VMs.
pub fn platform(wanted: Option<&str>) -> Result<Platform> {
    match wanted {
        None => Ok(Platform::default()),
        Some(text) => text
            .parse()
            .map_err(|why| Error::invalid(format!("{why}."))),
    }
}

/// One sentence, of the kind that fits.
pub fn of_registry(error: &RegistryError, folder: &Path) -> Error {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(error) = cause.downcast_ref::<io::Error>()
            && is_full(error)
        {
            return Error::io("keep what the registry sends", folder, error);
        }
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    let mut chars = text.chars();
    let text = match chars.next() {
        Some(first) => format!("{}{}.", first.to_uppercase(), chars.as_str()),
        None => text,
    };
    use RegistryError as R;
    let failed = match error {
        R::NotFound { .. } => Error::not_found(text)
            .hint("Check its name and tag; a registry also says so of what may not be seen."),
        R::NoPlatform { .. } => {
            Error::not_found(text).hint("Choose one of them with --platform OS/ARCHITECTURE.")
        }
        R::Unauthorised { .. } => {
            Error::invalid(text).hint("Log in with `docker login`, or give --creds USER:PASSWORD.")
        }
        R::Insecure { source, .. } if source.to_string().contains("certificate") => Error::invalid(
            text,
        )
        .hint(
            "Give the file of the authority that signed the registry's certificate with --ca FILE.",
        ),
        R::Insecure { .. } => Error::invalid(text)
            .hint("If the registry has no TLS and you trust the network, give --plain-http."),
        R::Unreachable { .. } | R::Refused { .. } | R::Protocol { .. } | R::Damaged { .. } => {
            Error::registry(text)
        }
        R::File { .. } | R::Sink { .. } => Error::internal(text),
        _ => Error::invalid(text),
    };
    match error.hint() {
        Some(hint) if failed.0.hint.is_none() => failed.hint(hint),
        _ => failed,
    }
}
