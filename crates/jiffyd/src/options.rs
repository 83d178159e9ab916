//! The daemon's command line.

use anyhow::{Context, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, Parser};
use jiffy_api::auth::Token;
use jiffy_content::images::policy::{Policy, Signed};
use jiffy_content::room::Limit;
use jiffy_node::Config;
use jiffy_vmhost::network;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// The Jiffy node: keeps images and VMs, and serves the API.
#[derive(Debug, Clone, Parser)]
#[command(name = "jiffyd", version, about)]
pub struct Options {
    /// What must survive: images, volumes, VMs' records and logs.
    #[arg(long, value_name = "DIR", env = "JIFFY_DATA")]
    pub data: Option<PathBuf>,
    /// Sockets.
    #[arg(long, value_name = "DIR", env = "JIFFY_RUN")]
    pub run: Option<PathBuf>,
    /// Where jiffy-vmm is.
    #[arg(long, value_name = "DIR", env = "JIFFY_LIB")]
    pub lib: Option<PathBuf>,
    /// Where kernels, the initramfs and the base image are.
    #[arg(long, value_name = "DIR", env = "JIFFY_SHARE")]
    pub share: Option<PathBuf>,
    /// The API's Unix socket (default: jiffyd.sock in the run folder).
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Listen here too; needs --token-file.
    #[arg(long, value_name = "tcp:ADDR:PORT")]
    pub listen: Option<TcpAddress>,
    /// A file with the token that every request over TCP must carry.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Write one byte to this inherited descriptor once the API listens.
    #[arg(long, value_name = "N", hide = true)]
    pub ready_fd: Option<u32>,
    /// The registry of images whose name has none, like localhost:5000.
    #[arg(long, value_name = "HOST", env = "JIFFY_REGISTRY")]
    pub registry: Option<String>,
    /// What is pulled from there, and what VMs start from of it, must be signed by this
    /// public key (PEM, as cosign does it): HOST[:PORT][/PATH]=FILE, or *=FILE for all
    /// registries. The longest that fits an image counts; of several keys for the same one
    /// is enough. Can be given several times, or as a list with commas.
    #[arg(
        long,
        value_name = "WHERE=FILE",
        env = "JIFFY_SIGNED",
        value_delimiter = ','
    )]
    pub signed: Vec<Signed>,
    /// A folder with images of chunks (ID.jimg) that is looked into before a
    /// registry: another node's `chunks`, say.
    #[arg(long, value_name = "DIR", env = "JIFFY_PEER")]
    pub peer: Option<PathBuf>,
    /// Seconds a guest has to get ready.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "JIFFY_START_TIMEOUT",
        default_value_t = 60,
        value_parser = clap::value_parser!(u32).range(1..=86_400)
    )]
    pub start_timeout: u32,
    /// How many VMs to keep restored ahead of runs, each of another kind; 0
    /// for none. One takes some 5 MiB.
    #[arg(
        long,
        value_name = "COUNT",
        env = "JIFFY_STANDBY",
        default_value_t = 2,
        value_parser = clap::value_parser!(u32).range(..=1000)
    )]
    pub standby: u32,
    /// How many VMMs to start ahead of what will need them: a fork, a restore,
    /// a boot; 0 for none.
    #[arg(
        long,
        value_name = "COUNT",
        env = "JIFFY_SPARE",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(..=1000)
    )]
    pub spare: u32,
    /// Whether each VMM runs in a jail: as a user of its own (without root: in a user
    /// namespace), in namespaces of its own, with an empty root. Not yet the default.
    #[arg(
        long,
        value_name = "on|off",
        env = "JIFFY_JAIL",
        default_value = "off",
        action = ArgAction::Set,
        value_parser = on_or_off()
    )]
    pub jail: bool,
    /// Most connections at a time; one process may have three quarters of them.
    /// Never more than a quarter of the files that the daemon may open.
    #[arg(
        long,
        value_name = "COUNT",
        env = "JIFFY_CONNECTIONS",
        default_value_t = 4096,
        value_parser = clap::value_parser!(u32).range(4..=65536)
    )]
    pub connections: u32,
    /// What images that are fetched as they are read may take on the disk, in
    /// all: a share of the data folder's file system (10%), or a size (20G).
    /// What a VM uses is not counted out.
    #[arg(
        long,
        value_name = "SHARE|SIZE",
        env = "JIFFY_CACHE",
        default_value = "10%"
    )]
    pub cache: Limit,
    /// What VMs may have of the memory, in all: a share of the host's (80%), or a
    /// size (64G). Every VM that has a VMM counts with the memory that it was given,
    /// so that VMs can never take more. Without this VMs start as long as the host
    /// has memory available for what they take at first.
    #[arg(long, value_name = "SHARE|SIZE", env = "JIFFY_MEMORY_LIMIT")]
    pub memory_limit: Option<Limit>,
    /// Whether VMs can have a network. It needs root, for links, addresses and rules of this
    /// host. Where it can't be set up, VMs have none.
    #[arg(
        long,
        value_name = "on|off",
        env = "JIFFY_VM_NETWORK",
        default_value = "on",
        action = ArgAction::Set,
        value_parser = on_or_off()
    )]
    pub vm_network: bool,
    /// Range of the VMs' IPv4 addresses, like 10.118.0.0/16; by default one that overlaps none
    /// of the host's routes. The first address is the host's.
    #[arg(long, value_name = "RANGE", env = "JIFFY_VM_IPV4")]
    pub vm_ipv4: Option<Range>,
    /// Range of the VMs' IPv6 addresses, a /96 or larger.
    #[arg(long, value_name = "RANGE", env = "JIFFY_VM_IPV6")]
    pub vm_ipv6: Option<Range>,
    /// Remove all links, routes, rules and settings that were made for VMs, then exit. For
    /// uninstalling Jiffy; no daemon may be running.
    #[arg(long)]
    pub remove_network: bool,
    /// Seconds that a VM waits for memory before it is refused; 0 for none.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "JIFFY_MEMORY_WAIT",
        default_value_t = 10,
        value_parser = clap::value_parser!(u32).range(..=86_400)
    )]
    pub memory_wait: u32,
}

fn on_or_off() -> impl TypedValueParser<Value = bool> {
    PossibleValuesParser::new(["on", "off"]).map(|value| value == "on")
}

/// Set in the machine, where localhost is not the user's.
const LOOPBACK: &str = "JIFFY_LOOPBACK";

/// `ADDRESS/PREFIX`.
pub type Range = jiffy_net::Cidr;

/// `tcp:ADDR:PORT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpAddress(pub SocketAddr);

impl Options {
    /// The options of the node.
    pub fn node(&self) -> anyhow::Result<Config> {
        Ok(Config {
            registry: self.registry.clone(),
            policy: Policy::read(&self.signed)?,
            start_timeout: Duration::from_secs(self.start_timeout.into()),
            standbys: self.standby as usize,
            spares: self.spare as usize,
            jailed: self.jail,
            cache: self.cache,
            memory_limit: self.memory_limit,
            memory_wait: Duration::from_secs(self.memory_wait.into()),
            network: network::Settings {
                on: self.vm_network,
                v4: self.vm_ipv4,
                v6: self.vm_ipv6,
                never: self.listen.iter().flat_map(never_reached).collect(),
                everywhere: std::env::var_os(LOOPBACK).is_some(),
            },
        })
    }

    /// The address to listen on besides the Unix socket, and its token.
    pub fn tcp(&self) -> anyhow::Result<Option<(SocketAddr, Token)>> {
        match (self.listen, &self.token_file) {
            (None, _) => Ok(None),
            (Some(_), None) => {
                bail!("Listening on TCP needs a token: name its file with --token-file.")
            }
            (Some(address), Some(file)) => Ok(Some((address.0, read_token(file)?))),
        }
    }
}

/// Ports that VMs never reach: the API's, and the next one, of the machine's agent.
fn never_reached(api: &TcpAddress) -> [u16; 2] {
    let port = api.0.port();
    [port, port.saturating_add(1)]
}

fn read_token(path: &Path) -> anyhow::Result<Token> {
    let text = fs::read_to_string(path)
        .with_context(|| format!("Reading the token file {} failed", path.display()))?;
    match text.trim() {
        "" => bail!("The token file {} is empty.", path.display()),
        token => Ok(Token::new(token)),
    }
}

impl FromStr for TcpAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<TcpAddress, String> {
        text.strip_prefix("tcp:")
            .and_then(|address| address.parse().ok())
            .map(TcpAddress)
            .ok_or_else(|| "expected tcp:ADDRESS:PORT, like tcp:127.0.0.1:7070".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_needs_its_prefix_and_its_port() {
        assert!("tcp:127.0.0.1:80".parse::<TcpAddress>().is_ok());
        assert!("tcp:[::1]:80".parse::<TcpAddress>().is_ok());
        for wrong in ["127.0.0.1:80", "tcp:127.0.0.1", "tcp:localhost:80", ""] {
            assert!(wrong.parse::<TcpAddress>().is_err(), "{wrong}");
        }
    }
}
