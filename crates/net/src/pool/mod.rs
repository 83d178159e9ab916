//! The pool of VMs' addresses.
//!
//! * [`choose`]: chooses ranges that overlap none of the host's routes.

pub mod choose;

#[cfg(test)]
mod tests;

use crate::{Cidr, Error};
use std::collections::{BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Prefix lengths an IPv4 pool may have: 4 addresses to 2^20.
const V4_PREFIXES: std::ops::RangeInclusive<u8> = 12..=30;
/// The longest prefix of an IPv6 pool: the low 32 bits are for the offset of the IPv4 address.
const MAX_V6_PREFIX: u8 = 96;

/// The ranges of VMs' addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ranges {
    v4: (Ipv4Addr, u8),
    v6: (Ipv6Addr, u8),
}

impl Ranges {
    /// Ranges of VMs' addresses. `v4` must have 4 to 2^20 addresses, `v6` at most a /96.
    ///
    /// # Errors
    ///
    /// If they don't, or one is of the other family.
    pub fn new(v4: Cidr, v6: Cidr) -> Result<Ranges, Error> {
        let IpAddr::V4(first4) = v4.first() else {
            return Err(Error::Pool(v4.to_string(), "it is not IPv4"));
        };
        if !V4_PREFIXES.contains(&v4.prefix()) {
            return Err(Error::Pool(
                v4.to_string(),
                "its prefix is not between /12 and /30",
            ));
        }
        let IpAddr::V6(first6) = v6.first() else {
            return Err(Error::Pool(v6.to_string(), "it is not IPv6"));
        };
        if v6.prefix() > MAX_V6_PREFIX {
            return Err(Error::Pool(v6.to_string(), "its prefix is longer than /96"));
        }
        Ok(Ranges {
            v4: (first4, v4.prefix()),
            v6: (first6, v6.prefix()),
        })
    }

    /// All IPv4 addresses.
    pub fn v4(self) -> Cidr {
        Cidr::new(self.v4.0.into(), self.v4.1).unwrap_or(Cidr::single(self.v4.0.into()))
    }

    /// All IPv6 addresses.
    pub fn v6(self) -> Cidr {
        Cidr::new(self.v6.0.into(), self.v6.1).unwrap_or(Cidr::single(self.v6.0.into()))
    }

    /// The host's own IPv4 address in the range: the guests' gateway and name server.
    pub fn gateway(self) -> Ipv4Addr {
        self.address(1)
    }

    /// The host's own IPv6 address in the range.
    pub fn gateway6(self) -> Ipv6Addr {
        self.v6_of(self.gateway())
    }

    /// The IPv6 address that belongs to an IPv4 address: it has the same offset in its range.
    pub fn v6_of(self, v4: Ipv4Addr) -> Ipv6Addr {
        let place = v4.to_bits().wrapping_sub(self.v4.0.to_bits());
        Ipv6Addr::from_bits(self.v6.0.to_bits() | u128::from(place))
    }

    fn address(self, place: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.v4.0.to_bits() + place)
    }

    /// Offsets that VMs may have: all except the network address, the gateway and the broadcast
    /// address.
    fn places(self) -> std::ops::Range<u32> {
        2..(1 << (32 - self.v4.1)) - 1
    }
}

/// The addresses in use. Addresses that were never used are assigned first, then those that have
/// been free for longest.
#[derive(Debug)]
pub struct Pool {
    ranges: Ranges,
    used: BTreeSet<Ipv4Addr>,
    /// The lowest offset that was never assigned.
    fresh: u32,
    /// Claimed addresses above it.
    claimed: BTreeSet<Ipv4Addr>,
    freed: VecDeque<Ipv4Addr>,
}

impl Pool {
    /// A pool with all addresses free.
    pub fn new(ranges: Ranges) -> Pool {
        Pool {
            ranges,
            used: BTreeSet::new(),
            fresh: ranges.places().start,
            claimed: BTreeSet::new(),
            freed: VecDeque::new(),
        }
    }

    /// Its ranges.
    pub fn ranges(&self) -> Ranges {
        self.ranges
    }

    /// Takes a free address.
    ///
    /// # Errors
    ///
    /// If all addresses are in use.
    pub fn take(&mut self) -> Result<Ipv4Addr, Error> {
        while self.ranges.places().contains(&self.fresh) {
            let address = self.ranges.address(self.fresh);
            self.fresh += 1;
            if !self.claimed.remove(&address) {
                self.used.insert(address);
                return Ok(address);
            }
        }
        let address = self.freed.pop_front();
        let address = address.ok_or_else(|| Error::PoolEmpty(self.ranges.v4().to_string()))?;
        self.used.insert(address);
        Ok(address)
    }

    /// Claims this address for a VM that had it before. `false` if it is not in this pool, or in
    /// use.
    pub fn claim(&mut self, address: Ipv4Addr) -> bool {
        let place = address.to_bits().wrapping_sub(self.ranges.v4.0.to_bits());
        let claimed = self.ranges.places().contains(&place) && self.used.insert(address);
        if claimed {
            self.freed.retain(|it| *it != address);
            if place >= self.fresh {
                self.claimed.insert(address);
            }
        }
        claimed
    }

    /// Frees an address. It is assigned again after all others.
    pub fn free(&mut self, address: Ipv4Addr) {
        if self.used.remove(&address) {
            self.freed.push_back(address);
        }
    }
}
