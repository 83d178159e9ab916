//! The kernel's command line.

use super::BootError;

/// The user's command line, followed by `parameters` and a zero byte. Words after a lone `--`
/// belong to PID 1, so parameters are put before it. `size` is the limit in bytes, including the
/// zero.
///
/// # Errors
///
/// If `user` contains a zero byte, or the line does not fit in `size`.
pub fn compose(user: &str, parameters: &str, size: usize) -> Result<Vec<u8>, BootError> {
    if let Some(position) = user.bytes().position(|byte| byte == 0) {
        return Err(BootError::CommandLineZero(position));
    }
    let (kernel, init) = split(user.trim());
    let line = [kernel.trim(), parameters, init]
        .into_iter()
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join(" ");
    if line.len() >= size {
        return Err(BootError::CommandLineTooLong {
            length: line.len(),
            limit: size.saturating_sub(1),
        });
    }
    let mut bytes = line.into_bytes();
    bytes.push(0);
    Ok(bytes)
}

/// Splits the line before a lone `--` outside quotes.
fn split(line: &str) -> (&str, &str) {
    let bytes = line.as_bytes();
    let mut quoted = false;
    for at in 0..bytes.len() {
        quoted ^= bytes[at] == b'"';
        let starts = at == 0 || bytes[at - 1].is_ascii_whitespace();
        let ends = bytes.get(at + 2).is_none_or(u8::is_ascii_whitespace);
        if !quoted && starts && ends && bytes[at..].starts_with(b"--") {
            return line.split_at(at);
        }
    }
    (line, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn composed(user: &str, parameters: &str) -> String {
        let mut bytes = compose(user, parameters, 2048).unwrap();
        assert_eq!(bytes.pop(), Some(0));
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn device_parameters_go_between_the_users_and_those_of_pid_1() {
        assert_eq!(composed("quiet", "a=1"), "quiet a=1");
        assert_eq!(composed("", "a=1"), "a=1");
        assert_eq!(composed(" quiet ", ""), "quiet");
        assert_eq!(composed("quiet -- single", "a=1"), "quiet a=1 -- single");
        assert_eq!(composed("--", "a=1"), "a=1 --");
        assert_eq!(composed("x=\"a -- b\" y", "a=1"), "x=\"a -- b\" y a=1");
        assert_eq!(composed("--x", "a=1"), "--x a=1");
    }

    #[test]
    fn command_lines_that_are_too_long_or_contain_nul_are_refused() {
        assert!(compose(&"x".repeat(2043), "a=1", 2048).is_ok());
        assert!(matches!(
            compose(&"x".repeat(2044), "a=1", 2048),
            Err(BootError::CommandLineTooLong {
                length: 2048,
                limit: 2047
            })
        ));
        assert!(matches!(
            compose("a\0b", "", 2048),
            Err(BootError::CommandLineZero(1))
        ));
    }
}
