//! Chooses ranges that overlap none of the host's routes.

use crate::{Cidr, Error};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Prefix length of a chosen IPv4 range: 65,533 VMs.
const PREFIX: u8 = 16;

/// An IPv4 range that overlaps none of `taken`, the host's routes and addresses: a /16 of the private
/// ranges (RFC 1918), rarely used ones first.
///
/// # Errors
///
/// If all private ranges overlap one of `taken`.
pub fn choose_v4(taken: &[Cidr]) -> Result<Cidr, Error> {
    candidates()
        .filter_map(|it| Cidr::new(IpAddr::V4(it), PREFIX))
        .find(|range| is_free(taken, *range))
        .ok_or(Error::NoRange {
            family: "IPv4",
            option: "--vm-ipv4",
        })
}

/// An IPv6 range that overlaps none of `taken`: a /64 of the locally assigned ones (RFC 4193), whose
/// 40 random bits are `seed`.
///
/// # Errors
///
/// If all ranges with these bits overlap one of `taken`.
pub fn choose_v6(taken: &[Cidr], seed: [u8; 5]) -> Result<Cidr, Error> {
    (0..=u16::MAX)
        .filter_map(|subnet| {
            let [a, b, c, d, e] = seed;
            let mut octets = [0; 16];
            octets[..6].copy_from_slice(&[0xfd, a, b, c, d, e]);
            octets[6..8].copy_from_slice(&subnet.to_be_bytes());
            let first = Ipv6Addr::from(octets);
            Cidr::new(IpAddr::V6(first), 64)
        })
        .find(|range| is_free(taken, *range))
        .ok_or(Error::NoRange {
            family: "IPv6",
            option: "--vm-ipv6",
        })
}

/// A default route takes no range.
fn is_free(taken: &[Cidr], range: Cidr) -> bool {
    !taken
        .iter()
        .any(|it| it.prefix() != 0 && it.overlaps(range))
}

/// From the middle of 10/8 upwards, then its lower half, then 172.16/12, where the part that Docker
/// uses first comes last.
fn candidates() -> impl Iterator<Item = Ipv4Addr> {
    let ten = (118..=254)
        .chain(1..118)
        .map(|it| Ipv4Addr::new(10, it, 0, 0));
    let others = (24..=31)
        .chain(16..24)
        .map(|it| Ipv4Addr::new(172, it, 0, 0));
    ten.chain(others)
}
