//! A kernel configuration as text: `CONFIG_NAME=value` and `# CONFIG_NAME is not set`.

use std::collections::BTreeMap;

/// Largest text that is read, bytes; configurations of distributions have 300 KB.
pub const MAX_TEXT: usize = 4 << 20;

/// Value of an option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// `=y`
    BuiltIn,
    /// `=m`
    Module,
    /// A number or a quoted string, as written.
    Other(String),
}

/// The options of a kernel. An option that is not set is absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    options: BTreeMap<String, Value>,
}

/// Why a text is not a kernel configuration.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ConfigError {
    /// Larger than [`MAX_TEXT`].
    #[error("it has {0} bytes; a kernel configuration has at most {MAX_TEXT}")]
    TooLarge(usize),
    /// This line is neither an option nor a comment.
    #[error("line {0} is neither CONFIG_NAME=value nor a comment")]
    Line(usize),
    /// It sets no option.
    #[error("it sets no CONFIG_ option")]
    Empty,
}

impl Config {
    /// Parses a `.config`, `/proc/config` or `/boot/config-*`.
    ///
    /// # Errors
    ///
    /// If the text is larger than [`MAX_TEXT`], a line is neither an option nor a comment, or no
    /// option is set.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        if text.len() > MAX_TEXT {
            return Err(ConfigError::TooLarge(text.len()));
        }
        let mut options = BTreeMap::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (name, value) = line
                .strip_prefix("CONFIG_")
                .and_then(|rest| rest.split_once('='))
                .filter(|(name, _)| is_name(name))
                .ok_or(ConfigError::Line(number + 1))?;
            let value = match value {
                "y" => Value::BuiltIn,
                "m" => Value::Module,
                "n" => {
                    options.remove(name);
                    continue;
                }
                other => Value::Other(other.to_owned()),
            };
            options.insert(name.to_owned(), value);
        }
        if options.is_empty() {
            return Err(ConfigError::Empty);
        }
        Ok(Self { options })
    }

    /// Value of an option, named without `CONFIG_`; `None` if it is not set.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.options.get(name)
    }

    /// Number of options that are set.
    pub fn len(&self) -> usize {
        self.options.len()
    }

    /// Whether no option is set. Never true for a parsed configuration.
    pub fn is_empty(&self) -> bool {
        self.options.is_empty()
    }
}

fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_what_kconfig_writes() {
        let config = Config::parse(
            "#\n# Automatically generated\n#\nCONFIG_SMP=y\nCONFIG_KVM=m\n\
             # CONFIG_PCI is not set\nCONFIG_NR_CPUS=32\nCONFIG_X=\"a=b\"\nCONFIG_Q=n\n",
        )
        .unwrap();
        assert_eq!(config.get("SMP"), Some(&Value::BuiltIn));
        assert_eq!(config.get("KVM"), Some(&Value::Module));
        assert_eq!(config.get("NR_CPUS"), Some(&Value::Other("32".into())));
        assert_eq!(config.get("X"), Some(&Value::Other("\"a=b\"".into())));
        assert_eq!(config.get("PCI"), None);
        assert_eq!(config.get("Q"), None);
        assert_eq!(config.len(), 4);
    }

    #[test]
    fn refuses_other_texts() {
        assert_eq!(Config::parse(""), Err(ConfigError::Empty));
        assert_eq!(
            Config::parse("CONFIG_A=y\nhello\n"),
            Err(ConfigError::Line(2))
        );
        assert_eq!(Config::parse("CONFIG_=y\n"), Err(ConfigError::Line(1)));
        let large = "#".repeat(MAX_TEXT + 1);
        assert_eq!(
            Config::parse(&large),
            Err(ConfigError::TooLarge(MAX_TEXT + 1))
        );
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in ".{0,400}") {
            let _ = Config::parse(&text);
        }
    }
}
