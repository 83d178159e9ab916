//! Published ports: maps from the host's address and port to a VM's.
//!
//! Those of a hibernated VM are not in the maps: the sockets that hold them wake it.

use super::GuestRules;
use super::table;
use crate::nft::{Element, Transaction};
use crate::policy::publish::Publish;
use std::net::IpAddr;

pub(super) fn add(to: &mut Transaction, guest: &GuestRules) {
    for (map, elements) in elements(guest) {
        to.add_elements(map, &elements);
    }
}

pub(super) fn delete(to: &mut Transaction, guest: &GuestRules) {
    for (map, elements) in elements(guest) {
        to.delete_elements(map, &elements);
    }
}

fn elements(guest: &GuestRules) -> Vec<(&'static str, Vec<Element>)> {
    let forwarded = if guest.asleep { &[][..] } else { &guest.ports };
    forwarded
        .iter()
        .filter_map(|it| {
            let target = match it.address {
                IpAddr::V4(_) => guest.v4.octets().to_vec(),
                IpAddr::V6(_) => guest.v6?.octets().to_vec(),
            };
            let elements = it
                .pairs()
                .map(|(host, port)| element(it, host, &target, port));
            Some((map(it), elements.collect()))
        })
        .collect()
}

fn map(publish: &Publish) -> &'static str {
    match (publish.address, publish.address.is_unspecified()) {
        (IpAddr::V4(_), true) => table::PORTS4,
        (IpAddr::V4(_), false) => table::PORTS_AT4,
        (IpAddr::V6(_), true) => table::PORTS6,
        (IpAddr::V6(_), false) => table::PORTS_AT6,
    }
}

/// Maps address (unless all), protocol and port to address and port, each in whole registers.
fn element(publish: &Publish, host: u16, target: &[u8], guest: u16) -> Element {
    let mut key = match publish.address {
        it if it.is_unspecified() => Vec::new(),
        IpAddr::V4(it) => it.octets().to_vec(),
        IpAddr::V6(it) => it.octets().to_vec(),
    };
    key.extend_from_slice(&[publish.protocol.number(), 0, 0, 0]);
    key.extend_from_slice(&host.to_be_bytes());
    key.extend_from_slice(&[0; 2]);
    let mut value = target.to_vec();
    value.extend_from_slice(&guest.to_be_bytes());
    value.extend_from_slice(&[0; 2]);
    Element {
        value: Some(value),
        ..Element::new(key)
    }
}
