//! The one nftables table that holds all VMs' rules, `inet jiffy`.
//!
//! What holds for every VM is in chains that never change. What a VM is, and may do beside
//! that, is elements of sets and maps keyed by its link and addresses; only a VM with a policy
//! of its own has a chain. So a VM is added and removed in one small transaction, and packets
//! pass as few rules with a thousand VMs as with one.
//!
//! * [`table`]: what is always there.
//! * [`rule`]: how a rule is put together.
//! * [`guest`]: what one VM adds.
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
use crate::policy::Policy;
use crate::policy::publish::Publish;
use crate::{Error, VmId};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;
use table::Base;

/// The table's name.
pub const TABLE: &str = "jiffy";

/// What the table is to know of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestRules {
    /// Which.
    pub vm: VmId,
    /// Its link.
    pub link: u32,
    /// Its address.
    pub v4: Ipv4Addr,
    /// The same of IPv6.
    pub v6: Option<Ipv6Addr>,
    /// The network whose other VMs it sees.
    pub network: Option<String>,
    /// What it may reach.
    pub policy: Policy,
    /// The host's ports that lead to it.
    pub ports: Vec<Publish>,
}

/// What was counted of a VM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counted {
    /// Packets dropped because they were not from the VM's own addresses, or what no VM sends.
    pub spoofed: u64,
    /// Packets refused because the VM may not reach where they were to go.
    pub refused: u64,
}

/// The table, and what is known to be in it.
#[derive(Debug)]
pub struct Rules {
    netfilter: Channel,
    base: Base,
    networks: BTreeSet<String>,
    guests: BTreeMap<VmId, GuestRules>,
}

impl Rules {
    /// Nothing is asked of the kernel yet: [`Rules::replace`] makes the table.
    pub fn new(base: Base) -> Result<Rules, Error> {
        let netfilter = Channel::netfilter()
            .map_err(|error| Error::kernel("opening a netfilter socket")(Refusal::Socket(error)))?;
        Ok(Rules {
            netfilter,
            base,
            networks: BTreeSet::new(),
            guests: BTreeMap::new(),
        })
    }

    /// What holds for all VMs.
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

    /// Makes the table anew, in one step, with these VMs and networks and no others. What was
    /// counted and what names have opened is kept of those that stay.
    pub fn replace(
        &mut self,
        base: Base,
        networks: BTreeSet<String>,
        guests: Vec<GuestRules>,
    ) -> Result<(), Error> {
        self.base = base;
        self.networks = networks;
        self.guests = guests.into_iter().map(|it| (it.vm, it)).collect();
        self.rebuild()
    }

    fn rebuild(&mut self) -> Result<(), Error> {
        let failed = "making the nftables table `inet jiffy`";
        let kept = Kept::read(&mut self.netfilter, &self.guests).map_err(Error::kernel(failed))?;
        let mut changes = Transaction::new(TABLE);
        // It must exist to be deleted.
        changes.add_table(&[]);
        changes.delete_table();
        table::add(&mut changes, &self.base);
        for network in &self.networks {
            policy::add_network(&mut changes, network);
        }
        for guest in self.guests.values() {
            guest::add(&mut changes, guest, kept.counted(guest));
            let names = kept.names.get(&guest.vm).map(Vec::as_slice);
            policy::open_names(&mut changes, guest.vm, names.unwrap_or(&[]));
        }
        let changed = changes.commit(&mut self.netfilter);
        changed.map_err(Error::kernel(failed))
    }

    /// Commits changes to what the model has already. If the table is not as it was left (a
    /// stranger changed or removed it), it is made anew from the model.
    fn commit(&mut self, changes: Transaction, what: &'static str) -> Result<(), Error> {
        match changes.commit(&mut self.netfilter) {
            Err(refusal) if matches!(refusal.errno(), Some(Errno::NOENT | Errno::EXIST)) => {
                tracing::warn!(
                    %refusal,
                    "the nftables table `inet jiffy` is not as it was left: it is made anew"
                );
                self.rebuild()
            }
            other => other.map_err(Error::kernel(what)),
        }
    }

    /// Adds a VM.
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

    /// Removes a VM. One that is not there is no error.
    pub fn remove(&mut self, vm: VmId) -> Result<Option<GuestRules>, Error> {
        let Some(guest) = self.guests.remove(&vm) else {
            return Ok(None);
        };
        let mut changes = Transaction::new(TABLE);
        guest::delete(&mut changes, &guest);
        self.commit(changes, "removing a VM's rules")?;
        Ok(Some(guest))
    }

    /// Gives a VM another policy, network or ports. What it counted stays.
    pub fn change(&mut self, to: GuestRules) -> Result<(), Error> {
        let from = self.guests.get(&to.vm);
        let from = from
            .ok_or_else(|| Error::NotAttached(to.vm.to_string()))?
            .clone();
        let mut changes = Transaction::new(TABLE);
        self.need_network(&mut changes, to.network.as_deref());
        guest::change(&mut changes, &from, &to);
        let vm = to.vm;
        self.guests.insert(vm, to);
        let changed = self.commit(changes, "changing a VM's rules");
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

    /// Removes a network. VMs that are in it are in none from now on.
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

    /// What was counted of a VM.
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
        })
    }

    /// Removes the table. One that is gone is no error.
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

/// The links where the table says that forwarding was turned on for VMs, for IPv4 and IPv6.
pub(crate) fn uplinks(netfilter: &mut Channel) -> Result<[BTreeSet<u32>; 2], Error> {
    let mut links = |set| {
        let found = absent_is_empty(read::elements(netfilter, TABLE, set));
        let found = found.map_err(Error::kernel("reading the nftables table `inet jiffy`"))?;
        let index = |it: &read::FoundElement| Some(u32::from_ne_bytes(it.key[..].try_into().ok()?));
        Ok::<_, Error>(found.iter().filter_map(index).collect())
    };
    Ok([links(table::UPLINKS4)?, links(table::UPLINKS6)?])
}

/// Opens to VMs the addresses that names they may reach have, for as long as the names have
/// them. A channel of its own: no other change of rules is waited for.
#[derive(Debug)]
pub struct NameRules {
    netfilter: Channel,
}

impl NameRules {
    /// Opens a channel in the network namespace of this thread.
    pub fn new() -> Result<NameRules, Error> {
        let netfilter = Channel::netfilter()
            .map_err(|error| Error::kernel("opening a netfilter socket")(Refusal::Socket(error)))?;
        Ok(NameRules { netfilter })
    }

    /// Opens these addresses. A VM that is gone, or has no rule for names any more, is no error.
    pub fn open(&mut self, vm: VmId, addresses: &[(IpAddr, Duration)]) -> Result<(), Error> {
        let mut changes = Transaction::new(TABLE);
        policy::reopen_names(&mut changes, vm, addresses);
        match changes.commit(&mut self.netfilter) {
            Err(refusal) if refusal.errno() == Some(Errno::NOENT) => Ok(()),
            other => other.map_err(Error::kernel("opening what a name has")),
        }
    }
}

/// What is kept of a table that is made anew.
#[derive(Debug, Default)]
struct Kept {
    spoofed: BTreeMap<Vec<u8>, (u64, u64)>,
    refused: BTreeMap<Vec<u8>, (u64, u64)>,
    names: BTreeMap<VmId, Vec<(IpAddr, Duration)>>,
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
        ] {
            let found = absent_is_empty(read::elements(netfilter, TABLE, set))?;
            to.extend(found.into_iter().map(|it| (it.key, it.counted)));
        }
        for guest in guests.values().filter(|it| it.policy.has_domains()) {
            let mut names = Vec::new();
            for set in policy::name_sets(guest.vm) {
                let found = absent_is_empty(read::elements(netfilter, TABLE, &set))?;
                names.extend(found.into_iter().filter_map(|it| {
                    let left = Duration::from_millis(it.expires?);
                    Some((address(&it.key)?, left))
                }));
            }
            kept.names.insert(guest.vm, names);
        }
        Ok(kept)
    }

    fn counted(&self, guest: &GuestRules) -> guest::Counters {
        let link = guest.link.to_ne_bytes();
        guest::Counters {
            spoofed: self.spoofed.get(&link[..]).copied(),
            refused: self.refused.get(&link[..]).copied(),
        }
    }
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
