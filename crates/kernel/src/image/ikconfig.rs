//! The configuration that `CONFIG_IKCONFIG` embeds in a kernel: gzip data between `IKCFG_ST` and
//! `IKCFG_ED` (Linux, `kernel/configs.c`).

use std::io::Read;

use flate2::read::GzDecoder;

use super::NoConfig;
use super::bytes::find as find_bytes;
use crate::config::{Config, MAX_TEXT};

const START: &[u8] = b"IKCFG_ST";
const END: &[u8] = b"IKCFG_ED";

/// Finds and unpacks the configuration in an uncompressed kernel.
///
/// # Errors
///
/// If there is no configuration, or it is damaged.
pub fn find(kernel: &[u8]) -> Result<Config, NoConfig> {
    let mut rest = kernel;
    let mut damaged = false;
    // A program that searches for these words, such as this one, contains them too: they count only
    // if gzip data follows.
    while let Some(at) = find_bytes(rest, START) {
        rest = &rest[at + START.len()..];
        if !rest.starts_with(&[0x1f, 0x8b]) {
            continue;
        }
        match unpack(rest) {
            Some(config) => return Ok(config),
            None => damaged = true,
        }
    }
    Err(if damaged {
        NoConfig::Damaged
    } else {
        NoConfig::Absent
    })
}

fn unpack(data: &[u8]) -> Option<Config> {
    let packed = &data[..find_bytes(data, END)?];
    let mut text = Vec::new();
    let read = GzDecoder::new(packed)
        .take(MAX_TEXT as u64 + 1)
        .read_to_end(&mut text)
        .ok()?;
    if read > MAX_TEXT {
        return None;
    }
    Config::parse(std::str::from_utf8(&text).ok()?).ok()
}
