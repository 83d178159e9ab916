//! Name resolution.

use crate::reference::is_loopback;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use ureq::Error;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;

/// Resolves addresses and `localhost` itself, and everything else with glibc.
#[derive(Debug)]
pub(super) struct HostResolver {
    others: DefaultResolver,
    /// Refuse hosts that resolve to this computer.
    refuse_local: bool,
    registry: Arc<RegistryIsHere>,
}

/// Whether a registry that the user named has one of this computer's addresses. It may then name
/// other hosts that have one, such as its token server.
#[derive(Debug, Default)]
pub(super) struct RegistryIsHere(AtomicBool);

impl HostResolver {
    /// A resolver for hosts that the user named.
    pub(super) fn new(registry: &Arc<RegistryIsHere>) -> HostResolver {
        HostResolver {
            others: DefaultResolver::default(),
            refuse_local: false,
            registry: Arc::clone(registry),
        }
    }

    /// A resolver for hosts that a registry named, which must not be this computer.
    pub(super) fn refuse_local(registry: &Arc<RegistryIsHere>) -> HostResolver {
        HostResolver {
            refuse_local: true,
            ..HostResolver::new(registry)
        }
    }

    /// Whether a host with this address is refused.
    fn refuses(&self, address: IpAddr) -> bool {
        is_local_address(address, loopback())
            || !self.registry.0.load(Ordering::Relaxed) && is_own_address(address)
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
        if is_proxy {
            return Ok(found);
        }
        if !self.refuse_local {
            let is_here = !found.is_empty() && found.iter().all(|at| is_own_address(at.ip()));
            self.registry.0.store(is_here, Ordering::Relaxed);
        } else if found.iter().any(|at| self.refuses(at.ip())) {
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

/// Whether an interface of this computer has the address: only such an address can be bound, unless
/// `ip_nonlocal_bind` permits all.
fn is_own_address(address: IpAddr) -> bool {
    let address = address.to_canonical();
    // Addresses for documentation, RFC 5737 and RFC 3849.
    let foreign = match address {
        IpAddr::V4(_) => IpAddr::from([192, 0, 2, 1]),
        IpAddr::V6(_) => IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1]),
    };
    let can_be_bound = |address| UdpSocket::bind((address, 0)).is_ok();
    can_be_bound(address) && !can_be_bound(foreign)
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
    fn an_address_of_this_computer_is_refused_unless_the_registry_has_one() {
        // The only ones that every computer has.
        for own in ["127.0.0.1", "::ffff:127.0.0.1", "127.9.9.9"] {
            assert!(is_own_address(own.parse().unwrap()), "{own}");
        }
        for foreign in ["192.0.2.7", "2001:db8::7"] {
            assert!(!is_own_address(foreign.parse().unwrap()), "{foreign}");
        }
        let resolve = |resolver: HostResolver, host: &str| {
            let uri = format!("https://{host}/").parse().unwrap();
            let timeout = NextTimeout {
                after: ureq::unversioned::transport::time::Duration::NotHappening,
                reason: ureq::Timeout::Resolve,
                per_read: None,
                per_write: None,
            };
            resolver.resolve(&uri, &Config::default(), timeout)
        };
        let registry = Arc::default();
        assert!(resolve(HostResolver::new(&registry), "192.0.2.7").is_ok());
        let named = HostResolver::refuse_local(&registry);
        assert!(named.refuses([127, 0, 0, 1].into()) && !named.refuses([192, 0, 2, 7].into()));
        assert!(!registry.0.load(Ordering::Relaxed));
        assert!(resolve(HostResolver::new(&registry), "127.0.0.1").is_ok());
        assert!(registry.0.load(Ordering::Relaxed));
        assert!(
            resolve(named, "127.0.0.1").is_err(),
            "the loopback is refused in any case"
        );
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
