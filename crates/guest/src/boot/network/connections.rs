//! Resets TCP connections that a clone has inherited and can't use (sock_diag(7)).

use super::netlink::{Message, Netlink};
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use rustix::io::{Errno, Result as IoResult};
use rustix::net::netlink::SOCK_DIAG;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const IPPROTO_TCP: u8 = 6;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// All states except TCP_CLOSE (7) and TCP_LISTEN (10).
const CONNECTED: u32 = 0xffe & !(1 << 7) & !(1 << 10);
/// Bytes of `struct inet_diag_sockid`.
const ID: usize = 48;

/// A socket as the kernel identifies it.
struct Connection {
    family: u8,
    id: [u8; ID],
}

impl Connection {
    /// Parses a `struct inet_diag_msg`.
    fn read(message: &[u8]) -> Option<Connection> {
        let id = message.get(4..)?.first_chunk::<ID>()?;
        Some(Connection {
            family: *message.first()?,
            id: *id,
        })
    }

    /// The local address.
    fn local(&self) -> Option<IpAddr> {
        let bytes = &self.id[4..20];
        match self.family {
            AF_INET => Some(Ipv4Addr::from(*bytes.first_chunk::<4>()?).into()),
            AF_INET6 => {
                let address = Ipv6Addr::from(*bytes.first_chunk::<16>()?);
                Some(address.to_canonical())
            }
            _ => None,
        }
    }
}

/// Resets all TCP connections from these addresses; returns their number. The addresses and routes
/// must be removed before: the peer is still connected to the parent VM and must get no packet.
///
/// # Errors
///
/// If the kernel refuses the list or to end a connection.
pub fn reset(addresses: &[IpAddr]) -> IoResult<usize> {
    let mut netlink = Netlink::open(Some(SOCK_DIAG))?;
    let mut inherited = Vec::new();
    for family in [AF_INET, AF_INET6] {
        let all = request(SOCK_DIAG_BY_FAMILY, family, CONNECTED, &[0; ID]);
        netlink.dump(all, |message| {
            let connection = Connection::read(message);
            inherited.extend(connection.filter(|connection| {
                connection
                    .local()
                    .is_some_and(|local| addresses.contains(&local))
            }));
        })?;
    }
    for connection in &inherited {
        let end = request(SOCK_DESTROY, connection.family, CONNECTED, &connection.id);
        match netlink.request(end) {
            // The connection has ended meanwhile.
            Err(Errno::NOENT) => {}
            other => other?,
        }
    }
    Ok(inherited.len())
}

/// A `struct inet_diag_req_v2`.
fn request(kind: u16, family: u8, states: u32, id: &[u8; ID]) -> Message {
    let mut message = Message::new(kind, 0);
    message.bytes(&[family, IPPROTO_TCP, 0, 0]);
    message.word(states);
    message.bytes(id);
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message(family: u8, local: &[u8]) -> Vec<u8> {
        let mut bytes = std::vec![0; 72];
        bytes[0] = family;
        bytes[8..8 + local.len()].copy_from_slice(local);
        bytes
    }

    #[test]
    fn the_local_address_of_a_connection_is_parsed() {
        let local = |family, bytes: &[u8]| Connection::read(&message(family, bytes))?.local();
        let four = IpAddr::from([10, 0, 0, 2]);
        assert_eq!(local(AF_INET, &[10, 0, 0, 2]), Some(four));
        let six: Ipv6Addr = "fd00::2".parse().unwrap();
        assert_eq!(local(AF_INET6, &six.octets()), Some(six.into()));
        let mapped = Ipv4Addr::new(10, 0, 0, 2).to_ipv6_mapped();
        assert_eq!(local(AF_INET6, &mapped.octets()), Some(four));
        assert_eq!(local(1, &[]), None);
    }

    #[test]
    #[ignore = "needs CAP_NET_ADMIN"]
    fn connections_of_a_local_address_are_reset() {
        use std::io::Read;
        use std::net::{TcpListener, TcpStream};
        // An address that no other test uses.
        let listener = TcpListener::bind("127.77.3.9:0").unwrap();
        let mut here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut there, _) = listener.accept().unwrap();
        assert_eq!(reset(&["127.77.3.9".parse().unwrap()]), Ok(1));
        assert!(there.read(&mut [0]).is_err());
        assert!(here.read(&mut [0]).is_err());
        // The listening socket still accepts connections.
        let _ = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        listener.accept().unwrap();
    }

    proptest! {
        #[test]
        fn any_sock_diag_message_is_parsed_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = Connection::read(&bytes).and_then(|connection| connection.local());
        }
    }
}
