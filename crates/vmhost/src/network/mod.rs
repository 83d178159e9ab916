//! VMs on the host's network: links, addresses, rules, names.
//!
//! [`Network`] connects the records of VMs with `jiffy_net`, which does not know them. A VM's
//! record has its network settings and addresses. An [`Attachment`] that is dropped before a VM has
//! taken it over is detached.
//!
//! * [`guest`]: the network configuration of a VM's guest.
//! * [`background`]: removes links of ended VMs, and prepares a link for the next VM.
//! * [`open`]: opens the network when the daemon starts.
//! * [`recovered`]: recovers addresses that are missing in records.
//! * [`specs`]: converts records to the network's types.
//! * [`traffic`]: traffic of VMs' links.

mod background;
mod guest;
mod open;
mod recovered;
mod specs;
mod traffic;

pub use background::clean_up;
pub use guest::{configure_guest, configure_link, hosts_entry};
pub use jiffy_net::inbound::InboundConnection;
pub use open::{Settings, uninstall};
pub use recovered::recovered;
pub use specs::{check_policy, check_ports, check_proxy_ports, is_open_to_the_proxy};
pub use traffic::traffic;

use jiffy_content::clock::monotonic_ns;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::network::Networks;
use jiffy_content::model::vm::{Spec, VmRecord};
use jiffy_content::names as rules;
use jiffy_content::records::networks;
use jiffy_net::host::{Addresses, GuestSpec, Host};
use jiffy_net::inbound::{Acceptor, SleepingVm};
use jiffy_net::names::{Asker, Directory};
use jiffy_net::policy::hold::Held;
use jiffy_net::{Error as NetError, VmId};
use jiffy_sys::causes;
use jiffy_sys::mutex::lock;
use jiffy_wire::api::{NetworkCounters, NetworkUse};
use jiffy_wire::mac::Mac;
use specs::spec_of;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::block_in_place;
use tracing::warn;

/// The network of VMs that request no other. VMs on it can't reach each other.
pub const DEFAULT: &str = "default";
/// The name that requests no network.
pub const NONE: &str = "none";

/// The network of this node's VMs.
#[derive(Debug)]
pub struct Network(State);

#[derive(Debug)]
enum State {
    /// There is none, for this reason.
    Off(String),
    On(Box<On>),
}

#[derive(Debug)]
struct On {
    inner: Mutex<Inner>,
    directory: Arc<Directory>,
    /// Ports for loopback are published on all addresses: in the machine, loopback is not the
    /// user's.
    everywhere: bool,
    /// Notifies that VMs have ended and must be detached.
    left: Notify,
    /// Notifies that tracked connections of removed VMs must be deleted.
    released: Notify,
    /// Notifies that a link must be prepared.
    wanted: Notify,
    /// Accepts connections to ports of hibernated VMs.
    inbound: Acceptor,
    /// The accepted connections, until [`Network::inbound`] takes them.
    waiting: Mutex<Option<UnboundedReceiver<InboundConnection>>>,
    file: PathBuf,
    /// Keeps other daemons from using the network of this network namespace.
    _lock: UnixListener,
}

#[derive(Debug)]
struct Inner {
    host: Host,
    networks: Networks,
    /// Published ports.
    held: HashMap<VmId, Held>,
    /// Descriptors of VMs' TAPs, besides those of their monitors. They keep a link after its
    /// monitor's end, while its VM is hibernated or until background work removes it.
    kept: HashMap<VmId, Vec<OwnedFd>>,
    /// VMs that have ended and whose links and rules still exist.
    leaving: HashMap<VmId, Ipv4Addr>,
    /// A link prepared for an unknown VM, and prepared links that were promised to VMs.
    ahead: Option<PreparedLink>,
    promised: HashMap<VmId, PreparedLink>,
}

/// A link that belongs to no VM yet.
#[derive(Debug, Clone, Copy)]
struct PreparedLink {
    vm: VmId,
    v4: Ipv4Addr,
}

/// A starting VM's attachment to the network. It is detached if it is dropped before the VM has
/// taken it over.
#[derive(Debug)]
pub struct Attachment {
    network: Weak<Network>,
    vm: VmId,
    /// The address was allocated for this start.
    fresh: bool,
    /// The addresses of its guest.
    pub addresses: Addresses,
    /// A descriptor of its TAP for each pair of queues.
    pub queues: Vec<OwnedFd>,
    /// When it began, and when address, link and rules were ready (host CLOCK_MONOTONIC).
    pub times_ns: [u64; 4],
}

impl Attachment {
    /// Hands the attachment to the VM; returns its addresses, IPv4 first.
    pub fn taken_over(mut self) -> Vec<IpAddr> {
        self.network = Weak::new();
        self.addresses.own().collect()
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        // A hibernated VM stays hibernated, and its link is kept.
        if self.fresh
            && let Some(network) = self.network.upgrade()
            && let State::On(on) = &network.0
        {
            on.detach(&mut on.lock(), self.vm, Some(self.addresses.v4));
        }
    }
}

impl Network {
    /// Why VMs have no network here, without a full stop; `None` if they can have one.
    pub fn why_not(&self) -> Option<&str> {
        match &self.0 {
            State::Off(why) => Some(why),
            State::On(_) => None,
        }
    }

    /// Attaches a starting VM. `None` if it has no network interface, or the host has no network.
    pub fn attach(self: &Arc<Self>, record: &VmRecord) -> Result<Option<Attachment>> {
        let (State::On(on), Some(_)) = (&self.0, &record.spec.network) else {
            return Ok(None);
        };
        let begun_ns = monotonic_ns();
        let vm = id_of(record)?;
        let attached = on.attach(vm, record)?;
        let [addressed_ns, linked_ns, ruled_ns] = attached.times_ns;
        Ok(Some(Attachment {
            network: Arc::downgrade(self),
            vm,
            fresh: attached.fresh,
            addresses: attached.addresses,
            queues: attached.queues,
            times_ns: [begun_ns, addressed_ns, linked_ns, ruled_ns],
        }))
    }

    /// Takes the id of a VM whose link was prepared; the next link is prepared in the background.
    pub fn take_prepared_link(&self) -> Option<String> {
        let State::On(on) = &self.0 else { return None };
        let mut inner = on.lock();
        let taken = inner.ahead.take();
        on.wanted.notify_one();
        let ahead = taken?;
        inner.promised.insert(ahead.vm, ahead);
        Some(ahead.vm.to_string())
    }

    /// Changes an attachment made for this VM's id to the name, policy and ports of its record.
    pub fn apply_record(&self, attachment: &Attachment, record: &VmRecord) -> Result<()> {
        let State::On(on) = &self.0 else {
            return Ok(());
        };
        let spec = spec_of(record, attachment.addresses.v4, on.everywhere)?;
        let mut inner = on.lock();
        on.free_ports(&mut inner, record);
        inner.hold(&spec)?;
        inner.change_plain(&spec)?;
        on.directory
            .set(asker(record, &spec, &attachment.addresses));
        Ok(())
    }

    /// Applies an attached VM's current record.
    pub fn change(&self, record: &VmRecord) -> Result<()> {
        let (State::On(on), Some(v4)) = (&self.0, v4_of(record)) else {
            return Ok(());
        };
        let spec = spec_of(record, v4, on.everywhere)?;
        let mut inner = on.lock();
        inner.host.change(&spec).map_err(failed)?;
        let addresses = inner.host.addresses(&spec);
        on.directory.set(asker(record, &spec, &addresses));
        Ok(())
    }

    /// A VM has ended: releases its names and ports. The rest is removed in the background, so that
    /// the VM's client does not wait for it.
    pub fn release(&self, record: &VmRecord) {
        let (State::On(on), Some(v4), Ok(vm)) = (&self.0, v4_of(record), id_of(record)) else {
            return;
        };
        on.directory.remove(vm);
        let mut inner = on.lock();
        inner.held.remove(&vm);
        inner.leaving.insert(vm, v4);
        on.left.notify_one();
    }

    /// Removes all that belongs to a VM before it returns. True if there was something.
    pub fn forget(&self, id: &str) -> bool {
        let (State::On(on), Ok(vm)) = (&self.0, id_from(id)) else {
            return false;
        };
        let mut inner = on.lock();
        let freed = match inner.promised.remove(&vm) {
            Some(ahead) => Some(ahead.v4),
            None => inner.leaving.remove(&vm),
        };
        if freed.is_some() {
            on.detach(&mut inner, vm, freed);
        }
        freed.is_some()
    }

    /// A VM hibernates: from now on this process accepts connections to its TCP ports
    /// ([`Network::inbound`]).
    pub fn divert_ports(&self, id: &str) {
        if let (State::On(on), Ok(vm)) = (&self.0, id_from(id)) {
            block_in_place(|| on.divert_ports(&mut on.lock(), vm));
        }
    }

    /// A VM is awake: new connections to its TCP ports reach it again.
    pub fn restore_ports(&self, id: &str) {
        let (State::On(on), Ok(vm)) = (&self.0, id_from(id)) else {
            return;
        };
        block_in_place(|| {
            let mut inner = on.lock();
            if inner.held.contains_key(&vm)
                && let Err(error) = inner.host.set_asleep(vm, false)
            {
                let error = causes::sentence(&error);
                warn!(%vm, error, "connections to a woken VM still go through jiffyd");
            }
        });
    }

    /// Connections to ports of hibernated VMs; `None` after the first call.
    pub fn inbound(&self) -> Option<UnboundedReceiver<InboundConnection>> {
        let State::On(on) = &self.0 else { return None };
        let mut waiting = lock(&on.waiting);
        waiting.take()
    }

    /// Keeps the link of a hibernated VM, whose monitor has ended, until it wakes.
    pub fn keep_asleep(&self, record: &VmRecord) {
        let (State::On(on), Some(v4), Ok(vm)) = (&self.0, v4_of(record), id_of(record)) else {
            return;
        };
        let keep = |spec: GuestSpec| -> Result<()> {
            let mut inner = on.lock();
            if !inner.kept.contains_key(&vm) {
                // An earlier daemon held its descriptors.
                let spec = GuestSpec {
                    asleep: true,
                    ..spec
                };
                let attached = inner.host.attach_again(&spec).map_err(failed)?;
                on.directory.set(asker(record, &spec, &attached.addresses));
                inner.kept.insert(vm, attached.tap.queues);
                inner.hold(&spec)?;
            }
            on.divert_ports(&mut inner, vm);
            Ok(())
        };
        let spec = spec_of(record, v4, on.everywhere);
        if let Err(error) = spec.and_then(|spec| block_in_place(|| keep(spec))) {
            warn!(vm = %record.name, %error, "a hibernated VM has no network until it wakes");
        }
    }

    /// Traffic counters of a VM's link.
    pub fn counters(&self, id: &str) -> Option<NetworkCounters> {
        let State::On(on) = &self.0 else { return None };
        let vm = VmId::parse(id).ok()?;
        let (traffic, stopped) = block_in_place(|| on.lock().host.counters(vm)).ok()?;
        Some(NetworkCounters {
            sent_packets: traffic.sent_packets,
            sent_bytes: traffic.sent_bytes,
            received_packets: traffic.received_packets,
            received_bytes: traffic.received_bytes,
            spoofed: stopped.spoofed,
            refused: stopped.refused,
        })
    }

    /// The address at which this host reaches a VM that is attached.
    pub fn address_of(&self, id: &str) -> Option<IpAddr> {
        let State::On(on) = &self.0 else { return None };
        let vm = id_from(id).ok()?;
        let inner = on.lock();
        inner.host.guest(vm).map(|guest| guest.v4.into())
    }

    /// Number of open TCP connections to published ports, by VM id; `None` if they can't be
    /// counted. Reads all tracked connections of the host.
    pub fn open_connections(&self) -> Option<HashMap<String, usize>> {
        let State::On(on) = &self.0 else {
            return Some(HashMap::new());
        };
        let counted = on.lock().host.open_connections().inspect_err(|error| {
            let error = causes::sentence(error);
            warn!(error, "the connections of VMs can't be counted");
        });
        let by_id = |(vm, open): (VmId, usize)| (vm.to_string(), open);
        Some(counted.ok()?.into_iter().map(by_id).collect())
    }

    /// The ranges of VMs' addresses.
    pub fn ranges(&self) -> Vec<String> {
        match &self.0 {
            State::Off(_) => Vec::new(),
            State::On(on) => {
                let ranges = on.lock().host.ranges();
                vec![ranges.v4().to_string(), ranges.v6().to_string()]
            }
        }
    }

    /// Names of the networks that users made.
    pub fn names(&self) -> Vec<String> {
        match &self.0 {
            State::Off(_) => Vec::new(),
            State::On(on) => on.lock().networks.names.iter().cloned().collect(),
        }
    }

    /// Makes a network.
    pub fn create(&self, name: &str) -> Result<()> {
        rules::check("network", name)?;
        let on = self.on()?;
        let mut inner = on.lock();
        if [DEFAULT, NONE].contains(&name) || inner.networks.names.contains(name) {
            return Err(Error::conflict(format!("The network {name} exists.")));
        }
        let mut networks = inner.networks.clone();
        networks.names.insert(name.to_owned());
        on.save(&mut inner, networks)
    }

    /// Removes a network that no VM is in.
    pub fn remove(&self, name: &str) -> Result<()> {
        let on = self.on()?;
        let mut inner = on.lock();
        let mut networks = inner.networks.clone();
        if !networks.names.remove(name) {
            return Err(match [DEFAULT, NONE].contains(&name) {
                true => Error::invalid(format!("The network {name} can't be removed.")),
                false => no_network(name),
            });
        }
        on.save(&mut inner, networks)?;
        inner.host.remove_network(name).map_err(failed)
    }

    /// Refuses a name that no network may have, and says why.
    pub fn check_name(&self, name: &str) -> Result<()> {
        let on = self.on()?;
        match name == DEFAULT || on.lock().networks.names.contains(name) {
            true => Ok(()),
            false => Err(no_network(name)),
        }
    }

    fn on(&self) -> Result<&On> {
        match &self.0 {
            State::On(on) => Ok(on),
            State::Off(why) => Err(Error::wrong_state(format!(
                "VMs have no network on this host: {why}."
            ))
            .hint("Omit the network's options, or see `jiffy doctor`.")),
        }
    }
}

impl On {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// Attaches a VM, at its previous address if it has one.
    fn attach(&self, vm: VmId, record: &VmRecord) -> Result<NewAttachment> {
        let mut inner = self.lock();
        if let Some(freed) = inner.leaving.remove(&vm) {
            self.detach(&mut inner, vm, Some(freed));
        }
        self.free_ports(&mut inner, record);
        let promised = inner.promised.remove(&vm);
        let own = v4_of(record);
        let fresh = own.is_none();
        let v4 = match (own, promised) {
            (Some(v4), _) => v4,
            (None, Some(ahead)) => ahead.v4,
            (None, None) => inner.host.take_address().map_err(failed)?,
        };
        let made = self.attach_at(&mut inner, vm, record, v4);
        if made.is_err() && fresh {
            self.detach(&mut inner, vm, Some(v4));
        }
        made.map(|made| NewAttachment { fresh, ..made })
    }

    fn attach_at(
        &self,
        inner: &mut Inner,
        vm: VmId,
        record: &VmRecord,
        v4: Ipv4Addr,
    ) -> Result<NewAttachment> {
        let spec = spec_of(record, v4, self.everywhere)?;
        inner.hold(&spec)?;
        let made = match inner.kept.get(&vm) {
            // The link was prepared, or made before the VM was hibernated.
            Some(queues) => {
                let queues = dup(queues)?;
                inner.change_plain(&spec)?;
                let now = monotonic_ns();
                NewAttachment {
                    addresses: inner.host.addresses(&spec),
                    queues,
                    times_ns: [now; 3],
                    fresh: false,
                }
            }
            None => {
                let attached = inner.host.attach_again(&spec).map_err(failed)?;
                inner.kept.insert(vm, dup(&attached.tap.queues)?);
                NewAttachment {
                    addresses: attached.addresses,
                    queues: attached.tap.queues,
                    times_ns: attached.times_ns,
                    fresh: false,
                }
            }
        };
        self.directory.set(asker(record, &spec, &made.addresses));
        Ok(made)
    }

    /// Detaches VMs that have just ended, because this one may publish their ports.
    fn free_ports(&self, inner: &mut Inner, record: &VmRecord) {
        let publishes = |network: &NetworkUse| !network.ports.is_empty();
        if record.spec.network.as_ref().is_some_and(publishes) {
            for (vm, freed) in std::mem::take(&mut inner.leaving) {
                self.detach(inner, vm, Some(freed));
            }
        }
    }

    /// Detaches a VM, and releases the address `freed`.
    fn detach(&self, inner: &mut Inner, vm: VmId, freed: Option<Ipv4Addr>) {
        self.directory.remove(vm);
        inner.held.remove(&vm);
        if let Err(error) = inner.host.detach(vm) {
            let error = causes::sentence(&error);
            warn!(%vm, error, "a VM's link or rules can't be removed");
        }
        inner.kept.remove(&vm);
        if let Some(v4) = freed {
            inner.host.free_address(v4);
        }
        self.released.notify_one();
    }

    /// See [`Network::divert_ports`].
    fn divert_ports(&self, inner: &mut Inner, vm: VmId) {
        let Some(held) = inner.held.get_mut(&vm) else {
            return;
        };
        let Some(guest) = inner.host.guest(vm) else {
            return;
        };
        let (v4, v6, ranges) = (guest.v4, guest.v6, inner.host.ranges());
        let sleeping = SleepingVm { vm, v4, v6, ranges };
        self.inbound.accept(held, sleeping);
        if let Err(error) = inner.host.set_asleep(vm, true) {
            let error = causes::sentence(&error);
            warn!(%vm, error, "connections to a hibernated VM are lost: its ports can't be redirected to jiffyd");
        }
    }

    /// Prepares a link for the next VM.
    fn prepare_link(&self) -> Result<()> {
        let mut inner = self.lock();
        if inner.ahead.is_some() {
            return Ok(());
        }
        let id = rules::new_id();
        let spec = Spec {
            network: Some(plain()),
            ..Spec::default()
        };
        let record = VmRecord::new(id.clone(), id, spec, 0);
        let vm = id_of(&record)?;
        let v4 = inner.host.take_address().map_err(failed)?;
        let attached = spec_of(&record, v4, self.everywhere)
            .and_then(|spec| inner.host.attach(&spec).map_err(failed));
        match attached {
            Ok(attached) => {
                inner.kept.insert(vm, attached.tap.queues);
                inner.ahead = Some(PreparedLink { vm, v4 });
                Ok(())
            }
            Err(error) => {
                inner.host.free_address(v4);
                Err(error)
            }
        }
    }

    fn save(&self, inner: &mut Inner, networks: Networks) -> Result<()> {
        networks::save(&self.file, networks.clone())
            .map_err(|error| Error::io("write the networks", &self.file, &error))?;
        inner.networks = networks;
        Ok(())
    }
}

impl Inner {
    /// Holds a VM's published ports, unless they are held already. A VM without ports gets no
    /// entry, because a standby may become a VM with ports.
    fn hold(&mut self, spec: &GuestSpec) -> Result<()> {
        if !spec.ports.is_empty()
            && let Entry::Vacant(held) = self.held.entry(spec.vm)
        {
            held.insert(Held::all(&spec.ports).map_err(port_error)?);
        }
        Ok(())
    }

    /// Extends a plain link by this VM's network, policy and ports.
    fn change_plain(&mut self, spec: &GuestSpec) -> Result<()> {
        match is_plain(spec) {
            true => Ok(()),
            false => self.host.change(spec).map_err(failed),
        }
    }
}

/// A new attachment of a VM.
struct NewAttachment {
    addresses: Addresses,
    queues: Vec<OwnedFd>,
    /// When it had its address, its link and its rules.
    times_ns: [u64; 3],
    /// The address was allocated for this attachment.
    fresh: bool,
}

fn dup(queues: &[OwnedFd]) -> Result<Vec<OwnedFd>> {
    let dup: std::io::Result<_> = queues.iter().map(OwnedFd::try_clone).collect();
    dup.map_err(|error| {
        Error::internal(format!(
            "The descriptors of a VM's TAP can't be duplicated: {error}."
        ))
    })
}

/// Is a prepared link all that it needs?
fn is_plain(spec: &GuestSpec) -> bool {
    spec.network.is_none() && spec.policy.is_default() && spec.ports.is_empty()
}

fn asker(record: &VmRecord, spec: &GuestSpec, addresses: &Addresses) -> Asker {
    Asker {
        vm: spec.vm,
        name: record.name.clone(),
        network: spec.network.clone(),
        policy: spec.policy.clone(),
        v4: addresses.v4,
        v6: addresses.v6,
    }
}

/// The MAC address of the VM with this id.
pub fn mac_of(id: &str) -> Result<Mac> {
    Ok(id_from(id)?.mac())
}

fn id_of(record: &VmRecord) -> Result<VmId> {
    id_from(&record.id)
}

fn id_from(id: &str) -> Result<VmId> {
    VmId::parse(id).map_err(|error| Error::internal(format!("{error}.")))
}

/// The IPv4 address in a VM's record.
fn v4_of(record: &VmRecord) -> Option<Ipv4Addr> {
    record.addresses.iter().find_map(|address| match address {
        IpAddr::V4(v4) => Some(*v4),
        IpAddr::V6(_) => None,
    })
}

fn no_network(name: &str) -> Error {
    Error::not_found(format!("There is no network {name}."))
        .hint(format!("Make it with `jiffy network create {name}`."))
}

fn failed(error: NetError) -> Error {
    match error {
        NetError::Port(..) | NetError::PortWithoutIpv6(_) => port_error(error),
        NetError::PoolEmpty(_) => Error::no_room(format!(
            "{}.",
            causes::capitalised(causes::sentence(&error))
        )),
        _ => Error::internal(format!(
            "The VM can't be attached to the network: {}.",
            causes::sentence(&error)
        )),
    }
}

fn port_error(error: NetError) -> Error {
    Error::conflict(format!("The port {error}.")).hint("Choose another with -p.")
}

/// The network of standbys: the default one, until a VM takes the standby over.
pub fn plain() -> NetworkUse {
    NetworkUse {
        name: Some(DEFAULT.to_owned()),
        ..NetworkUse::default()
    }
}
