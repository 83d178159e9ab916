//! The daemon's command line.

use anyhow::bail;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, Parser};
use jiffy_content::images::policy::{Policy, Signed};
use jiffy_content::room::{Limit, MemoryLimit, memory as room};
use jiffy_content::token::Token;
use jiffy_node::Config;
use jiffy_proxy::serve as proxy;
use jiffy_proxy::tls::Tls;
use jiffy_vmhost::network::{self, Wanted};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// The Jiffy node: stores images and VMs, and serves the API
#[derive(Debug, Clone, Parser)]
#[command(name = "jiffyd", version, about)]
pub struct Options {
    /// Folder of images, volumes, and the records and logs of VMs [default: /var/lib/jiffy for
    /// root, else $XDG_DATA_HOME/jiffy or ~/.local/share/jiffy]
    #[arg(long, value_name = "DIR", env = "JIFFY_DATA")]
    pub data: Option<PathBuf>,
    /// Folder of sockets, removed by a reboot [default: /run/jiffy for root, else
    /// $XDG_RUNTIME_DIR/jiffy or /tmp/jiffy-UID]
    #[arg(long, value_name = "DIR", env = "JIFFY_RUN")]
    pub run: Option<PathBuf>,
    /// Folder of jiffy-vmm and the other programs [default: lib/jiffy beside jiffyd's bin]
    #[arg(long, value_name = "DIR", env = "JIFFY_LIB")]
    pub lib: Option<PathBuf>,
    /// Folder of kernels, the initramfs and the base image [default: share/jiffy beside jiffyd's
    /// bin]
    #[arg(long, value_name = "DIR", env = "JIFFY_SHARE")]
    pub share: Option<PathBuf>,
    /// Unix socket of the API [default: jiffyd.sock in the run folder]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Also serve the API on this TCP address; needs --token-file
    #[arg(long, value_name = "tcp:ADDR:PORT")]
    pub listen: Option<TcpAddress>,
    /// File with the token that every request over TCP must have
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Serve HTTP to ports of VMs on this TCP address. Without --proxy-token whoever reaches it
    /// reaches the ports of all VMs (see `jiffy run --proxy-ports`). A request for a hibernated VM
    /// wakes it
    #[arg(
        long,
        value_name = "ADDR:PORT",
        env = "JIFFY_PROXY",
        value_parser = proxy_address
    )]
    pub proxy: Option<SocketAddr>,
    /// Domain of the proxy: a request for the host PORT-NAME.DOMAIN is for that port of that VM
    #[arg(
        long,
        value_name = "DOMAIN",
        env = "JIFFY_PROXY_DOMAIN",
        value_parser = proxy_domain,
        default_value = "localhost"
    )]
    pub proxy_domain: String,
    /// Serve the proxy with TLS, in HTTP/1.1 and HTTP/2: file with the certificate, then those of
    /// its authorities, in PEM. SIGHUP reloads this file and the key's
    #[arg(
        long,
        value_name = "FILE",
        env = "JIFFY_PROXY_CERT",
        requires = "proxy_key",
        requires = "proxy"
    )]
    pub proxy_cert: Option<PathBuf>,
    /// File of the certificate's private key, in PEM; others must have no access to it
    #[arg(
        long,
        value_name = "FILE",
        env = "JIFFY_PROXY_KEY",
        requires = "proxy_cert"
    )]
    pub proxy_key: Option<PathBuf>,
    /// File with the token that every request to the proxy must have, as `Jiffy-Token: TOKEN` or
    /// `Authorization: Bearer TOKEN`
    #[arg(
        long,
        value_name = "FILE",
        env = "JIFFY_PROXY_TOKEN",
        requires = "proxy"
    )]
    pub proxy_token: Option<PathBuf>,
    /// Write one byte to this inherited descriptor once the API listens
    #[arg(long, value_name = "N", hide = true)]
    pub ready_fd: Option<u32>,
    /// Registry of image references without a host, such as localhost:5000
    #[arg(long, value_name = "HOST", env = "JIFFY_REGISTRY")]
    pub registry: Option<String>,
    /// Require a signature by this public key (PEM, cosign's format) for pulls and starts of images
    /// and snapshots: HOST[:PORT][/PATH]=FILE, or *=FILE for all registries. The longest match of a
    /// reference applies; of several keys for the same WHERE one is sufficient. Repeatable, or a
    /// list with commas
    #[allow(rustdoc::broken_intra_doc_links)] // Help: the brackets are no links.
    #[arg(
        long,
        value_name = "WHERE=FILE",
        env = "JIFFY_SIGNED",
        value_delimiter = ','
    )]
    pub signed: Vec<Signed>,
    /// Folder with images of chunks (ID.jimg) that is searched before a registry, such as another
    /// node's folder `chunks`
    #[arg(long, value_name = "DIR", env = "JIFFY_PEER")]
    pub peer: Option<PathBuf>,
    /// Timeout in seconds for a guest to get ready after its start
    #[arg(
        long,
        value_name = "SECONDS",
        env = "JIFFY_START_TIMEOUT",
        default_value_t = 60,
        value_parser = clap::value_parser!(u32).range(1..=86_400)
    )]
    pub start_timeout: u32,
    /// Number of VMs that are kept restored ahead of runs, each of another kind; 0 for none. Each
    /// takes some 5 MiB
    #[arg(
        long,
        value_name = "COUNT",
        env = "JIFFY_STANDBY",
        default_value_t = 2,
        value_parser = clap::value_parser!(u32).range(..=1000)
    )]
    pub standby: u32,
    /// Number of VMMs that are started ahead of boots, restores and forks; 0 for none
    #[arg(
        long,
        value_name = "COUNT",
        env = "JIFFY_SPARE",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(..=1000)
    )]
    pub spare: u32,
    /// Run each VMM in a jail: as a user of its own (without root: in a user namespace), in
    /// namespaces and a control group of its own, with an empty root
    #[arg(
        long,
        value_name = "on|off",
        env = "JIFFY_JAIL",
        default_value = "on",
        action = ArgAction::Set,
        value_parser = on_or_off()
    )]
    pub jail: bool,
    /// Limit of simultaneous connections, at most a quarter of the files that the daemon may open;
    /// one process may have three quarters of them
    #[arg(
        long,
        value_name = "COUNT",
        env = "JIFFY_CONNECTIONS",
        default_value_t = 4096,
        value_parser = clap::value_parser!(u32).range(4..=65536)
    )]
    pub connections: u32,
    /// Limit of the disk space that images which are fetched on demand take together: a share of
    /// the data folder's file system (10%), or a size (20G). Caches in use count, but are not
    /// dropped
    #[arg(
        long,
        value_name = "SHARE|SIZE",
        env = "JIFFY_CACHE",
        default_value = "10%"
    )]
    pub cache: Limit,
    /// Limit of the memory of all VMs together: a share of the host's (80%), or a size (64G). Every
    /// VM with a VMM counts with its configured memory, so the VMs can't exceed the limit. With
    /// "none" VMs start as long as the host has memory available for their start [default: the
    /// host's memory less --memory-reserve]
    #[arg(long, value_name = "SHARE|SIZE|none", env = "JIFFY_MEMORY_LIMIT")]
    pub memory_limit: Option<MemoryLimit>,
    /// How much memory VMs may be promised, in percent of --memory-limit. With more than 100, what
    /// they use together is kept below a chosen limit as below the host's memory (see
    /// --memory-reserve)
    #[arg(
        long,
        value_name = "PERCENT",
        env = "JIFFY_MEMORY_OVERCOMMIT",
        default_value_t = 100,
        value_parser = clap::value_parser!(u32).range(100..=1000)
    )]
    pub memory_overcommit: u32,
    /// Memory that VMs leave to the host: a share of it (5%), or a size (1G); 0 for none. With less
    /// than twice that left, idle guests give up caches; with less than that, or when a request waits
    /// for memory, idle VMs with an idle time are hibernated early, and VMs that keep growing are
    /// slowed down [default: 5%, at least 128M and at most 4G]
    #[arg(long, value_name = "SHARE|SIZE", env = "JIFFY_MEMORY_RESERVE")]
    pub memory_reserve: Option<Limit>,
    /// Hibernated VMs with no more memory in use than this keep it as it is on disk, and wake several
    /// times faster; with more, it is compressed. 0: it always is
    #[arg(
        long,
        value_name = "SIZE",
        env = "JIFFY_HIBERNATE_RAW",
        default_value = "64M",
        value_parser = jiffy_content::room::parse_bytes
    )]
    pub hibernate_raw: u64,
    /// What schedules this host. `kernel`: its own scheduler, by nice values. `sched-ext`:
    /// jiffy-sched, so that VMs start sooner on a busy host (docs/scheduler.md); needs root and
    /// Linux 6.12 with sched_ext. If that can't be used, it is logged, and the kernel's is
    #[arg(
        long,
        value_name = "kernel|sched-ext",
        env = "JIFFY_SCHEDULER",
        default_value = "kernel",
        action = ArgAction::Set,
        value_parser = scheduler()
    )]
    pub scheduler: bool,
    /// The network of VMs. `on`: by links, addresses and rules of this host, which needs root; if
    /// they can't be set up, by passt, or none if it is not installed. `passt`: by passt in any case
    #[arg(
        long,
        value_name = "on|passt|off",
        env = "JIFFY_VM_NETWORK",
        default_value = "on",
        value_parser = wanted_network()
    )]
    pub vm_network: Wanted,
    /// Range of the VMs' IPv4 addresses, such as 10.118.0.0/16; its first address is the host's
    /// [default: a range that overlaps no route of the host]
    #[arg(long, value_name = "RANGE", env = "JIFFY_VM_IPV4")]
    pub vm_ipv4: Option<Range>,
    /// Range of the VMs' IPv6 addresses, /96 or larger [default: a random unique local range]
    #[arg(long, value_name = "RANGE", env = "JIFFY_VM_IPV6")]
    pub vm_ipv6: Option<Range>,
    /// Remove all links, routes, rules and settings that were made for VMs, then exit; for
    /// uninstalling Jiffy, while no daemon runs
    #[arg(long)]
    pub remove_network: bool,
    /// Seconds that a request waits for memory and vCPUs before it is refused, unless it says how
    /// long; 0 to refuse it at once
    #[arg(
        long,
        value_name = "SECONDS",
        env = "JIFFY_MEMORY_WAIT",
        default_value_t = 10,
        value_parser = clap::value_parser!(u32).range(..=86_400)
    )]
    pub memory_wait: u32,
    /// vCPUs that all VMs with a VMM may have together, for each processor of the host, such as 4
    /// or 1.5; 0 for any number
    #[arg(
        long,
        value_name = "N",
        env = "JIFFY_CPU_SHARE",
        default_value = "0",
        value_parser = cpu_share
    )]
    pub cpu_share: u32,
    /// Limit of requests that wait for memory and vCPUs; one owner may have three quarters of
    /// them. A further request is refused
    #[arg(
        long,
        value_name = "COUNT",
        env = "JIFFY_QUEUE_LIMIT",
        default_value_t = 1024,
        value_parser = clap::value_parser!(u32).range(..=65_536)
    )]
    pub queue_limit: u32,
}

/// vCPUs per processor, in thousandths.
fn cpu_share(text: &str) -> Result<u32, String> {
    const MOST: u32 = 1000;
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let thousandths = (digits(whole) && digits(part) && part.len() <= 3)
        .then(|| format!("{part:0<3}").parse().ok())
        .flatten();
    whole
        .parse()
        .ok()
        .filter(|whole: &u32| *whole < MOST)
        .zip(thousandths)
        .map(|(whole, thousandths): (u32, u32)| whole * 1000 + thousandths)
        .ok_or_else(|| format!("a number below {MOST} is needed, such as 4 or 1.5"))
}

fn wanted_network() -> impl TypedValueParser<Value = Wanted> {
    PossibleValuesParser::new(["on", "passt", "off"]).map(|value| match &*value {
        "on" => Wanted::Any,
        "passt" => Wanted::Passt,
        _ => Wanted::Off,
    })
}

/// Is it jiffy-sched?
fn scheduler() -> impl TypedValueParser<Value = bool> {
    PossibleValuesParser::new(["kernel", "sched-ext"]).map(|value| value == "sched-ext")
}

fn on_or_off() -> impl TypedValueParser<Value = bool> {
    PossibleValuesParser::new(["on", "off"]).map(|value| value == "on")
}

/// Set in the machine, whose localhost is not the user's.
const LOOPBACK: &str = "JIFFY_LOOPBACK";

/// `ADDRESS/PREFIX`.
pub type Range = jiffy_net::Cidr;

/// `tcp:ADDR:PORT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpAddress(pub SocketAddr);

impl Options {
    /// The options of the node. `api`: the TCP address on which the API listens; the kernel may have
    /// chosen its port.
    pub fn node(&self, api: Option<SocketAddr>) -> anyhow::Result<Config> {
        Ok(Config {
            registry: self.registry.clone(),
            policy: Policy::read(&self.signed)?,
            start_timeout: Duration::from_secs(self.start_timeout.into()),
            standbys: self.standby as usize,
            spares: self.spare as usize,
            jailed: self.jail,
            cache: self.cache,
            hibernate_raw: self.hibernate_raw,
            room: room::Settings {
                memory: self.memory_limit,
                overcommit: self.overcommit()?,
                reserve: self.memory_reserve,
                cpu_share: (self.cpu_share > 0).then_some(self.cpu_share),
                wait: Duration::from_secs(self.memory_wait.into()),
                queue: self.queue_limit as usize,
            },
            scheduler: self.scheduler,
            network: network::Settings {
                wanted: self.vm_network,
                v4: self.vm_ipv4,
                v6: self.vm_ipv6,
                never: self.never_reached(api),
                everywhere: std::env::var_os(LOOPBACK).is_some(),
            },
        })
    }

    /// The percentage of the memory limit that may be promised.
    fn overcommit(&self) -> anyhow::Result<u32> {
        let percent = self.memory_overcommit;
        if percent == 100 {
            return Ok(percent);
        }
        if self.memory_limit == Some(MemoryLimit::Unlimited) {
            bail!("--memory-overcommit {percent} needs a limit: leave out --memory-limit none.");
        }
        let reserve = self.memory_reserve;
        if reserve.is_some_and(|reserve| reserve.of(u64::MAX) == 0) {
            bail!("--memory-overcommit {percent} needs a reserve: leave out --memory-reserve 0.");
        }
        Ok(percent)
    }

    /// Ports of the host that VMs never reach: the API's; the next one, of the machine's agent; and
    /// the proxy's, through which they would reach one another.
    fn never_reached(&self, api: Option<SocketAddr>) -> Vec<u16> {
        let api = api.into_iter().flat_map(api_ports);
        api.chain(self.proxy.map(|address| address.port()))
            .collect()
    }

    /// The proxy, if one is configured.
    pub fn proxy(&self) -> anyhow::Result<Option<proxy::Settings>> {
        let Some(address) = self.proxy else {
            return Ok(None);
        };
        let tls = match (&self.proxy_cert, &self.proxy_key) {
            (Some(certificate), Some(key)) => Some(Tls::open(certificate, key)?),
            _ => None,
        };
        Ok(Some(proxy::Settings {
            address,
            domain: self.proxy_domain.clone(),
            token: self.proxy_token.as_deref().map(Token::read).transpose()?,
            tls: tls.map(Arc::new),
        }))
    }

    /// The address to listen on besides the Unix socket, and its token.
    pub fn tcp(&self) -> anyhow::Result<Option<(SocketAddr, Token)>> {
        match (self.listen, &self.token_file) {
            (None, _) => Ok(None),
            (Some(_), None) => {
                bail!("Listening on TCP needs a token: name its file with --token-file.")
            }
            (Some(address), Some(file)) => Ok(Some((address.0, Token::read(file)?))),
        }
    }
}

/// The API's port, and the next one.
fn api_ports(api: SocketAddr) -> [u16; 2] {
    let port = api.port();
    [port, port.saturating_add(1)]
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

/// An address with a fixed port, so that VMs can be kept from it.
fn proxy_address(text: &str) -> Result<SocketAddr, String> {
    let address: SocketAddr = text
        .parse()
        .map_err(|_| "an address and a port are needed, such as 127.0.0.1:9000".to_owned())?;
    match address.port() {
        0 => Err("a port from 1 to 65535 is needed".into()),
        _ => Ok(address),
    }
}

fn proxy_domain(text: &str) -> Result<String, String> {
    let of_a_host = |part: &str| {
        let good = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        !part.is_empty() && part.bytes().all(good)
    };
    match text.split('.').all(of_a_host) {
        true => Ok(text.to_owned()),
        false => Err("a host name without a port is needed, such as vm.example".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tcp_address_needs_prefix_and_port() {
        assert!("tcp:127.0.0.1:80".parse::<TcpAddress>().is_ok());
        assert!("tcp:[::1]:80".parse::<TcpAddress>().is_ok());
        for wrong in ["127.0.0.1:80", "tcp:127.0.0.1", "tcp:localhost:80", ""] {
            assert!(wrong.parse::<TcpAddress>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_proxy_has_a_port_and_a_domain() {
        assert!(proxy_address("127.0.0.1:9000").is_ok());
        for wrong in ["127.0.0.1:0", "127.0.0.1", "9000", ""] {
            assert!(proxy_address(wrong).is_err(), "{wrong}");
        }
        assert!(proxy_domain("vm-1.example").is_ok());
        for wrong in ["", ".example", "example.", "a..b", "example:9000", "a b"] {
            assert!(proxy_domain(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_vcpu_limit_is_a_number_per_host_processor() {
        let good = [
            ("0", 0),
            ("4", 4000),
            ("1.5", 1500),
            ("0.25", 250),
            ("999.999", 999_999),
        ];
        for (text, share) in good {
            assert_eq!(cpu_share(text), Ok(share));
        }
        for wrong in [
            "", ".", "1.", ".5", "-1", "1.2345", "1000", "1,5", "1e3", "x",
        ] {
            assert!(cpu_share(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn vms_reach_neither_the_api_nor_the_machine_agent() {
        let never = |listen: &str, bound: &str| {
            let options = Options::parse_from(["jiffyd", "--listen", listen]);
            let config = options.node(Some(bound.parse().unwrap())).unwrap();
            config.network.never
        };
        assert_eq!(never("tcp:10.0.2.15:7070", "10.0.2.15:7070"), [7070, 7071]);
        // There is no next port.
        assert_eq!(never("tcp:[::]:65535", "[::]:65535"), [65535, 65535]);
        // The kernel has chosen the port.
        assert_eq!(never("tcp:127.0.0.1:0", "127.0.0.1:40001"), [40001, 40002]);
    }
}
