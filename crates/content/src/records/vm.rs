//! `vm.json`: all that is known of a VM.

use super::spec::{DiskLimit, NetLimit, NetworkPolicy, Spec};
use super::{both_ways, both_ways_enum, is_false};
use crate::durable::{self, LoadError};
use crate::model::image as lazy;
use crate::model::vm as live;
use jiffy_wire::{agent, api};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

const FORMAT: &str = "jiffy-vm";
const VERSION: u32 = 1;
const FILE: &str = "vm.json";

/// See [`live::Kept`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vm {
    id: String,
    name: String,
    spec: Spec,
    cid: u32,
    created: u64,
    state: State,
    started: Option<u64>,
    ended: Option<u64>,
    pid: Option<u32>,
    main: Main,
    main_pid: Option<u32>,
    failure: Option<Failure>,
    warnings: Vec<String>,
    log_start: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    origin: Option<Origin>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    root: Option<Root>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    paged: Option<Paged>,
    #[serde(default, skip_serializing_if = "is_false")]
    powering_off: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    addresses: Vec<IpAddr>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    policy: Option<NetworkPolicy>,
    #[serde(default, skip_serializing_if = "Limits::is_default")]
    limits: Limits,
}
both_ways!(
    Vm,
    live::Kept { powering_off }
    around record: live::VmRecord {
        id: same,
        name: same,
        spec: into,
        cid: same,
        created: same,
        state: into,
        started: same,
        ended: same,
        pid: same,
        main: into,
        main_pid: same,
        failure: opt,
        warnings: same,
        log_start: same,
        origin: opt,
        root: opt,
        paged: opt,
        addresses: same,
        policy: opt,
        limits: into,
    }
);

/// See [`api::Limits`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    #[serde(skip_serializing_if = "Option::is_none")]
    root: Option<DiskLimit>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    volumes: BTreeMap<String, DiskLimit>,
    #[serde(skip_serializing_if = "Option::is_none")]
    network: Option<NetLimit>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpus: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_mib: Option<u32>,
}
both_ways!(
    Limits,
    api::Limits {
        root: opt,
        volumes: map,
        network: opt,
        cpus: same,
        memory_mib: same,
    }
);

impl Limits {
    fn is_default(&self) -> bool {
        *self == Limits::default()
    }
}

/// See [`api::VmState`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Made, not started.
    Created,
    /// Not ready.
    Starting,
    /// Ready.
    Running,
    /// On request.
    Paused,
    /// About to end.
    Stopping,
    /// On disk.
    Hibernated,
    /// Ended.
    Exited,
}
both_ways_enum!(
    State,
    api::VmState {
        Created,
        Starting,
        Running,
        Paused,
        Stopping,
        Hibernated,
        Exited,
    }
);

/// See [`live::MainState`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Main {
    /// Not started.
    Pending,
    /// It runs.
    Started,
    /// It is over.
    Ended(End),
}

impl From<live::MainState> for Main {
    fn from(live: live::MainState) -> Main {
        match live {
            live::MainState::Pending => Main::Pending,
            live::MainState::Started => Main::Started,
            live::MainState::Ended(end) => Main::Ended(end.into()),
        }
    }
}

impl From<Main> for live::MainState {
    fn from(saved: Main) -> live::MainState {
        match saved {
            Main::Pending => live::MainState::Pending,
            Main::Started => live::MainState::Started,
            Main::Ended(end) => live::MainState::Ended(end.into()),
        }
    }
}

/// See [`live::MainEnd`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// By itself or by a signal.
    Exited(ExitStatus),
    /// Never started.
    Failed(StartError),
    /// With its VM.
    Lost(Failure),
}

impl From<live::MainEnd> for End {
    fn from(live: live::MainEnd) -> End {
        match live {
            live::MainEnd::Exited(status) => End::Exited(status.into()),
            live::MainEnd::Failed(error) => End::Failed(error.into()),
            live::MainEnd::Lost(failure) => End::Lost(failure.into()),
        }
    }
}

impl From<End> for live::MainEnd {
    fn from(saved: End) -> live::MainEnd {
        match saved {
            End::Exited(status) => live::MainEnd::Exited(status.into()),
            End::Failed(error) => live::MainEnd::Failed(error.into()),
            End::Lost(failure) => live::MainEnd::Lost(failure.into()),
        }
    }
}

/// See [`agent::ExitStatus`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitStatus {
    /// A status.
    Code(i32),
    /// A signal.
    Signal(i32),
}

impl From<agent::ExitStatus> for ExitStatus {
    fn from(live: agent::ExitStatus) -> ExitStatus {
        match live {
            agent::ExitStatus::Code(code) => ExitStatus::Code(code),
            agent::ExitStatus::Signal(signal) => ExitStatus::Signal(signal),
        }
    }
}

impl From<ExitStatus> for agent::ExitStatus {
    fn from(saved: ExitStatus) -> agent::ExitStatus {
        match saved {
            ExitStatus::Code(code) => agent::ExitStatus::Code(code),
            ExitStatus::Signal(signal) => agent::ExitStatus::Signal(signal),
        }
    }
}

/// See [`agent::StartError`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartError {
    kind: StartFailure,
    message: String,
}
both_ways!(
    StartError,
    agent::StartError {
        kind: into,
        message: same
    }
);

/// See [`agent::StartFailure`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StartFailure {
    /// 127.
    NotFound,
    /// 126.
    NotExecutable,
    /// No user or group.
    NoSuchUser,
    /// No working directory.
    NoSuchDirectory,
    /// A senseless request.
    Invalid,
    /// Anything else.
    Other,
}

impl From<agent::StartFailure> for StartFailure {
    fn from(live: agent::StartFailure) -> StartFailure {
        match live {
            agent::StartFailure::NotFound => StartFailure::NotFound,
            agent::StartFailure::NotExecutable => StartFailure::NotExecutable,
            agent::StartFailure::NoSuchUser => StartFailure::NoSuchUser,
            agent::StartFailure::NoSuchDirectory => StartFailure::NoSuchDirectory,
            agent::StartFailure::Invalid => StartFailure::Invalid,
            _ => StartFailure::Other,
        }
    }
}

impl From<StartFailure> for agent::StartFailure {
    fn from(saved: StartFailure) -> agent::StartFailure {
        match saved {
            StartFailure::NotFound => agent::StartFailure::NotFound,
            StartFailure::NotExecutable => agent::StartFailure::NotExecutable,
            StartFailure::NoSuchUser => agent::StartFailure::NoSuchUser,
            StartFailure::NoSuchDirectory => agent::StartFailure::NoSuchDirectory,
            StartFailure::Invalid => agent::StartFailure::Invalid,
            StartFailure::Other => agent::StartFailure::Other,
        }
    }
}

/// See [`live::Failure`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    message: String,
    hint: Option<String>,
}
both_ways!(
    Failure,
    live::Failure {
        message: same,
        hint: same
    }
);

/// See [`api::Origin`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// A snapshot.
    From(String),
    /// A VM.
    ForkedFrom(String),
    /// A golden snapshot.
    Golden,
}

impl From<api::Origin> for Origin {
    fn from(live: api::Origin) -> Origin {
        match live {
            api::Origin::From(name) => Origin::From(name),
            api::Origin::ForkedFrom(name) => Origin::ForkedFrom(name),
            api::Origin::Golden => Origin::Golden,
        }
    }
}

impl From<Origin> for api::Origin {
    fn from(saved: Origin) -> api::Origin {
        match saved {
            Origin::From(name) => api::Origin::From(name),
            Origin::ForkedFrom(name) => api::Origin::ForkedFrom(name),
            Origin::Golden => api::Origin::Golden,
        }
    }
}

/// See [`live::Root`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Root {
    path: PathBuf,
    digest: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lazy: Option<LazyDisk>,
}
both_ways!(
    Root,
    live::Root {
        path: same,
        digest: same,
        lazy: opt
    }
);

/// See [`lazy::LazyDisk`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LazyDisk {
    chunks: Vec<String>,
    #[serde(default)]
    ext4: bool,
}
both_ways!(
    LazyDisk,
    lazy::LazyDisk {
        chunks: same,
        ext4: same
    }
);

/// See [`live::Paged`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paged {
    image: PathBuf,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    record: Option<PathBuf>,
    #[serde(default)]
    prefetch: bool,
}
both_ways!(
    Paged,
    live::Paged {
        image: same,
        record: same,
        prefetch: same
    }
);

impl live::Kept {
    /// Writes it into the VM's folder. A VM that is removed at its end anyway
    /// need not survive a crash of the host, which ends it.
    ///
    /// # Errors
    ///
    /// If the file can't be written, synced or renamed.
    pub fn save(self, folder: &Path) -> io::Result<()> {
        let sync = !self.record.spec.remove;
        save(folder, self, sync)
    }
}

impl live::VmRecord {
    /// The record of what [`live::Kept::save`] wrote.
    ///
    /// # Errors
    ///
    /// If the file can't be read, is damaged, or is of another version.
    pub fn load(folder: &Path) -> Result<live::VmRecord, LoadError> {
        load(folder).map(|kept| kept.record)
    }
}

/// Writes what is kept of a VM into its folder.
///
/// # Errors
///
/// If the file can't be written, synced or renamed.
pub fn save(folder: &Path, kept: live::Kept, sync: bool) -> io::Result<()> {
    let saved = Vm::from(kept);
    durable::save(&folder.join(FILE), FORMAT, VERSION, &saved, sync)
}

/// Reads what [`save`] wrote.
///
/// # Errors
///
/// If the file can't be read, is damaged, or is of another version.
pub fn load(folder: &Path) -> Result<live::Kept, LoadError> {
    durable::load::<Vm>(&folder.join(FILE), FORMAT, VERSION).map(Into::into)
}

/// The VM's name in a record of an unknown version, if it has such a field.
pub fn name_in_any(folder: &Path) -> Option<String> {
    #[derive(Deserialize)]
    struct Named {
        name: String,
    }
    let named: Named = durable::peek(&folder.join(FILE), FORMAT)?;
    crate::names::check("VM", &named.name).ok()?;
    Some(named.name)
}
