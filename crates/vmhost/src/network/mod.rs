//! VMs on the host's network: links, addresses, rules, names.
//!
//! [`Network`] connects the records of VMs with `jiffy_net`, which does not know them. A VM's
//! record has its network settings and addresses. An [`Attachment`] that is dropped before a VM has
//! taken it over is detached.
//!
//! * [`guest`]: the network configuration of a VM's guest.
//! * [`background`]: removes links of ended VMs, and prepares a link for the next VM.
//! * [`on`]: the network where there is one, and what VMs hold of it.
//! * [`ids`], [`names`]: ids of VMs, names of networks.
//! * [`failures`]: failures, as users see them.
//! * [`passt`]: the network of a host without root.
//! * [`open`]: opens the network when the daemon starts.
//! * [`recovered`](mod@recovered): recovers addresses that are missing in records.
//! * [`specs`]: converts records to the network's types.
//! * [`traffic`](mod@traffic): traffic of VMs' links.

mod background;
mod failures;
mod guest;
mod ids;
mod names;
mod on;
mod open;
mod passt;
mod recovered;
mod specs;
mod traffic;

pub use background::clean_up;
pub use guest::{Names, configure_guest, configure_link, hosts_entry};
pub use ids::mac_of;
pub use jiffy_net::inbound::InboundConnection;
pub use names::{DEFAULT, NONE, plain};
pub use open::{Settings, Wanted, uninstall};
pub use recovered::recovered;
pub use specs::{
    check_policy, check_ports, check_proxy_ports, is_about_a_name, is_open_to_the_proxy,
};
pub use traffic::traffic;

use failures::failed;
use ids::{id_from, id_of, v4_of};
use jiffy_content::clock::monotonic_ns;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::VmRecord;
use jiffy_content::names as rules;
use jiffy_net::VmId;
use jiffy_net::firewalls::Blocker;
use jiffy_net::host::{Addresses, GuestSpec};
use jiffy_sys::causes;
use jiffy_sys::mutex::lock;
use jiffy_wire::api::{NetworkCounters, NetworkUse};
use jiffy_wire::vmm::Guard;
use names::no_network;
use on::{On, asker};
use passt::{ByPasst, Starting, failed_to_start};
use specs::spec_of;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::block_in_place;
use tracing::warn;

/// The network of this node's VMs.
#[derive(Debug)]
pub struct Network(State);

#[derive(Debug)]
enum State {
    /// There is none, for this reason.
    Off(String),
    On(Box<On>),
    ByPasst(Box<ByPasst>),
}

/// What connects a VM's interface to the host.
#[derive(Debug)]
pub enum Peer {
    /// A descriptor of its TAP for each pair of queues.
    Tap(Vec<OwnedFd>),
    /// The VMM's end of the socket to its passt.
    Passt(OwnedFd, Guard),
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
    /// Where its guest resolves names.
    pub names: Names,
    /// The other end of its interface.
    pub peer: Peer,
    /// A passt that may not be ready yet.
    starting: Option<Starting>,
    /// When it began, and when address, link, rules and name were ready (host CLOCK_MONOTONIC).
    pub times_ns: [u64; 5],
}

impl Attachment {
    /// Waits until the other end is ready.
    ///
    /// # Errors
    ///
    /// If its passt ends or is not ready in time.
    pub fn settle(&mut self) -> Result<()> {
        let settled = self.starting.take().map_or(Ok(()), Starting::settle);
        settled.map_err(failed_to_start)
    }

    /// Hands the attachment to the VM; returns its addresses, IPv4 first. By passt it has none that
    /// the host could use.
    pub fn taken_over(mut self) -> Vec<IpAddr> {
        self.network = Weak::new();
        match self.peer {
            Peer::Tap(_) => self.addresses.own().collect(),
            Peer::Passt(..) => Vec::new(),
        }
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        // A hibernated VM stays hibernated, and its link is kept.
        if self.fresh
            && let Some(network) = self.network.upgrade()
        {
            match &network.0 {
                State::Off(_) => {}
                State::On(on) => on.detach(&mut on.lock(), self.vm, Some(self.addresses.v4)),
                State::ByPasst(by) => by.release(self.vm),
            }
        }
    }
}

impl Network {
    /// Why VMs have no network here, without a full stop; `None` if they can have one.
    pub fn why_not(&self) -> Option<&str> {
        match &self.0 {
            State::Off(why) => Some(why),
            State::On(_) | State::ByPasst(_) => None,
        }
    }

    /// How VMs have a network if not by links and rules of this host, as a sentence.
    pub fn note(&self) -> Option<String> {
        match &self.0 {
            State::ByPasst(by) => Some(by.note()),
            State::Off(_) | State::On(_) => None,
        }
    }

    /// Checks that VMs can have this on this host's network.
    ///
    /// # Errors
    ///
    /// If VMs have it by passt, which can't do what is asked for.
    pub fn check_use(&self, network: &NetworkUse) -> Result<()> {
        match &self.0 {
            State::ByPasst(by) => by.check_use(network),
            State::Off(_) | State::On(_) => Ok(()),
        }
    }

    /// Attaches a starting VM. `None` if it has no network interface, or the host has no network.
    ///
    /// # Errors
    ///
    /// If there is no free address, a published port is in use, or the kernel or passt refuses.
    pub fn attach(self: &Arc<Self>, record: &VmRecord) -> Result<Option<Attachment>> {
        if record.spec.network.is_none() {
            return Ok(None);
        }
        let vm = id_of(record)?;
        let on = match &self.0 {
            State::Off(_) => return Ok(None),
            State::On(on) => on,
            State::ByPasst(by) => return self.attach_to_passt(by, vm, record).map(Some),
        };
        let begun_ns = monotonic_ns();
        let attached = on.attach(vm, record)?;
        let [addressed_ns, linked_ns, ruled_ns, named_ns] = attached.times_ns;
        Ok(Some(Attachment {
            network: Arc::downgrade(self),
            vm,
            fresh: attached.fresh,
            names: Names {
                servers: vec![attached.addresses.gateway.into()],
                of_vms: true,
            },
            addresses: attached.addresses,
            peer: Peer::Tap(attached.queues),
            starting: None,
            times_ns: [begun_ns, addressed_ns, linked_ns, ruled_ns, named_ns],
        }))
    }

    fn attach_to_passt(
        self: &Arc<Self>,
        by: &ByPasst,
        vm: VmId,
        record: &VmRecord,
    ) -> Result<Attachment> {
        let attached = by.attach(vm, record)?;
        let [begun_ns, started_ns] = attached.times_ns;
        Ok(Attachment {
            network: Arc::downgrade(self),
            vm,
            fresh: attached.fresh,
            addresses: attached.addresses,
            names: Names {
                servers: attached.name_servers,
                of_vms: false,
            },
            peer: Peer::Passt(attached.socket, attached.guard),
            starting: Some(attached.starting),
            times_ns: [begun_ns, begun_ns, started_ns, started_ns, started_ns],
        })
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
    ///
    /// # Errors
    ///
    /// If a published port is in use, the kernel refuses the rules, or passt can't do what the
    /// record asks for.
    pub fn apply_record(&self, attachment: &Attachment, record: &VmRecord) -> Result<()> {
        let on = match &self.0 {
            State::Off(_) => return Ok(()),
            State::On(on) => on,
            State::ByPasst(by) => {
                return match &attachment.peer {
                    Peer::Passt(_, guard) => by.suits(record, &attachment.names.servers, guard),
                    Peer::Tap(_) => Ok(()),
                };
            }
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
    ///
    /// # Errors
    ///
    /// If the kernel refuses the new rules, which leaves the old ones, or passt can't do what the
    /// record asks for.
    pub fn change(&self, record: &VmRecord) -> Result<()> {
        if let State::ByPasst(by) = &self.0 {
            return by.check_record(record);
        }
        let (State::On(on), Some(v4)) = (&self.0, v4_of(record)) else {
            return Ok(());
        };
        let spec = spec_of(record, v4, on.everywhere)?;
        let mut inner = on.lock();
        let addresses = inner.host.addresses(&spec);
        // The name server first: it must not open an address by the old policy after the change.
        let before = on.directory.asker(v4.into());
        on.directory.set(asker(record, &spec, &addresses));
        let changed = inner.host.change(&spec).map_err(failed);
        match (&changed, before) {
            (Err(_), Some(before)) => on.directory.set((*before).clone()),
            // Once more, because the name server forgets then what it has opened meanwhile: the
            // change may have closed it.
            _ => on.directory.set(asker(record, &spec, &addresses)),
        }
        changed
    }

    /// A VM has ended: releases its names and ports. The rest is removed in the background, so that
    /// the VM's client does not wait for it.
    pub fn release(&self, record: &VmRecord) {
        if let (State::ByPasst(by), Ok(vm)) = (&self.0, id_of(record)) {
            by.release(vm);
        }
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
        let Ok(vm) = id_from(id) else { return false };
        let on = match &self.0 {
            State::Off(_) => return false,
            State::On(on) => on,
            State::ByPasst(by) => {
                by.release(vm);
                return false;
            }
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

    /// A VM that an earlier daemon had just begun was ended: removes what was found of it when the
    /// network was opened.
    pub fn discard(&self, id: &str) {
        let Ok(vm) = id_from(id) else { return };
        let on = match &self.0 {
            State::Off(_) => return,
            State::On(on) => on,
            State::ByPasst(by) => return by.release(vm),
        };
        // It has no link any more if its monitor ended meanwhile.
        let found = on.directory.known(vm).map(|it| it.v4);
        if found.is_some() {
            on.detach(&mut on.lock(), vm, found);
        }
    }

    /// A VM hibernates: from now on this process accepts connections and datagrams to its ports
    /// ([`Network::inbound`]).
    pub fn divert_ports(&self, id: &str) {
        if let (State::On(on), Ok(vm)) = (&self.0, id_from(id)) {
            block_in_place(|| on.divert_ports(&mut on.lock(), vm));
        }
    }

    /// A VM is awake: new connections and datagrams of further clients reach it again.
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
        match &self.0 {
            State::Off(_) => None,
            State::On(on) => lock(&on.waiting).take(),
            State::ByPasst(by) => by.inbound(),
        }
    }

    /// Keeps the link of a hibernated VM, whose monitor has ended, until it wakes.
    pub fn keep_asleep(&self, record: &VmRecord) {
        if let State::ByPasst(by) = &self.0 {
            by.keep_asleep(record);
        }
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
            limited: stopped.limited,
        })
    }

    /// Where this host reaches a TCP port of a VM that is attached: by passt, only a published one.
    pub fn server(&self, id: &str, port: u16) -> Option<SocketAddr> {
        let vm = id_from(id).ok()?;
        match &self.0 {
            State::Off(_) => None,
            State::On(on) => {
                let inner = on.lock();
                let guest = inner.host.guest(vm)?;
                Some(SocketAddr::new(guest.v4.into(), port))
            }
            State::ByPasst(by) => by.server(vm, port),
        }
    }

    /// Number of open TCP connections to published ports, by VM id; `None` if they can't be
    /// counted. Reads all tracked connections of the host.
    pub fn open_connections(&self) -> Option<HashMap<String, usize>> {
        let on = match &self.0 {
            State::Off(_) => return Some(HashMap::new()),
            State::On(on) => on,
            State::ByPasst(by) => return by.open_connections(),
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
            State::Off(_) | State::ByPasst(_) => Vec::new(),
            State::On(on) => {
                let ranges = on.lock().host.ranges();
                vec![ranges.v4().to_string(), ranges.v6().to_string()]
            }
        }
    }

    /// Other firewalls that drop VMs' packets now, and what helps: a sentence for each.
    pub fn blockers(&self) -> Vec<String> {
        let State::On(on) = &self.0 else {
            return Vec::new();
        };
        let found = block_in_place(|| on.lock().host.blockers());
        let found = found.inspect_err(|error| {
            let error = causes::sentence(error);
            warn!(error, "other firewalls can't be listed");
        });
        let sentence = |blocker: &Blocker| format!("The firewall chain {blocker}.");
        found.unwrap_or_default().iter().map(sentence).collect()
    }

    /// Names of the networks that users made.
    pub fn names(&self) -> Vec<String> {
        match &self.0 {
            State::Off(_) | State::ByPasst(_) => Vec::new(),
            State::On(on) => on.lock().networks.names.iter().cloned().collect(),
        }
    }

    /// Makes a network.
    ///
    /// # Errors
    ///
    /// If the name is not valid or taken, VMs have no networks here, or the list can't be written.
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
    ///
    /// # Errors
    ///
    /// If there is no such network or it can't be removed, the list can't be written, or the kernel
    /// refuses.
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

    /// Checks that there is a network of this name.
    ///
    /// # Errors
    ///
    /// If there is none, or VMs have no networks here.
    pub fn check_name(&self, name: &str) -> Result<()> {
        if let (State::ByPasst(_), DEFAULT) = (&self.0, name) {
            return Ok(());
        }
        let on = self.on()?;
        match name == DEFAULT || on.lock().networks.names.contains(name) {
            true => Ok(()),
            false => Err(no_network(name)),
        }
    }

    fn on(&self) -> Result<&On> {
        match &self.0 {
            State::On(on) => Ok(on),
            State::ByPasst(by) => Err(by.no_networks()),
            State::Off(why) => Err(Error::wrong_state(format!(
                "VMs have no network on this host: {why}."
            ))
            .hint("Omit the network's options, or see `jiffy doctor`.")),
        }
    }
}
