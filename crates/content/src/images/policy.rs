//! The keys that must have signed images and snapshots from registries.
//!
//! Signatures are verified during a pull, and the record says which keys were found. At a start
//! only the record is checked, so no registry is needed.

use crate::error::{Error, Result};
use jiffy_registry::signature::PublicKey;
use jiffy_registry::{Reference, RegistryError};
use jiffy_wire::api::ImageSource;
use std::fs;
use std::path::PathBuf;
use std::str::FromStr;

/// All registries.
const ALL: &str = "*";

/// `--signed WHERE=FILE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signed {
    /// `HOST[:PORT][/PATH]`, or [`ALL`].
    place: String,
    /// The file with the public key.
    key: PathBuf,
}

impl FromStr for Signed {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Signed, String> {
        let (place, key) = text
            .split_once('=')
            .filter(|(_, key)| !key.is_empty())
            .ok_or("expected WHERE=FILE, like registry.example/team=/etc/jiffy/team.pub")?;
        let place = place.trim_end_matches('/');
        let wrong = format!("expected HOST[:PORT][/PATH] or * before the =, and not {place:?}");
        if place == ALL {
            return Ok(Signed {
                place: ALL.to_owned(),
                key: key.into(),
            });
        }
        let repository = match place.contains('/') {
            true => place.to_owned(),
            false => format!("{place}/any"),
        };
        let is_place = !place.contains('@')
            && !place
                .rsplit_once('/')
                .is_some_and(|(_, last)| last.contains(':'));
        let reference = Reference::parse(&repository, None)
            .ok()
            .filter(|_| is_place);
        let reference = reference.ok_or(wrong)?;
        Ok(Signed {
            place: match place.contains('/') {
                true => place_of(&reference),
                false => reference.registry().to_owned(),
            },
            key: key.into(),
        })
    }
}

/// The required keys of each registry or repository.
#[derive(Debug, Default)]
pub struct Policy {
    rules: Vec<Rule>,
}

/// A rule: at least one of these keys must have signed everything from this place.
#[derive(Debug)]
struct Rule {
    place: String,
    keys: Vec<PublicKey>,
}

/// The keys that a pull verifies.
pub struct Keys<'a> {
    /// The request's key, which must have signed in any case.
    asked: Option<PublicKey>,
    rule: Option<&'a Rule>,
}

impl Policy {
    /// Reads the keys.
    ///
    /// # Errors
    ///
    /// If a file can't be read, or is not a public key.
    pub fn read(wanted: &[Signed]) -> Result<Policy> {
        let mut policy = Policy::default();
        for Signed { place, key } in wanted {
            let unusable = |why: &dyn std::fmt::Display| {
                Error::invalid(format!("--signed {place}={}: {why}", key.display()))
            };
            let pem = fs::read(key).map_err(|error| unusable(&error))?;
            let key = PublicKey::from_pem(&pem).map_err(|error| unusable(&error))?;
            let rules = &mut policy.rules;
            match rules.iter_mut().find(|rule| rule.place == *place) {
                Some(rule) => rule.keys.push(key),
                None => rules.push(Rule {
                    place: place.clone(),
                    keys: vec![key],
                }),
            }
        }
        Ok(policy)
    }

    /// The rule for this name; `None` for a plain name, which the user chose.
    fn rule(&self, name: &str) -> Option<&Rule> {
        let reference = Reference::parse(name, None).ok()?;
        let place = place_of(&reference);
        let fits = self.rules.iter().filter(|rule| rule.has(&place));
        fits.max_by_key(|rule| (rule.place != ALL, rule.place.len()))
    }

    /// Checks the signatures of an image or snapshot of this name.
    ///
    /// # Errors
    ///
    /// If a rule requires keys for the name, and none of them has signed.
    pub fn check(&self, kind: &str, name: &str, source: Option<&ImageSource>) -> Result<()> {
        let Some(rule) = self.rule(name) else {
            return Ok(());
        };
        let signed_by = source.map_or(&[][..], |source| &source.signed_by);
        if rule.keys.iter().any(|key| signed_by.contains(&id(key))) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "The {kind} {name} has no verified signature of a key that this node requires for {}.",
            rule.shown()
        ))
        .hint(format!(
            "`jiffy image pull {name}` verifies its signatures; `jiffyd --signed` sets the required keys."
        )))
    }

    /// The keys that a pull verifies: those of the rule, and `asked`, the request's, PEM.
    ///
    /// # Errors
    ///
    /// If `asked` is not a public key.
    pub fn keys(
        &self,
        reference: &Reference,
        asked: Option<&str>,
    ) -> std::result::Result<Keys<'_>, RegistryError> {
        let asked = asked.map(|key| PublicKey::from_pem(key.as_bytes()));
        Ok(Keys {
            asked: asked.transpose()?,
            rule: self.rule(&reference.to_string()),
        })
    }
}

impl Rule {
    fn has(&self, place: &str) -> bool {
        let below = place.strip_prefix(self.place.as_str());
        self.place == ALL || below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    fn shown(&self) -> String {
        match self.place.as_str() {
            ALL => "all registries".to_owned(),
            place => place.to_owned(),
        }
    }
}

impl Keys<'_> {
    /// Whether there is no key to verify.
    pub fn is_empty(&self) -> bool {
        self.asked.is_none() && self.rule.is_none()
    }

    /// Verifies the keys; returns the ids of those for which `is_signed` succeeds.
    ///
    /// # Errors
    ///
    /// If `is_signed` fails for the request's key, or for all keys of the rule: the error of the
    /// last.
    pub fn verify(&self, is_signed: impl Fn(&PublicKey) -> Result<()>) -> Result<Vec<String>> {
        let mut signed_by = Vec::new();
        if let Some(key) = &self.asked {
            is_signed(key)?;
            signed_by.push(id(key));
        }
        let Some(rule) = self.rule else {
            return Ok(signed_by);
        };
        let mut refused = None;
        for key in &rule.keys {
            match is_signed(key) {
                Ok(()) => {
                    add(&mut signed_by, &[id(key)]);
                    return Ok(signed_by);
                }
                Err(error) => refused = Some(error),
            }
        }
        let refused = refused.unwrap_or_else(|| Error::internal("A signature rule has no key."));
        let wants = format!(
            "This node requires signatures for {} (`jiffyd --signed`).",
            rule.shown()
        );
        Err(match refused.0.hint.clone() {
            Some(hint) => refused.hint(format!("{wants} {hint}")),
            None => refused.hint(wants),
        })
    }
}

/// Adds key ids that are not in `known` yet.
pub fn add(known: &mut Vec<String>, more: &[String]) {
    for id in more {
        if !known.contains(id) {
            known.push(id.clone());
        }
    }
}

fn id(key: &PublicKey) -> String {
    key.id().to_string()
}

fn place_of(reference: &Reference) -> String {
    format!("{}/{}", reference.registry(), reference.repository())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signed(text: &str) -> std::result::Result<String, String> {
        text.parse::<Signed>().map(|signed| signed.place)
    }

    #[test]
    fn a_policy_place_is_a_registry_or_a_repository_prefix() {
        assert_eq!(signed("*=k").unwrap(), "*");
        assert_eq!(signed("Registry.example=k").unwrap(), "registry.example");
        assert_eq!(signed("localhost:5000/=k").unwrap(), "localhost:5000");
        assert_eq!(signed("r.example/a/b=k=1").unwrap(), "r.example/a/b");
        for wrong in [
            "",
            "k",
            "r.example",
            "r.example=",
            "=k",
            "a b=k",
            "r.example/A=k",
            "r.example/a:1=k",
            "team=k",
            "r.example/*=k",
        ] {
            signed(wrong).unwrap_err();
        }
    }

    #[test]
    fn the_longest_matching_policy_place_applies() {
        let rule = |place: &str| Rule {
            place: place.to_owned(),
            keys: Vec::new(),
        };
        let mut policy = Policy {
            rules: ["r.example", "r.example/team/app", "r.example/team"]
                .map(rule)
                .into(),
        };
        let place = |policy: &Policy, name: &str| policy.rule(name).map(|rule| rule.place.clone());
        for (name, found) in [
            ("r.example/other:1", Some("r.example")),
            ("r.example/team/app:1", Some("r.example/team/app")),
            ("r.example/team/app/x:1", Some("r.example/team/app")),
            ("r.example/team/apple:1", Some("r.example/team")),
            ("r.example/teams:1", Some("r.example")),
            ("r.example:5000/team:1", None),
            ("q.example/team:1", None),
            ("base", None),
        ] {
            assert_eq!(place(&policy, name).as_deref(), found, "{name}");
        }
        policy.rules.insert(0, rule(ALL));
        assert_eq!(place(&policy, "q.example/a:1").as_deref(), Some(ALL));
        assert_eq!(
            place(&policy, "r.example/a:1").as_deref(),
            Some("r.example")
        );
        assert_eq!(place(&policy, "base"), None);
    }

    #[test]
    fn an_invalid_key_is_reported_with_its_option() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let read = || {
            let wanted = format!("r.example={}", path.display());
            format!(
                "{:#}",
                Policy::read(&[wanted.parse().unwrap()]).unwrap_err()
            )
        };
        assert!(read().contains("No such file"), "{}", read());
        fs::write(&path, "no key").unwrap();
        let why = read();
        assert!(
            why.contains("--signed r.example=") && why.contains("PUBLIC KEY"),
            "{why}"
        );
    }
}
