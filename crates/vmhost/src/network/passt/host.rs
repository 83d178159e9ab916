//! What is read of this host.

use jiffy_content::error::{Error, Result};
use jiffy_net::links::found;
use jiffy_net::names::resolvers;
use jiffy_sys::causes;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;

/// The host's resolvers, and those to which systemd-resolved forwards, which listens on loopback.
const RESOLV_CONF: [&str; 2] = ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"];
/// State of a connection in /proc/net/tcp (TCP_ESTABLISHED).
const ESTABLISHED: &str = "01";

/// How a VM resolves names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resolving {
    /// The host's resolvers, which the guest asks itself.
    direct: Vec<Ipv4Addr>,
}

impl Resolving {
    /// As this host resolves names.
    pub fn of_host() -> Resolving {
        Resolving::from(RESOLV_CONF.map(Path::new).into_iter())
    }

    /// As the first of these files says that names a resolver which is not on loopback.
    fn from<'a>(files: impl Iterator<Item = &'a Path>) -> Resolving {
        let of = |file: &Path| -> Vec<Ipv4Addr> {
            let text = fs::read(file).unwrap_or_default();
            let named = resolvers::named(&String::from_utf8_lossy(&text));
            let v4 = named.into_iter().filter_map(|it| match it.ip() {
                IpAddr::V4(v4) => Some(v4),
                IpAddr::V6(_) => None,
            });
            v4.filter(|it| !it.is_loopback() && !it.is_unspecified())
                .collect()
        };
        let direct = files.map(of).find(|all| !all.is_empty());
        Resolving {
            direct: direct.unwrap_or_default(),
        }
    }

    /// Whether passt forwards queries to the resolver that listens on the host's 127.0.0.1.
    pub fn is_forwarded(&self) -> bool {
        self.direct.is_empty()
    }

    /// The name servers that a guest behind this gateway asks.
    pub fn servers(&self, gateway: Ipv4Addr) -> Vec<IpAddr> {
        match self.is_forwarded() {
            true => vec![gateway.into()],
            false => self.direct.iter().copied().map(IpAddr::V4).collect(),
        }
    }
}

/// This host's own IPv4 addresses.
///
/// # Errors
///
/// If the kernel refuses to list them.
pub fn own_addresses() -> Result<Vec<Ipv4Addr>> {
    found::own_v4().map_err(|error| {
        let why = causes::sentence(&error);
        Error::internal(format!("The host's addresses can't be listed: {why}."))
    })
}

/// Whether the host has a route to everywhere.
pub fn has_default_route() -> bool {
    fs::read_to_string("/proc/self/net/route").is_ok_and(|text| is_default_among(&text))
}

/// /proc/net/route of proc_pid_net(5): link, destination and gateway, hexadecimal.
fn is_default_among(text: &str) -> bool {
    let destinations = text
        .lines()
        .skip(1)
        .filter_map(|line| line.split('\t').nth(1));
    destinations.into_iter().any(|it| it == "00000000")
}

/// The local ends of this network namespace's open IPv4 connections; `None` if they can't be read.
pub fn open_connections() -> Option<Vec<SocketAddr>> {
    Some(established(&fs::read_to_string("/proc/self/net/tcp").ok()?))
}

/// /proc/net/tcp of proc_pid_net(5): number, local and remote address, state.
fn established(text: &str) -> Vec<SocketAddr> {
    let local = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (local, state) = (words.nth(1)?, words.nth(1)?);
        let (address, port) = local.split_once(':')?;
        // The address is in the byte order of the network, as this host reads it.
        let address = u32::from_str_radix(address, 16).ok()?.to_ne_bytes();
        let port = u16::from_str_radix(port, 16).ok()?;
        (state == ESTABLISHED).then(|| SocketAddr::new(address.into(), port))
    };
    text.lines().skip(1).filter_map(local).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_asks_resolvers_that_it_can_reach() {
        let folder = tempfile::tempdir().unwrap();
        let gateway = Ipv4Addr::new(10, 118, 0, 1);
        let servers = |texts: &[&str]| {
            let files: Vec<_> = (0..texts.len())
                .map(|number| folder.path().join(number.to_string()))
                .collect();
            for (file, text) in files.iter().zip(texts) {
                fs::write(file, text).unwrap();
            }
            let resolving = Resolving::from(files.iter().map(|file| &**file));
            let servers = resolving.servers(gateway);
            let texts = servers.iter().map(ToString::to_string).collect::<Vec<_>>();
            (texts.join(" "), resolving.is_forwarded())
        };
        let direct = "nameserver fd00::1\nnameserver 192.0.2.1\nnameserver 192.0.2.2\n";
        assert_eq!(servers(&[direct]), ("192.0.2.1 192.0.2.2".into(), false));
        let stub = "nameserver 127.0.0.53\n";
        assert_eq!(servers(&[stub, direct]).0, "192.0.2.1 192.0.2.2");
        let none = [&[stub][..], &[stub, "nameserver 0.0.0.0"], &[""], &[]];
        for texts in none {
            assert_eq!(servers(texts), ("10.118.0.1".into(), true), "{texts:?}");
        }
    }

    #[test]
    fn the_kernels_tables_are_parsed() {
        let head = "Iface\tDestination\tGateway \tFlags\n";
        let local = "eth0\t00FEA9C0\t00000000\t0001\n";
        let default = "eth0\t00000000\t0100000A\t0003\n";
        assert!(is_default_among(&format!("{head}{local}{default}")));
        assert!(!is_default_among(&format!("{head}{local}")));
        assert!(!is_default_among(""));
        let tcp = "  sl  local_address rem_address   st tx_queue rx_queue\n\
            \x20  0: 0100007F:1F90 00000000:0000 0A 00000000:00000000\n\
            \x20  1: 0100007F:1F90 0100007F:9C40 01 00000000:00000000\n\
            \x20  2: x:1F90 0100007F:9C40 01\n   3:\n";
        assert_eq!(established(tcp), ["127.0.0.1:8080".parse().unwrap()]);
    }
}
