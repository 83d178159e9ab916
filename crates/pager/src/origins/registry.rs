//! A file of an artifact in a registry, read by ranges.

use super::helpers::Helpers;
use super::request::MIN_RATE;
use jiffy_registry::artifact::{RemoteArtifact, RemoteFile};
use jiffy_registry::client::Retries;
use jiffy_registry::{Client, ClientOptions, Progress, Reference, RegistryError};
use jiffy_store::OriginError;
use jiffy_sys::causes;
use jiffy_sys::mutex::lock;
use jiffy_sys::sealed::Unsealed;
use jiffy_wire::pager::RegistryOrigin;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a connection may be idle; short, because a guest waits.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Retries after temporary failures, for each fetch of the store.
const RETRIES: u32 = 2;
const MAX_RETRY_WAIT: Duration = Duration::from_secs(5);
/// The most time that a fetch may take in all: this, plus the time that the bytes take at
/// [`MIN_RATE`].
const FETCH_TIME: Duration = Duration::from_secs(15);

/// One fetch.
struct FetchProgress<'a> {
    deadline: Instant,
    given_up: &'a (dyn Fn() -> bool + Sync),
}

impl Progress for FetchProgress<'_> {
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
    helpers: Arc<Helpers>,
    file: Mutex<Option<RemoteFile>>,
}

impl RegistryFile {
    pub fn new(described: &RegistryOrigin, helpers: &Arc<Helpers>) -> RegistryFile {
        RegistryFile {
            described: described.clone(),
            helpers: Arc::clone(helpers),
            file: Mutex::new(None),
        }
    }

    fn file(&self, progress: &FetchProgress<'_>) -> Result<RemoteFile, OriginError> {
        let mut known = lock(&self.file);
        if let Some(file) = &*known {
            return Ok(file.clone());
        }
        let found = self.open(progress)?;
        Ok(known.insert(found).clone())
    }

    fn open(&self, progress: &FetchProgress<'_>) -> Result<RemoteFile, OriginError> {
        let described = &self.described;
        let reference = Reference::parse(&described.reference, None)
            .map_err(|error| OriginError::permanent(error.to_string()))?;
        let mut options = options(described);
        let helpers = Arc::clone(&self.helpers);
        options.credentials = options.credentials.with_helpers(helpers);
        let client = Client::new(options).map_err(origin_error)?;
        let artifact = RemoteArtifact::open(&client, &reference, progress).map_err(origin_error)?;
        artifact.file(&described.file).cloned().ok_or_else(|| {
            OriginError::permanent(format!("the artifact has no file {:?}", described.file))
        })
    }
}

fn options(described: &RegistryOrigin) -> ClientOptions {
    let config = described.docker_config.as_deref();
    ClientOptions {
        connect_timeout: STALL_TIMEOUT,
        stall_timeout: STALL_TIMEOUT,
        retries: Retries {
            limit: RETRIES,
            longest_wait: MAX_RETRY_WAIT,
            ..Retries::default()
        },
        ..ClientOptions::from_recorded(config, described.plain_http, &described.authorities)
    }
}

impl RegistryFile {
    /// Reads these bytes of the file, and those around them by which they are verified, unless the
    /// read is cancelled. Returns the memory, and the offset of the first requested byte in it.
    ///
    /// # Errors
    ///
    /// If the artifact can't be opened, its file is shorter, the bytes do not arrive in time or do
    /// not match their hashes, the read is cancelled, or there is no memory.
    pub fn fetch(
        &self,
        range: Range<u64>,
        given_up: &(dyn Fn() -> bool + Sync),
    ) -> Result<(Unsealed, u64), OriginError> {
        let within = |time| FetchProgress {
            deadline: Instant::now() + time,
            given_up,
        };
        let file = self.file(&within(FETCH_TIME))?;
        if range.end > file.size() {
            return Err(OriginError::permanent(format!(
                "its file {:?} has {} bytes",
                self.described.file,
                file.size()
            )));
        }
        let around = file.verifiable(&range).map_err(origin_error)?;
        let mut memory = new_memory(around.end - around.start)?;
        // All bytes are checked against a hash, so only the artifact's own bytes are unpacked.
        let least = Duration::from_secs(file.bytes_to_read(&range) / MIN_RATE);
        file.read_into(&around, &mut memory, &within(FETCH_TIME + least))
            .map_err(origin_error)?;
        Ok((memory, range.start - around.start))
    }
}

/// Memory for bytes that are read.
///
/// # Errors
///
/// If the kernel has none.
pub fn new_memory(bytes: u64) -> Result<Unsealed, OriginError> {
    Unsealed::new("jiffy origin", bytes as usize)
        .map_err(|error| OriginError::transient(format!("there is no memory for it: {error}")))
}

/// Converts the error. The result is permanent, because the client has retried already.
fn origin_error(error: RegistryError) -> OriginError {
    OriginError::permanent(causes::sentence(&error))
}
