//! Opens the network when the daemon starts: makes links, routes and rules match the records, and
//! starts the name server.

use super::ids::v4_of;
use super::on::{Inner, On, asker};
use super::passt::ByPasst;
use super::recovered::{linked, recovered, unknown};
use super::specs::spec_of;
use super::{Network, State};
use crate::folders::Found;
use crate::process::{DYING_POLL, DYING_TIME, is_alive};
use jiffy_content::durable::LoadError;
use jiffy_content::model::network::Networks;
use jiffy_content::model::vm::{VmRecord, is_active};
use jiffy_content::paths::Paths;
use jiffy_content::records::networks;
use jiffy_net::host::{GuestSpec, Host, HostOptions, Report};
use jiffy_net::inbound::{Acceptor, Reached, SleepingVm};
use jiffy_net::names::resolvers::Resolvers;
use jiffy_net::names::{Directory, NameServer, Sockets};
use jiffy_net::policy::hold::Held;
use jiffy_net::rules::NameRules;
use jiffy_net::{Cidr, Error};
use jiffy_sys::causes;
use jiffy_sys::peer::Peer;
use jiffy_wire::api::VmState;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::IpAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tokio::sync::Notify;
use tracing::{debug, info, warn};

/// The abstract socket of the daemon that owns the network. Abstract sockets belong to the network
/// namespace, like the network.
const LOCK_SOCKET: &[u8] = b"jiffy-network";
/// The host's resolvers.
const RESOLV_CONF: &str = "/etc/resolv.conf";
/// Most connections that were made to ports of hibernated VMs and are still open.
const MAX_INBOUND: usize = 16_384;
/// Port of the name server.
const NAME_PORT: u16 = 53;

/// Which network VMs have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Wanted {
    /// VMs have no network.
    #[default]
    Off,
    /// Links and rules of this host, or passt if the daemon can't make these.
    Any,
    /// passt.
    Passt,
}

/// The operator's settings of the network.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// Which network VMs have.
    pub wanted: Wanted,
    /// Range of the VMs' IPv4 addresses; `None` to choose one.
    pub v4: Option<Cidr>,
    /// Range of the VMs' IPv6 addresses; `None` to choose one.
    pub v6: Option<Cidr>,
    /// Ports of the host that no rule can open to VMs.
    pub never: Vec<u16>,
    /// Publish ports for loopback on all addresses.
    pub everywhere: bool,
}

impl Network {
    /// Opens the network for these VMs, all that have a folder. If the host does not support any,
    /// VMs have none.
    pub fn open(settings: &Settings, paths: &Paths, vms: &[Found]) -> Arc<Network> {
        let by_passt = |why| {
            let by = ByPasst::open(vms, why, settings.everywhere, max_inbound());
            by.map(|by| State::ByPasst(Box::new(by)))
        };
        let opened = match settings.wanted {
            Wanted::Off => Err("jiffyd was started with --vm-network off".to_owned()),
            Wanted::Passt => by_passt("jiffyd was started with --vm-network passt".to_owned()),
            Wanted::Any => match open(settings, paths, vms) {
                Ok(on) => Ok(State::On(Box::new(on))),
                Err(why) => by_passt(why),
            },
        };
        Arc::new(Network(opened.unwrap_or_else(|why| {
            info!(why, "VMs have no network");
            State::Off(why)
        })))
    }
}

/// Removes all of Jiffy's links, routes, rules and settings from the host's network. Running VMs
/// lose their network.
///
/// # Errors
///
/// If another daemon has the network, its list is of a newer release, or the kernel refuses: a
/// sentence.
pub fn uninstall(settings: &Settings, paths: &Paths) -> Result<(), String> {
    let _lock = lock_namespace()?;
    let options = options(settings, &load_networks(&paths.networks())?, &[])?;
    let (host, _) = Host::open(options, &[], &BTreeSet::new()).map_err(failed)?;
    host.uninstall().map_err(failed)
}

fn failed(error: Error) -> String {
    causes::sentence(&error)
}

/// Reserves the network of this network namespace for this daemon.
fn lock_namespace() -> Result<UnixListener, String> {
    lock_name(LOCK_SOCKET, is_alive)
}

/// Listens on an abstract socket. If the daemon that has it is dead, waits: a child that it had just
/// forked has the socket until it executes its program.
fn lock_name(name: &[u8], is_alive: impl Fn(u32) -> bool) -> Result<UnixListener, String> {
    let unlocked = |error: io::Error| format!("cannot lock the network: {error}");
    let address = SocketAddr::from_abstract_name(name).map_err(unlocked)?;
    let until = Instant::now() + DYING_TIME;
    let mut holder = Holder::Unknown;
    loop {
        match UnixListener::bind_addr(&address) {
            Ok(lock) => return Ok(lock),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(unlocked(error)),
        }
        // Its holder is looked at once: each look takes a place in the socket's queue.
        if holder == Holder::Unknown {
            holder = match listener_of(name) {
                // It was closed since the attempt to listen.
                Err(Errno::CONNREFUSED) => Holder::Unknown,
                Ok(Some(pid)) if !is_alive(pid) => Holder::Dead,
                _ => Holder::Alive,
            };
        }
        if holder == Holder::Alive || Instant::now() >= until {
            return Err(failed(Error::OtherNode));
        }
        std::thread::sleep(DYING_POLL);
    }
}

/// What is known of the daemon that has the network.
#[derive(PartialEq, Eq)]
enum Holder {
    Unknown,
    Dead,
    /// Or it can't be seen.
    Alive,
}

/// The process that began to listen on an abstract socket; `None` if that can't be seen.
fn listener_of(name: &[u8]) -> Result<Option<u32>, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    Ok(Peer::of(&socket).ok().and_then(|peer| peer.pid))
}

/// The options for VMs that have these addresses now.
fn options(
    settings: &Settings,
    kept: &Networks,
    addresses: &[IpAddr],
) -> Result<HostOptions, String> {
    let range = |option: &str, own: Option<Cidr>, kept: &str| {
        let range = range(own, kept.parse().ok(), addresses);
        if let (Some(wanted), Some(range)) = (own, range)
            && wanted != range
        {
            warn!(%range, "VMs have addresses of the earlier range, which is kept: {option} {wanted} is used when jiffyd is started after these VMs have ended");
        }
        range
    };
    Ok(HostOptions {
        v4: range("--vm-ipv4", settings.v4, &kept.v4),
        v6: range("--vm-ipv6", settings.v6, &kept.v6),
        seed: seed()?,
        never: settings.never.clone(),
        ..HostOptions::default()
    })
}

/// The operator's range; if there is none, that of the earlier daemon. That one is also kept while
/// the guest of a VM has been told an address of it that the operator's would not give it, or another
/// gateway: it would lose its network.
fn range(own: Option<Cidr>, kept: Option<Cidr>, addresses: &[IpAddr]) -> Option<Cidr> {
    let (Some(own), Some(kept)) = (own, kept) else {
        return own.or(kept);
    };
    let mut told = addresses.iter().filter(|it| kept.contains(**it));
    // The gateway is the first address, and the last one is for broadcasts.
    let stays = |it: &IpAddr| own.first() == kept.first() && own.contains(*it) && *it != own.last();
    match told.all(stays) {
        true => Some(own),
        false => Some(kept),
    }
}

fn open(settings: &Settings, paths: &Paths, vms: &[Found]) -> Result<On, String> {
    let lock = lock_namespace()?;
    let file = paths.networks();
    let kept = load_networks(&file)?;
    let records = records(paths, vms);
    let addresses: Vec<IpAddr> = records.iter().flat_map(|it| it.addresses.clone()).collect();
    let mut options = options(settings, &kept, &addresses)?;
    let guests = guests_of(records, settings);
    let all: Vec<GuestSpec> = guests.iter().map(|(spec, _)| spec.clone()).collect();
    let mut opened = Host::open(options.clone(), &all, &kept.names);
    if matches!(opened, Err(Error::PoolTaken { .. })) && guests.is_empty() {
        // The saved range overlaps a route that was added to the host later.
        (options.v4, options.v6) = (settings.v4, settings.v6);
        opened = Host::open(options.clone(), &all, &kept.names);
    }
    let (mut host, mut report) = opened.map_err(failed)?;
    let ranges = host.ranges();
    let gateway = ranges.gateway();
    let sockets = Sockets::bind(&[gateway.into()], NAME_PORT)
        .map_err(|error| format!("the VMs' name server can't bind a port: {error}"))?;
    if sockets.port != NAME_PORT {
        options.name_port = sockets.port;
        drop(host);
        (host, report) = Host::open(options, &all, &kept.names).map_err(failed)?;
    }
    log_report(&report);
    let networks = Networks {
        v4: ranges.v4().to_string(),
        v6: ranges.v6().to_string(),
        names: kept.names.clone(),
    };
    if networks != kept {
        networks::save(&file, networks.clone())
            .map_err(|error| format!("{} can't be written: {error}", file.display()))?;
    }
    let directory = Arc::new(Directory::new(gateway, report_v6(&report)));
    let mut held = HashMap::new();
    for (spec, record) in &guests {
        match Held::all(&spec.ports) {
            Ok(ports) => _ = held.insert(spec.vm, ports),
            Err(error) => {
                warn!(vm = %record.name, %error, "a VM's published ports can't be reserved")
            }
        }
        directory.set(asker(record, spec, &host.addresses(spec)));
    }
    let (inbound, waiting) = Acceptor::new(max_inbound());
    for (&vm, held) in &mut held {
        // The kernel leads flows to these sockets that an earlier daemon relayed.
        if let Some(guest) = host.guest(vm) {
            let (v4, v6) = (guest.v4, guest.v6);
            let reached = Reached::At { v4, v6, ranges };
            inbound.receive(held, SleepingVm { vm, reached });
        }
    }
    serve_names(&directory, sockets, gateway.into())?;
    Ok(On {
        inner: Mutex::new(Inner {
            host,
            networks,
            held,
            kept: HashMap::new(),
            leaving: HashMap::new(),
            ahead: None,
            promised: HashMap::new(),
        }),
        directory,
        everywhere: settings.everywhere,
        left: Notify::new(),
        released: Notify::new(),
        wanted: Notify::new(),
        inbound,
        waiting: Mutex::new(Some(waiting)),
        file,
        _lock: lock,
    })
}

/// Most connections relayed at a time. Each needs two descriptors; half of this process's limit is
/// kept for everything else.
fn max_inbound() -> usize {
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    files.map_or(MAX_INBOUND, |files| MAX_INBOUND.min(files as usize / 4))
}

fn report_v6(report: &Report) -> Option<std::net::Ipv6Addr> {
    report.no_ipv6.is_none().then(|| report.ranges.gateway6())
}

/// The state that an earlier daemon saved.
fn load_networks(file: &Path) -> Result<Networks, String> {
    match networks::load(file) {
        Ok(kept) => Ok(kept),
        Err(LoadError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
            Ok(Networks::default())
        }
        Err(error) if error.is_newer() => {
            Err(format!("{}: {}", file.display(), causes::sentence(&error)))
        }
        Err(error) => {
            let why = causes::sentence(&error);
            warn!(file = %file.display(), why, "the list of networks can't be read and is replaced by an empty one");
            Ok(Networks::default())
        }
    }
}

/// What the network is told of these VMs.
fn guests_of(records: Vec<VmRecord>, settings: &Settings) -> Vec<(GuestSpec, VmRecord)> {
    let guest = |record: VmRecord| {
        let spec = spec_of(&record, v4_of(&record)?, settings.everywhere);
        let spec = spec.inspect_err(
            |error| warn!(vm = %record.name, %error, "a VM's network can't be restored"),
        );
        Some((spec.ok()?, record))
    };
    records.into_iter().filter_map(guest).collect()
}

/// Records of VMs that have addresses.
fn records(paths: &Paths, vms: &[Found]) -> Vec<VmRecord> {
    let linked = linked();
    let lives = |record: &VmRecord| is_active(record.state) || record.state == VmState::Hibernated;
    vms.iter()
        .filter_map(|Found { id, record }| {
            let folder = paths.vm(id);
            let has_link = linked.contains(id);
            let mut record = match record {
                // Most VMs: no copy of their records is made.
                Ok(kept)
                    if !has_link && (kept.record.addresses.is_empty() || !lives(&kept.record)) =>
                {
                    return None;
                }
                Ok(kept) => kept.record.clone(),
                Err(_) if has_link => unknown(id, &folder),
                Err(_) => return None,
            };
            if record.addresses.is_empty() && has_link {
                record.addresses = recovered(&folder);
            }
            (!record.addresses.is_empty() && (lives(&record) || has_link)).then_some(record)
        })
        .collect()
}

/// Random bytes for the IPv6 range.
fn seed() -> Result<[u8; 5], String> {
    let mut seed = [0; 5];
    rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| format!("cannot get random numbers: {error}"))?;
    Ok(seed)
}

/// Logs what was found and changed.
fn log_report(report: &Report) {
    let (v4, v6) = (report.ranges.v4(), report.ranges.v6());
    info!(%v4, %v6, "VMs have a network");
    if !report.settings.is_empty() {
        info!(
            settings = report.settings.join(" "),
            "changed kernel settings for VMs"
        );
    }
    if let Some(why) = report.no_ipv6 {
        info!(why, "VMs have no IPv6");
    }
    if !report.removed_links.is_empty() || report.removed_routes > 0 || report.forgotten > 0 {
        info!(
            links = report.removed_links.join(" "),
            routes = report.removed_routes,
            connections = report.forgotten,
            "removed links, routes and connections of VMs that no longer exist"
        );
    }
    for vm in &report.without_link {
        debug!(%vm, "a VM has no link");
    }
    for vm in &report.displaced {
        warn!(%vm, "a VM's address is not in the range of VMs' addresses, or another VM has it, too: stop and start the VM to give it another one");
    }
    for blocker in &report.blockers {
        let remedy = blocker.remedy();
        warn!(
            chain = blocker.chain,
            remedy, "another firewall drops packets of VMs"
        );
    }
}

fn serve_names(directory: &Arc<Directory>, sockets: Sockets, own: IpAddr) -> Result<(), String> {
    let rules = NameRules::new().map_err(|error| causes::sentence(&error))?;
    let resolvers = Resolvers::new(RESOLV_CONF.into(), vec![own]);
    let server = Arc::new(NameServer::new(
        Arc::clone(directory),
        resolvers,
        Mutex::new(rules),
    ));
    tokio::spawn(async move {
        if let Err(error) = server.serve(sockets).await {
            warn!(%error, "the VMs' name server stopped");
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn the_network_of_a_dead_daemon_is_waited_for() {
        let name = format!("jiffy-network-test-{}", std::process::id());
        let name = name.as_bytes();
        let held = lock_name(name, |_| panic!("nobody has it")).unwrap();
        let other = lock_name(name, |pid| pid == std::process::id()).unwrap_err();
        assert!(other.contains("another jiffyd"), "{other}");
        // The child of a dead daemon closes it as the second attempt is about to be made.
        let held = RefCell::new(Some(held));
        let held = lock_name(name, |_| held.take().is_none()).unwrap();
        // A child closes it just before its holder is looked for: as one that does not listen yet.
        drop(held);
        let address = SocketAddrUnix::new_abstract_name(name).unwrap();
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &address).unwrap();
        let closes = std::thread::spawn(move || {
            std::thread::sleep(2 * DYING_POLL);
            drop(socket);
        });
        lock_name(name, |_| panic!("nobody listens")).unwrap();
        closes.join().unwrap();
    }

    #[test]
    fn the_earlier_range_is_kept_while_a_vm_has_an_address_of_it() {
        let cidr = |text: &str| text.parse::<Cidr>().unwrap();
        let chosen = |own: &str, kept: &str, address: &str| {
            let addresses = [address.parse().unwrap()];
            let range = range(Some(cidr(own)), Some(cidr(kept)), &addresses);
            range.unwrap().to_string()
        };
        let old = "10.118.0.0/16";
        let v4 = |own, address| chosen(own, old, address);
        assert_eq!(v4("10.9.0.0/16", "10.118.0.2"), old);
        // No VM has one of it.
        assert_eq!(v4("10.9.0.0/16", "10.7.0.2"), "10.9.0.0/16");
        assert_eq!(v4("10.9.0.0/16", "fd00::2"), "10.9.0.0/16");
        // Gateway and addresses stay the same.
        assert_eq!(v4("10.118.0.0/24", "10.118.0.2"), "10.118.0.0/24");
        for (own, address) in [
            ("10.118.0.0/24", "10.118.1.2"),
            ("10.118.0.0/24", "10.118.0.255"),
            ("10.112.0.0/12", "10.118.0.2"),
            ("10.118.0.128/25", "10.118.0.129"),
        ] {
            assert_eq!(v4(own, address), old, "{own} {address}");
        }
        let v6 = |own, address| chosen(own, "fd00:1::/64", address);
        assert_eq!(v6("fd00:2::/64", "fd00:1::2"), "fd00:1::/64");
        assert_eq!(v6("fd00:1::/48", "fd00:1::2"), "fd00:1::/48");
        assert_eq!(v6("fd00:2::/64", "10.118.0.2"), "fd00:2::/64");
        assert_eq!(range(None, Some(cidr(old)), &[]), Some(cidr(old)));
        assert_eq!(range(Some(cidr(old)), None, &[]), Some(cidr(old)));
        assert_eq!(range(None, None, &[]), None);
    }

    #[test]
    fn a_network_list_of_a_newer_release_is_refused_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("networks.json");
        assert!(
            load_networks(&file).unwrap().names.is_empty(),
            "none was written yet"
        );
        let golden = include_str!("../../../content/golden/networks-1.json");
        std::fs::write(&file, golden).unwrap();
        assert_eq!(load_networks(&file).unwrap().names.len(), 2);
        let newer = golden.replace("\"version\":1", "\"version\":9");
        std::fs::write(&file, &newer).unwrap();
        let why = load_networks(&file).unwrap_err();
        assert!(why.contains("networks.json") && why.contains('9'), "{why}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), newer);
    }
}
