//! Text of guests and other processes, as it is shown.

/// Longest name or remark of a guest that is kept, in characters.
const MAX_TEXT: usize = 200;

/// A guest's text, cut to a bearable length, without control characters.
pub fn short(text: &str) -> String {
    cut(text, MAX_TEXT)
}

/// The same, of at most so many characters.
pub fn cut(text: &str, most: usize) -> String {
    text.chars()
        .filter(|c| !c.is_control())
        .take(most)
        .collect()
}
