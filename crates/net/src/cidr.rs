//! Ranges of addresses, `ADDRESS/PREFIX`.

use crate::Error;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// A range of IPv4 or IPv6 addresses that begin with the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cidr {
    first: IpAddr,
    prefix: u8,
}

impl Cidr {
    /// Addresses whose first `prefix` bits are those of `address`.
    pub fn new(address: IpAddr, prefix: u8) -> Option<Cidr> {
        let first = match address {
            IpAddr::V4(it) if prefix <= 32 => {
                let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
                IpAddr::V4(Ipv4Addr::from_bits(it.to_bits() & mask))
            }
            IpAddr::V6(it) if prefix <= 128 => {
                let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from_bits(it.to_bits() & mask))
            }
            _ => return None,
        };
        Some(Cidr { first, prefix })
    }

    /// The range of this single address.
    pub fn single(address: IpAddr) -> Cidr {
        let prefix = if address.is_ipv4() { 32 } else { 128 };
        Cidr {
            first: address,
            prefix,
        }
    }

    /// Its lowest address.
    pub fn first(self) -> IpAddr {
        self.first
    }

    /// Its highest address.
    pub fn last(self) -> IpAddr {
        match self.first {
            IpAddr::V4(it) => {
                let host = u32::MAX.checked_shr(self.prefix.into()).unwrap_or(0);
                IpAddr::V4(Ipv4Addr::from_bits(it.to_bits() | host))
            }
            IpAddr::V6(it) => {
                let host = u128::MAX.checked_shr(self.prefix.into()).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from_bits(it.to_bits() | host))
            }
        }
    }

    /// Bits that all its addresses share.
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    /// Whether the range contains the address.
    pub fn contains(self, address: IpAddr) -> bool {
        Cidr::new(address, self.prefix).is_some_and(|it| it.first == self.first)
    }

    /// Whether the two ranges have an address in common.
    pub fn overlaps(self, other: Cidr) -> bool {
        self.contains(other.first) || other.contains(self.first)
    }
}

impl FromStr for Cidr {
    type Err = Error;

    fn from_str(text: &str) -> Result<Cidr, Error> {
        let wrong = || Error::Cidr(text.chars().take(60).collect());
        let (address, prefix) = text.split_once('/').unwrap_or((text, ""));
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let range = if text.contains('/') {
            let digits = !prefix.is_empty() && prefix.bytes().all(|it| it.is_ascii_digit());
            let prefix = prefix.parse().ok().filter(|_| digits).ok_or_else(wrong)?;
            Cidr::new(address, prefix).ok_or_else(wrong)?
        } else {
            Cidr::single(address)
        };
        // 10.0.0.1/8 is more likely a mistake than a range.
        if range.first != address {
            return Err(wrong());
        }
        Ok(range)
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cidr(text: &str) -> Cidr {
        text.parse().expect("a range")
    }

    #[test]
    fn cidr_last_address_and_overlaps() {
        assert_eq!(cidr("10.1.0.0/16").last().to_string(), "10.1.255.255");
        assert_eq!(cidr("0.0.0.0/0").last().to_string(), "255.255.255.255");
        assert_eq!(cidr("fd00::/127").last().to_string(), "fd00::1");
        assert_eq!(cidr("10.0.0.1").to_string(), "10.0.0.1/32");
        assert!(cidr("::/0").contains("ff::1".parse().expect("an address")));
        assert!(!cidr("::/0").contains("1.1.1.1".parse().expect("an address")));
        assert!(cidr("10.0.0.0/8").overlaps(cidr("10.2.0.0/16")));
        assert!(cidr("10.2.0.0/16").overlaps(cidr("10.0.0.0/8")));
        assert!(!cidr("10.2.0.0/16").overlaps(cidr("10.3.0.0/16")));
    }

    #[test]
    fn invalid_cidrs_are_refused() {
        for text in [
            "",
            "/",
            "10.0.0.0/",
            "10.0.0.0/33",
            "10.0.0.0/+8",
            "10.0.0.1/8",
            "::/129",
            "a/8",
        ] {
            assert!(text.parse::<Cidr>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_printed_cidr_parses_to_itself(bits: u32, prefix in 0u8..=32) {
            let range = Cidr::new(Ipv4Addr::from_bits(bits).into(), prefix).expect("a range");
            prop_assert_eq!(cidr(&range.to_string()), range);
            prop_assert!(range.contains(range.first()) && range.contains(range.last()));
        }
    }
}
