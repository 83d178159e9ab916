//! Credential helpers: `docker-credential-NAME get`.

use super::{Login, Secret};
use crate::RegistryError;
use crate::error::Result;
use jiffy_oci::one_line;
use serde::Deserialize;
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long a helper may take: it may have to ask its user, or a server.
pub(super) const TIME_LIMIT: Duration = Duration::from_secs(30);

/// The longest answer, bytes.
const LONGEST: u64 = 64 << 10;

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    username: String,
    secret: String,
}

/// The credentials that the helper has for a registry; `None` if it has none.
pub(super) fn get(name: &str, registry: &str, limit: Duration) -> Result<Option<Login>> {
    if !name
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    {
        return Err(failed(
            registry,
            format!("{name:?} is not the name of a helper"),
        ));
    }
    run(
        format!("docker-credential-{name}").as_ref(),
        registry,
        limit,
    )
}

fn run(program: &OsStr, registry: &str, limit: Duration) -> Result<Option<Login>> {
    let shown = program.to_string_lossy().into_owned();
    let failed = |reason: String| failed(registry, format!("{shown}: {reason}"));
    let mut child = Command::new(program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| failed(format!("can't be started: {error}")))?;
    let answer = query_helper(&mut child, registry, limit);
    let status = match &answer {
        Some(_) => child.wait().ok(),
        None => {
            let _ = child.kill();
            child.wait().ok()
        }
    };
    let Some(answer) = answer else {
        return Err(failed(format!(
            "gave no answer within {} s",
            limit.as_secs_f32()
        )));
    };
    if !status.is_some_and(|status| status.success()) {
        // The convention of docker-credential-helpers for "not found".
        let said = String::from_utf8_lossy(&answer);
        if said.contains("credentials not found") {
            return Ok(None);
        }
        return Err(failed(format!("failed: {}", one_line(&said))));
    }
    let answer: Answer = serde_json::from_slice(&answer)
        .map_err(|_| failed("answered with something else than a user and a secret".to_owned()))?;
    let secret = Secret::new(answer.secret);
    Ok(Some(if answer.username == "<token>" {
        Login::Identity(secret)
    } else {
        Login::Password {
            user: answer.username,
            password: secret,
        }
    }))
}

/// Writes the registry's name to the helper, and waits for its answer and its exit; `None` if that
/// takes too long.
fn query_helper(child: &mut Child, registry: &str, limit: Duration) -> Option<Vec<u8>> {
    let deadline = Instant::now() + limit;
    if let Some(mut input) = child.stdin.take() {
        // A helper that does not read its input is no error.
        let _ = input.write_all(registry.as_bytes());
    }
    let output = child.stdout.take()?;
    let (sender, answers) = mpsc::channel();
    // In a thread, because the helper may leave a child process that keeps its output open.
    std::thread::spawn(move || {
        let mut answer = Vec::new();
        let _ = output.take(LONGEST).read_to_end(&mut answer);
        let _ = sender.send(answer);
    });
    let answer = answers
        .recv_timeout(deadline.saturating_duration_since(Instant::now()))
        .ok()?;
    while child.try_wait().ok()?.is_none() {
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Some(answer)
}

fn failed(registry: &str, reason: String) -> RegistryError {
    RegistryError::Credentials {
        host: registry.to_owned(),
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;

    fn helper(folder: &tempfile::TempDir, script: &str) -> std::ffi::OsString {
        let path = folder.path().join("docker-credential-test");
        std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o755)
            .open(&path)
            .unwrap()
            .write_all(format!("#!/bin/sh\n{script}\n").as_bytes())
            .unwrap();
        path.into_os_string()
    }

    /// Retries while exec fails with ETXTBSY: a child of another test may have the script open for
    /// writing.
    fn run(folder: &tempfile::TempDir, script: &str, limit: Duration) -> Result<Option<Login>> {
        let program = helper(folder, script);
        loop {
            match super::run(&program, "h.example", limit) {
                Err(error) if error.to_string().contains("Text file busy") => {}
                other => return other,
            }
        }
    }

    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn a_helper_gets_the_registry_and_its_answer_is_used() {
        let folder = tempfile::tempdir().unwrap();
        let script = r#"read -r host; printf '{"ServerURL":"%s","Username":"%s-%s","Secret":"s"}' "$host" "$1" "$host""#;
        assert_eq!(
            run(&folder, script, LONG).unwrap(),
            Some(Login::Password {
                user: "get-h.example".into(),
                password: Secret::new("s"),
            })
        );
        let script = r#"echo '{"Username":"<token>","Secret":"s"}'"#;
        assert_eq!(
            run(&folder, script, LONG).unwrap(),
            Some(Login::Identity(Secret::new("s")))
        );
    }

    #[test]
    fn a_helper_that_knows_nothing_fails_or_hangs() {
        let folder = tempfile::tempdir().unwrap();
        let none = "echo 'credentials not found in native keychain'; exit 1";
        assert_eq!(run(&folder, none, LONG).unwrap(), None);
        for script in ["echo locked; exit 1", "echo nonsense", "kill -9 $$"] {
            run(&folder, script, LONG).unwrap_err();
        }
        let error = run(&folder, "exec sleep 1000", Duration::from_millis(50)).unwrap_err();
        assert!(error.to_string().contains("no answer within"), "{error}");
        let error = get("../x", "h", LONG).unwrap_err();
        assert!(error.to_string().contains("not the name"), "{error}");
    }

    #[test]
    fn an_endless_answer_is_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        run(&folder, "yes", LONG).unwrap_err();
    }
}
