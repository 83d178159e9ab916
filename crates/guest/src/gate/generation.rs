//! Reads and checks the generation of a restored guest.

use crate::fw_cfg::FwCfg;
use alloc::{format, string::String};
use jiffy_wire::guest::{GENERATION_NAME, Generation, VERSION};

/// Largest file, bytes; a generation is much shorter.
pub const LARGEST: usize = 4096;
const SEED: usize = 64;

/// A generation with checked fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checked {
    /// See [`Generation::id`].
    pub id: String,
    /// The decoded seed.
    pub seed: [u8; SEED],
    /// See [`Generation::realtime_ns`].
    pub realtime_ns: u64,
    /// See [`Generation::start_main`].
    pub start_main: bool,
}

/// Id of the host's current generation, if there is one.
///
/// # Errors
///
/// If fw_cfg can't be read, or [`parse`] refuses the generation.
pub fn known(source: &FwCfg) -> Result<Option<String>, String> {
    let bytes = source.read(GENERATION_NAME, LARGEST)?;
    bytes
        .map(|bytes| parse(&bytes).map(|generation| generation.id))
        .transpose()
}

/// Parses and checks a generation.
///
/// # Errors
///
/// If it is not JSON of this version with a UUID and a whole seed.
pub fn parse(bytes: &[u8]) -> Result<Checked, String> {
    let wrong = |what: String| format!("fw_cfg file {GENERATION_NAME}: {what}");
    let generation: Generation = serde_json::from_slice(bytes)
        .map_err(|error| wrong(format!("not a generation: {error}")))?;
    let Generation {
        version,
        id,
        seed,
        realtime_ns,
        start_main,
    } = generation;
    if version != VERSION {
        return Err(wrong(format!(
            "version {version}; this jiffy-init reads version {VERSION}"
        )));
    }
    if !is_uuid(&id) {
        return Err(wrong(format!("the id {id:?} is not a UUID")));
    }
    let seed = parse_seed(&seed)
        .ok_or_else(|| wrong(format!("the seed is not {} hexadecimal digits", 2 * SEED)))?;
    Ok(Checked {
        id,
        seed,
        realtime_ns,
        start_main,
    })
}

/// Whether a text is `8-4-4-4-12` hexadecimal digits in lower case, as Linux writes UUIDs.
fn is_uuid(text: &str) -> bool {
    text.len() == 36
        && text.bytes().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
        })
}

fn parse_seed(text: &str) -> Option<[u8; SEED]> {
    if text.len() != 2 * SEED {
        return None;
    }
    let mut seed = [0; SEED];
    for (byte, digits) in seed.iter_mut().zip(text.as_bytes().as_chunks::<2>().0) {
        let digit = |at: usize| char::from(digits[at]).to_digit(16);
        *byte = (digit(0)? * 16 + digit(1)?) as u8;
    }
    Some(seed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::string::ToString;

    const ID: &str = "0f8fad5b-d9cb-469f-a165-70867728950e";

    fn json(version: u32, id: &str, seed: &str) -> String {
        format!(
            "{{\"version\":{version},\"id\":\"{id}\",\"seed\":\"{seed}\",\"realtime_ns\":5,\"start_main\":true}}"
        )
    }

    #[test]
    fn a_valid_generation_is_parsed() {
        let seed: String = (0..64).map(|n| format!("{n:02x}")).collect();
        let checked = parse(json(1, ID, &seed).as_bytes()).unwrap();
        assert_eq!(checked.id, ID);
        assert_eq!(checked.seed, core::array::from_fn(|n| n as u8));
        assert_eq!((checked.realtime_ns, checked.start_main), (5, true));
    }

    #[test]
    fn an_invalid_generation_is_refused_with_a_reason() {
        let seed = "0".repeat(128);
        for (text, said) in [
            (json(2, ID, &seed), "version 2"),
            (json(1, "x", &seed), "UUID"),
            (json(1, &ID.to_uppercase(), &seed), "UUID"),
            (json(1, &ID.replace('-', "0"), &seed), "UUID"),
            (json(1, ID, ""), "seed"),
            (json(1, ID, &seed[1..]), "seed"),
            (json(1, ID, &seed.replace('0', "g")), "seed"),
            (json(1, ID, &"é".repeat(64)), "seed"),
            ("{}".to_string(), "not a generation"),
            (String::new(), "not a generation"),
        ] {
            let error = parse(text.as_bytes()).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }

    proptest! {
        #[test]
        fn random_bytes_are_refused_as_a_generation(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(parse(&bytes).is_err());
        }
    }
}
