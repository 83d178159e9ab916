//! The elements and chains of one VM in the table.

use super::table;
use super::{GuestRules, link_element, policy, ports};
use crate::nft::{Element, Transaction, Verdict};
use crate::policy::Access;
use std::borrow::Cow;
use std::collections::BTreeSet;

/// The counters of a VM before the table was replaced: bytes and packets.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counters {
    pub spoofed: Option<(u64, u64)>,
    pub refused: Option<(u64, u64)>,
    pub limited: Option<(u64, u64)>,
}

pub(super) fn add(to: &mut Transaction, guest: &GuestRules, counters: Counters) {
    to.add_elements(table::SOURCES4, &[source4(guest)]);
    if let Some(source) = source6(guest) {
        to.add_elements(table::SOURCES6, &[source]);
    }
    for (set, counted) in [
        (table::SPOOFED, counters.spoofed),
        (table::REFUSED, counters.refused),
        (table::LIMITED, counters.limited),
    ] {
        let link = Element {
            counted,
            ..link_element(guest.link)
        };
        to.add_elements(set, &[link]);
    }
    for set in table::RATES {
        to.add_elements(set, &[link_element(guest.link)]);
    }
    add_dispatch(to, guest, &BTreeSet::new());
    ports::add(to, guest);
}

pub(super) fn delete(to: &mut Transaction, guest: &GuestRules) {
    ports::delete(to, guest);
    delete_dispatch(to, guest, &BTreeSet::new());
    let counters = [table::SPOOFED, table::REFUSED, table::LIMITED];
    for set in counters.into_iter().chain(table::RATES) {
        to.delete_elements(set, &[link_element(guest.link)]);
    }
    if let Some(source) = source6(guest) {
        to.delete_elements(table::SOURCES6, &[source]);
    }
    to.delete_elements(table::SOURCES4, &[source4(guest)]);
}

/// Changes the policy, network and ports of a VM whose link stays the same. Addresses that were
/// opened by names stay open as far as all these names are still allowed.
pub(super) fn change(to: &mut Transaction, from: &GuestRules, into: &GuestRules) {
    if from.ports != into.ports || from.asleep != into.asleep {
        ports::delete(to, from);
        ports::add(to, into);
    }
    if from.policy != into.policy || from.network != into.network {
        let stay = policy::staying(&from.policy, &into.policy);
        delete_dispatch(to, from, &stay);
        add_dispatch(to, into, &stay);
    }
}

/// Adds the VM's chains, and the map elements that lead from its link to them. The sets of names in
/// `there` exist.
fn add_dispatch(to: &mut Transaction, guest: &GuestRules, there: &BTreeSet<Access>) {
    policy::add_chains(to, guest, there);
    let leads = |to: &mut Transaction, map, chain: Cow<'static, str>| {
        let element = Element {
            verdict: Some(Verdict::Goto(chain)),
            ..link_element(guest.link)
        };
        to.add_elements(map, &[element]);
    };
    leads(to, table::GUESTS, policy::chain(guest));
    if let Some(chain) = policy::host_chain(guest) {
        leads(to, table::HOST_ACCESS, chain.into());
    }
    if let Some(network) = &guest.network {
        to.add_elements(&policy::members(network), &[link_element(guest.link)]);
    }
}

fn delete_dispatch(to: &mut Transaction, guest: &GuestRules, stay: &BTreeSet<Access>) {
    if let Some(network) = &guest.network {
        to.delete_elements(&policy::members(network), &[link_element(guest.link)]);
    }
    to.delete_elements(table::GUESTS, &[link_element(guest.link)]);
    if policy::host_chain(guest).is_some() {
        to.delete_elements(table::HOST_ACCESS, &[link_element(guest.link)]);
    }
    policy::delete_chains(to, guest, stay);
}

fn source4(guest: &GuestRules) -> Element {
    source(guest, &guest.v4.octets())
}

fn source6(guest: &GuestRules) -> Option<Element> {
    guest.v6.map(|it| source(guest, &it.octets()))
}

/// The key of link, MAC and address, each in whole registers.
fn source(guest: &GuestRules, address: &[u8]) -> Element {
    let mut key = guest.link.to_ne_bytes().to_vec();
    key.extend_from_slice(&guest.vm.mac().0);
    key.extend_from_slice(&[0; 2]);
    key.extend_from_slice(address);
    Element::new(key)
}
