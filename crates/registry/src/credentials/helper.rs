//! Credential helpers: `docker-credential-NAME get`.

use super::{Login, Secret};
use crate::RegistryError;
use jiffy_oci::one_line;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::fmt;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long a helper may take: it may have to ask its user, or a server.
const TIME_LIMIT: Duration = Duration::from_secs(30);

/// The longest answer, bytes.
const LONGEST: u64 = 64 << 10;

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    username: String,
    secret: String,
}

/// What a credential helper printed.
#[derive(Deserialize, Serialize)]
pub struct HelperOutput {
    /// Whether its exit status was 0.
    pub succeeded: bool,
    /// The first 64 KiB of its standard output. It may contain a secret.
    pub output: Vec<u8>,
}

/// Runs credential helpers, for a process that can't execute programs itself.
pub trait RunHelper: fmt::Debug + Send + Sync {
    /// As [`run_helper`].
    ///
    /// # Errors
    ///
    /// As for [`run_helper`].
    fn run(&self, name: &str, registry: &str) -> Result<HelperOutput, String>;
}

/// Runs `docker-credential-NAME get` for a registry, within 30 s.
///
/// # Errors
///
/// If `name` is not valid, or the helper can't be started or gives no answer within 30 s; the text
/// says why, such as "docker-credential-pass: can't be started: …".
pub fn run_helper(name: &str, registry: &str) -> Result<HelperOutput, String> {
    let valid = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    if !name.bytes().all(valid) {
        return Err(format!("{name:?} is not the name of a helper"));
    }
    execute(program(name).as_ref(), registry, TIME_LIMIT)
}

fn program(name: &str) -> String {
    format!("docker-credential-{name}")
}

/// The credentials that the helper has for a registry; `None` if it has none.
pub(super) fn get(
    runner: Option<&dyn RunHelper>,
    name: &str,
    registry: &str,
) -> Result<Option<Login>, RegistryError> {
    let output = match runner {
        Some(runner) => runner.run(name, registry),
        None => run_helper(name, registry),
    };
    let output = output.map_err(|reason| failed(registry, reason))?;
    login(&program(name), registry, &output)
}

fn execute(program: &OsStr, registry: &str, limit: Duration) -> Result<HelperOutput, String> {
    let failed = |reason: String| format!("{}: {reason}", program.to_string_lossy());
    let mut child = Command::new(program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| failed(format!("can't be started: {error}")))?;
    let output = query_helper(&mut child, registry, limit);
    if output.is_none() {
        let _ = child.kill();
    }
    let status = child.wait().ok();
    let output =
        output.ok_or_else(|| failed(format!("gave no answer within {} s", limit.as_secs_f32())))?;
    Ok(HelperOutput {
        succeeded: status.is_some_and(|status| status.success()),
        output,
    })
}

fn login(
    program: &str,
    registry: &str,
    answer: &HelperOutput,
) -> Result<Option<Login>, RegistryError> {
    let failed = |reason: String| failed(registry, format!("{program}: {reason}"));
    if !answer.succeeded {
        // The convention of docker-credential-helpers for "not found".
        let said = String::from_utf8_lossy(&answer.output);
        if said.contains("credentials not found") {
            return Ok(None);
        }
        return Err(failed(format!("failed: {}", one_line(&said))));
    }
    let answer: Answer = serde_json::from_slice(&answer.output)
        .map_err(|_| failed("gave an answer that is not a user and a secret".to_owned()))?;
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
        // A helper that does not read its input is not an error.
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
    fn run(
        folder: &tempfile::TempDir,
        script: &str,
        limit: Duration,
    ) -> Result<Option<Login>, String> {
        let program = helper(folder, script);
        loop {
            match execute(&program, "h.example", limit) {
                Err(error) if error.contains("Text file busy") => {}
                other => {
                    return login("it", "h.example", &other?).map_err(|error| error.to_string());
                }
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
        assert!(error.contains("no answer within"), "{error}");
        let error = get(None, "../x", "h").unwrap_err();
        assert!(error.to_string().contains("not the name"), "{error}");
    }

    #[test]
    fn an_endless_answer_is_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        run(&folder, "yes", LONG).unwrap_err();
    }
}
