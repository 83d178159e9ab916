//! Converts records to the network's types.

use super::names::DEFAULT;
use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::VmRecord;
use jiffy_net::host::GuestSpec;
use jiffy_net::policy::publish::Publish;
use jiffy_net::policy::{Policy, RULES, Rule, port_range};
use jiffy_net::{Error as NetError, VmId};
use jiffy_wire::api::{NetworkPolicy, NetworkUse};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// MTU, bytes, as on Ethernet.
const MTU: u32 = 1500;
/// Most published ports of a VM; each may be a range.
const PORTS: usize = 64;

/// The specification of this record's VM at this address. With `everywhere`, ports for loopback are
/// published on all addresses.
pub(super) fn spec_of(record: &VmRecord, v4: Ipv4Addr, everywhere: bool) -> Result<GuestSpec> {
    let network = record.spec.network.clone().unwrap_or_default();
    let ports = published(&network.ports, everywhere)?;
    Ok(GuestSpec {
        vm: VmId::parse(&record.id).map_err(invalid)?,
        v4,
        network: network.name.filter(|name| name != DEFAULT),
        policy: check_policy(&record.network_policy())?,
        ports,
        mtu: MTU,
        queues: 1,
        owner: None,
        asleep: false,
    })
}

/// The published ports; with `everywhere`, those for loopback on all addresses.
pub(super) fn published(texts: &[String], everywhere: bool) -> Result<Vec<Publish>> {
    let mut ports = check_ports(texts)?;
    if everywhere {
        for port in ports.iter_mut().filter(|port| port.address.is_loopback()) {
            port.address = match port.address {
                IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
        }
    }
    Ok(ports)
}

/// Parses published ports.
///
/// # Errors
///
/// If there are too many, one is not valid, or one is published twice.
pub fn check_ports(texts: &[String]) -> Result<Vec<Publish>> {
    if texts.len() > PORTS {
        return Err(Error::invalid(format!(
            "A VM can have at most {PORTS} published ports and ranges."
        )));
    }
    let mut ports: Vec<Publish> = Vec::with_capacity(texts.len());
    for text in texts {
        let port: Publish = text.parse().map_err(invalid)?;
        if ports.iter().any(|other| other.collides(&port)) {
            return Err(Error::invalid(format!(
                "The port {port} is published twice."
            )));
        }
        ports.push(port);
    }
    Ok(ports)
}

/// Whether a rule of a policy is about a name. Names open public addresses only.
pub fn is_about_a_name(rule: &str) -> bool {
    let rule = rule.parse::<Rule>();
    rule.is_ok_and(|rule| matches!(rule.to, jiffy_net::policy::Target::Domain(_)))
}

/// Parses a network policy.
///
/// # Errors
///
/// If there are too many rules, one is not valid, or one denies the host.
pub fn check_policy(policy: &NetworkPolicy) -> Result<Policy> {
    if policy.allow.len() + policy.deny.len() > RULES {
        return Err(Error::invalid(format!(
            "A VM's network policy can have at most {RULES} rules."
        )));
    }
    let parsed = |texts: &[String]| -> Result<Vec<Rule>> {
        let rules = texts.iter().map(|text| text.parse().map_err(invalid));
        rules.collect()
    };
    let policy = Policy {
        allow: parsed(&policy.allow)?,
        deny: parsed(&policy.deny)?,
    };
    if policy
        .deny
        .iter()
        .any(|rule| rule.to == jiffy_net::policy::Target::Host)
    {
        return Err(
            Error::invalid("VMs never reach the host unless a rule allows it.")
                .hint("Omit --deny host."),
        );
    }
    Ok(policy)
}

/// Parses the ports that the proxy may reach: the first and the last of each range.
///
/// # Errors
///
/// If there are too many, or one is neither a port nor a range.
pub fn check_proxy_ports(texts: &[String]) -> Result<Vec<(u16, u16)>> {
    if texts.len() > PORTS {
        return Err(Error::invalid(format!(
            "A VM can open at most {PORTS} ports and ranges to the proxy."
        )));
    }
    let range = |text: &String| {
        port_range(text).ok_or_else(|| {
            Error::invalid(format!("{text:?} is neither a port nor a range of ports."))
                .hint("Write 3000, 8000-8100, none or all.")
        })
    };
    texts.iter().map(range).collect()
}

/// Whether the proxy may reach this TCP port of a VM.
pub fn is_open_to_the_proxy(network: &NetworkUse, port: u16) -> bool {
    let ranges = network.proxy_ports.iter().flatten();
    let is_listed = ranges
        .filter_map(|text| port_range(text))
        .any(|(first, last)| (first..=last).contains(&port));
    network.proxy_ports.is_none() || is_listed
}

fn invalid(error: NetError) -> Error {
    Error::invalid(format!("{error}."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_content::model::vm::Spec;

    fn texts<const N: usize>(all: [&str; N]) -> Vec<String> {
        all.map(str::to_owned).into()
    }

    #[test]
    fn loopback_ports_are_published_on_all_addresses_if_asked() {
        let network = NetworkUse {
            name: Some("lab".to_owned()),
            ports: texts(["8080:80", "192.0.2.1:53:53/udp"]),
            ..NetworkUse::default()
        };
        let spec = Spec {
            network: Some(network),
            ..Spec::default()
        };
        let record = VmRecord::new("0123456789ab".into(), "web".into(), spec, 3);
        let ports = |everywhere| {
            let spec = spec_of(&record, [10, 118, 0, 2].into(), everywhere).expect("a spec");
            assert_eq!(spec.network.as_deref(), Some("lab"));
            spec.ports
                .iter()
                .map(Publish::to_string)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            ports(false),
            ["127.0.0.1:8080:80/tcp", "192.0.2.1:53:53/udp"]
        );
        assert_eq!(ports(true), ["0.0.0.0:8080:80/tcp", "192.0.2.1:53:53/udp"]);
    }

    #[test]
    fn the_proxy_reaches_only_listed_ports() {
        let open = |ports: Option<&[&str]>, port| {
            let list = |ports: &[&str]| ports.iter().map(|&it| it.to_owned()).collect();
            let network = NetworkUse {
                proxy_ports: ports.map(list),
                ..NetworkUse::default()
            };
            is_open_to_the_proxy(&network, port)
        };
        assert!(open(None, 1) && open(None, 65535));
        assert!(!open(Some(&[]), 80));
        let some: Option<&[&str]> = Some(&["80", "8000-8100"]);
        assert!(open(some, 80) && open(some, 8000) && open(some, 8100));
        assert!(!open(some, 79) && !open(some, 81) && !open(some, 7999) && !open(some, 8101));
        check_proxy_ports(&texts(["80", "8000-8100"])).expect("ports");
        for wrong in ["", "0", "65536", "81-80", "+80", "all", "80/udp"] {
            let error = check_proxy_ports(&texts([wrong])).expect_err(wrong);
            assert!(error.0.message.contains("neither a port"), "{error}");
        }
        check_proxy_ports(&vec!["80".to_owned(); PORTS + 1]).expect_err("too many");
    }

    #[test]
    fn invalid_ports_and_policies_are_refused() {
        assert!(check_ports(&texts(["80:80", "70-90:170-190"])).is_err());
        assert!(check_ports(&vec!["80:80".to_owned(); PORTS + 1]).is_err());
        assert!(check_ports(&texts(["80"])).is_err());
        let policy = |allow: Vec<String>, deny: Vec<String>| {
            check_policy(&NetworkPolicy { allow, deny }).map(drop)
        };
        policy(texts(["host:5432", "*.example.org"]), texts(["all"])).expect("a policy");
        policy(vec![], texts(["host:80"])).expect_err("never reached anyway");
        policy(texts(["10.0.0.0/8:0"]), vec![]).expect_err("no port");
        policy(vec!["all".to_owned(); RULES + 1], vec![]).expect_err("too many");
    }
}
