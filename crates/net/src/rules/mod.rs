//! The nftables table with all VMs' rules, `inet jiffy`.
//!
//! The rules for every VM are in chains that never change. Differences between VMs are elements of
//! sets and maps, keyed by link and addresses; only a VM with a policy of its own has a chain. So a
//! VM is added and removed in one small transaction, and the number of rules that a packet passes
//! does not grow with the number of VMs.
//!
//! * [`table`]: the chains and sets for all VMs.
//! * [`rule`]: builds a rule.
//! * [`guest`]: the elements and chains of one VM.
//! * [`policy`]: a VM's own chains.
//! * [`ports`]: published ports.

mod guest;
mod policy;
mod ports;
mod rule;
pub mod table;

use crate::netlink::{Channel, Refusal};
use crate::nft::read;
use crate::nft::{Element, Transaction};
use crate::policy::publish::Publish;
use crate::policy::{Access, Policy};
use crate::{Error, VmId};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;
use table::Base;

/// The table's name.
pub const TABLE: &str = "jiffy";

/// The part of the table for one VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestRules {
    /// Its id.
    pub vm: VmId,
    /// Its link.
    pub link: u32,
    /// Its IPv4 address.
    pub v4: Ipv4Addr,
    /// Its IPv6 address.
    pub v6: Option<Ipv6Addr>,
    /// The network on which it reaches other VMs.
    pub network: Option<String>,
    /// Its policy.
    pub policy: Policy,
    /// The published ports of the host.
    pub ports: Vec<Publish>,
    /// Its TCP ports are not forwarded now: connections go to the sockets that hold the ports.
    pub asleep: bool,
}

/// The counters of a VM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counted {
    /// Packets dropped because their source was not the VM's own address, or because VMs must not
    /// send such packets.
    pub spoofed: u64,
    /// Packets refused because the VM may not reach their destination.
    pub refused: u64,
    /// Packets dropped because of the VM's limits ([`table`]).
    pub limited: u64,
}

/// The table, and a model of its contents.
#[derive(Debug)]
pub struct Rules {
    netfilter: Channel,
    base: Base,
    networks: BTreeSet<String>,
    guests: BTreeMap<VmId, GuestRules>,
}

impl Rules {
    /// Does not change anything yet: [`Rules::replace`] creates the table.
    ///
    /// # Errors
    ///
    /// If a netlink socket can't be opened.
    pub fn new(base: Base) -> Result<Rules, Error> {
        Ok(Rules {
            netfilter: netfilter()?,
            base,
            networks: BTreeSet::new(),
            guests: BTreeMap::new(),
        })
    }

    /// The settings for all VMs.
    pub fn base(&self) -> &Base {
        &self.base
    }

    /// The VM's part.
    pub fn guest(&self, vm: VmId) -> Option<&GuestRules> {
        self.guests.get(&vm)
    }

    /// All VMs.
    pub fn guests(&self) -> impl Iterator<Item = &GuestRules> {
        self.guests.values()
    }

    /// Replaces the table atomically, with exactly these VMs and networks. The counters and opened
    /// names of VMs that stay are kept.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to read the old table or to create the new one; the old one stays
    /// then.
    pub fn replace(
        &mut self,
        base: Base,
        networks: BTreeSet<String>,
        guests: Vec<GuestRules>,
    ) -> Result<(), Error> {
        self.base = base;
        self.networks = networks;
        self.guests = guests.into_iter().map(|it| (it.vm, it)).collect();
        self.rebuild(&|_, _| true)
    }

    /// Whether the table has all chains, their rules, and all VMs. Reads a little of it, however
    /// many rules VMs have.
    fn is_whole(&mut self) -> Result<bool, Refusal> {
        for chain in table::CHAINS {
            if absent_is_empty(read::rules(&mut self.netfilter, TABLE, chain))? == 0 {
                return Ok(false);
            }
        }
        let mut chains: BTreeSet<String> = BTreeSet::new();
        for found in read::chains(&mut self.netfilter)? {
            if found.table == TABLE {
                chains.insert(found.name);
            }
        }
        let mut own = self.guests.values().map(policy::chain);
        if !own.all(|it| chains.contains(&*it)) {
            return Ok(false);
        }
        let there = absent_is_empty(read::elements(&mut self.netfilter, TABLE, table::GUESTS))?;
        let there: BTreeSet<Vec<u8>> = there.into_iter().map(|it| it.key).collect();
        let wanted = self
            .guests
            .values()
            .map(|it| it.link.to_ne_bytes().to_vec());
        Ok(there == wanted.collect())
    }

    /// Creates the table again if another program has removed it or a part of it, or if the
    /// settings for all VMs are other ones now. True if it did.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to read the table or to create it again.
    pub fn reconcile(&mut self, base: Base) -> Result<bool, Error> {
        let whole = self.is_whole();
        let whole = whole.map_err(Error::kernel("reading the nftables table `inet jiffy`"))?;
        if whole && base == self.base {
            return Ok(false);
        }
        self.base = base;
        self.rebuild(&|_, _| true).map(|()| true)
    }

    /// Creates the table again from the model. Addresses that were opened by names stay open where
    /// `stays` returns true.
    fn rebuild(&mut self, stays: &dyn Fn(VmId, Access) -> bool) -> Result<(), Error> {
        let failed = "creating the nftables table `inet jiffy`";
        let mut kept =
            Kept::read(&mut self.netfilter, &self.guests).map_err(Error::kernel(failed))?;
        kept.names.retain(|(vm, at), _| stays(*vm, *at));
        let mut changes = Transaction::new(TABLE);
        // The table must exist to be deleted.
        changes.add_table(&[]);
        changes.delete_table();
        table::add(&mut changes, &self.base);
        for network in &self.networks {
            policy::add_network(&mut changes, network);
        }
        for guest in self.guests.values() {
            guest::add(&mut changes, guest, kept.counted(guest));
        }
        for ((vm, at), opened) in &kept.names {
            policy::open_names(&mut changes, *vm, *at, opened);
        }
        let changed = changes.commit(&mut self.netfilter);
        changed.map_err(Error::kernel(failed))
    }

    /// Commits changes that the model already contains. If that fails because another program
    /// changed or removed the table, the table is rebuilt from the model.
    fn commit(&mut self, changes: Transaction, what: &'static str) -> Result<(), Error> {
        self.commit_keeping(changes, what, &|_, _| true)
    }

    fn commit_keeping(
        &mut self,
        changes: Transaction,
        what: &'static str,
        stays: &dyn Fn(VmId, Access) -> bool,
    ) -> Result<(), Error> {
        match changes.commit(&mut self.netfilter) {
            Err(refusal) if matches!(refusal.errno(), Some(Errno::NOENT | Errno::EXIST)) => {
                tracing::warn!(
                    %refusal,
                    "another program changed the nftables table `inet jiffy`: it is created again"
                );
                self.rebuild(stays)
            }
            other => other.map_err(Error::kernel(what)),
        }
    }

    /// Adds a VM.
    ///
    /// # Errors
    ///
    /// If the kernel refuses its rules; the VM is not added then.
    pub fn add(&mut self, guest: GuestRules) -> Result<(), Error> {
        let mut changes = Transaction::new(TABLE);
        self.need_network(&mut changes, guest.network.as_deref());
        guest::add(&mut changes, &guest, guest::Counters::default());
        let vm = guest.vm;
        self.guests.insert(vm, guest);
        let added = self.commit(changes, "adding a VM's rules");
        if added.is_err() {
            self.guests.remove(&vm);
        }
        added
    }

    /// Removes a VM. It is no error if the VM does not exist.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to delete its rules; [`Rules::guest`] no longer has the VM then.
    pub fn remove(&mut self, vm: VmId) -> Result<Option<GuestRules>, Error> {
        let Some(guest) = self.guests.remove(&vm) else {
            return Ok(None);
        };
        let mut changes = Transaction::new(TABLE);
        guest::delete(&mut changes, &guest);
        self.commit(changes, "removing a VM's rules")?;
        Ok(Some(guest))
    }

    /// Changes a VM's policy, network or ports. Its counters are kept.
    ///
    /// # Errors
    ///
    /// If the VM was not added, or the kernel refuses the new rules; the old ones stay then.
    pub fn change(&mut self, to: GuestRules) -> Result<(), Error> {
        let from = self.guests.get(&to.vm);
        let from = from
            .ok_or_else(|| Error::NotAttached(to.vm.to_string()))?
            .clone();
        let mut changes = Transaction::new(TABLE);
        self.need_network(&mut changes, to.network.as_deref());
        guest::change(&mut changes, &from, &to);
        let vm = to.vm;
        let stay = policy::staying(&from.policy, &to.policy);
        self.guests.insert(vm, to);
        let stays = |of, at: Access| of != vm || stay.contains(&at);
        let changed = self.commit_keeping(changes, "changing a VM's rules", &stays);
        if changed.is_err() {
            self.guests.insert(vm, from);
        }
        changed
    }

    fn need_network(&mut self, changes: &mut Transaction, network: Option<&str>) {
        if let Some(name) = network
            && self.networks.insert(name.to_owned())
        {
            policy::add_network(changes, name);
        }
    }

    /// Removes a network. Its VMs have no network from then on.
    ///
    /// # Errors
    ///
    /// If the kernel refuses the new rules.
    pub fn remove_network(&mut self, name: &str) -> Result<(), Error> {
        let members = self
            .guests
            .values()
            .filter(|it| it.network.as_deref() == Some(name));
        let members: Vec<GuestRules> = members.cloned().collect();
        for mut guest in members {
            guest.network = None;
            self.change(guest)?;
        }
        if !self.networks.remove(name) {
            return Ok(());
        }
        let mut changes = Transaction::new(TABLE);
        policy::delete_network(&mut changes, name);
        self.commit(changes, "removing a network")
    }

    /// The addresses that names have opened to a VM, with their ports.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to list a set of addresses.
    pub fn opened(&mut self, vm: VmId) -> Result<Vec<(IpAddr, Access)>, Error> {
        let Some(guest) = self.guests.get(&vm) else {
            return Ok(Vec::new());
        };
        let mut opened = Vec::new();
        for at in guest.policy.named().into_keys() {
            let found = opened_names(&mut self.netfilter, vm, at);
            let found = found.map_err(Error::kernel("reading the addresses of allowed names"))?;
            opened.extend(found.into_iter().map(|(address, _)| (address, at)));
        }
        Ok(opened)
    }

    /// The counters of a VM.
    ///
    /// # Errors
    ///
    /// If the VM was not added, or the kernel refuses to read a counter.
    pub fn counted(&mut self, vm: VmId) -> Result<Counted, Error> {
        let guest = self.guests.get(&vm);
        let link = guest
            .ok_or_else(|| Error::NotAttached(vm.to_string()))?
            .link;
        let mut packets = |set| {
            let found = read::element(&mut self.netfilter, TABLE, set, &link.to_ne_bytes());
            let found = found.map_err(Error::kernel("reading a VM's counters"))?;
            Ok::<u64, Error>(found.map_or(0, |it| it.counted.1))
        };
        Ok(Counted {
            spoofed: packets(table::SPOOFED)?,
            refused: packets(table::REFUSED)?,
            limited: packets(table::LIMITED)?,
        })
    }

    /// Removes the table. It is no error if the table does not exist.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to delete the table.
    pub fn uninstall(&mut self) -> Result<(), Error> {
        self.guests.clear();
        self.networks.clear();
        let mut changes = Transaction::new(TABLE);
        changes.add_table(&[]);
        changes.delete_table();
        let removed = changes.commit(&mut self.netfilter);
        removed.map_err(Error::kernel("removing the nftables table `inet jiffy`"))
    }
}

/// The links of VMs that the table of this network namespace has rules for.
///
/// # Errors
///
/// If a netlink socket can't be opened, or the kernel refuses to read the table.
pub fn linked() -> Result<BTreeSet<u32>, Error> {
    indexes(&mut netfilter()?, table::GUESTS)
}

/// The links with forwarding enabled for VMs, according to the table: for IPv4 and IPv6.
pub(crate) fn uplinks(netfilter: &mut Channel) -> Result<[BTreeSet<u32>; 2], Error> {
    Ok([
        indexes(netfilter, table::UPLINKS4)?,
        indexes(netfilter, table::UPLINKS6)?,
    ])
}

/// The links in this set of the table.
fn indexes(netfilter: &mut Channel, set: &str) -> Result<BTreeSet<u32>, Error> {
    let found = absent_is_empty(read::elements(netfilter, TABLE, set));
    let found = found.map_err(Error::kernel("reading the nftables table `inet jiffy`"))?;
    let index = |it: &read::FoundElement| Some(u32::from_ne_bytes(it.key[..].try_into().ok()?));
    Ok(found.iter().filter_map(index).collect())
}

/// A netlink socket in the network namespace of this thread.
pub(crate) fn netfilter() -> Result<Channel, Error> {
    Channel::netfilter()
        .map_err(|error| Error::kernel("opening a netfilter socket")(Refusal::Socket(error)))
}

/// Opens addresses of allowed names to VMs until their TTLs expire. It has its own netlink channel,
/// so that it does not wait for other changes of rules.
#[derive(Debug)]
pub struct NameRules {
    netfilter: Channel,
}

impl NameRules {
    /// Opens a channel in the network namespace of this thread.
    ///
    /// # Errors
    ///
    /// If a netlink socket can't be opened.
    pub fn new() -> Result<NameRules, Error> {
        Ok(NameRules {
            netfilter: netfilter()?,
        })
    }

    /// Opens these addresses at these ports. It is no error if the VM does not exist, or has no
    /// rule about names with these ports any more.
    ///
    /// # Errors
    ///
    /// If the kernel refuses, for a reason other than that the set does not exist.
    pub fn open(
        &mut self,
        vm: VmId,
        at: Access,
        addresses: &[(IpAddr, Duration)],
    ) -> Result<(), Error> {
        let mut changes = Transaction::new(TABLE);
        policy::reopen_names(&mut changes, vm, at, addresses);
        match changes.commit(&mut self.netfilter) {
            Err(refusal) if refusal.errno() == Some(Errno::NOENT) => Ok(()),
            other => other.map_err(Error::kernel("opening the addresses of an allowed name")),
        }
    }
}

/// State that is kept when a table is replaced.
#[derive(Debug, Default)]
struct Kept {
    spoofed: BTreeMap<Vec<u8>, (u64, u64)>,
    refused: BTreeMap<Vec<u8>, (u64, u64)>,
    limited: BTreeMap<Vec<u8>, (u64, u64)>,
    names: BTreeMap<(VmId, Access), Vec<(IpAddr, Duration)>>,
}

impl Kept {
    fn read(netfilter: &mut Channel, guests: &BTreeMap<VmId, GuestRules>) -> Result<Kept, Refusal> {
        if read::userdata(netfilter, TABLE)?.is_none() {
            return Ok(Kept::default());
        }
        let mut kept = Kept::default();
        for (set, to) in [
            (table::SPOOFED, &mut kept.spoofed),
            (table::REFUSED, &mut kept.refused),
            (table::LIMITED, &mut kept.limited),
        ] {
            let found = absent_is_empty(read::elements(netfilter, TABLE, set))?;
            to.extend(found.into_iter().map(|it| (it.key, it.counted)));
        }
        for guest in guests.values() {
            for at in guest.policy.named().into_keys() {
                let opened = opened_names(netfilter, guest.vm, at)?;
                kept.names.insert((guest.vm, at), opened);
            }
        }
        Ok(kept)
    }

    fn counted(&self, guest: &GuestRules) -> guest::Counters {
        let link = guest.link.to_ne_bytes();
        guest::Counters {
            spoofed: self.spoofed.get(&link[..]).copied(),
            refused: self.refused.get(&link[..]).copied(),
            limited: self.limited.get(&link[..]).copied(),
        }
    }
}

/// The addresses that names have opened to a VM at these ports, with the time that is left.
fn opened_names(
    netfilter: &mut Channel,
    vm: VmId,
    at: Access,
) -> Result<Vec<(IpAddr, Duration)>, Refusal> {
    let mut opened = Vec::new();
    for set in policy::name_sets(vm, at) {
        let found = absent_is_empty(read::elements(netfilter, TABLE, &set))?;
        opened.extend(found.into_iter().filter_map(|it| {
            let left = Duration::from_millis(it.expires?);
            Some((address(&it.key)?, left))
        }));
    }
    Ok(opened)
}

fn absent_is_empty<T: Default>(found: Result<T, Refusal>) -> Result<T, Refusal> {
    match found {
        Err(refusal) if refusal.errno() == Some(Errno::NOENT) => Ok(T::default()),
        other => other,
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(v4) = <[u8; 4]>::try_from(bytes) {
        return Some(IpAddr::from(v4));
    }
    Some(IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?))
}

fn link_element(link: u32) -> Element {
    Element::new(link.to_ne_bytes())
}
