//! `jiffy image build`: mmdebstrap writes a tar, which the node imports.

use super::import::upload;
use super::{default_registry, show_image};
use crate::args::image::Build;
use crate::client::{Client, encoded};
use crate::failure::{Failure, Outcome, Result, reason};
use std::io::{self, Read, Write};
use std::process::{Command, Stdio};

/// Most bytes of mmdebstrap's stderr that are searched for a cause.
const MAX_STDERR: usize = 64 * 1024;
/// Run at the end of a build. mmdebstrap copies both files from this host, so that it
/// can reach mirrors; in an image they would be another host's.
const FORGET_HOST: &str = r#"rm -f "$1/etc/hostname" "$1/etc/resolv.conf""#;

/// `jiffy image build`
///
/// # Errors
///
/// If mmdebstrap is not installed or fails, an option of the build is wrong, or the node refuses
/// the image.
pub async fn build(client: &Client, wanted: Build) -> Result<Outcome> {
    let mut command = mmdebstrap(&wanted)?;
    let mut child = command.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            Failure::new("mmdebstrap is not installed on this host").hint("apt install mmdebstrap")
        }
        _ => Failure::io("mmdebstrap can't be started", error),
    })?;
    let (Some(mut tar), Some(words)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(Failure::new("mmdebstrap's output can't be read"));
    };
    let words = std::thread::spawn(move || last_error_line(words));
    let query = format!(
        "kind=root&from={}{}",
        encoded(&format!("debian {}", wanted.debian)),
        match default_registry() {
            Some(registry) => format!("&registry={}", encoded(&registry)),
            None => String::new(),
        }
    );
    let write = move |out: &mut dyn Write| {
        let copied = io::copy(&mut tar, out);
        if copied.is_err() {
            let _ = child.kill();
        }
        let status = child.wait()?;
        copied?;
        if status.success() {
            return Ok(());
        }
        let words = words.join().unwrap_or_default();
        Err(io::Error::other(format!("mmdebstrap failed: {words}")))
    };
    let image = upload(client, &wanted.name, &query, None, write).await?;
    show_image(&image, wanted.format)
}

fn mmdebstrap(wanted: &Build) -> Result<Command> {
    for text in [&wanted.debian, &wanted.variant]
        .into_iter()
        .chain(&wanted.include)
    {
        let odd = |c: char| c.is_whitespace() || c.is_control();
        if text.is_empty() || text.starts_with('-') || text.contains(odd) {
            return Err(Failure::new(format!(
                "{text:?} is not the name of a suite, a variant or a package"
            )));
        }
    }
    if wanted
        .mirror
        .as_ref()
        .is_some_and(|mirror| mirror.starts_with('-') || mirror.is_empty())
    {
        return Err(Failure::new(
            "the mirror must be a URL or a line of sources.list",
        ));
    }
    let mut command = Command::new("mmdebstrap");
    command
        .arg(format!("--variant={}", wanted.variant))
        .arg("--format=tar")
        .arg("--quiet")
        .arg(format!("--customize-hook={FORGET_HOST}"));
    if !wanted.include.is_empty() {
        command.arg(format!("--include={}", wanted.include.join(",")));
    }
    command.arg(&wanted.debian).arg("-").args(&wanted.mirror);
    // Reproducible: the same packages result in the same tar.
    if std::env::var_os("SOURCE_DATE_EPOCH").is_none() {
        command.env("SOURCE_DATE_EPOCH", "0");
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    Ok(command)
}

/// The last line that a program wrote, or the last one with the word "error".
fn last_error_line(mut stderr: impl Read) -> String {
    let mut kept: Vec<u8> = Vec::new();
    let mut piece = [0; 4096];
    loop {
        match stderr.read(&mut piece) {
            Ok(0) => break,
            Ok(count) => {
                kept.extend_from_slice(&piece[..count]);
                let over = kept.len().saturating_sub(MAX_STDERR);
                kept.drain(..over);
            }
            Err(error) => return reason(&error),
        }
    }
    let text = String::from_utf8_lossy(&kept);
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    let error = lines().rfind(|line| line.starts_with("E:"));
    let words = error.or_else(|| lines().next_back());
    words.unwrap_or("it printed nothing").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted() -> Build {
        Build {
            debian: "trixie".into(),
            include: vec!["curl".into(), "git".into()],
            mirror: Some("http://mirror.example/debian".into()),
            variant: "minbase".into(),
            format: None,
            name: "box".into(),
        }
    }

    #[test]
    fn mmdebstrap_gets_only_the_requested_options() {
        let command = mmdebstrap(&wanted()).unwrap();
        let arguments: Vec<_> = command
            .get_args()
            .map(|word| word.to_string_lossy())
            .collect();
        assert_eq!(
            arguments,
            [
                "--variant=minbase",
                "--format=tar",
                "--quiet",
                r#"--customize-hook=rm -f "$1/etc/hostname" "$1/etc/resolv.conf""#,
                "--include=curl,git",
                "trixie",
                "-",
                "http://mirror.example/debian"
            ]
        );
        for change in [
            (|build| build.debian = "--setup-hook=x".into()) as fn(&mut Build),
            |build| build.include = vec!["a b".into()],
            |build| build.mirror = Some("--x".into()),
            |build| build.variant = String::new(),
        ] {
            let mut build = wanted();
            change(&mut build);
            assert!(mmdebstrap(&build).is_err());
        }
    }

    #[test]
    fn the_reason_for_a_failure_is_the_last_error_line() {
        assert_eq!(
            last_error_line(&b"I: x\nE: no such suite\nW: y\n"[..]),
            "E: no such suite"
        );
        assert_eq!(last_error_line(&b"one\ntwo\n\n"[..]), "two");
        assert_eq!(last_error_line(&b""[..]), "it printed nothing");
    }
}
