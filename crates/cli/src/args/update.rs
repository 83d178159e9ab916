//! `jiffy update`

use super::queue::WaitTime;
use super::values::{disk_limit, mebibytes, network_limit, new_limit, volume_limit};
use clap::Args;
use jiffy_wire::vmm::{DiskLimit, NetLimit};

/// `jiffy update`
#[derive(Debug, Args)]
pub struct Update {
    /// vCPUs that programs may use, at most as many as the VM was made with
    /// (`run --max-cpus`)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=32))]
    pub cpus: Option<u8>,
    /// Memory that programs may use, at most as much as the VM was made with
    /// (`run --max-memory`): 256, 256M, 2G (without a letter: MiB)
    #[arg(long, short, value_name = "SIZE", value_parser = mebibytes)]
    pub memory: Option<u64>,
    /// New rate limit of each disk of the root file system: bps=50M, iops=1000, or none
    #[arg(
        long,
        value_name = "LIMIT[,LIMIT]|none",
        value_parser = |text: &str| new_limit(text, disk_limit)
    )]
    pub root_limit: Option<DiskLimit>,
    /// New rate limit of a volume. Repeatable
    #[arg(long, value_name = "VOLUME,LIMIT[,LIMIT]|none", value_parser = volume_limit)]
    pub disk_limit: Vec<(String, DiskLimit)>,
    /// New rate limit of the network in each direction: bps=10M, pps=5000, burst=1M,
    /// packet-burst=100, or none
    #[arg(
        long,
        value_name = "LIMIT[,LIMIT]|none",
        value_parser = |text: &str| new_limit(text, network_limit)
    )]
    pub network_limit: Option<NetLimit>,
    #[command(flatten)]
    pub time: WaitTime,
    /// VMs: names, ids or unique prefixes of ids
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
}
