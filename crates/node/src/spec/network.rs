//! The network, policy and published ports of a VM.

use jiffy_content::error::{Error, Result};
use jiffy_content::model::vm::Spec;
use jiffy_vmhost::network::{
    DEFAULT, NONE, Network, check_policy, check_ports, check_proxy_ports, hosts_entry,
    is_about_a_name,
};
use jiffy_wire::api::{ImageConfig, NetworkUse};
use jiffy_wire::guest::is_host_name;
use std::net::{IpAddr, TcpListener, UdpSocket};

/// Most name servers (resolv.conf(5)), search domains, and entries of /etc/hosts.
const SERVERS: usize = 3;
const DOMAINS: usize = 6;
const HOSTS: usize = 256;

/// The network of a new VM: the requested one, or the default one if the host has networks.
pub(super) fn wanted(
    mut asked: NetworkUse,
    image: &ImageConfig,
    network: &Network,
) -> Result<Option<NetworkUse>> {
    if asked.name.as_deref() == Some(NONE) {
        return none(&asked).map(|()| None);
    }
    if asked.is_default() && network.why_not().is_some() {
        return Ok(None);
    }
    let name = asked.name.get_or_insert_with(|| DEFAULT.to_owned());
    network.check_name(name)?;
    network.check_use(&asked)?;
    if asked.publish_all {
        for port in &image.exposed_ports {
            asked.ports.push(free_port(port)?);
        }
    }
    check(&mut asked)?;
    Ok(Some(asked))
}

/// The network of a VM from a snapshot, which decides whether there is an interface.
pub(super) fn of_snapshot(
    name: &str,
    captured: &Spec,
    is_pulled: bool,
    asked: NetworkUse,
    network: &Network,
) -> Result<Option<NetworkUse>> {
    match inherited(captured) {
        None if asked.is_default() || asked.name.as_deref() == Some(NONE) => Ok(None),
        None => Err(Error::invalid(format!(
            "The snapshot {name} has no network interface, so a VM from it can't have one."
        ))
        .hint("Leave the network options out, or create a snapshot of a VM that has a network.")),
        Some(_) if asked.name.as_deref() == Some(NONE) => Err(Error::invalid(format!(
            "The snapshot {name} has a network interface, so a VM from it has one, too."
        ))
        .hint("Use `--deny all` instead of `--network none`.")),
        Some(mut kept) => {
            if is_pulled {
                remove_untrusted(&mut kept);
                check(&mut kept)?;
            }
            // The network belongs to another node, or was removed.
            let missing = |name: &&mut String| network.check_name(name).is_err();
            if let Some(name) = kept.name.as_mut().filter(missing) {
                DEFAULT.clone_into(name);
            }
            match asked.is_default() {
                true => network.check_use(&kept).map(|()| Some(kept)),
                false => wanted(over(kept, asked), &captured.config, network),
            }
        }
    }
}

/// Removes what a pulled snapshot must not choose, because whoever made it may be a stranger: VMs of
/// this node that it would see, name servers, and addresses of the host and of private networks that
/// its policy would open.
fn remove_untrusted(kept: &mut NetworkUse) {
    kept.name = Some(DEFAULT.to_owned());
    kept.dns.clear();
    kept.policy.allow.retain(|rule| is_about_a_name(rule));
}

/// The settings of a snapshot with those of a request in place of them. Settings that the request
/// does not mention stay: a VM that could reach nothing does not get an open network because one of
/// its ports is published. A policy is replaced as a whole.
fn over(kept: NetworkUse, asked: NetworkUse) -> NetworkUse {
    fn given<T>(asked: Vec<T>, kept: Vec<T>) -> Vec<T> {
        match asked.is_empty() {
            true => kept,
            false => asked,
        }
    }
    NetworkUse {
        name: asked.name.or(kept.name),
        ports: asked.ports,
        publish_all: asked.publish_all,
        policy: match asked.policy.is_default() {
            true => kept.policy,
            false => asked.policy,
        },
        dns: given(asked.dns, kept.dns),
        search: given(asked.search, kept.search),
        hosts: given(asked.hosts, kept.hosts),
        proxy_ports: asked.proxy_ports.or(kept.proxy_ports),
        limit: match asked.limit.is_none() {
            true => kept.limit,
            false => asked.limit,
        },
    }
}

/// The network settings that a VM inherits from the one it is forked or restored from: without
/// published ports, because a port of the host leads to one VM only.
pub fn inherited(parent: &Spec) -> Option<NetworkUse> {
    let network = parent.network.clone()?;
    Some(NetworkUse {
        ports: Vec::new(),
        publish_all: false,
        ..network
    })
}

fn none(asked: &NetworkUse) -> Result<()> {
    let plain = NetworkUse {
        name: asked.name.clone(),
        ..NetworkUse::default()
    };
    match *asked == plain {
        true => Ok(()),
        false => Err(Error::invalid(
            "A VM without a network has no ports, rules, name servers or hosts.",
        )
        .hint("Leave out --network none, or the other network options.")),
    }
}

/// Checks a request, and normalises its ports.
fn check(asked: &mut NetworkUse) -> Result<()> {
    let ports = check_ports(&asked.ports)?;
    asked.ports = ports.iter().map(ToString::to_string).collect();
    check_policy(&asked.policy)?;
    if let Some(ports) = &asked.proxy_ports {
        check_proxy_ports(ports)?;
    }
    let counts = [
        (asked.dns.len(), SERVERS, "name servers"),
        (asked.search.len(), DOMAINS, "search domains"),
        (asked.hosts.len(), HOSTS, "further hosts"),
    ];
    if let Some((count, most, what)) = counts.into_iter().find(|(count, most, _)| count > most) {
        return Err(Error::invalid(format!(
            "A VM can have at most {most} {what}, not {count}."
        )));
    }
    for server in &asked.dns {
        if server.parse::<IpAddr>().is_err() {
            return Err(Error::invalid(format!(
                "The name server {server:?} is not an IP address."
            )));
        }
    }
    for domain in &asked.search {
        if !is_host_name(domain) {
            return Err(Error::invalid(format!(
                "{domain:?} is not the name of a domain."
            )));
        }
    }
    for host in &asked.hosts {
        if hosts_entry(host).is_none() {
            return Err(Error::invalid(format!("{host:?} is not NAME:ADDRESS.")));
        }
    }
    Ok(())
}

/// Publishes a port that an image exposes, like `80/tcp`, on a free port of the host.
fn free_port(exposed: &str) -> Result<String> {
    let (port, protocol) = exposed.split_once('/').unwrap_or((exposed, "tcp"));
    let free = match protocol {
        "udp" => UdpSocket::bind("127.0.0.1:0").and_then(|it| it.local_addr()),
        _ => TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()),
    };
    let free = free
        .map_err(|error| Error::internal(format!("The host has no free port: {error}.")))?
        .port();
    Ok(format!("127.0.0.1:{free}:{port}/{protocol}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_wire::api::NetworkPolicy;
    use jiffy_wire::vmm::NetLimit;
    use std::num::NonZeroU64;

    fn asked(change: impl FnOnce(&mut NetworkUse)) -> Result<NetworkUse> {
        let mut asked = NetworkUse::default();
        change(&mut asked);
        check(&mut asked).map(|()| asked)
    }

    #[test]
    fn every_invalid_value_is_named_in_the_error() {
        let refused = |change: fn(&mut NetworkUse)| {
            let error = asked(change).expect_err("bad");
            error.0.message
        };
        assert!(refused(|it| it.ports = vec!["x".into()]).contains('x'));
        assert!(refused(|it| it.proxy_ports = Some(vec!["y".into()])).contains('y'));
        assert!(refused(|it| it.dns = vec!["dns".into()]).contains("dns"));
        assert!(refused(|it| it.search = vec!["a b".into()]).contains("a b"));
        assert!(refused(|it| it.hosts = vec!["db=1".into()]).contains("db=1"));
        assert!(refused(|it| it.policy.deny = vec!["host:1".into()]).contains("host"));
        assert!(refused(|it| it.dns = vec!["192.0.2.1".into(); 4]).contains("3 name servers"));
    }

    #[test]
    fn a_pulled_snapshot_opens_nothing_of_this_node() {
        let words = |list: &[&str]| list.iter().map(|word| (*word).to_owned()).collect();
        let mut kept = NetworkUse {
            name: Some("lab".into()),
            dns: words(&["10.0.0.1"]),
            policy: NetworkPolicy {
                allow: words(&[
                    "host:5432",
                    "10.0.0.0/8",
                    "all:443",
                    "*.example.org:443",
                    "x y",
                ]),
                deny: words(&["all"]),
            },
            ..NetworkUse::default()
        };
        remove_untrusted(&mut kept);
        let left = NetworkUse {
            name: Some(DEFAULT.into()),
            policy: NetworkPolicy {
                allow: words(&["*.example.org:443"]),
                deny: words(&["all"]),
            },
            ..NetworkUse::default()
        };
        assert_eq!(kept, left);
    }

    #[test]
    fn ports_are_normalised_and_not_inherited() {
        let network = asked(|it| {
            it.ports = vec!["8080:80".into()];
            it.proxy_ports = Some(vec!["80".into()]);
        });
        let network = network.expect("good");
        assert_eq!(network.ports, ["127.0.0.1:8080:80/tcp"]);
        let parent = Spec {
            network: Some(network),
            ..Spec::default()
        };
        let child = inherited(&parent).expect("a network");
        assert!(child.ports.is_empty());
        assert_eq!(child.proxy_ports.as_deref(), Some(&["80".to_owned()][..]));
        assert_eq!(inherited(&Spec::default()), None);
    }

    #[test]
    fn a_request_replaces_only_what_it_mentions_of_a_snapshots_network() {
        let limit = |bytes_per_second| NetLimit {
            bytes_per_second: NonZeroU64::new(bytes_per_second),
            ..NetLimit::default()
        };
        let policy = |allow: &[&str], deny: &[&str]| NetworkPolicy {
            allow: allow.iter().map(ToString::to_string).collect(),
            deny: deny.iter().map(ToString::to_string).collect(),
        };
        let kept = NetworkUse {
            name: Some("lab".to_owned()),
            policy: policy(&["10.1.2.3:5432"], &["all"]),
            dns: vec!["192.0.2.1".to_owned()],
            search: vec!["lab.example".to_owned()],
            hosts: vec!["db:192.0.2.2".to_owned()],
            proxy_ports: Some(vec!["80".to_owned()]),
            limit: limit(1 << 20),
            ..NetworkUse::default()
        };
        let with = |change: fn(&mut NetworkUse)| {
            let mut asked = NetworkUse::default();
            change(&mut asked);
            over(kept.clone(), asked)
        };
        let published = with(|it| it.ports = vec!["8080:80".to_owned()]);
        assert_eq!(published.ports, ["8080:80"]);
        assert!(with(|it| it.publish_all = true).publish_all);
        for other in [published, with(|it| it.publish_all = true)] {
            let same = NetworkUse {
                ports: Vec::new(),
                publish_all: false,
                ..other
            };
            assert_eq!(same, kept);
        }
        let asked = NetworkUse {
            name: Some(DEFAULT.to_owned()),
            ports: vec!["8080:80".to_owned()],
            publish_all: true,
            policy: policy(&[], &["10.0.0.0/8"]),
            dns: vec!["192.0.2.7".to_owned()],
            search: vec!["other.example".to_owned()],
            hosts: vec!["db:192.0.2.8".to_owned()],
            proxy_ports: Some(Vec::new()),
            limit: limit(2 << 20),
        };
        assert_eq!(over(kept.clone(), asked.clone()), asked);
        let closed = NetworkUse {
            policy: asked.policy.clone(),
            ..NetworkUse::default()
        };
        let closed = over(kept.clone(), closed);
        assert_eq!(closed.policy, asked.policy, "as a whole");
        assert_eq!(closed.name, kept.name);
    }

    #[test]
    fn an_exposed_port_gets_a_free_host_port() {
        let port = free_port("53/udp").expect("a port");
        assert!(
            port.starts_with("127.0.0.1:") && port.ends_with(":53/udp"),
            "{port}"
        );
        check_ports(&[port, free_port("80").expect("a port")]).expect("ports");
    }

    #[test]
    fn network_none_excludes_other_options() {
        let mut network = NetworkUse {
            name: Some(NONE.to_owned()),
            ..NetworkUse::default()
        };
        none(&network).expect("none");
        network.policy.allow = vec!["all".to_owned()];
        none(&network).expect_err("rules without a network");
    }
}
