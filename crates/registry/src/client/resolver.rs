//! Name resolution.

use crate::reference::is_loopback;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use ureq::Error;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;

/// Resolves addresses and `localhost` itself, and everything else with glibc.
#[derive(Debug, Default)]
pub(super) struct HostResolver {
    others: DefaultResolver,
    /// Refuse hosts that resolve to this computer.
    refuse_local: bool,
}

impl HostResolver {
    /// A resolver for hosts that a registry names, which must not be this computer.
    pub(super) fn refuse_local() -> HostResolver {
        HostResolver {
            refuse_local: true,
            ..HostResolver::default()
        }
    }
}

impl Resolver for HostResolver {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, Error> {
        let host = uri.host().unwrap_or_default();
        let port = uri.port_u16().unwrap_or(match uri.scheme_str() {
            Some("http") => 80,
            _ => 443,
        });
        let found = match addresses(host, loopback()) {
            None => self.others.resolve(uri, config, timeout)?,
            Some(known) => {
                let mut addresses = self.empty();
                for address in known {
                    addresses.push(SocketAddr::new(address, port));
                }
                addresses
            }
        };
        // The user has configured the proxy, so it may be this computer.
        let is_proxy = config.proxy().is_some_and(|proxy| proxy.host() == host);
        if self.refuse_local
            && !is_proxy
            && found.iter().any(|at| is_local_address(at.ip(), loopback()))
        {
            return Err(Error::Other(Box::new(ThisComputer)));
        }
        Ok(found)
    }
}

/// A host that the registry named is this computer, or link-local.
#[derive(Debug, thiserror::Error)]
#[error("a remote registry must not refer to this computer or to a link-local address")]
pub(super) struct ThisComputer;

/// Whether an address is this computer's or link-local, like those of cloud metadata services.
fn is_local_address(address: IpAddr, loopback: Option<IpAddr>) -> bool {
    let address = address.to_canonical();
    let linked = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    address.is_loopback() || address.is_unspecified() || linked || loopback == Some(address)
}

/// The variable with the address that users call `localhost`, if they are outside of this VM.
const LOOPBACK: &str = "JIFFY_LOOPBACK";

fn loopback() -> Option<IpAddr> {
    std::env::var(LOOPBACK).ok()?.parse().ok()
}

/// The addresses of a host that needs no name service.
fn addresses(host: &str, loopback: Option<IpAddr>) -> Option<Vec<IpAddr>> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    if let Some(address) = loopback.filter(|_| is_loopback(host)) {
        return Some(vec![address]);
    }
    if let Ok(address) = bare.parse() {
        return Some(vec![address]);
    }
    // RFC 6761 §6.3: names below localhost are this computer.
    is_loopback(host).then(|| vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_addresses_are_recognised() {
        let outside = Some(IpAddr::from([10, 0, 2, 2]));
        for near in [
            "127.9.9.9",
            "::1",
            "0.0.0.0",
            "::ffff:127.0.0.1",
            "169.254.169.254",
            "fe80::1",
            "10.0.2.2",
        ] {
            assert!(is_local_address(near.parse().unwrap(), outside), "{near}");
        }
        for far in ["10.0.2.2", "192.0.2.1", "2001:db8::1"] {
            assert!(!is_local_address(far.parse().unwrap(), None), "{far}");
        }
    }

    #[test]
    fn loopback_and_addresses_need_no_name_service() {
        let shown = |host| addresses(host, None).map(|known| format!("{known:?}"));
        assert_eq!(shown("localhost").as_deref(), Some("[127.0.0.1, ::1]"));
        assert_eq!(shown("a.localhost").as_deref(), Some("[127.0.0.1, ::1]"));
        assert_eq!(shown("[::1]").as_deref(), Some("[::1]"));
        assert_eq!(shown("10.1.2.3").as_deref(), Some("[10.1.2.3]"));
        assert_eq!(shown("registry.example"), None);
        let outside = Some(IpAddr::from([10, 0, 2, 2]));
        for host in ["localhost", "127.0.0.1", "a.localhost", "[::1]"] {
            assert_eq!(
                addresses(host, outside),
                outside.map(|ip| vec![ip]),
                "{host}"
            );
        }
        assert_eq!(addresses("registry.example", outside), None);
        assert_eq!(
            addresses("10.1.2.3", outside),
            Some(vec![IpAddr::from([10, 1, 2, 3])])
        );
    }
}
