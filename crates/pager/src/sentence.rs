//! Sentences that a VMM has influenced, for the log and for the VMM.

/// Most characters that are kept.
const MOST: usize = 1000;

/// The sentence in one line, truncated: it may quote what a VMM sent.
pub(crate) fn bounded(sentence: &str) -> String {
    let one_line = |c: char| if c.is_control() { ' ' } else { c };
    let mut characters = sentence.chars();
    let mut kept: String = characters.by_ref().take(MOST).map(one_line).collect();
    if characters.next().is_some() {
        kept.push('…');
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_has_a_bounded_length_and_no_control_characters() {
        assert_eq!(bounded("it failed"), "it failed");
        assert_eq!(bounded("a\nb\u{1b}[2Jc\u{9b}d"), "a b [2Jc d");
        assert_eq!(bounded(&"ä".repeat(MOST)), "ä".repeat(MOST));
        let long = bounded(&"ä".repeat(MOST + 1));
        assert_eq!(long, format!("{}…", "ä".repeat(MOST)));
    }
}
