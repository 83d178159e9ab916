//! A file of an artifact in a registry, read by ranges.

use jiffy_registry::artifact::{RemoteArtifact, RemoteFile};
use jiffy_registry::client::Retries;
use jiffy_registry::{Client, ClientOptions, Reference, RegistryError};
use jiffy_store::{Origin, OriginError};
use jiffy_wire::pager::RegistryOrigin;
use std::error::Error;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

/// How long nothing may come on a connection: a guest waits.
const STALL: Duration = Duration::from_secs(10);
/// What is done about failures that may pass, for each time the store asks.
const RETRIES: u32 = 2;
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// The manifest is fetched when the first byte is asked for.
pub struct RegistryFile {
    described: RegistryOrigin,
    file: Mutex<Option<RemoteFile>>,
}

impl RegistryFile {
    pub fn new(described: &RegistryOrigin) -> RegistryFile {
        RegistryFile {
            described: described.clone(),
            file: Mutex::new(None),
        }
    }

    fn file(&self) -> Result<RemoteFile, OriginError> {
        let mut known = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = &*known {
            return Ok(file.clone());
        }
        let found = self.look()?;
        Ok(known.insert(found).clone())
    }

    fn look(&self) -> Result<RemoteFile, OriginError> {
        let described = &self.described;
        let reference = Reference::parse(&described.reference, None)
            .map_err(|error| OriginError::never(error.to_string()))?;
        let client = Client::new(options(described)).map_err(told)?;
        let artifact = RemoteArtifact::open(&client, &reference, &()).map_err(told)?;
        artifact.file(&described.file).cloned().ok_or_else(|| {
            OriginError::never(format!("the artifact has no file {:?}", described.file))
        })
    }
}

fn options(described: &RegistryOrigin) -> ClientOptions {
    let config = described.docker_config.as_deref();
    ClientOptions {
        connect_timeout: STALL,
        stall_timeout: STALL,
        retries: Retries {
            limit: RETRIES,
            longest_wait: LONGEST_WAIT,
            ..Retries::default()
        },
        ..ClientOptions::noted(config, described.plain_http, &described.authorities)
    }
}

impl Origin for RegistryFile {
    fn name(&self) -> String {
        self.described.reference.clone()
    }

    fn fetch(&self, range: Range<u64>) -> Result<Vec<u8>, OriginError> {
        let file = self.file()?;
        if range.end > file.size() {
            return Err(OriginError::never(format!(
                "its file {:?} has {} bytes",
                self.described.file,
                file.size()
            )));
        }
        file.read(range, &()).map_err(told)
    }
}

/// The client has tried again already.
fn told(error: RegistryError) -> OriginError {
    let mut why = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        why.push_str(": ");
        why.push_str(&error.to_string());
        cause = error.source();
    }
    OriginError::never(why)
}
