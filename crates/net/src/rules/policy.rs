//! Chains of networks, and of VMs that have a policy of their own.

use super::rule::{DESTINATION4, DESTINATION6, Rule};
use super::table::{ADMIT, OPEN, REFUSE};
use super::{GuestRules, VmId};
use crate::nft::constants::{kind, set};
use crate::nft::expression::meta;
use crate::nft::{Element, Expression, Set, Transaction};
use crate::policy::{Access, Policy, Protocol, Rule as PolicyRule, Target};
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

/// Most addresses that names have opened to one VM at the same ports, for each of IPv4 and IPv6.
const NAMED: u32 = 4096;

/// The set of a network's links; its chain has the same name.
pub(super) fn members(network: &str) -> String {
    format!("net-{network}")
}

pub(super) fn add_network(to: &mut Transaction, network: &str) {
    let name = members(network);
    let links = Set {
        key: (kind::LINK, 4),
        ..Set::default()
    };
    to.add_set(&name, &links);
    to.add_chain(&name, None);
    to.add_rule(&name, &to_member(network));
    to.add_rule(&name, &Rule::new().goto(OPEN));
}

pub(super) fn delete_network(to: &mut Transaction, network: &str) {
    let name = members(network);
    to.delete_chain(&name);
    to.delete_set(&name);
}

fn to_member(network: &str) -> Vec<Expression> {
    Rule::new()
        .meta(meta::OIF, 0)
        .in_set(members(network))
        .goto(ADMIT)
}

/// The chain that decides what a VM may reach.
pub(super) fn chain(guest: &GuestRules) -> Cow<'static, str> {
    match &guest.network {
        _ if !guest.policy.is_default() => own_chain(guest.vm).into(),
        Some(network) => members(network).into(),
        None => OPEN.into(),
    }
}

/// The chain that decides what it may reach of the host, if anything.
pub(super) fn host_chain(guest: &GuestRules) -> Option<String> {
    let host = |it: &PolicyRule| it.to == Target::Host;
    let any = guest.policy.allow.iter().any(host);
    any.then(|| format!("host-{}", guest.vm))
}

fn own_chain(vm: VmId) -> String {
    format!("vm-{vm}")
}

/// The sets of addresses opened by names at these ports, for IPv4 and IPv6.
pub(super) fn name_sets(vm: VmId, at: Access) -> [String; 2] {
    let mut rest = vm.to_string();
    if let Some((from, to)) = at.ports {
        rest.push_str(&format!("-{from}-{to}"));
    }
    if let Some(protocol) = at.protocol {
        rest.push_str(&format!("-{protocol}"));
    }
    [format!("names4-{rest}"), format!("names6-{rest}")]
}

/// The ports and protocols whose sets stay as they are when a policy changes: all names that may
/// have opened an address there are still allowed.
pub(super) fn staying(from: &Policy, into: &Policy) -> BTreeSet<Access> {
    let (old, new) = (from.named(), into.named());
    let stays =
        |(at, names): &(_, BTreeSet<_>)| new.get(at).is_some_and(|it| it.is_superset(names));
    old.into_iter().filter(stays).map(|(at, _)| at).collect()
}

/// Adds the VM's chains and the sets that they need, except those that exist already.
pub(super) fn add_chains(to: &mut Transaction, guest: &GuestRules, there: &BTreeSet<Access>) {
    if guest.policy.is_default() {
        return;
    }
    for at in guest
        .policy
        .named()
        .into_keys()
        .filter(|it| !there.contains(it))
    {
        let [names4, names6] = name_sets(guest.vm, at);
        for (name, key) in [(&names4, (kind::IPV4, 4)), (&names6, (kind::IPV6, 16))] {
            let timed = Set {
                flags: set::FLAG_TIMEOUT,
                key,
                most: Some(NAMED),
                ..Set::default()
            };
            to.add_set(name, &timed);
        }
    }
    let own = own_chain(guest.vm);
    to.add_chain(&own, None);
    if let Some(network) = &guest.network {
        to.add_rule(&own, &to_member(network));
    }
    // Other VMs can only be reached through a network, not by a rule.
    to.add_rule(&own, &Rule::new().toward_guests().goto(REFUSE));
    for one in &guest.policy.allow {
        for conditions in conditions(one, guest.vm) {
            to.add_rule(&own, &conditions.goto(ADMIT));
        }
    }
    for one in &guest.policy.deny {
        if !matches!(one.to, Target::Domain(_)) {
            for conditions in conditions(one, guest.vm) {
                to.add_rule(&own, &conditions.goto(REFUSE));
            }
        }
    }
    to.add_rule(&own, &Rule::new().goto(OPEN));
    if let Some(host) = host_chain(guest) {
        to.add_chain(&host, None);
        for one in guest.policy.allow.iter().filter(|it| it.to == Target::Host) {
            for protocol in protocols(one) {
                let ports = one.ports.unwrap_or((1, u16::MAX));
                let opened = Rule::new().protocol(protocol).ports(ports);
                to.add_rule(&host, &opened.goto(ADMIT));
            }
        }
        to.add_rule(&host, &Rule::new().goto(REFUSE));
    }
}

/// Deletes the VM's chains, and their sets except those that stay.
pub(super) fn delete_chains(to: &mut Transaction, guest: &GuestRules, stay: &BTreeSet<Access>) {
    if guest.policy.is_default() {
        return;
    }
    to.delete_chain(&own_chain(guest.vm));
    if let Some(host) = host_chain(guest) {
        to.delete_chain(&host);
    }
    for at in guest
        .policy
        .named()
        .into_keys()
        .filter(|it| !stay.contains(it))
    {
        for name in name_sets(guest.vm, at) {
            to.delete_set(&name);
        }
    }
}

/// The conditions of a policy rule: one rule for each protocol and address family.
fn conditions(one: &PolicyRule, vm: VmId) -> Vec<Rule> {
    let targets: Vec<Box<dyn Fn() -> Rule>> = match &one.to {
        Target::Host => Vec::new(),
        Target::Everything => vec![Box::new(Rule::new)],
        Target::Range(range) => {
            let range = *range;
            vec![Box::new(move || Rule::new().destination(range))]
        }
        Target::Domain(_) => {
            let [names4, names6] = name_sets(vm, one.access());
            vec![
                Box::new(move || {
                    let v4 = Rule::new().v4().load(DESTINATION4, 0);
                    v4.in_set(names4.clone())
                }),
                Box::new(move || {
                    let v6 = Rule::new().v6().load(DESTINATION6, 0);
                    v6.in_set(names6.clone())
                }),
            ]
        }
    };
    let mut rules = Vec::new();
    for target in targets {
        match (one.ports, one.protocol) {
            (None, None) => rules.push(target()),
            (ports, _) => rules.extend(protocols(one).map(|protocol| {
                let rule = target().protocol(protocol);
                match ports {
                    Some(ports) => rule.ports(ports),
                    None => rule,
                }
            })),
        }
    }
    rules
}

fn protocols(one: &PolicyRule) -> impl Iterator<Item = u8> {
    let spoken = one.protocol;
    [Protocol::Tcp, Protocol::Udp]
        .into_iter()
        .filter(move |it| spoken.is_none_or(|spoken| spoken == *it))
        .map(Protocol::number)
}

/// Opens addresses of names at these ports.
pub(super) fn open_names(
    to: &mut Transaction,
    vm: VmId,
    at: Access,
    addresses: &[(IpAddr, Duration)],
) {
    let [names4, names6] = name_sets(vm, at);
    for (set, v4) in [(names4, true), (names6, false)] {
        let of_kind = addresses.iter().filter(|it| it.0.is_ipv4() == v4);
        let elements: Vec<Element> = of_kind.map(element).collect();
        to.add_elements(&set, &elements);
    }
}

/// As [`open_names`], for addresses that may be open already: their timeout restarts.
pub(super) fn reopen_names(
    to: &mut Transaction,
    vm: VmId,
    at: Access,
    addresses: &[(IpAddr, Duration)],
) {
    let [names4, names6] = name_sets(vm, at);
    for (set, v4) in [(names4, true), (names6, false)] {
        for one in addresses.iter().filter(|it| it.0.is_ipv4() == v4) {
            // An existing element keeps its timeout unless it is deleted first, and only existing
            // elements can be deleted. So each is added, deleted and added again.
            let element = element(one);
            to.add_elements(&set, std::slice::from_ref(&element));
            to.delete_elements(&set, std::slice::from_ref(&element));
            to.add_elements(&set, std::slice::from_ref(&element));
        }
    }
}

fn element((address, left): &(IpAddr, Duration)) -> Element {
    let key = match address {
        IpAddr::V4(it) => it.octets().to_vec(),
        IpAddr::V6(it) => it.octets().to_vec(),
    };
    let timeout = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
    Element {
        timeout: Some(timeout.max(1)),
        ..Element::new(key)
    }
}
