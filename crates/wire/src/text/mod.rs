//! Text for people: tables, sizes, ages, and escaping of text from guests.
//!
//! * [`list`]: the list of VMs, which the node writes.
//! * [`table`]: rows under headings.

pub mod list;
pub mod table;

use std::borrow::Cow;

/// Replaces every control character of an untrusted text, so that a guest can't control the user's
/// terminal.
pub fn harmless(text: &str) -> Cow<'_, str> {
    if is_plain(text.as_bytes()) {
        text.into()
    } else if text.contains(is_harmful) {
        text.replace(is_harmful, "\u{fffd}").into()
    } else {
        text.into()
    }
}

/// Escapes what [`harmless`] replaces in JSON, whose writers escape only control characters of
/// ASCII. Outside of strings, JSON has none of what is escaped.
pub fn harmless_json(json: String) -> String {
    let escaped = |c: char| is_harmful(c) && !matches!(c, '\n' | '\r' | '\t');
    if !json.contains(escaped) {
        return json;
    }
    let mut text = String::with_capacity(json.len() + 64);
    for c in json.chars() {
        match escaped(c) {
            true => text.push_str(&format!("\\u{:04x}", u32::from(c))),
            false => text.push(c),
        }
    }
    text
}

/// Some terminals treat C1 controls like escape sequences; bidirectional overrides reorder the text.
fn is_harmful(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Whether the text is only printable ASCII. If so, each byte is one column, and none is harmful.
fn is_plain(text: &[u8]) -> bool {
    // Eight bytes at a time, because a list of a thousand VMs has a hundred thousand bytes.
    let (words, rest) = text.as_chunks::<8>();
    let is_word = |word: &[u8; 8]| {
        const ONES: u64 = u64::from_ne_bytes([1; 8]);
        let word = u64::from_ne_bytes(*word);
        // A byte's top bit is set if it is below 0x20 or above 0x7e, or by a borrow or carry from
        // such a byte.
        (word.wrapping_sub(ONES * 0x20) | word.wrapping_add(ONES) | word) & (ONES * 0x80) == 0
    };
    words.iter().all(is_word) && rest.iter().all(|byte| (b' '..=b'~').contains(byte))
}

/// Formats a size: `512 B`, `5.9 MiB`.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// Parses a size in bytes: a whole number followed by nothing (units of `plain` bytes) or by `K`,
/// `M`, `G` or `T` in either case, with or without `iB`. `None` if it is not a size.
pub fn parse_size(text: &str, plain: u64) -> Option<u64> {
    let upper = text.to_ascii_uppercase();
    let digits = upper.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = match &upper[digits.len()..] {
        "" => plain,
        "K" | "KIB" => 1 << 10,
        "M" | "MIB" => 1 << 20,
        "G" | "GIB" => 1 << 30,
        "T" | "TIB" => 1 << 40,
        _ => return None,
    };
    // `parse` would accept a sign.
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = digits.parse().ok().filter(|_| is_number)?;
    number.checked_mul(unit)
}

/// Formats the time from `since` to `now` (Unix seconds): `3 seconds`, `2 hours`.
pub fn age(since: u64, now: u64) -> String {
    let mut age = String::new();
    push_age(&mut age, since, now);
    age
}

/// Appends [`age`].
fn push_age(text: &mut String, since: u64, now: u64) {
    let seconds = now.saturating_sub(since);
    let (count, unit) = match seconds {
        0..60 => (seconds, "second"),
        60..3600 => (seconds / 60, "minute"),
        3600..86_400 => (seconds / 3600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    push_number(text, count);
    text.push(' ');
    text.push_str(unit);
    text.push_str(if count == 1 { "" } else { "s" });
}

/// Appends a number with a tenth of the instructions of the standard formatting.
fn push_number(text: &mut String, number: u64) {
    if number >= 10 {
        push_number(text, number / 10);
    }
    text.push((b'0' + (number % 10) as u8) as char);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_no_controls_and_the_same_contents() {
        let text = "ä\u{7f}\u{80}\u{9b}31m\u{9f}\u{a0}\u{202e}\t\n";
        let json = serde_json::to_string_pretty(&[text]).unwrap();
        let safe = harmless_json(json.clone());
        assert!(safe.contains(r"ä\u007f\u0080\u009b31m\u009f"), "{safe}");
        assert_eq!(harmless(&safe.replace('\n', "")), safe.replace('\n', ""));
        assert_eq!(serde_json::from_str::<[String; 1]>(&safe).unwrap(), [text]);
        let plain = serde_json::to_string_pretty(&["ä", "b"]).unwrap();
        assert_eq!(harmless_json(plain.clone()), plain);
    }

    #[test]
    fn escapes_do_not_reach_the_terminal() {
        assert_eq!(harmless("plain ünï"), "plain ünï");
        assert_eq!(
            harmless("a\x1b]0;x\x07b\nc\u{9b}d\u{202e}"),
            "a\u{fffd}]0;x\u{fffd}b\u{fffd}c\u{fffd}d\u{fffd}"
        );
    }

    #[test]
    fn only_printable_ascii_is_plain_at_any_position() {
        for byte in 0..=255 {
            for length in 1..20 {
                for place in 0..length {
                    let mut text = vec![b'a'; length];
                    text[place] = byte;
                    assert_eq!(is_plain(&text), (b' '..=b'~').contains(&byte), "{byte:#x}");
                }
            }
        }
    }

    #[test]
    fn a_size_is_parsed_from_number_and_unit() {
        for (text, plain, expected) in [
            ("0", 1, 0),
            ("50", 1, 50),
            ("50", 1 << 20, 50 << 20),
            ("50k", 1, 50 << 10),
            ("2M", 1 << 20, 2 << 20),
            ("1GiB", 1, 1 << 30),
            ("3t", 1, 3 << 40),
        ] {
            assert_eq!(parse_size(text, plain), Some(expected), "{text}");
        }
        for text in [
            "",
            "M",
            "-1",
            "+1",
            "1.5G",
            "5 M",
            "5X",
            "5iB",
            "99999999T",
            "ä",
            "1Gä",
        ] {
            assert_eq!(parse_size(text, 1), None, "{text}");
        }
    }

    #[test]
    fn sizes_and_ages_are_short() {
        assert_eq!(size(0), "0 B");
        assert_eq!(size(1023), "1023 B");
        assert_eq!(size(1024), "1.0 KiB");
        assert_eq!(size(1024 * 1024 - 1), "1.0 MiB");
        assert_eq!(size(6 * 1024 * 1024), "6.0 MiB");
        assert_eq!(size(u64::MAX), "16.0 EiB");
        assert_eq!(age(10, 11), "1 second");
        assert_eq!(age(11, 10), "0 seconds");
        assert_eq!(age(0, 7200), "2 hours");
        assert_eq!(age(0, u64::MAX), "213503982334601 days");
        assert_eq!(age(0, 86_400 * 3), "3 days");
    }
}
