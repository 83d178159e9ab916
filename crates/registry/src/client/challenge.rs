//! `WWW-Authenticate`: the authorisation that a registry asks for.
//!
//! RFC 9110 §11.6.1, and Docker's token authentication for the parameters of `Bearer`.

use std::collections::BTreeMap;

/// One challenge.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Challenge {
    /// In small letters: `basic`, `bearer`.
    pub(super) scheme: String,
    /// Names in small letters.
    pub(super) parameters: BTreeMap<String, String>,
}

/// Parses the value of a header; unknown parts are ignored.
pub(super) fn parse(header: &str) -> Vec<Challenge> {
    let mut challenges: Vec<Challenge> = Vec::new();
    let mut rest = header;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let end = rest.find(|c: char| !is_token(c)).unwrap_or(rest.len());
        if end == 0 {
            return challenges;
        }
        let (word, behind) = rest.split_at(end);
        let value = behind.trim_start_matches([' ', '\t']).strip_prefix('=');
        match (value, challenges.last_mut()) {
            (Some(value), Some(challenge)) => {
                let Some((value, behind)) = value_of(value.trim_start_matches([' ', '\t'])) else {
                    return challenges;
                };
                challenge
                    .parameters
                    .entry(word.to_ascii_lowercase())
                    .or_insert(value);
                rest = behind;
            }
            (Some(_), None) => return challenges,
            (None, _) => {
                challenges.push(Challenge {
                    scheme: word.to_ascii_lowercase(),
                    parameters: BTreeMap::new(),
                });
                rest = behind;
            }
        }
    }
}

/// A token or a quoted string, and what follows.
fn value_of(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find(|c: char| !is_token(c)).unwrap_or(text.len());
        return Some((text[..end].to_owned(), &text[end..]));
    };
    let mut value = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, c)) = characters.next() {
        match c {
            '"' => return Some((value, &quoted[at + 1..])),
            '\\' => value.push(characters.next()?.1),
            c => value.push(c),
        }
    }
    None
}

/// RFC 9110 §5.6.2, plus characters that some registries use in unquoted values.
fn is_token(c: char) -> bool {
    c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~/:".contains(c)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn challenge(scheme: &str, parameters: &[(&str, &str)]) -> Challenge {
        Challenge {
            scheme: scheme.to_owned(),
            parameters: parameters
                .iter()
                .map(|&(name, value)| (name.to_owned(), value.to_owned()))
                .collect(),
        }
    }

    #[test]
    fn challenges_of_common_registries_are_parsed() {
        let header = r#"Bearer realm="https://auth.example/token",service="r.example",scope="repository:a/b:pull,push""#;
        assert_eq!(
            parse(header),
            [challenge(
                "bearer",
                &[
                    ("realm", "https://auth.example/token"),
                    ("service", "r.example"),
                    ("scope", "repository:a/b:pull,push"),
                ],
            )]
        );
        assert_eq!(
            parse(r#"Negotiate, BASIC Realm = "a \"b\"" , Bearer realm=http://x/y"#),
            [
                challenge("negotiate", &[]),
                challenge("basic", &[("realm", "a \"b\"")]),
                challenge("bearer", &[("realm", "http://x/y")]),
            ]
        );
        assert_eq!(parse("Basic"), [challenge("basic", &[])]);
        assert_eq!(parse("realm=\"x\""), []);
        assert_eq!(parse("Basic realm=\"open"), [challenge("basic", &[])]);
    }

    proptest! {
        #[test]
        fn any_header_is_parsed_without_a_panic(header in "\\PC{0,80}|([a-zA-Z]{1,6} ?[=,\"\\\\ ]{0,3}){0,12}") {
            parse(&header);
        }
    }
}
