//! Connection tracking: lists and deletes entries (linux/netfilter/nfnetlink_conntrack.h).

use crate::Error;
use crate::netlink::channel::find;
use crate::netlink::{Batch, Channel, Refusal, flags};
use rustix::io::Errno;
use std::net::IpAddr;

const SUBSYSTEM: u16 = 1;
const GET: u16 = SUBSYSTEM << 8 | 1;
const DELETE: u16 = SUBSYSTEM << 8 | 2;
const TUPLE_ORIGINAL: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const PROTOCOL_INFO: u16 = 4;
const ID: u16 = 12;
const ZONE: u16 = 18;
const TUPLE_IP: u16 = 1;
const TUPLE_PROTOCOL: u16 = 2;
const PROTOCOL_NUMBER: u16 = 1;
const PROTOCOL_PORT: u16 = 3;
const PROTOCOL_INFO_TCP: u16 = 1;
const TCP_STATE: u16 = 1;
const NFGENMSG: usize = 4;
/// The first and last TCP state in which data may still be received (`enum tcp_conntrack`): from
/// SYN_SENT to CLOSE_WAIT. The kernel takes a FIN that was sent twice for those of both sides, so a
/// connection that only one side has closed may count as closed.
const OPEN: std::ops::RangeInclusive<u8> = 1..=5;
/// Entries that are deleted with one datagram.
const AT_ONCE: usize = 256;

/// A tracked connection, in its original direction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connection {
    /// Number of its protocol.
    pub protocol: u8,
    /// The source address.
    pub source: IpAddr,
    /// The destination address before translation.
    pub destination: IpAddr,
    /// The destination port before translation; 0 if the protocol has no ports.
    pub port: u16,
    /// The address that answers.
    pub answers: IpAddr,
    /// It is a TCP connection that neither side has reset and not both have closed.
    pub open: bool,
    /// The family and attributes that identify it to the kernel.
    name: Name,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Name {
    family: u8,
    tuple: Vec<u8>,
    id: Option<Vec<u8>>,
    zone: Option<Vec<u8>>,
}

/// All connections.
#[cfg(test)]
pub(crate) fn list(netfilter: &mut Channel) -> Result<Vec<Connection>, Error> {
    matching(netfilter, |_| true)
}

/// The replying addresses of open TCP connections whose destination was translated, as for
/// published ports: one entry for each connection.
pub(crate) fn translated(netfilter: &mut Channel) -> Result<Vec<IpAddr>, Error> {
    let found = matching(netfilter, |it| it.open && it.answers != it.destination)?;
    Ok(found.iter().map(|it| it.answers).collect())
}

/// Deletes the entries for which `unwanted` returns true. Returns their number.
pub(crate) fn forget(
    netfilter: &mut Channel,
    unwanted: impl Fn(&Connection) -> bool,
) -> Result<usize, Error> {
    let unwanted = matching(netfilter, unwanted)?;
    for some in unwanted.chunks(AT_ONCE) {
        let mut batch = Batch::new();
        for one in some {
            let name = &one.name;
            batch.message(DELETE, 0, |it| {
                it.fixed(&[name.family, 0, 0, 0]);
                it.nested(TUPLE_ORIGINAL, |it| _ = it.fixed(&name.tuple));
                for (kind, value) in [(ID, &name.id), (ZONE, &name.zone)] {
                    if let Some(value) = value {
                        it.bytes(kind, value);
                    }
                }
            });
        }
        let last = batch.len() - 1;
        match netfilter.transact(batch, last) {
            // The connection has ended meanwhile; the other deletions of the batch still happen.
            Err(refusal) if refusal.errno() == Some(Errno::NOENT) => {}
            other => other.map_err(Error::kernel("forgetting connections"))?,
        }
    }
    Ok(unwanted.len())
}

/// The connections for which `wanted` returns true.
pub(crate) fn matching(
    netfilter: &mut Channel,
    wanted: impl Fn(&Connection) -> bool,
) -> Result<Vec<Connection>, Error> {
    let request = || {
        let mut batch = Batch::new();
        batch.message(GET, flags::DUMP, |it| _ = it.fixed(&[0; NFGENMSG]));
        batch
    };
    let take = |_, body: &[u8]| Ok::<_, Refusal>(connection(body).filter(|it| wanted(it)));
    let found = netfilter.dump(request, take);
    found.map_err(Error::kernel("listing connections"))
}

fn connection(body: &[u8]) -> Option<Connection> {
    let (header, attributes) = body.split_at_checked(NFGENMSG)?;
    let original = find(attributes, TUPLE_ORIGINAL)?;
    let reply = find(attributes, TUPLE_REPLY)?;
    let protocol = find(original, TUPLE_PROTOCOL)?;
    let port = find(protocol, PROTOCOL_PORT).and_then(|it| it.try_into().ok());
    let bytes = |kind| find(attributes, kind).map(<[u8]>::to_vec);
    let state = find(attributes, PROTOCOL_INFO)
        .and_then(|it| find(it, PROTOCOL_INFO_TCP))
        .and_then(|it| find(it, TCP_STATE)?.first());
    Some(Connection {
        protocol: *find(protocol, PROTOCOL_NUMBER)?.first()?,
        source: address(original, false)?,
        destination: address(original, true)?,
        port: port.map_or(0, u16::from_be_bytes),
        answers: address(reply, false)?,
        open: state.is_some_and(|it| OPEN.contains(it)),
        name: Name {
            family: header[0],
            tuple: original.to_vec(),
            id: bytes(ID),
            zone: bytes(ZONE),
        },
    })
}

/// The source or destination of a tuple (`CTA_IP_*`).
fn address(tuple: &[u8], destination: bool) -> Option<IpAddr> {
    let addresses = find(tuple, TUPLE_IP)?;
    let offset = u16::from(destination);
    if let Some(v4) = find(addresses, 1 + offset) {
        return Some(IpAddr::from(<[u8; 4]>::try_from(v4).ok()?));
    }
    let v6 = find(addresses, 3 + offset)?;
    Some(IpAddr::from(<[u8; 16]>::try_from(v6).ok()?))
}
