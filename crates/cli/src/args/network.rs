//! `jiffy network`, `jiffy port`, and the network's options of `run` and `create`.

use super::values::network_limit;
use super::{JsonFormat, ListFormat};
use clap::{Args, Subcommand};
use jiffy_wire::vmm::NetLimit;

/// Options of a new VM's network.
#[derive(Debug, Args)]
pub struct NetworkOptions {
    /// The VM's network: none, default, or one of `jiffy network create`, whose VMs see
    /// each other [default: default, where the host can have one]
    #[arg(
        long,
        value_name = "none|default|NAME",
        env = "JIFFY_NETWORK",
        hide_env_values = true
    )]
    pub network: Option<String>,
    /// Publish a port of the VM on this host, on 127.0.0.1 unless an address is given.
    /// Ranges have as many ports on both sides. Repeatable
    #[arg(short, long, value_name = "[ADDRESS:]HOST:GUEST[/udp]")]
    pub publish: Vec<String>,
    /// Publish all ports that the image names, each on a free port of this host
    #[arg(short = 'P', long)]
    pub publish_all: bool,
    /// Let the VM reach TARGET[:PORT[-PORT]][/tcp|/udp]: an address, a range, a name,
    /// *.NAME, all, or host with a port. Repeatable
    #[arg(long, value_name = "RULE")]
    pub allow: Vec<String>,
    /// Don't let the VM reach TARGET, as in --allow, unless --allow permits it. Repeatable
    #[arg(long, value_name = "RULE")]
    pub deny: Vec<String>,
    /// TCP ports that the node's proxy may reach (jiffyd --proxy): a list of ports and ranges,
    /// none, or all [default: those of the snapshot, or else all]
    #[arg(long, value_name = "PORTS|none|all")]
    pub proxy_ports: Option<String>,
    /// Rate limit of the VM's network in each direction: bps=10M, pps=5000, and
    /// what passes at once after a pause: burst=1M (bytes), packet-burst=100 [default: one
    /// second's worth]
    #[arg(long, value_name = "LIMIT[,LIMIT]", value_parser = network_limit)]
    pub network_limit: Option<NetLimit>,
    /// Name server in place of the node's. Repeatable
    #[arg(long, value_name = "ADDRESS")]
    pub dns: Vec<String>,
    /// Domain in which short names are looked up. Repeatable
    #[arg(long, value_name = "DOMAIN")]
    pub dns_search: Vec<String>,
    /// Additional line of /etc/hosts. Repeatable
    #[arg(long, value_name = "NAME:ADDRESS")]
    pub add_host: Vec<String>,
}

impl NetworkOptions {
    /// The ports that the proxy may reach; `None` for those of the snapshot, or else all.
    pub fn ports_of_the_proxy(&self) -> Option<Vec<String>> {
        match self.proxy_ports.as_deref()? {
            "all" => Some(vec!["1-65535".to_owned()]),
            "none" => Some(Vec::new()),
            list => Some(list.split(',').map(str::to_owned).collect()),
        }
    }
}

/// `jiffy network`
#[derive(Debug, Subcommand)]
pub enum Network {
    /// Create a network, whose VMs see each other and each other's names
    Create {
        /// Name of the new network
        name: String,
    },
    /// List networks
    Ls {
        /// Output format
        #[arg(long, value_enum, default_value = "table")]
        format: ListFormat,
    },
    /// Show the details of networks, as JSON
    Inspect {
        /// Their names
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Remove networks that no VM is in
    Rm {
        /// Their names
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Show what a VM may reach, or change it while the VM runs: connections that are
    /// not allowed any more are cut
    Policy {
        /// Let the VM reach RULE (see `jiffy run --help`). Repeatable
        #[arg(long, value_name = "RULE")]
        allow: Vec<String>,
        /// Don't let the VM reach RULE, unless --allow permits it. Repeatable
        #[arg(long, value_name = "RULE")]
        deny: Vec<String>,
        /// Drop the rules that the VM has, before others are added
        #[arg(long)]
        clear: bool,
        /// Output: rules, one a line, or json
        #[arg(long, value_enum, value_name = "FORMAT")]
        format: Option<JsonFormat>,
        /// The VM: its name, its id or a unique prefix of its id
        #[arg(value_name = "VM")]
        vm: String,
    },
}

/// `jiffy port`
#[derive(Debug, Args)]
pub struct Port {
    /// Output: a line for each, or json
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<JsonFormat>,
    /// The VM: its name, its id or a unique prefix of its id
    #[arg(value_name = "VM")]
    pub vm: String,
}
