//! Reads and checks the configuration.

use crate::fw_cfg::FwCfg;
use alloc::{format, string::String};
use jiffy_wire::guest::{FW_CFG_NAME, GuestConfig, MAX_CONFIG, VERSION};

/// Reads the configuration and checks it.
///
/// # Errors
///
/// If the host gave none, it can't be read, or [`parse`] refuses it.
pub fn read(source: &FwCfg) -> Result<GuestConfig, String> {
    let bytes = source
        .read(FW_CFG_NAME, MAX_CONFIG)?
        .ok_or_else(|| format!("no fw_cfg file {FW_CFG_NAME}: the host gave no configuration"))?;
    parse(&bytes)
}

/// Parses a configuration and checks its version.
///
/// # Errors
///
/// If it is too large, of another version, or not valid.
pub fn parse(bytes: &[u8]) -> Result<GuestConfig, String> {
    if bytes.len() > MAX_CONFIG {
        return Err(too_large());
    }
    match serde_json::from_slice::<GuestConfig>(bytes) {
        Ok(config) if config.version == VERSION => Ok(config),
        Ok(config) => Err(wrong_version(config.version)),
        Err(error) => {
            // A newer version may have fields that this one does not know: its version decides the
            // message.
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
    fn parse_errors_name_the_field_and_column() {
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

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_parsed_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn any_json_object_is_refused_or_parsed(text in "\\{(\"[a-z_]{1,9}\":(1|\"x\"|null|\\[\\]),?){0,5}\\}") {
            let _ = parse(text.as_bytes());
        }
    }
}
