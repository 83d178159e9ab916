//! Names of VMs, images, kernels and volumes, and VMs' ids.

use crate::error::{Error, Result};

/// Longest name, in bytes.
const MAX_NAME: usize = 63;

const ADJECTIVES: [&str; 48] = [
    "able", "airy", "apt", "blithe", "bold", "brave", "brisk", "calm", "clear", "clever", "cosy",
    "crisp", "deft", "eager", "early", "fair", "fleet", "fond", "frank", "fresh", "gentle", "glad",
    "grand", "hardy", "jolly", "keen", "kind", "light", "lively", "lucid", "merry", "mild", "neat",
    "nimble", "plain", "proud", "quick", "quiet", "rapid", "ready", "sharp", "sound", "spry",
    "sturdy", "sunny", "swift", "warm", "wise",
];

const NOUNS: [&str; 48] = [
    "alder", "badger", "beech", "birch", "brook", "cedar", "clover", "comet", "crane", "curlew",
    "delta", "ember", "falcon", "fern", "finch", "fjord", "gale", "hare", "harbour", "hazel",
    "heron", "ibis", "kestrel", "lark", "larch", "linnet", "marten", "meadow", "merlin", "moss",
    "oak", "osprey", "otter", "pine", "plover", "raven", "reed", "robin", "rowan", "sparrow",
    "stoat", "stork", "swallow", "teal", "thrush", "tern", "willow", "wren",
];

/// Checks a name the user chose. `what` is "VM", "image", and so on.
///
/// # Errors
///
/// If it is not 1 to 63 letters, digits, `_`, `.` and `-`, beginning with a letter or digit.
pub fn check(what: &str, name: &str) -> Result<()> {
    let mut bytes = name.bytes();
    let good = bytes
        .next()
        .is_some_and(|first| first.is_ascii_alphanumeric())
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-'))
        && name.len() <= MAX_NAME;
    if good {
        return Ok(());
    }
    let shown: String = name.chars().take(MAX_NAME + 1).collect();
    Err(
        Error::invalid(format!("{shown:?} can't be the name of a {what}.")).hint(
            "Use up to 63 letters, digits, `_`, `.` and `-`, beginning with a letter or digit.",
        ),
    )
}

/// Checks a name the user chose for a VM.
///
/// # Errors
///
/// As for [`check`], or if it looks like an id: it could be mistaken for another VM's id.
pub fn check_vm(name: &str) -> Result<()> {
    check("VM", name)?;
    if is_id(name) {
        return Err(Error::invalid(format!(
            "{name:?} can't be the name of a VM: it looks like the id of one."
        ))
        .hint("VMs' ids are 12 digits and letters from a to f: use any other letter, or another length."));
    }
    Ok(())
}

/// A generated name, like `swift-heron`.
pub fn random_name() -> String {
    let [first, second] = random::<2>();
    format!(
        "{}-{}",
        ADJECTIVES[first as usize % ADJECTIVES.len()],
        NOUNS[second as usize % NOUNS.len()]
    )
}

/// A new id: 12 hexadecimal digits.
pub fn new_id() -> String {
    hexadecimal(&random::<6>())
}

/// A UUID of random bits (RFC 9562 §5.4), `8-4-4-4-12`.
pub fn new_uuid() -> String {
    let mut bytes = random::<16>();
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let digits = hexadecimal(&bytes);
    format!(
        "{}-{}-{}-{}-{}",
        &digits[..8],
        &digits[8..12],
        &digits[12..16],
        &digits[16..20],
        &digits[20..]
    )
}

/// Four hexadecimal digits that make a generated name unique.
pub fn suffix() -> String {
    hexadecimal(&random::<2>())
}

/// Whether the whole text is an id.
pub fn is_id(text: &str) -> bool {
    text.len() == 12
        && text
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("Linux 3.17 and later have getrandom(2)");
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_rule() {
        for good in ["a", "0", "web-1", "A_b.c", &"x".repeat(63)] {
            check("VM", good).unwrap();
        }
        for bad in [
            "",
            "-a",
            ".a",
            "_a",
            "a b",
            "a/b",
            "..",
            "ä",
            "a\n",
            &"x".repeat(64),
        ] {
            assert!(check("VM", bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_vm_name_must_not_look_like_an_id() {
        for good in ["0123456789a", "0123456789abc", "0123456789aB", "deadbeef"] {
            check_vm(good).unwrap();
        }
        for bad in ["0123456789ab", "deadbeefcafe", "123456789012"] {
            let error = check_vm(bad).unwrap_err();
            assert!(error.0.message.contains("looks like the id"), "{bad}");
        }
    }

    #[test]
    fn made_up_names_and_ids_are_valid() {
        for _ in 0..200 {
            check_vm(&random_name()).unwrap();
            assert!(is_id(&new_id()));
        }
        assert!(!is_id("0123456789aB"));
        assert!(!is_id("0123456789a"));
    }
}
