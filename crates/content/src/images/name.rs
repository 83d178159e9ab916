//! Names of images: plain names chosen by the user, like `web`, or references, like
//! `registry.example/team/web:2`; and the names of their folders.

use crate::error::{Error, Result};
use crate::names;
use jiffy_registry::Reference;
use jiffy_registry::reference::ReferenceError;
use std::net::Ipv6Addr;

/// Longest name of a folder, bytes; the limit of common file systems (NAME_MAX).
const MAX_FOLDER: usize = 255;

/// The images that this text may mean, the likeliest first. `registry` is used for names without
/// a registry.
///
/// # Errors
///
/// If the text is neither a name nor a reference, or has no registry and `registry` is `None`.
pub fn candidates(text: &str, registry: Option<&str>) -> Result<Vec<String>> {
    let mut candidates = Vec::new();
    if names::check("image", text).is_ok() {
        candidates.push(text.to_owned());
        if registry.is_none() {
            return Ok(candidates);
        }
    }
    match reference(text, registry) {
        Ok(reference) => candidates.push(reference.to_string()),
        Err(error) if candidates.is_empty() => return Err(error),
        Err(_) => {}
    }
    Ok(candidates)
}

/// Parses this text as a reference.
///
/// # Errors
///
/// If the text is not a reference, has no registry and `registry` is `None`, or is too long for
/// [`folder`].
pub fn reference(text: &str, registry: Option<&str>) -> Result<Reference> {
    let registry = registry.filter(|registry| !registry.is_empty());
    let reference = Reference::parse(text, registry)
        .map_err(|error| {
            let shown: String = text.chars().take(200).collect();
            let error = match error {
                ReferenceError::Unqualified(_) => format!(
                    "The name {shown} has no registry, and this node has no image of that name."
                ),
                error => format!("{shown:?} is not a valid image reference: {error}."),
            };
            Error::invalid(error).hint("Write HOST/REPOSITORY:TAG, or set JIFFY_REGISTRY to the registry of names without one.")
        })?;
    folder(&reference.to_string())?;
    Ok(reference)
}

/// Whether it is a plain name, not a reference.
pub fn is_plain(name: &str) -> bool {
    !name.contains(['/', ':', '@'])
}

/// The folder's name for an image of this name. Characters that can't be in a file name, or would
/// be ambiguous, are written as `%` and two digits.
///
/// # Errors
///
/// If it can't be the name of an image, or the folder's name would have more than 255 bytes.
pub fn folder(name: &str) -> Result<String> {
    if is_plain(name) {
        names::check("image", name)?;
        return Ok(name.to_owned());
    }
    let mut folder = String::new();
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'_' | b'-' => {
                folder.push(byte.into());
            }
            _ => folder.push_str(&format!("%{byte:02X}")),
        }
    }
    let behind = behind_ipv6(name);
    if !(behind.is_some() || name.starts_with(|first: char| first.is_ascii_alphanumeric()))
        || name
            .bytes()
            .any(|byte| byte.is_ascii_control() || byte >= 0x80)
        || behind
            .unwrap_or(name)
            .split(['/', ':', '@'])
            .any(|part| matches!(part, "" | "." | ".."))
    {
        let shown: String = name.chars().take(200).collect();
        return Err(
            Error::invalid(format!("{shown:?} can't be the name of an image."))
                .hint("Use a name like `web`, or a reference like HOST/REPOSITORY:TAG."),
        );
    }
    if folder.len() > MAX_FOLDER {
        return Err(Error::invalid(format!(
            "The name of an image has {} bytes, written as a folder's name; at most {MAX_FOLDER} fit.",
            folder.len()
        )));
    }
    Ok(folder)
}

/// What follows the host of `[IPv6]:PORT/…` or `[IPv6]/…`; `None` for another host. The parts of such
/// an address, between its colons, may be empty.
fn behind_ipv6(name: &str) -> Option<&str> {
    let (address, behind) = name.strip_prefix('[')?.split_once(']')?;
    address.parse::<Ipv6Addr>().ok()?;
    behind.strip_prefix([':', '/'])
}

/// The name of the image in a folder; `None` if the folder's name is not valid.
pub fn of_folder(folder_name: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = folder_name.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &rest[2..];
    }
    let name = String::from_utf8(bytes).ok()?;
    // Only the canonical encoding is accepted.
    (folder(&name).ok()?.as_str() == folder_name).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_reference_survives_conversion_to_a_folder_name() {
        for name in [
            "web",
            "localhost:5000/alpine:3",
            "registry.example/team/web:2",
            "registry.example/team/web@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
            "[::1]:5000/a:b",
            "[2001:db8::7]/team/web@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
        ] {
            let folder = folder(name).unwrap();
            assert!(!folder.contains('/'), "{folder}");
            assert_eq!(of_folder(&folder).as_deref(), Some(name));
        }
        for bad in [
            "",
            ".",
            "..",
            "../up",
            "a/../b",
            "a//b",
            "/a",
            "a/",
            "a:b/\n",
            ".new-x",
            "a/ä",
            "[::1]",
            "[::1]:",
            "[::1]a",
            "[::1]:5000//a",
            "[::1]/../a",
            "[..]/a",
            "[a]/b",
            "[::1/a",
        ] {
            assert!(folder(bad).is_err(), "{bad:?}");
        }
        assert!(folder(&format!("h/{}", "x".repeat(300))).is_err());
        for foreign in [".new-abc", "a%2", "a%zz", "web%61", "lost+found"] {
            assert_eq!(of_folder(foreign), None, "{foreign}");
        }
    }

    #[test]
    fn a_plain_name_may_refer_to_the_default_registry() {
        assert_eq!(candidates("web", None).unwrap(), ["web"]);
        assert_eq!(
            candidates("web", Some("localhost:5000")).unwrap(),
            ["web", "localhost:5000/web:latest"]
        );
        assert_eq!(
            candidates("web:2", Some("localhost:5000")).unwrap(),
            ["localhost:5000/web:2"]
        );
        assert!(
            candidates("web:2", None)
                .unwrap_err()
                .0
                .hint
                .unwrap()
                .contains("JIFFY_REGISTRY")
        );
    }

    #[test]
    fn a_registry_may_have_an_ipv6_address() {
        assert_eq!(
            candidates("[::1]:5000/team/web", None).unwrap(),
            ["[::1]:5000/team/web:latest"]
        );
        assert_eq!(
            candidates("web", Some("[::1]:5000")).unwrap(),
            ["web", "[::1]:5000/web:latest"]
        );
    }

    proptest! {
        #[test]
        fn no_image_name_escapes_the_images_folder(name in "(\\[[0-9:.]{0,4}\\])?[a-zA-Z0-9./:@%_-]{1,40}") {
            if let Ok(folder) = folder(&name) {
                prop_assert!(!folder.contains('/') && !folder.starts_with('.'));
                prop_assert_eq!(of_folder(&folder), Some(name));
            }
        }
    }
}
