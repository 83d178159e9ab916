//! Texts of strangers in messages.

/// Makes an untrusted text printable: one line, no control characters, at most 300 characters.
pub fn one_line(text: &str) -> String {
    let clean: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(300)
        .collect();
    clean.split_whitespace().collect::<Vec<_>>().join(" ")
}
