//! Text of guests and other processes, made safe to show.

/// Most characters that are kept of a guest's name or detail.
const MAX_TEXT: usize = 200;

/// A guest's text, truncated, without control characters.
pub fn short(text: &str) -> String {
    truncate(text, MAX_TEXT)
}

/// As [`short`], with at most `most` characters.
pub fn truncate(text: &str, most: usize) -> String {
    text.chars()
        .filter(|c| !c.is_control())
        .take(most)
        .collect()
}
