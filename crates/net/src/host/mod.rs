//! The host's network for VMs.
//!
//! [`Host::open`] reconciles links, routes, neighbours and rules with the records. From then on VMs
//! are attached, changed and detached one at a time.
//!
//! * [`forwarding`]: the host's forwarding settings for VMs.
//! * [`reconcile`]: reconciles what exists with the records.

pub mod forwarding;
mod reconcile;

#[cfg(test)]
mod tests;

use crate::conntrack::{self, Connection};
use crate::firewalls::{self, Blocker};
use crate::identity::{GATEWAY_MAC, both_families};
use crate::links::found::Traffic;
use crate::links::{self, LinkSpec};
use crate::netlink::Channel;
use crate::policy::publish::Publish;
use crate::policy::{Access, Policy, Protocol};
use crate::pool::{Pool, Ranges};
use crate::rules::table::NAME_PORT;
use crate::rules::{Counted, GuestRules, Rules};
use crate::{Cidr, Error, VmId};
use forwarding::Forwarding;
use jiffy_sys::clock::monotonic_ns;
use jiffy_sys::tap::Tap;
use jiffy_wire::mac::Mac;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The operator's settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostOptions {
    /// VMs' IPv4 range; `None` chooses one that overlaps none of the host's routes.
    pub v4: Option<Cidr>,
    /// VMs' IPv6 range; `None` chooses one in the same way.
    pub v6: Option<Cidr>,
    /// Random bytes for the chosen IPv6 range.
    pub seed: [u8; 5],
    /// Whether VMs have IPv6, provided that the host can forward it.
    pub ipv6: bool,
    /// The port of the name server at the gateway's address.
    pub name_port: u16,
    /// Ports of the host that no rule opens to VMs.
    pub never: Vec<u16>,
}

impl Default for HostOptions {
    fn default() -> HostOptions {
        HostOptions {
            v4: None,
            v6: None,
            seed: [0; 5],
            ipv6: true,
            name_port: 53,
            never: Vec::new(),
        }
    }
}

/// The network settings of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestSpec {
    /// Its id.
    pub vm: VmId,
    /// Its IPv4 address, from [`Host::take_address`]. The IPv6 address follows from it.
    pub v4: Ipv4Addr,
    /// The network on which it reaches other VMs.
    pub network: Option<String>,
    /// Its policy.
    pub policy: Policy,
    /// The published ports of the host.
    pub ports: Vec<Publish>,
    /// Its MTU, bytes.
    pub mtu: u32,
    /// Pairs of queues.
    pub queues: u16,
    /// The user who may attach to its TAP.
    pub owner: Option<u32>,
    /// Its TCP ports are not forwarded to it until [`Host::set_asleep`] says so. Only used when it
    /// is attached.
    pub asleep: bool,
}

/// The addresses that a VM's device and guest are given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// The VM's MAC address.
    pub mac: Mac,
    /// The VM's IPv4 address (/32).
    pub v4: Ipv4Addr,
    /// The VM's IPv6 address (/128), if VMs have IPv6.
    pub v6: Option<Ipv6Addr>,
    /// Gateway and name server.
    pub gateway: Ipv4Addr,
    /// Gateway and name server of IPv6.
    pub gateway6: Option<Ipv6Addr>,
    /// The MAC address of both gateways: a guest gets it as a permanent neighbour, because the host
    /// does not answer its ARP requests and neighbour solicitations.
    pub gateway_mac: Mac,
}

impl Addresses {
    /// The VM's own addresses, IPv4 first.
    pub fn own(&self) -> impl Iterator<Item = IpAddr> {
        both_families(self.v4, self.v6)
    }

    /// The addresses of its gateway and name server, IPv4 first.
    pub fn gateways(&self) -> impl Iterator<Item = IpAddr> {
        both_families(self.gateway, self.gateway6)
    }
}

/// An attached VM. The TAP exists as long as one of its descriptors is open.
#[derive(Debug)]
pub struct Attached {
    /// A descriptor for each pair of queues, and the link's index.
    pub tap: Tap,
    /// The addresses of its device and guest.
    pub addresses: Addresses,
    /// When its creation began, when its link was ready, and when its rules were (host
    /// CLOCK_MONOTONIC).
    pub times_ns: [u64; 3],
}

/// The result of reconciling.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// VMs' addresses.
    pub ranges: Ranges,
    /// Names of removed links that belonged to no VM.
    pub removed_links: Vec<String>,
    /// Number of removed routes and neighbours that belonged to no VM.
    pub removed_routes: usize,
    /// Number of deleted tracked connections of unused addresses.
    pub forgotten: usize,
    /// VMs without a link: they must be attached.
    pub without_link: Vec<VmId>,
    /// VMs whose address is outside of the range, or another VM's, too. Only [`Host::open`] looks for
    /// them.
    pub displaced: Vec<VmId>,
    /// Settings under /proc/sys/net that were made for VMs, as `sysctl` writes them.
    pub settings: Vec<String>,
    /// Why VMs have no IPv6, if they have none.
    pub no_ipv6: Option<&'static str>,
    /// Other firewalls' chains that drop VMs' packets.
    pub blockers: Vec<Blocker>,
}

/// The host's network for VMs.
#[derive(Debug)]
pub struct Host {
    options: HostOptions,
    route: Channel,
    netfilter: Channel,
    rules: Rules,
    pool: Pool,
    forwarding: Forwarding,
    /// Addresses whose tracked connections are still to be deleted.
    released: BTreeSet<IpAddr>,
}

impl Host {
    /// Opens the network and reconciles it with `guests` and `networks`.
    ///
    /// # Errors
    ///
    /// If there is no free range for VMs or it overlaps a route, without CAP_NET_ADMIN, or if the
    /// kernel refuses a link, a route, a rule or a setting.
    pub fn open(
        options: HostOptions,
        guests: &[GuestSpec],
        networks: &BTreeSet<String>,
    ) -> Result<(Host, Report), Error> {
        reconcile::open(options, guests, networks)
    }

    /// Reconciles an open network again, after another program may have changed something or the
    /// host's routes have changed.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to list or change links, routes, rules or settings; those changed
    /// before stay changed.
    pub fn reconcile(
        &mut self,
        guests: &[GuestSpec],
        networks: &BTreeSet<String>,
    ) -> Result<Report, Error> {
        reconcile::run(self, guests, networks)
    }

    /// Restores the rules if another program has removed them, and the forwarding settings, also
    /// for links that the host's routes use only now. Links, routes and connections of VMs stay as
    /// they are. True if there was something to restore.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to list links and routes, or to change the rules or a setting.
    pub fn reconcile_rules(&mut self) -> Result<bool, Error> {
        reconcile::rules(self)
    }

    /// Number of attached VMs.
    pub fn attached(&self) -> usize {
        self.rules.guests().count()
    }

    /// VMs' addresses.
    pub fn ranges(&self) -> Ranges {
        self.pool.ranges()
    }

    /// An address for a new VM.
    ///
    /// # Errors
    ///
    /// If all addresses are in use, or the tracked connections of the address can't be deleted.
    pub fn take_address(&mut self) -> Result<Ipv4Addr, Error> {
        let address = self.pool.take()?;
        // Tracked connections of the address must not be taken for the new VM's.
        if self.released.contains(&IpAddr::V4(address)) {
            self.forget_released()?;
        }
        Ok(address)
    }

    /// Frees the address of a removed VM. Its tracked connections are deleted by
    /// [`Host::forget_released`], also if the VM lost its link before this network was opened and
    /// was not attached since.
    pub fn free_address(&mut self, address: Ipv4Addr) {
        self.pool.free(address);
        self.released.insert(address.into());
        self.released.insert(self.ranges().v6_of(address).into());
    }

    /// Creates a VM's link and rules. Its address must be reserved by [`Host::take_address`] or
    /// [`Host::open`].
    ///
    /// # Errors
    ///
    /// If the VM is attached already, another VM has its address or one of its ports, it publishes
    /// IPv6 ports on a host without IPv6, or the kernel refuses its link or rules.
    pub fn attach(&mut self, spec: &GuestSpec) -> Result<Attached, Error> {
        let begun_ns = monotonic_ns();
        let taken = |it: &&GuestRules| it.v4 == spec.v4 || it.vm == spec.vm;
        if self.rules.guests().any(|it| taken(&it)) {
            return Err(Error::AddressTaken(spec.v4));
        }
        self.check_ports(spec)?;
        if self.released.contains(&IpAddr::V4(spec.v4)) {
            self.forget_released()?;
        }
        let link = self.link_spec(spec);
        let ranges = self.ranges();
        let tap = links::create(&mut self.route, &link, ranges)?;
        // A link without rules reaches nothing. After an error it is removed by closing its
        // descriptors.
        self.forwarding.link_made(&link.vm.link())?;
        let linked_ns = monotonic_ns();
        self.rules.add(self.guest_rules(spec, tap.index))?;
        Ok(Attached {
            tap,
            addresses: self.addresses(spec),
            times_ns: [begun_ns, linked_ns, monotonic_ns()],
        })
    }

    /// Creates the link of a VM again. The address stays the same, so its connections continue.
    ///
    /// # Errors
    ///
    /// If the old link or rules can't be removed, or for the reasons of [`Host::attach`].
    pub fn attach_again(&mut self, spec: &GuestSpec) -> Result<Attached, Error> {
        if let Some(guest) = self.rules.remove(spec.vm)? {
            links::remove(&mut self.route, guest.link)?;
        }
        for address in both_families(spec.v4, self.v6(spec)) {
            self.released.remove(&address);
        }
        self.attach(spec)
    }

    /// Checks that the host's ports can be published, and are published for no other VM.
    fn check_ports(&self, spec: &GuestSpec) -> Result<(), Error> {
        for port in &spec.ports {
            if port.address.is_ipv6() && !self.forwarding.ipv6() {
                return Err(Error::PortWithoutIpv6(port.to_string()));
            }
            let others = self.rules.guests().filter(|it| it.vm != spec.vm);
            if others.flat_map(|it| &it.ports).any(|it| it.collides(port)) {
                return Err(Error::Port(
                    port.to_string(),
                    "another VM publishes one of these ports",
                ));
            }
        }
        Ok(())
    }

    /// Removes a VM's link and rules. Its address stays reserved. It is no error if the VM is not
    /// attached.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to remove the rules or the link.
    pub fn detach(&mut self, vm: VmId) -> Result<(), Error> {
        let Some(guest) = self.rules.remove(vm)? else {
            return Ok(());
        };
        self.released.insert(guest.v4.into());
        self.released.extend(guest.v6.map(IpAddr::from));
        links::remove(&mut self.route, guest.link)
    }

    /// Deletes the tracked connections of released addresses. Returns their number. It reads all
    /// connections of the host, so it is done for many VMs at once: in the background, and at the
    /// latest before an address is reused.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to list or delete them; the addresses stay to be done.
    pub fn forget_released(&mut self) -> Result<usize, Error> {
        if self.released.is_empty() {
            return Ok(0);
        }
        let released = &self.released;
        let of_one = |it: &Connection| {
            [it.source, it.destination, it.answers]
                .iter()
                .any(|it| released.contains(it))
        };
        let forgotten = conntrack::forget(&mut self.netfilter, of_one)?;
        self.released.clear();
        Ok(forgotten)
    }

    /// Changes the policy, network and ports of an attached VM. Connections that are forbidden now
    /// and were permitted before are cut.
    ///
    /// # Errors
    ///
    /// If the VM is not attached, its new ports can't be published, or the kernel refuses the new
    /// rules or the deletion of connections.
    pub fn change(&mut self, spec: &GuestSpec) -> Result<(), Error> {
        let old = self.rules.guest(spec.vm).cloned();
        let old = old.ok_or_else(|| Error::NotAttached(spec.vm.to_string()))?;
        self.check_ports(spec)?;
        let new = GuestRules {
            asleep: old.asleep,
            ..self.guest_rules(spec, old.link)
        };
        if loopback(&new.ports) && !loopback(&old.ports) {
            let (link, ranges) = (self.link_spec(spec), self.ranges());
            links::configure(&mut self.route, &link, old.link, ranges)?;
        }
        self.rules.change(new.clone())?;
        // The kernel walks its whole table of connections for a list of them.
        match permits_all_of(&new, &old) {
            true => Ok(()),
            false => self.delete_forbidden(&new),
        }
    }

    /// Whether an attached VM sleeps. If it does, new connections and all datagrams to its ports go to
    /// the sockets that hold the ports instead of to the VM. Open connections stay as they are.
    ///
    /// # Errors
    ///
    /// If the VM is not attached, or the kernel refuses the new rules or the deletion of tracked
    /// datagrams.
    pub fn set_asleep(&mut self, vm: VmId, asleep: bool) -> Result<(), Error> {
        let guest = self.rules.guest(vm).cloned();
        let guest = guest.ok_or_else(|| Error::NotAttached(vm.to_string()))?;
        if guest.asleep == asleep {
            return Ok(());
        }
        let forgets = asleep && guest.ports.iter().any(|it| it.protocol == Protocol::Udp);
        let own = [Some(guest.v4.into()), guest.v6.map(IpAddr::from)];
        self.rules.change(GuestRules { asleep, ..guest })?;
        if forgets {
            // Later datagrams of a tracked flow would be translated as the first one was.
            conntrack::forget(&mut self.netfilter, |it| {
                it.protocol == Protocol::Udp.number()
                    && it.answers != it.destination
                    && own.contains(&Some(it.answers))
            })?;
        }
        Ok(())
    }

    /// The rules of an attached VM.
    pub fn guest(&self, vm: VmId) -> Option<&GuestRules> {
        self.rules.guest(vm)
    }

    /// Number of open TCP connections to published ports, for each VM that has some. Reads all
    /// tracked connections of the host.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to list the connections.
    pub fn open_connections(&mut self) -> Result<BTreeMap<VmId, usize>, Error> {
        let guests = self.rules.guests();
        let owners: BTreeMap<IpAddr, VmId> = guests
            .flat_map(|it| both_families(it.v4, it.v6).map(|own| (own, it.vm)))
            .collect();
        let mut open = BTreeMap::new();
        for address in conntrack::translated(&mut self.netfilter)? {
            if let Some(vm) = owners.get(&address) {
                *open.entry(*vm).or_default() += 1;
            }
        }
        Ok(open)
    }

    /// Removes a network: its VMs can no longer reach each other. It is no error if the network
    /// does not exist.
    ///
    /// # Errors
    ///
    /// If the kernel refuses the new rules or the deletion of connections.
    pub fn remove_network(&mut self, name: &str) -> Result<(), Error> {
        let members = self.rules.guests();
        let members = members.filter(|it| it.network.as_deref() == Some(name));
        let members: Vec<VmId> = members.map(|it| it.vm).collect();
        self.rules.remove_network(name)?;
        for vm in members {
            if let Some(guest) = self.rules.guest(vm).cloned() {
                self.delete_forbidden(&guest)?;
            }
        }
        Ok(())
    }

    /// A VM's traffic, and the counters of its rules.
    ///
    /// # Errors
    ///
    /// If the VM is not attached, or the kernel refuses to read its counters.
    pub fn counters(&mut self, vm: VmId) -> Result<(Traffic, Counted), Error> {
        let stopped = self.rules.counted(vm)?;
        let link = self.rules.guest(vm).map_or(0, |it| it.link);
        let traffic = links::found::traffic(&mut self.route, link)?;
        Ok((traffic, stopped))
    }

    /// The addresses that a VM's device and guest are given.
    pub fn addresses(&self, spec: &GuestSpec) -> Addresses {
        let ranges = self.ranges();
        Addresses {
            mac: spec.vm.mac(),
            v4: spec.v4,
            v6: self.v6(spec),
            gateway: ranges.gateway(),
            gateway6: self.forwarding.ipv6().then(|| ranges.gateway6()),
            gateway_mac: GATEWAY_MAC,
        }
    }

    /// Removes everything: links, routes, rules, settings.
    ///
    /// # Errors
    ///
    /// If the kernel refuses one of the removals; the later ones are not tried then.
    pub fn uninstall(mut self) -> Result<(), Error> {
        self.rules.uninstall()?;
        self.forwarding.unset()?;
        for link in links::found::links(&mut self.route)? {
            if links::is_ours(&link) {
                links::remove(&mut self.route, link.index)?;
            }
        }
        links::remove_routes(&mut self.route, None)?;
        let (v4, v6) = (self.ranges().v4(), self.ranges().v6());
        let ours = |it: &IpAddr| v4.contains(*it) || v6.contains(*it);
        conntrack::forget(&mut self.netfilter, |it| {
            [it.source, it.destination, it.answers].iter().any(ours)
        })?;
        Ok(())
    }

    /// Chains of other firewalls that drop VMs' packets.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to list the chains.
    pub fn blockers(&mut self) -> Result<Vec<Blocker>, Error> {
        firewalls::find(&mut self.netfilter)
    }

    /// Deletes the tracked connections that a VM may not have.
    fn delete_forbidden(&mut self, guest: &GuestRules) -> Result<(), Error> {
        let ranges = self.ranges();
        let mine = |it: IpAddr| both_families(guest.v4, guest.v6).any(|own| own == it);
        let peers: BTreeSet<IpAddr> = self
            .rules
            .guests()
            .filter(|it| it.network.is_some() && it.network == guest.network)
            .flat_map(|it| both_families(it.v4, it.v6))
            .collect();
        let opened = self.rules.opened(guest.vm)?;
        let by_name = |to: IpAddr, it: &Connection| {
            let opens = |(address, at): &(IpAddr, Access)| {
                *address == to && at.covers(it.protocol, it.port)
            };
            opened.iter().any(opens)
        };
        let is_vm = |it: IpAddr| ranges.v4().contains(it) || ranges.v6().contains(it);
        let gateway = |it: IpAddr| it == ranges.gateway() || it == ranges.gateway6();
        let own = links::found::all_addresses(&mut self.route)?;
        let own: BTreeSet<IpAddr> = own.into_iter().map(|(_, address, _)| address).collect();
        let unwanted = |it: &Connection| {
            if mine(it.source) {
                let permitted = match it.answers {
                    to if gateway(to) && it.port == NAME_PORT => true,
                    to if gateway(to) || own.contains(&to) => {
                        guest.policy.permits_host(it.protocol, it.port)
                    }
                    to if is_vm(to) => peers.contains(&to),
                    to => guest.policy.permits(to, it.protocol, it.port) || by_name(to, it),
                };
                return !permitted;
            }
            if !mine(it.answers) {
                return false;
            }
            if is_vm(it.source) {
                return !gateway(it.source) && !peers.contains(&it.source);
            }
            // The connection's port is not published any more.
            !mine(it.destination) && !guest.ports.iter().any(|port| is_published_by(port, it))
        };
        conntrack::forget(&mut self.netfilter, unwanted)?;
        Ok(())
    }

    fn v6(&self, spec: &GuestSpec) -> Option<Ipv6Addr> {
        self.forwarding.ipv6().then(|| self.ranges().v6_of(spec.v4))
    }

    fn link_spec(&self, spec: &GuestSpec) -> LinkSpec {
        LinkSpec {
            vm: spec.vm,
            v4: spec.v4,
            v6: self.v6(spec),
            mtu: spec.mtu,
            queues: spec.queues,
            owner: spec.owner,
            loopback: loopback(&spec.ports),
        }
    }

    fn guest_rules(&self, spec: &GuestSpec, link: u32) -> GuestRules {
        GuestRules {
            vm: spec.vm,
            link,
            v4: spec.v4,
            v6: self.v6(spec),
            network: spec.network.clone(),
            policy: spec.policy.clone(),
            ports: spec.ports.clone(),
            asleep: spec.asleep,
        }
    }
}

/// Whether a port is published on a loopback address.
fn loopback(ports: &[Publish]) -> bool {
    let reaches = |it: &Publish| it.address.is_loopback() || it.address.is_unspecified();
    ports.iter().any(|it| it.address.is_ipv4() && reaches(it))
}

/// Whether a VM may have all connections under `new` that it may have under `old`.
fn permits_all_of(new: &GuestRules, old: &GuestRules) -> bool {
    let network = old.network.is_none() || old.network == new.network;
    network && old.policy == new.policy && old.ports.iter().all(|port| new.ports.contains(port))
}

fn is_published_by(port: &Publish, connection: &Connection) -> bool {
    let host = port.host..=port.host + (port.count - 1);
    port.protocol.number() == connection.protocol && host.contains(&connection.port)
}

/// `guests` by VM.
fn by_vm(guests: &[GuestSpec]) -> BTreeMap<VmId, &GuestSpec> {
    guests.iter().map(|it| (it.vm, it)).collect()
}
