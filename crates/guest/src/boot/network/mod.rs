//! Configures network interfaces.
//!
//! * `netlink`: requests to the kernel.
//! * `connections`: resets connections that a clone can't use.

mod connections;
mod netlink;

use super::disks;
use crate::files;
use crate::program::prepare::reason;
use crate::report::Report;
use alloc::{format, string::String, vec::Vec};
use core::net::{IpAddr, Ipv6Addr};
use jiffy_wire::guest::Interface;
use jiffy_wire::mac::Mac;
use netlink::Netlink;
use rustix::io::{Errno, Result as IoResult};

const TIMEOUT_NS: u64 = 2_000_000_000;
/// Index of the loopback interface, the same in every network namespace.
const LOOPBACK: u32 = 1;

/// Brings loopback and the given interfaces up. A failure of one is reported and does not stop the
/// others.
///
/// # Errors
///
/// If no netlink socket can be opened, or loopback can't be brought up.
pub fn configure(interfaces: &[Interface], report: &mut Report) -> Result<(), String> {
    let mut netlink = open()?;
    netlink
        .set_link(LOOPBACK, None)
        .map_err(|error| format!("loopback cannot be brought up: {}", reason(error)))?;
    for interface in interfaces {
        report.step(&format!("interface {}", interface.name), |_| {
            let plan = Plan::of(interface)?;
            let index = plan.bring_up(&mut netlink, false)?;
            plan.connect(&mut netlink, index)
        });
    }
    Ok(())
}

/// Reconfigures the interfaces of a restored guest. A changed interface first loses addresses and
/// routes that the new configuration lacks, and connections from removed addresses are reset. Only
/// then it gets its new MAC address and announces itself to neighbours.
///
/// # Errors
///
/// If no netlink socket can be opened. A failure of one interface is reported instead.
pub fn reconfigure(
    old: &[Interface],
    new: &[Interface],
    report: &mut Report,
) -> Result<(), String> {
    let mut netlink = open()?;
    let mut gone = Vec::new();
    for before in old.iter().filter(|it| !new.contains(it)) {
        let after = new.iter().find(|it| it.name == before.name);
        report.step(&format!("interface {}", before.name), |_| {
            let after = after.map(Plan::of).transpose()?.unwrap_or_default();
            remove_outdated(&mut netlink, &Plan::of(before)?, &after, &mut gone)
        });
    }
    if !gone.is_empty() {
        report.step("connections", |_| {
            let ended = connections::reset(&gone);
            ended.map(drop).map_err(|error| {
                format!(
                    "connections of the parent VM could not be reset: {}",
                    reason(error)
                )
            })
        });
    }
    for interface in super::added(old, new) {
        report.step(&format!("interface {}", interface.name), |_| {
            let plan = Plan::of(&interface)?;
            let index = plan.bring_up(&mut netlink, true)?;
            plan.change_mac(&mut netlink, index)?;
            plan.connect(&mut netlink, index)
        });
    }
    Ok(())
}

fn open() -> Result<Netlink, String> {
    Netlink::open(None).map_err(|error| format!("no netlink socket: {}", reason(error)))
}

/// The configuration of an interface, checked completely before anything is set.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan<'a> {
    name: &'a str,
    mtu: Option<u32>,
    mac: Option<Mac>,
    /// Addresses with their prefix lengths.
    addresses: Vec<(IpAddr, u8)>,
    gateways: Vec<IpAddr>,
    neighbours: Vec<(IpAddr, Mac)>,
}

impl Plan<'_> {
    fn of(interface: &Interface) -> Result<Plan<'_>, String> {
        let name = interface.name.as_str();
        if name.is_empty() || name.contains(['/', '\0']) || name == "." || name == ".." {
            return Err(format!("{name:?} is not the name of an interface"));
        }
        let address = |what: &str, text: &str| {
            text.parse::<IpAddr>()
                .map_err(|_| format!("the {what} {text:?} is not an address"))
        };
        let mut addresses = interface
            .addresses
            .iter()
            .map(|text| {
                parse_prefix(text)
                    .ok_or_else(|| format!("{text:?} is not an address with a prefix length"))
            })
            .collect::<Result<Vec<_>, _>>()?;
        // The kernel derives a link-local address from the MAC address with which the interface
        // came up, and keeps it when the MAC address changes.
        if let Some(mac) = interface.mac
            && addresses.iter().any(|(address, _)| address.is_ipv6())
        {
            addresses.push((link_local(mac).into(), 64));
        }
        Ok(Plan {
            name,
            mtu: interface.mtu,
            mac: interface.mac,
            addresses,
            gateways: interface
                .gateways
                .iter()
                .map(|text| address("gateway", text))
                .collect::<Result<_, _>>()?,
            neighbours: interface
                .neighbours
                .iter()
                .map(|it| Ok((address("neighbour", &it.address)?, it.mac)))
                .collect::<Result<_, String>>()?,
        })
    }

    /// Brings the interface up with its addresses and returns its index. In a restored guest it may
    /// have had another configuration.
    fn bring_up(&self, netlink: &mut Netlink, restored: bool) -> Result<u32, String> {
        let name = self.name;
        if !disks::wait_for(&format!("/sys/class/net/{name}"), TIMEOUT_NS) {
            return Err(format!("there is no interface {name}"));
        }
        let index = netlink
            .index_of(name)
            .map_err(|error| format!("there is no interface {name}: {}", reason(error)))?;
        if self.mac.is_some() {
            self.disable_autoconfiguration(restored);
        }
        netlink
            .set_link(index, self.mtu)
            .map_err(|error| format!("{name} cannot be brought up: {}", reason(error)))?;
        for (address, prefix) in &self.addresses {
            netlink
                .add_address(index, *address, *prefix)
                .map_err(|error| format!("{address}/{prefix} on {name}: {}", reason(error)))?;
        }
        Ok(index)
    }

    /// Disables router advertisements and duplicate address detection, or IPv6 altogether if the
    /// interface has no IPv6 address: the host has given this guest a link of its own and
    /// everything it needs. Parameters that the kernel lacks are skipped.
    fn disable_autoconfiguration(&self, restored: bool) {
        let name = self.name;
        let set = |parameter: &str, value: &[u8]| {
            let path = format!("/proc/sys/net/ipv6/conf/{name}/{parameter}");
            let _ = files::write(path.as_str(), value);
        };
        if self.addresses.iter().any(|(address, _)| address.is_ipv6()) {
            if restored {
                set("disable_ipv6", b"0");
            }
            set("accept_ra", b"0");
            set("accept_dad", b"0");
        } else {
            set("disable_ipv6", b"1");
        }
    }

    /// Sets the MAC address that the device has now, and lets the kernel announce the addresses to
    /// neighbours.
    fn change_mac(&self, netlink: &mut Netlink, index: u32) -> Result<(), String> {
        let Some(mac) = self.mac else {
            return Ok(());
        };
        let parameters = [("ipv4", "arp_notify"), ("ipv6", "ndisc_notify")];
        for (family, parameter) in parameters.into_iter().filter(|_| !self.mac_is_known()) {
            let path = format!("/proc/sys/net/{family}/conf/{}/{parameter}", self.name);
            let _ = files::write(path.as_str(), b"1");
        }
        netlink
            .set_mac(index, mac)
            .map_err(|error| format!("{mac} on {}: {}", self.name, reason(error)))
    }

    /// Whether the host knows this guest's MAC address. It does if it gave the gateways' addresses:
    /// then no host on this link resolves addresses, and no announcement is needed.
    fn mac_is_known(&self) -> bool {
        let known = |gateway| {
            self.neighbours
                .iter()
                .any(|(address, _)| address == gateway)
        };
        !self.gateways.is_empty() && self.gateways.iter().all(known)
    }

    /// Adds permanent neighbours, which a change of the MAC address removes, and routes.
    fn connect(&self, netlink: &mut Netlink, index: u32) -> Result<(), String> {
        let name = self.name;
        for (address, mac) in &self.neighbours {
            netlink
                .add_neighbour(index, *address, *mac)
                .map_err(|error| format!("{address} at {mac} on {name}: {}", reason(error)))?;
        }
        for gateway in &self.gateways {
            netlink
                .add_default_route(index, *gateway)
                .map_err(|error| {
                    format!("default route by {gateway} on {name}: {}", reason(error))
                })?;
        }
        Ok(())
    }
}

/// Removes from an interface what it has `before` but not `after`; appends removed addresses to
/// `gone`.
fn remove_outdated(
    netlink: &mut Netlink,
    before: &Plan<'_>,
    after: &Plan<'_>,
    gone: &mut Vec<IpAddr>,
) -> Result<(), String> {
    let name = before.name;
    let failed = |what: IpAddr, error: Errno| {
        format!("{what} could not be removed from {name}: {}", reason(error))
    };
    let index = netlink
        .index_of(name)
        .map_err(|error| format!("there is no interface {name}: {}", reason(error)))?;
    // Routes first, because removing an address removes some of them.
    for gateway in before
        .gateways
        .iter()
        .filter(|it| !after.gateways.contains(it))
    {
        ignore_missing(netlink.remove_default_route(index, *gateway))
            .map_err(|error| failed(*gateway, error))?;
    }
    let mut neighbours = before.neighbours.iter();
    while let Some((address, _)) = neighbours.find(|it| !after.neighbours.contains(it)) {
        ignore_missing(netlink.remove_neighbour(index, *address))
            .map_err(|error| failed(*address, error))?;
    }
    let mut addresses = before.addresses.iter();
    while let Some((address, prefix)) = addresses.find(|it| !after.addresses.contains(it)) {
        ignore_missing(netlink.remove_address(index, *address, *prefix))
            .map_err(|error| failed(*address, error))?;
        gone.push(*address);
    }
    Ok(())
}

/// The link-local address of a MAC address (RFC 4291, appendix A).
fn link_local(mac: Mac) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac.0;
    let word = |high: u8, low: u8| u16::from_be_bytes([high, low]);
    Ipv6Addr::new(
        0xfe80,
        0,
        0,
        0,
        word(a ^ 2, b),
        word(c, 0xff),
        word(0xfe, d),
        word(e, f),
    )
}

/// Ignores an error if a program has removed it before.
fn ignore_missing(result: IoResult<()>) -> IoResult<()> {
    match result {
        Err(Errno::ADDRNOTAVAIL | Errno::SRCH | Errno::NOENT) => Ok(()),
        other => other,
    }
}

/// Parses `10.0.0.2/24` or `fd00::2/64`; without a length the prefix is the whole address.
fn parse_prefix(text: &str) -> Option<(IpAddr, u8)> {
    let (address, prefix) = match text.split_once('/') {
        Some((address, prefix)) => (address, Some(prefix)),
        None => (text, None),
    };
    let address: IpAddr = address.parse().ok()?;
    let longest = if address.is_ipv4() { 32 } else { 128 };
    let prefix = prefix.map_or(Some(longest), |prefix| prefix.parse().ok())?;
    (prefix <= longest).then_some((address, prefix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn prefixes_are_checked() {
        assert_eq!(
            parse_prefix("10.0.0.2/24"),
            Some(([10, 0, 0, 2].into(), 24))
        );
        assert_eq!(parse_prefix("10.0.0.2"), Some(([10, 0, 0, 2].into(), 32)));
        assert_eq!(parse_prefix("fd00::2/64").unwrap().1, 64);
        for bad in [
            "",
            "10.0.0.2/33",
            "fd00::/129",
            "10.0.0/8",
            "10.0.0.2/",
            "10.0.0.2/-1",
        ] {
            assert_eq!(parse_prefix(bad), None, "{bad}");
        }
    }

    fn interface() -> Interface {
        serde_json::from_str(
            r#"{"name":"eth0","addresses":["10.0.0.2/32","fd00::2/128"],"gateways":["10.0.0.1"],
                "mac":"02:4a:46:00:00:01",
                "neighbours":[{"address":"10.0.0.1","mac":"02:4a:46:00:00:02"}]}"#,
        )
        .unwrap()
    }

    #[test]
    fn every_field_of_an_interface_is_checked() {
        let interface = interface();
        let plan = Plan::of(&interface).unwrap();
        assert_eq!(plan.addresses.len(), 3);
        assert_eq!(plan.addresses[2].0.to_string(), "fe80::4a:46ff:fe00:1");
        assert_eq!(plan.neighbours[0].1.to_string(), "02:4a:46:00:00:02");
        assert!(plan.mac_is_known());
        let mut asked_for = interface.clone();
        asked_for.neighbours.clear();
        assert!(!Plan::of(&asked_for).unwrap().mac_is_known());
        type Change = fn(&mut Interface);
        let wrong: [(Change, &str); 5] = [
            (|it| it.name = "..".into(), "not the name"),
            (|it| it.name = "a/b".into(), "not the name"),
            (|it| it.addresses.push("10.0.0.2/33".into()), "10.0.0.2/33"),
            (|it| it.gateways.push("gate".into()), "gateway \"gate\""),
            (
                |it| it.neighbours[0].address = "x".into(),
                "neighbour \"x\"",
            ),
        ];
        for (change, said) in wrong {
            let mut interface = interface.clone();
            change(&mut interface);
            let error = Plan::of(&interface).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
