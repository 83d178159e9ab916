//! Values that follow from a VM's id: the name of its link and its MAC address.

use crate::Error;
use jiffy_wire::mac::Mac;
use std::ffi::CString;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The prefix of our links' names. With the 12 digits of an id a name has 15 bytes, the most that
/// Linux allows.
pub const LINK_PREFIX: &str = "jf-";
/// Digits of a VM's id.
const ID_DIGITS: usize = 12;
/// The MAC address of the host's end of every VM's link. It is the same everywhere, because guests
/// keep it as their gateway's address after a fork or on another node.
pub const GATEWAY_MAC: Mac = Mac([0x02, 0x6a, 0x66, 0x00, 0x00, 0x01]);

/// A host's addresses of both families, IPv4 first.
pub fn both_families(v4: Ipv4Addr, v6: Option<Ipv6Addr>) -> impl Iterator<Item = IpAddr> + use<> {
    [Some(IpAddr::V4(v4)), v6.map(IpAddr::V6)]
        .into_iter()
        .flatten()
}

/// A VM's id: 12 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmId([u8; 6]);

impl VmId {
    /// Parses an id.
    ///
    /// # Errors
    ///
    /// If `text` is not 12 lower-case hexadecimal digits.
    pub fn parse(text: &str) -> Result<VmId, Error> {
        let wrong = || Error::Id(text.chars().take(40).collect());
        let digits = text.as_bytes();
        if digits.len() != ID_DIGITS {
            return Err(wrong());
        }
        let mut id = [0; 6];
        for (byte, pair) in id.iter_mut().zip(digits.chunks(2)) {
            let mut value = 0;
            for digit in pair {
                value = value * 16
                    + match digit {
                        b'0'..=b'9' => digit - b'0',
                        b'a'..=b'f' => digit - b'a' + 10,
                        _ => return Err(wrong()),
                    };
            }
            *byte = value;
        }
        Ok(VmId(id))
    }

    /// Name of its link.
    pub fn link(self) -> String {
        format!("{LINK_PREFIX}{self}")
    }

    /// The name of its link for system calls.
    pub(crate) fn link_c(self) -> CString {
        CString::new(self.link()).unwrap_or_default()
    }

    /// The id that a link of this name belongs to.
    pub fn of_link(name: &str) -> Option<VmId> {
        VmId::parse(name.strip_prefix(LINK_PREFIX)?).ok()
    }

    /// Its MAC address: the id, as a locally administered address of one station
    /// (IEEE 802 §8.4).
    pub fn mac(self) -> Mac {
        let mut mac = self.0;
        mac[0] = mac[0] & 0xfc | 0x02;
        Mac(mac)
    }
}

impl fmt::Display for VmId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_id_and_its_link_name_convert_both_ways() {
        let id = VmId::parse("ff23456789ab").expect("an id");
        assert_eq!(id.link(), "jf-ff23456789ab");
        assert_eq!(id.link().len(), 15);
        assert_eq!(VmId::of_link(&id.link()), Some(id));
        assert_eq!(id.mac().to_string(), "fe:23:45:67:89:ab");
    }

    #[test]
    fn invalid_vm_ids_and_link_names_are_refused() {
        for text in [
            "",
            "ff23456789a",
            "ff23456789abc",
            "FF23456789AB",
            "ff23456789a\u{e9}",
        ] {
            assert!(VmId::parse(text).is_err(), "{text}");
        }
        assert_eq!(VmId::of_link("eth0"), None);
        assert_eq!(VmId::of_link("jf-host"), None);
    }
}
