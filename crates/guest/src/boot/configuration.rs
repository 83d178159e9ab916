//! Reads the configuration from fw_cfg: through the kernel's driver, or, where
//! it has none, through the device's ports (QEMU, docs/specs/fw_cfg.rst).

use crate::files;
use crate::syscalls::ports::Ports;
use alloc::{format, string::String, vec, vec::Vec};
use core::ffi::CStr;
use jiffy_wire::guest::{FW_CFG_NAME, GuestConfig, MAX_CONFIG, VERSION};
use rustix::io::Errno;

const SYSFS_FILE: &CStr = c"/sys/firmware/qemu_fw_cfg/by_name/opt/jiffy/config/raw";

const SELECTOR_PORT: u16 = 0x510;
const SELECTOR: u16 = 0;
const DATA: u16 = 1;
const KEY_SIGNATURE: u16 = 0x0000;
const KEY_DIRECTORY: u16 = 0x0019;
/// A directory entry: size (u32), key (u16), reserved (u16), all big endian,
/// and a name of 56 bytes, NUL-terminated.
const ENTRY: usize = 64;
const MOST_ENTRIES: u32 = 4096;

/// Reads and checks it.
pub fn read() -> Result<GuestConfig, String> {
    let bytes = match files::read(SYSFS_FILE, MAX_CONFIG) {
        Ok(bytes) => bytes,
        Err(Errno::FBIG) => return Err(too_large()),
        Err(_) => read_by_ports()?,
    };
    parse(&bytes)
}

/// Checks a configuration's version, then the whole.
pub fn parse(bytes: &[u8]) -> Result<GuestConfig, String> {
    if bytes.len() > MAX_CONFIG {
        return Err(too_large());
    }
    match serde_json::from_slice::<GuestConfig>(bytes) {
        Ok(config) if config.version == VERSION => Ok(config),
        Ok(config) => Err(wrong_version(config.version)),
        Err(error) => {
            // A newer version may well have fields that this one doesn't know.
            #[derive(serde::Deserialize)]
            struct OnlyVersion {
                version: u32,
            }
            match serde_json::from_slice::<OnlyVersion>(bytes) {
                Ok(only) if only.version != VERSION => Err(wrong_version(only.version)),
                _ => Err(format!(
                    "fw_cfg file {FW_CFG_NAME} is not a configuration: {error}"
                )),
            }
        }
    }
}

fn wrong_version(version: u32) -> String {
    format!(
        "fw_cfg file {FW_CFG_NAME} has version {version}; this jiffy-init reads version {VERSION}"
    )
}

fn too_large() -> String {
    format!("fw_cfg file {FW_CFG_NAME} is over {MAX_CONFIG} bytes")
}

fn read_by_ports() -> Result<Vec<u8>, String> {
    let absent =
        || format!("no fw_cfg file {FW_CFG_NAME}: neither the kernel nor the ports have it");
    let device = Ports::open(SELECTOR_PORT, 2).ok_or_else(absent)?;
    let select = |key: u16| device.write_word(SELECTOR, key);
    let read = |bytes: &mut [u8]| device.read_bytes(DATA, bytes);

    let mut signature = [0; 4];
    select(KEY_SIGNATURE);
    read(&mut signature);
    if signature != *b"QEMU" {
        return Err(absent());
    }
    let mut count = [0; 4];
    select(KEY_DIRECTORY);
    read(&mut count);
    for _ in 0..u32::from_be_bytes(count).min(MOST_ENTRIES) {
        let mut entry = [0; ENTRY];
        read(&mut entry);
        if let Some((size, key)) = matching(&entry) {
            if size > MAX_CONFIG {
                return Err(too_large());
            }
            let mut bytes = vec![0; size];
            select(key);
            read(&mut bytes);
            return Ok(bytes);
        }
    }
    Err(absent())
}

/// Size and key of the entry, if it has the configuration's name.
fn matching(entry: &[u8; ENTRY]) -> Option<(usize, u16)> {
    let (header, name) = entry.split_first_chunk::<8>()?;
    let name = CStr::from_bytes_until_nul(name).ok()?;
    let [s0, s1, s2, s3, k0, k1, ..] = *header;
    (name.to_bytes() == FW_CFG_NAME.as_bytes()).then(|| {
        (
            u32::from_be_bytes([s0, s1, s2, s3]) as usize,
            u16::from_be_bytes([k0, k1]),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_whole_configuration_is_read() {
        let config = parse(
            br#"{"version":1,"vm_id":"a1","root":{"kind":"overlay","device":"/dev/vda","fstype":"erofs"},
                 "main":{"argv":["date"]},"sysctls":{"vm.swappiness":"1"},"timeline":true}"#,
        )
        .unwrap();
        assert_eq!(config.vm_id, "a1");
        assert_eq!(config.main.unwrap().argv, ["date"]);
        assert!(config.timeline);
    }

    #[test]
    fn another_version_is_refused_even_with_unknown_fields() {
        for json in [
            "{\"version\":2,\"vm_id\":\"\"}",
            "{\"version\":2,\"novelty\":[1]}",
        ] {
            let error = parse(json.as_bytes()).unwrap_err();
            assert!(error.contains("version 2"), "{error}");
        }
    }

    #[test]
    fn what_is_wrong_is_said_with_its_place() {
        let error = parse(b"{\"version\":1,\"vm_id\":\"\",\"hostnmae\":\"x\"}").unwrap_err();
        assert!(
            error.contains("hostnmae") && error.contains("column"),
            "{error}"
        );
        assert!(
            parse(&std::vec![b' '; MAX_CONFIG + 1])
                .unwrap_err()
                .contains("over")
        );
    }

    #[test]
    fn a_directory_entry_is_matched_by_its_whole_name() {
        let mut entry = [0; ENTRY];
        entry[..8].copy_from_slice(&[0, 0, 1, 2, 0, 0x21, 0, 0]);
        entry[8..8 + FW_CFG_NAME.len()].copy_from_slice(FW_CFG_NAME.as_bytes());
        assert_eq!(matching(&entry), Some((258, 0x21)));
        entry[8 + FW_CFG_NAME.len()] = b'x';
        assert_eq!(matching(&entry), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_read_but_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn any_json_object_is_refused_or_read(text in "\\{(\"[a-z_]{1,9}\":(1|\"x\"|null|\\[\\]),?){0,5}\\}") {
            let _ = parse(text.as_bytes());
        }
    }
}
