//! The network where the daemon may make no links and rules: for each VM a passt(1), which
//! translates the guest's connections to sockets of the host.
//!
//! A passt belongs to a VMM: it ends when the VMM closes their socket, so it needs no daemon, and
//! none to be found again. It has the VM's published ports while the VM runs; while the VM is
//! hibernated, this process accepts connections to them.
//!
//! * [`process`]: starts a passt.
//! * [`host`]: what is read of this host: its resolvers, addresses and connections.

mod host;
mod process;

use super::failures::port_error;
use super::ids::id_of;
use super::names::DEFAULT;
use super::specs::published;
use crate::folders::Found;
use jiffy_content::clock::monotonic_ns;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::{VmRecord, is_active};
use jiffy_net::host::Addresses;
use jiffy_net::identity::GATEWAY_MAC;
use jiffy_net::inbound::{Acceptor, InboundConnection, Reached, SleepingVm};
use jiffy_net::policy::hold::Held;
use jiffy_net::policy::publish::Publish;
use jiffy_net::policy::target::Protocol;
use jiffy_net::{VmId, policy};
use jiffy_sys::mutex::lock;
use jiffy_sys::programs::on_path;
use jiffy_wire::api::NetworkUse;
use jiffy_wire::vmm::Guard;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedReceiver;
use tracing::{info, warn};

pub(super) use process::Starting;
use process::{GATEWAY, GUEST};

/// How long ports may still belong to the passt of a VM that has just ended.
const FREED: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_millis(10);
/// Time between attempts to get the ports of a hibernated VM after that.
const LATE_RETRY: Duration = Duration::from_secs(1);

/// The network by passt.
#[derive(Debug)]
pub(super) struct ByPasst {
    program: PathBuf,
    /// Why VMs have no links.
    why: String,
    everywhere: bool,
    ports: Arc<Mutex<Ports>>,
    inbound: Acceptor,
    waiting: Mutex<Option<UnboundedReceiver<InboundConnection>>>,
}

/// The published ports of VMs.
#[derive(Debug, Default)]
struct Ports {
    /// Of VMs that run or are hibernated.
    published: HashMap<VmId, Vec<Publish>>,
    /// Of hibernated VMs; `None` until the sockets are bound.
    asleep: HashMap<VmId, Option<Held>>,
}

/// A VM's connection to its passt.
pub(super) struct Attached {
    pub addresses: Addresses,
    /// The VMM's end.
    pub socket: OwnedFd,
    pub guard: Guard,
    pub name_servers: Vec<IpAddr>,
    pub starting: Starting,
    /// The VM was not hibernated.
    pub fresh: bool,
    pub times_ns: [u64; 2],
}

impl ByPasst {
    /// Checks that passt works here. `why` there are no links.
    ///
    /// # Errors
    ///
    /// If passt is not installed or does not start here: a sentence that begins with `why`.
    pub fn open(
        vms: &[Found],
        why: String,
        everywhere: bool,
        most_inbound: usize,
    ) -> std::result::Result<ByPasst, String> {
        let program = on_path(process::PROGRAM).ok_or_else(|| {
            format!("{why}, and there is no passt, which needs no privileges (apt install passt)")
        })?;
        let tried = process::start(&program, &[], &host::Resolving::default(), GATEWAY_MAC);
        let tried = tried.and_then(|(_socket, starting)| starting.settle());
        tried.map_err(|failed| format!("{why}, and passt can't be used: {failed}"))?;
        let (inbound, waiting) = Acceptor::new(most_inbound);
        let by = ByPasst {
            program,
            why,
            everywhere,
            ports: Arc::default(),
            inbound,
            waiting: Mutex::new(Some(waiting)),
        };
        let kept = vms.iter().filter_map(|found| found.record.as_ref().ok());
        let records = kept.map(|kept| &kept.record);
        for record in records.filter(|record| is_active(record.state)) {
            if let (Ok(vm), Ok(ports)) = (id_of(record), by.published(record)) {
                lock(&by.ports).published.insert(vm, ports);
            }
        }
        info!(by.why, "VMs have a network by passt");
        Ok(by)
    }

    /// How VMs have a network, as a sentence.
    pub fn note(&self) -> String {
        format!(
            "VMs have a network by passt, without rules and networks of their own: {}.",
            self.why
        )
    }

    /// Checks that passt can do this.
    ///
    /// # Errors
    ///
    /// If it is a network other than the default one, a policy, or a port for IPv6.
    pub fn check_use(&self, network: &NetworkUse) -> Result<()> {
        if network.name.as_ref().is_some_and(|name| name != DEFAULT) {
            return Err(self.no_networks());
        }
        if !network.policy.is_default() {
            return Err(self.refusal("What a VM may reach can't be changed"));
        }
        let is_v6 = |text: &String| {
            let port: std::result::Result<Publish, _> = text.parse();
            port.is_ok_and(|port| port.address.is_ipv6())
        };
        if let Some(port) = network.ports.iter().find(|port| is_v6(port)) {
            return Err(self.refusal(&format!("The port {port} can't be published over IPv6")));
        }
        Ok(())
    }

    /// VMs can't be in networks of their own.
    pub fn no_networks(&self) -> Error {
        self.refusal("VMs can have no networks of their own")
    }

    fn refusal(&self, what: &str) -> Error {
        Error::wrong_state(format!(
            "{what} on this host: they have the network by passt, because {}.",
            self.why
        ))
        .hint("Leave the option out, or run jiffyd as root.")
    }

    /// Checks that passt can do what the record asks for.
    ///
    /// # Errors
    ///
    /// As in [`ByPasst::check_use`].
    pub fn check_record(&self, record: &VmRecord) -> Result<()> {
        let network = record.spec.network.clone().unwrap_or_default();
        self.check_use(&NetworkUse {
            policy: record.network_policy(),
            ..network
        })
    }

    /// Starts the passt of a VM.
    ///
    /// # Errors
    ///
    /// If passt can't do what the record asks for, a port is in use, or passt can't be started.
    pub fn attach(&self, vm: VmId, record: &VmRecord) -> Result<Attached> {
        let begun_ns = monotonic_ns();
        self.check_record(record)?;
        let published = self.published(record)?;
        let slept = lock(&self.ports).asleep.remove(&vm).is_some();
        // Before passt binds them, for an error that names the port.
        drop(held(&published)?);
        let dns = &record.spec.network.clone().unwrap_or_default().dns;
        let resolving = host::Resolving::of_host();
        let name_servers = match dns.is_empty() {
            true => resolving.servers(GATEWAY),
            false => dns.iter().filter_map(|it| it.parse().ok()).collect(),
        };
        let guard = guard(&published, &name_servers)?;
        let started = process::start(&self.program, &published, &resolving, vm.mac());
        let (socket, starting) = started.map_err(failed_to_start)?;
        lock(&self.ports).published.insert(vm, published);
        Ok(Attached {
            addresses: addresses(vm),
            socket,
            guard,
            name_servers,
            starting,
            fresh: !slept,
            times_ns: [begun_ns, monotonic_ns()],
        })
    }

    /// Checks that the passt of a standby, with these name servers and this guard, is also right
    /// for this VM, and still right for this host.
    ///
    /// # Errors
    ///
    /// If it is not, or the host's addresses can't be listed.
    pub fn suits(&self, record: &VmRecord, name_servers: &[IpAddr], made: &Guard) -> Result<()> {
        self.check_record(record)?;
        let network = record.spec.network.clone().unwrap_or_default();
        if !network.ports.is_empty() || !network.dns.is_empty() {
            return Err(Error::wrong_state(
                "A standby has neither ports nor name servers of its own.",
            ));
        }
        let now = host::Resolving::of_host().servers(GATEWAY);
        match now == name_servers && guard(&[], &now)? == *made {
            true => Ok(()),
            false => Err(Error::wrong_state(
                "The host's resolvers or addresses have changed since the standby was made.",
            )),
        }
    }

    /// A VM has ended.
    pub fn release(&self, vm: VmId) {
        let mut ports = lock(&self.ports);
        ports.published.remove(&vm);
        ports.asleep.remove(&vm);
    }

    /// A VM is hibernated: this process accepts connections to its ports, as soon as its passt has
    /// given them up.
    pub fn keep_asleep(&self, record: &VmRecord) {
        let (Ok(vm), Ok(published)) = (id_of(record), self.published(record)) else {
            return;
        };
        let mut ports = lock(&self.ports);
        ports.published.insert(vm, published.clone());
        if published.is_empty() || ports.asleep.contains_key(&vm) {
            return;
        }
        ports.asleep.insert(vm, None);
        drop(ports);
        let (ports, inbound) = (Arc::clone(&self.ports), self.inbound.clone());
        let name = record.name.clone();
        tokio::spawn(async move {
            let until = Instant::now() + FREED;
            let mut is_told = false;
            loop {
                let bound = {
                    let mut ports = lock(&ports);
                    let Some(slot @ None) = ports.asleep.get_mut(&vm) else {
                        return;
                    };
                    Held::all(&published).map(|mut bound| {
                        let reached = Reached::ByItsPort;
                        inbound.accept(&mut bound, SleepingVm { vm, reached });
                        *slot = Some(bound);
                    })
                };
                let pause = match bound {
                    Ok(()) => return,
                    Err(_) if Instant::now() < until => RETRY,
                    Err(error) => {
                        if !is_told {
                            warn!(vm = name, %error, "connections to a hibernated VM's ports do not wake it yet");
                            is_told = true;
                        }
                        LATE_RETRY
                    }
                };
                tokio::time::sleep(pause).await;
            }
        });
    }

    /// Connections to ports of hibernated VMs; `None` after the first call.
    pub fn inbound(&self) -> Option<UnboundedReceiver<InboundConnection>> {
        lock(&self.waiting).take()
    }

    /// Where this host reaches a TCP port of a VM: at a published port.
    pub fn server(&self, vm: VmId, port: u16) -> Option<SocketAddr> {
        let ports = lock(&self.ports);
        let mut published = ports.published.get(&vm)?.iter();
        published.find_map(|publish| {
            let mut pairs = publish.pairs();
            let (host, _) = pairs.find(|(_, guest)| *guest == port)?;
            let address = match publish.address.is_unspecified() {
                true => Ipv4Addr::LOCALHOST.into(),
                false => publish.address,
            };
            (publish.protocol == Protocol::Tcp).then_some(SocketAddr::new(address, host))
        })
    }

    /// Number of open TCP connections to published ports, by VM id; `None` if they can't be read.
    pub fn open_connections(&self) -> Option<HashMap<String, usize>> {
        let open = host::open_connections()?;
        let ports = lock(&self.ports);
        let of = |published: &[Publish]| {
            let mine = |at: &&SocketAddr| published.iter().any(|port| receives(port, **at));
            open.iter().filter(mine).count()
        };
        let counts = ports.published.iter();
        let counts = counts.map(|(vm, published)| (vm.to_string(), of(published)));
        Some(counts.filter(|(_, count)| *count > 0).collect())
    }

    fn published(&self, record: &VmRecord) -> Result<Vec<Publish>> {
        let network = record.spec.network.as_ref();
        network.map_or(Ok(Vec::new()), |it| published(&it.ports, self.everywhere))
    }
}

/// The error of a VM whose passt does not start, for this reason.
pub(super) fn failed_to_start(why: String) -> Error {
    Error::internal(format!("The VM can't have a network: {why}."))
}

/// Is this the local end of a connection to the port?
fn receives(port: &Publish, at: SocketAddr) -> bool {
    let (first, last) = (port.host, port.host + (port.count - 1));
    port.protocol == Protocol::Tcp
        && (first..=last).contains(&at.port())
        && (port.address.is_unspecified() || port.address == at.ip())
}

fn addresses(vm: VmId) -> Addresses {
    Addresses {
        mac: vm.mac(),
        v4: GUEST,
        v6: None,
        gateway: GATEWAY,
        gateway6: None,
        gateway_mac: GATEWAY_MAC,
    }
}

/// Reserves ports, which may be those of a VM that has just ended.
fn held(published: &[Publish]) -> Result<Held> {
    let until = Instant::now() + FREED;
    loop {
        match Held::all(published) {
            Err(_) if Instant::now() < until => thread::sleep(RETRY),
            held => return held.map_err(port_error),
        }
    }
}

/// By default a VM reaches public addresses that are not this host's, and its name servers.
fn guard(published: &[Publish], name_servers: &[IpAddr]) -> Result<Guard> {
    let v4 = |address| match address {
        IpAddr::V4(v4) => Some(v4),
        IpAddr::V6(_) => None,
    };
    let ranges = policy::closed().filter_map(|range| Some((v4(range.first())?, range.prefix())));
    let own = host::own_addresses()?.into_iter().map(|own| (own, 32));
    let tcp = published.iter().filter(|it| it.protocol == Protocol::Tcp);
    let tcp = tcp.map(|port| (port.guest, port.guest + (port.count - 1)));
    Ok(Guard {
        closed: ranges.chain(own).collect(),
        name_servers: name_servers.iter().copied().filter_map(v4).collect(),
        tcp: tcp.collect(),
    })
}

#[cfg(test)]
mod tests;
