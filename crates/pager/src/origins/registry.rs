//! A file of an artifact in a registry, read by ranges.

use super::request::LEAST_RATE;
use jiffy_registry::artifact::{RemoteArtifact, RemoteFile};
use jiffy_registry::client::Retries;
use jiffy_registry::{Client, ClientOptions, Progress, Reference, RegistryError};
use jiffy_store::OriginError;
use jiffy_sys::causes;
use jiffy_wire::pager::RegistryOrigin;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// How long a connection may be silent: a guest waits.
const STALL: Duration = Duration::from_secs(10);
/// Retries after temporary failures, for each fetch of the store.
const RETRIES: u32 = 2;
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// The most time that a fetch may take in all: this, plus the time that the bytes take at
/// [`LEAST_RATE`].
const FETCH_TIME: Duration = Duration::from_secs(15);

/// One fetch.
struct Asked<'a> {
    deadline: Instant,
    given_up: &'a (dyn Fn() -> bool + Sync),
}

impl Progress for Asked<'_> {
    fn cancelled(&self) -> bool {
        (self.given_up)()
    }

    fn deadline(&self) -> Option<Instant> {
        Some(self.deadline)
    }
}

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

    fn file(&self, asked: &Asked<'_>) -> Result<RemoteFile, OriginError> {
        let mut known = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = &*known {
            return Ok(file.clone());
        }
        let found = self.look(asked)?;
        Ok(known.insert(found).clone())
    }

    fn look(&self, asked: &Asked<'_>) -> Result<RemoteFile, OriginError> {
        let described = &self.described;
        let reference = Reference::parse(&described.reference, None)
            .map_err(|error| OriginError::never(error.to_string()))?;
        let client = Client::new(options(described)).map_err(told)?;
        let artifact = RemoteArtifact::open(&client, &reference, asked).map_err(told)?;
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

impl RegistryFile {
    /// Reads exactly these bytes of the file, unless they are given up.
    pub fn fetch(
        &self,
        range: Range<u64>,
        given_up: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<u8>, OriginError> {
        let within = |time| Asked {
            deadline: Instant::now() + time,
            given_up,
        };
        let file = self.file(&within(FETCH_TIME))?;
        if range.end > file.size() {
            return Err(OriginError::never(format!(
                "its file {:?} has {} bytes",
                self.described.file,
                file.size()
            )));
        }
        // The bytes it gives were checked against a hash, so nothing is unpacked that is not the
        // artifact's.
        let least = Duration::from_secs(file.bytes_to_read(&range) / LEAST_RATE);
        file.read(range, &within(FETCH_TIME + least)).map_err(told)
    }
}

/// Converts the error. Not to be retried: the client has retried already.
fn told(error: RegistryError) -> OriginError {
    OriginError::never(causes::sentence(&error))
}
