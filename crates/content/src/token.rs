//! Tokens that clients must send.

use crate::error::{Error, Result};
use jiffy_sys::regular;
use std::io;
use std::path::Path;

/// Most bytes of a file with a token.
const MAX_FILE: u64 = 64 << 10;

/// The hash of a token.
#[derive(Debug, Clone)]
pub struct Token(blake3::Hash);

impl Token {
    /// From the token in plain text.
    pub fn new(token: &str) -> Token {
        Token(blake3::hash(token.as_bytes()))
    }

    /// From a file that contains the token, and spaces and line ends around it.
    ///
    /// # Errors
    ///
    /// If the file can't be read, has more than 64 KiB, is not UTF-8, or has only white space.
    pub fn read(path: &Path) -> Result<Token> {
        let text = regular::read(path, MAX_FILE).and_then(|bytes| {
            let not_text = |_| io::Error::new(io::ErrorKind::InvalidData, "it is not text");
            String::from_utf8(bytes).map_err(not_text)
        });
        let text = text.map_err(|error| {
            Error::invalid(format!(
                "The token file {} can't be read: {error}.",
                path.display()
            ))
        })?;
        match text.trim() {
            "" => Err(Error::invalid(format!(
                "The token file {} is empty.",
                path.display()
            ))),
            token => Ok(Token::new(token)),
        }
    }

    /// Whether this is the token. Hashes are compared, so the time does not depend on how much of
    /// it matches.
    pub fn is(&self, sent: &[u8]) -> bool {
        blake3::hash(sent) == self.0
    }
}

/// The token in a value of the header `Authorization`.
pub fn bearer(value: &[u8]) -> Option<&[u8]> {
    value.strip_prefix(b"Bearer ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_file_contains_one_token() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let reason = || Token::read(&path).unwrap_err().0.message;
        assert!(reason().contains("can't be read"));
        for wrong in [vec![b'x'; MAX_FILE as usize + 1], vec![0xff]] {
            fs::write(&path, wrong).unwrap();
            assert!(reason().contains("can't be read: it "));
        }
        let made = std::process::Command::new("mkfifo")
            .arg(folder.path().join("fifo"))
            .status();
        assert!(made.unwrap().success());
        let fifo = Token::read(&folder.path().join("fifo")).unwrap_err();
        assert!(fifo.0.message.contains("it is a FIFO"));
        fs::write(&path, " \n").unwrap();
        assert!(reason().contains("is empty"));
        fs::write(&path, "secret\n").unwrap();
        let token = Token::read(&path).unwrap();
        assert!(token.is(b"secret"));
        for wrong in [&b"secre"[..], b"secret2", b"secret\n", b""] {
            assert!(!token.is(wrong));
        }
        assert_eq!(bearer(b"Bearer x"), Some(&b"x"[..]));
        assert_eq!(bearer(b"Basic x"), None);
    }
}
