//! A limit as users write it.

use jiffy_wire::text::parse_size;
use std::io;
use std::path::Path;
use std::str::FromStr;

/// A limit of use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// Percent of the total.
    Percent(u8),
    /// Bytes.
    Bytes(u64),
}

impl Limit {
    /// The limit in bytes, of a total of `all` bytes.
    pub fn of(self, all: u64) -> u64 {
        match self {
            Limit::Bytes(bytes) => bytes,
            Limit::Percent(share) => all / 100 * u64::from(share),
        }
    }

    /// The limit in bytes, of the file system that this folder is on.
    ///
    /// # Errors
    ///
    /// If `statvfs` fails.
    pub fn of_disk(self, folder: &Path) -> io::Result<u64> {
        let all = rustix::fs::statvfs(folder)?;
        Ok(self.of(all.f_blocks.saturating_mul(all.f_frsize)))
    }
}

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Limit, String> {
        let wrong = || format!("expected a share or a size, like 10% or 20G, and not {text:?}");
        if let Some(share) = text.strip_suffix('%') {
            let share: u8 = share.parse().map_err(|_| wrong())?;
            return (share <= 100)
                .then_some(Limit::Percent(share))
                .ok_or_else(wrong);
        }
        parse_size(text, 1).map(Limit::Bytes).ok_or_else(wrong)
    }
}

/// A limit of all VMs' memory as users write it: a [`Limit`], or `none`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryLimit {
    /// VMs have at most so much in all.
    Of(Limit),
    /// Any number of VMs may be promised memory.
    Unlimited,
}

impl FromStr for MemoryLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<MemoryLimit, String> {
        match text {
            "none" => Ok(MemoryLimit::Unlimited),
            _ => text.parse().map(MemoryLimit::Of),
        }
    }
}

/// A size in bytes, like `64M`.
///
/// # Errors
///
/// If it is not a size: a text that says what was expected.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    parse_size(text, 1).ok_or_else(|| format!("expected a size, like 64M, and not {text:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_a_share_or_a_size() {
        let limit = |text: &str| text.parse::<Limit>();
        assert_eq!(limit("10%"), Ok(Limit::Percent(10)));
        assert_eq!(limit("0"), Ok(Limit::Bytes(0)));
        assert_eq!(limit("20G"), Ok(Limit::Bytes(20 << 30)));
        for wrong in ["", "G", "101%", "-1", "99999999T", "1.5G", "ä"] {
            assert!(limit(wrong).is_err(), "{wrong}");
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
        for wrong in ["None", "", "-1"] {
            assert!(wrong.parse::<MemoryLimit>().is_err(), "{wrong}");
        }
        let all = Limit::Percent(100).of_disk(Path::new("/")).unwrap();
        let tenth = Limit::Percent(10).of_disk(Path::new("/")).unwrap();
        assert!(tenth > 0 && tenth * 9 < all);
    }
}
