//! MAC addresses.

use alloc::string::String;
use core::fmt;
use core::str::FromStr;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A MAC address. In JSON: six hexadecimal bytes with colons, `02:4a:46:00:00:01`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mac(pub [u8; 6]);

/// A text is not a [`Mac`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a MAC address, such as 02:4a:46:00:00:01")]
pub struct NotAMac;

impl fmt::Display for Mac {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, f] = self.0;
        write!(formatter, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl FromStr for Mac {
    type Err = NotAMac;

    fn from_str(text: &str) -> Result<Mac, NotAMac> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or(NotAMac)?.as_bytes();
            let digit = |at: usize| char::from(part[at]).to_digit(16).ok_or(NotAMac);
            if part.len() != 2 {
                return Err(NotAMac);
            }
            *byte = (digit(0)? * 16 + digit(1)?) as u8;
        }
        match parts.next() {
            None => Ok(Mac(bytes)),
            Some(_) => Err(NotAMac),
        }
    }
}

impl Serialize for Mac {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Mac {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Mac, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::string::ToString;

    #[test]
    fn invalid_mac_addresses_are_refused() {
        for bad in [
            "",
            "02:4a:46:00:00",
            "02:4a:46:00:00:01:02",
            "2:4a:46:00:00:01",
            "02-4a-46-00-00-01",
            "02:4a:46:00:00:0g",
            "02:4a:46:00:00:+1",
            "02:4a:46:00:00:é",
            "02:4a:46:00:00:01 ",
        ] {
            assert_eq!(bad.parse::<Mac>(), Err(NotAMac), "{bad}");
        }
        let upper: Mac = "02:4A:46:00:00:01".parse().unwrap();
        assert_eq!(upper.to_string(), "02:4a:46:00:00:01");
    }

    proptest! {
        #[test]
        fn a_printed_mac_address_parses_to_itself(bytes in any::<[u8; 6]>()) {
            let mac = Mac(bytes);
            prop_assert_eq!(mac.to_string().parse(), Ok(mac));
            let json = serde_json::to_string(&mac).unwrap();
            prop_assert_eq!(serde_json::from_str::<Mac>(&json).unwrap(), mac);
        }

        #[test]
        fn any_text_is_parsed_or_refused(text in "\\PC{0,20}") {
            let _ = text.parse::<Mac>();
        }
    }
}
