//! What VMs are made of: a part of a VM's record and of a snapshot's.

use super::{both_ways, both_ways_enum, is_false};
use crate::model::vm as live;
use jiffy_wire::cpu::Wanted;
use jiffy_wire::{agent, api, vmm};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::Arc;

/// See [`live::Spec`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    image: String,
    #[serde(default)]
    config: ImageConfig,
    kernel: String,
    cpus: u8,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_cpus: Option<u8>,
    memory_mib: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_memory_mib: Option<u32>,
    pages: PageSize,
    disks: Vec<VolumeUse>,
    command: Option<Command>,
    init: Option<Vec<String>>,
    console: bool,
    remove: bool,
    hostname: Option<String>,
    kernel_args: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cpu_profile: Option<Wanted>,
    timeline: bool,
    #[serde(default, skip_serializing_if = "is_false")]
    deep: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    from: Option<FromSnapshot>,
    #[serde(default, skip_serializing_if = "is_false")]
    cold: bool,
    #[serde(default, skip_serializing_if = "is_false")]
    hidden: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    preload: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    root_disk: Option<RootDisk>,
    #[serde(default, skip_serializing_if = "DiskLimit::is_none")]
    root_limit: DiskLimit,
    #[serde(default, skip_serializing_if = "is_false")]
    own_volumes: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    folders: Vec<FolderUse>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    network: Option<NetworkUse>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    idle: Option<IdlePolicy>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    owner: Option<String>,
    #[serde(default, skip_serializing_if = "Priority::is_normal")]
    priority: Priority,
}
both_ways!(
    Spec,
    live::Spec {
        image: same,
        config: into,
        kernel: same,
        cpus: same,
        max_cpus: same,
        memory_mib: same,
        max_memory_mib: same,
        pages: into,
        disks: list,
        command: opt,
        init: same,
        console: same,
        remove: same,
        hostname: same,
        kernel_args: same,
        cpu_profile: same,
        timeline: same,
        deep: same,
        from: opt,
        cold: same,
        hidden: same,
        preload: same,
        root_disk: opt,
        root_limit: into,
        own_volumes: same,
        folders: list,
        network: opt,
        idle: opt,
        owner: same,
        priority: into,
    }
);

impl From<Arc<live::Spec>> for Spec {
    fn from(live: Arc<live::Spec>) -> Spec {
        Arc::unwrap_or_clone(live).into()
    }
}

impl From<Spec> for Arc<live::Spec> {
    fn from(saved: Spec) -> Arc<live::Spec> {
        Arc::new(saved.into())
    }
}

/// See [`api::Priority`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// After all others.
    Low,
    /// The default.
    #[default]
    Normal,
    /// Before all others.
    High,
}
both_ways_enum!(Priority, api::Priority { Low, Normal, High });

impl Priority {
    fn is_normal(&self) -> bool {
        *self == Priority::Normal
    }
}

/// See [`api::IdlePolicy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdlePolicy {
    after_s: u32,
    action: IdleAction,
}
both_ways!(
    IdlePolicy,
    api::IdlePolicy {
        after_s: same,
        action: into,
    }
);

/// See [`api::IdleAction`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IdleAction {
    /// It is hibernated.
    Hibernate,
    /// It is stopped.
    Stop,
}
both_ways_enum!(IdleAction, api::IdleAction { Hibernate, Stop });

/// See [`api::NetworkUse`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkUse {
    name: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    ports: Vec<String>,
    #[serde(default, skip_serializing_if = "is_false")]
    publish_all: bool,
    #[serde(default, skip_serializing_if = "NetworkPolicy::is_default")]
    policy: NetworkPolicy,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    dns: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    search: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    hosts: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    proxy_ports: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "NetLimit::is_none")]
    limit: NetLimit,
}
both_ways!(
    NetworkUse,
    api::NetworkUse {
        name: same,
        ports: same,
        publish_all: same,
        policy: into,
        dns: same,
        search: same,
        hosts: same,
        proxy_ports: same,
        limit: into,
    }
);

/// See [`api::NetworkPolicy`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkPolicy {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    allow: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    deny: Vec<String>,
}
both_ways!(
    NetworkPolicy,
    api::NetworkPolicy {
        allow: same,
        deny: same,
    }
);

impl NetworkPolicy {
    fn is_default(&self) -> bool {
        *self == NetworkPolicy::default()
    }
}

/// See [`live::FromSnapshot`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FromSnapshot {
    name: String,
    start_main: bool,
}
both_ways!(
    FromSnapshot,
    live::FromSnapshot {
        name: same,
        start_main: same
    }
);

/// See [`api::ImageConfig`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageConfig {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    entrypoint: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cmd: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    env: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    workdir: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_signal: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    exposed_ports: Vec<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    labels: BTreeMap<String, String>,
}
both_ways!(
    ImageConfig,
    api::ImageConfig {
        entrypoint: same,
        cmd: same,
        env: same,
        workdir: same,
        user: same,
        stop_signal: same,
        exposed_ports: same,
        labels: same,
    }
);

/// See [`vmm::PageSize`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PageSize {
    /// 4 KiB.
    #[serde(rename = "4K")]
    Small,
    /// 2 MiB.
    #[serde(rename = "2M")]
    Huge2M,
    /// 1 GiB.
    #[serde(rename = "1G")]
    Huge1G,
}
both_ways_enum!(
    PageSize,
    vmm::PageSize {
        Small,
        Huge2M,
        Huge1G
    }
);

/// See [`api::VolumeUse`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeUse {
    name: String,
    #[serde(default)]
    size_mib: Option<u64>,
    #[serde(default)]
    read_only: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mount: Option<String>,
    #[serde(default, skip_serializing_if = "DiskLimit::is_none")]
    limit: DiskLimit,
}
both_ways!(
    VolumeUse,
    api::VolumeUse {
        name: same,
        size_mib: same,
        read_only: same,
        mount: same,
        limit: into,
    }
);

/// See [`api::FolderUse`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FolderUse {
    source: String,
    mount: String,
    #[serde(default, skip_serializing_if = "is_false")]
    read_only: bool,
    #[serde(default, skip_serializing_if = "is_false")]
    capture: bool,
}
both_ways!(
    FolderUse,
    api::FolderUse {
        source: same,
        mount: same,
        read_only: same,
        capture: same,
    }
);

/// See [`vmm::DiskLimit`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskLimit {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bytes_per_second: Option<NonZeroU64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    operations_per_second: Option<NonZeroU64>,
}
both_ways!(
    DiskLimit,
    vmm::DiskLimit {
        bytes_per_second: same,
        operations_per_second: same,
    }
);

impl DiskLimit {
    fn is_none(&self) -> bool {
        *self == DiskLimit::default()
    }
}

/// See [`vmm::NetLimit`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetLimit {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bytes_per_second: Option<NonZeroU64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    packets_per_second: Option<NonZeroU64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bytes_burst: Option<NonZeroU64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    packets_burst: Option<NonZeroU64>,
}
both_ways!(
    NetLimit,
    vmm::NetLimit {
        bytes_per_second: same,
        packets_per_second: same,
        bytes_burst: same,
        packets_burst: same,
    }
);

impl NetLimit {
    fn is_none(&self) -> bool {
        *self == NetLimit::default()
    }
}

/// See [`api::RootDisk`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RootDisk {
    /// A layer over the image.
    Layer {
        /// MiB.
        size_mib: u64,
    },
    /// A clone of the image.
    Copy {
        /// Byte by byte if need be.
        #[serde(default)]
        plainly: bool,
    },
}

impl From<api::RootDisk> for RootDisk {
    fn from(live: api::RootDisk) -> RootDisk {
        match live {
            api::RootDisk::Layer { size_mib } => RootDisk::Layer { size_mib },
            api::RootDisk::Copy { plainly } => RootDisk::Copy { plainly },
        }
    }
}

impl From<RootDisk> for api::RootDisk {
    fn from(saved: RootDisk) -> api::RootDisk {
        match saved {
            RootDisk::Layer { size_mib } => api::RootDisk::Layer { size_mib },
            RootDisk::Copy { plainly } => api::RootDisk::Copy { plainly },
        }
    }
}

/// See [`agent::Command`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    argv: Vec<String>,
    #[serde(default)]
    env: Vec<String>,
    #[serde(default)]
    cwd: Option<String>,
    #[serde(default)]
    user: Option<String>,
    #[serde(default)]
    tty: Option<WindowSize>,
    #[serde(default)]
    stdin: bool,
}
both_ways!(
    Command,
    agent::Command {
        argv: same,
        env: same,
        cwd: same,
        user: same,
        tty: opt,
        stdin: same,
    }
);

/// See [`agent::WindowSize`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowSize {
    rows: u16,
    columns: u16,
}
both_ways!(
    WindowSize,
    agent::WindowSize {
        rows: same,
        columns: same
    }
);
