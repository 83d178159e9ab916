//! The network configuration of a VM's guest.

use super::names::DEFAULT;
use jiffy_content::model::vm::VmRecord;
use jiffy_net::host::Addresses;
use jiffy_net::names::directory::DOMAIN;
use jiffy_wire::guest::{GuestConfig, HostEntry, Interface, Neighbour, is_host_name};
use std::net::IpAddr;

/// The interface in the guest.
const INTERFACE: &str = "eth0";

/// Where a guest resolves names, unless its user says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    /// Its name servers.
    pub servers: Vec<IpAddr>,
    /// They are the node's, which knows the names of VMs.
    pub of_vms: bool,
}

/// Configures a guest to bring its interface up without an address, which takes most of the time of
/// the setup.
pub fn configure_link(config: &mut GuestConfig, addresses: &Addresses) {
    config.interfaces = vec![Interface {
        name: INTERFACE.to_owned(),
        mac: Some(addresses.mac),
        ..Interface::default()
    }];
}

/// Configures a guest's addresses, its gateway as a permanent neighbour, and its name servers.
pub fn configure_guest(
    config: &mut GuestConfig,
    record: &VmRecord,
    addresses: &Addresses,
    names: &Names,
) {
    let network = record.spec.network.clone().unwrap_or_default();
    let own: Vec<String> = addresses.own().map(|it| it.to_string()).collect();
    let gateways: Vec<String> = addresses.gateways().map(|it| it.to_string()).collect();
    let neighbour = |address: &String| Neighbour {
        address: address.clone(),
        mac: addresses.gateway_mac,
    };
    config.interfaces = vec![Interface {
        name: INTERFACE.to_owned(),
        neighbours: gateways.iter().map(neighbour).collect(),
        addresses: own.clone(),
        gateways,
        mtu: None,
        mac: Some(addresses.mac),
    }];
    config.name_servers = match network.dns.is_empty() {
        true => names.servers.iter().map(IpAddr::to_string).collect(),
        false => network.dns,
    };
    config.search = network.search;
    if names.of_vms {
        config.search.push(DOMAIN.to_owned());
    }
    let hostname = config
        .hostname
        .clone()
        .unwrap_or_else(|| record.name.clone());
    let mut names = vec![hostname];
    if names[0] != record.name && network.name.as_deref() != Some(DEFAULT) {
        // The other VMs of its network resolve it by this name.
        names.push(record.name.clone());
    }
    let own = own.into_iter().map(|address| HostEntry {
        address,
        names: names.clone(),
    });
    let further = network.hosts.iter().filter_map(|text| hosts_entry(text));
    config.hosts = own.chain(further).collect();
}

/// Parses `NAME:ADDRESS` into an entry of /etc/hosts; `None` if it is invalid.
pub fn hosts_entry(text: &str) -> Option<HostEntry> {
    let (name, address) = text.split_once(':')?;
    let address = address.trim_start_matches('[').trim_end_matches(']');
    let address: IpAddr = address.parse().ok()?;
    is_host_name(name).then(|| HostEntry {
        address: address.to_string(),
        names: vec![name.to_owned()],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_content::model::vm::Spec;
    use jiffy_wire::api::NetworkUse;

    #[test]
    fn guest_config_has_hostname_addresses_and_resolvers() {
        let network = NetworkUse {
            name: Some("lab".to_owned()),
            search: vec!["example.org".to_owned()],
            hosts: vec!["db:192.0.2.7".to_owned(), "six:[2001:db8::1]".to_owned()],
            ..NetworkUse::default()
        };
        let spec = Spec {
            network: Some(network),
            ..Spec::default()
        };
        let record = VmRecord::new("0123456789ab".into(), "web".into(), spec, 3);
        let addresses = Addresses {
            mac: jiffy_wire::mac::Mac([2, 0, 0, 0, 0, 9]),
            v4: [10, 118, 0, 2].into(),
            v6: None,
            gateway: [10, 118, 0, 1].into(),
            gateway6: None,
            gateway_mac: jiffy_net::identity::GATEWAY_MAC,
        };
        let mut config = GuestConfig {
            hostname: Some("inside".to_owned()),
            ..GuestConfig::default()
        };
        let names = Names {
            servers: vec![addresses.gateway.into()],
            of_vms: true,
        };
        configure_guest(&mut config, &record, &addresses, &names);
        let interface = &config.interfaces[0];
        assert_eq!(interface.addresses, ["10.118.0.2"]);
        assert_eq!(interface.gateways, ["10.118.0.1"]);
        assert_eq!(interface.neighbours[0].mac.to_string(), "02:6a:66:00:00:01");
        assert_eq!(config.name_servers, ["10.118.0.1"]);
        assert_eq!(config.search, ["example.org", "jiffy.internal"]);
        let mut other = GuestConfig::default();
        let names = Names {
            servers: vec![[192, 0, 2, 1].into()],
            of_vms: false,
        };
        configure_guest(&mut other, &record, &addresses, &names);
        assert_eq!(other.name_servers, ["192.0.2.1"]);
        assert_eq!(other.search, ["example.org"]);
        let hosts: Vec<String> = config
            .hosts
            .iter()
            .map(|it| format!("{} {}", it.address, it.names.join(" ")))
            .collect();
        assert_eq!(
            hosts,
            ["10.118.0.2 inside web", "192.0.2.7 db", "2001:db8::1 six"]
        );
    }

    #[test]
    fn a_hosts_entry_needs_a_name_and_an_address() {
        for wrong in [
            "db",
            "db:",
            ":192.0.2.7",
            "d b:192.0.2.7",
            "db:192.0.2",
            "db:x",
        ] {
            assert_eq!(hosts_entry(wrong), None, "{wrong}");
        }
    }
}
