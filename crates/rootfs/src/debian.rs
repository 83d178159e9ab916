//! Debian root file systems, made by mmdebstrap.

use crate::config::ImageConfig;
use crate::error::ImportError;
use crate::import::{Imported, Progress, Watch, folder_of, import};
use crate::limits::Limits;
use crate::source::{Choice, Source, SourceError};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, Signal, kill_process_group};
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use thiserror::Error;

/// Removes files that mmdebstrap copies from the host, because the image must not depend on the
/// host.
const FORGET_HOST: &str = r#"rm -f "$1/etc/hostname" "$1/etc/resolv.conf""#;
/// Debian's archive keys (package debian-archive-keyring).
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Longest time between calls of the watcher while mmdebstrap writes nothing.
const POLL_INTERVAL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 200_000_000,
};
/// Bytes of mmdebstrap's last messages that an error quotes.
const MAX_STDERR: usize = 4096;

/// A Debian system to build.
#[derive(Debug, Clone)]
pub struct Debian {
    /// `bookworm`, `trixie`, `sid`, …
    pub suite: String,
    /// Packages to add to those of the variant.
    pub include: Vec<String>,
    /// mmdebstrap's variant: `minbase` is the essential packages and apt.
    pub variant: String,
    /// Lines of a sources.list. If empty, the archives in the host's apt configuration are used.
    pub sources: Vec<String>,
    /// `SOURCE_DATE_EPOCH`, seconds since 1970: no file is newer, so the same packages give the
    /// same image.
    pub newest: u64,
    /// The mmdebstrap program.
    pub mmdebstrap: PathBuf,
}

impl Debian {
    /// A minimal system of that suite, from the archives of the host's apt.
    pub fn new(suite: &str) -> Debian {
        Debian {
            suite: suite.into(),
            include: Vec::new(),
            variant: "minbase".into(),
            sources: Vec::new(),
            newest: 0,
            mmdebstrap: "mmdebstrap".into(),
        }
    }
}

/// Why a Debian system was not built. Nothing is left behind.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DebianError {
    /// A suite, variant or package name is not valid.
    #[error("{0:?} is not the name of a Debian {1}")]
    BadName(String, &'static str),
    /// mmdebstrap is not installed.
    #[error("{} is not installed; as root: apt-get install mmdebstrap", .0.display())]
    NotInstalled(PathBuf),
    /// The host's apt has no Debian archive.
    #[error("this host's apt has no Debian archive in its sources; add one")]
    NoArchive,
    /// A program could not be run.
    #[error("{program} can't be run")]
    Run {
        /// The program.
        program: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// mmdebstrap failed.
    #[error("mmdebstrap failed ({status}): {words}")]
    Failed {
        /// Its exit status.
        status: std::process::ExitStatus,
        /// Its last messages.
        words: String,
    },
    /// The tar that mmdebstrap wrote can't be imported.
    #[error(transparent)]
    Import(#[from] ImportError),
}

/// Builds a Debian system and writes it as an image to `out`, which appears complete or not at all.
/// Needs mmdebstrap, and root or unprivileged user namespaces. Blocks for minutes.
///
/// # Errors
///
/// If a name is not valid, mmdebstrap is not installed or fails, apt knows no Debian archive, the
/// tar can't be imported, or `watch` cancels it. Nothing is left behind.
pub fn debian(
    debian: &Debian,
    out: &Path,
    limits: &Limits,
    watch: Watch<'_>,
) -> Result<Imported, DebianError> {
    check_name(&debian.suite, "suite")?;
    check_name(&debian.variant, "variant")?;
    for package in &debian.include {
        check_name(package, "package")?;
    }
    let sources = match &debian.sources[..] {
        [] => host_sources(&debian.suite)?,
        own => own.to_vec(),
    };
    let mut choice = Choice::new(folder_of(out));
    choice.limits = *limits;
    let source = bootstrap(debian, &sources, &choice, watch)?;
    let mut imported = import(source, out, limits, watch)?;
    imported.config = ImageConfig {
        cmd: vec!["/bin/bash".into()],
        env: vec!["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".into()],
        ..ImageConfig::default()
    };
    Ok(imported)
}

/// Runs mmdebstrap and spools its tar; fails unless mmdebstrap succeeds.
fn bootstrap(
    debian: &Debian,
    sources: &[String],
    choice: &Choice,
    watch: Watch<'_>,
) -> Result<Source, DebianError> {
    let mut command = Command::new(&debian.mmdebstrap);
    command
        .arg(format!("--variant={}", debian.variant))
        .args(["--format=tar", "--architectures=amd64"])
        .arg(format!("--customize-hook={FORGET_HOST}"))
        .env("SOURCE_DATE_EPOCH", debian.newest.to_string())
        .env("LC_ALL", "C.UTF-8")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    if !debian.include.is_empty() {
        command.arg(format!("--include={}", debian.include.join(",")));
    }
    command.arg("--").arg(&debian.suite).arg("-").args(sources);
    let child = command.spawn().map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => DebianError::NotInstalled(debian.mmdebstrap.clone()),
        _ => DebianError::Run {
            program: debian.mmdebstrap.display().to_string(),
            source,
        },
    })?;
    let mut running = Running(child);
    let (stdout, stderr) = (running.0.stdout.take(), running.0.stderr.take());
    let words = std::thread::spawn(move || stderr.map(stderr_tail).unwrap_or_default());
    let mut done = 0;
    let mut cancelled = false;
    let watched = Watched(stdout, |got| {
        done += got;
        cancelled = watch(Progress::Reading { done, total: 0 }).is_break();
        !cancelled
    });
    let source = Source::stream(watched, choice);
    if cancelled {
        return Err(ImportError::Cancelled.into());
    }
    // If its tar can't be kept, mmdebstrap is stopped: a closed pipe does not always end it.
    if source.is_err() {
        running.stop();
    }
    let status = running.0.wait().map_err(|source| DebianError::Run {
        program: "mmdebstrap".into(),
        source,
    })?;
    let words = words.join().unwrap_or_default();
    match source {
        // A full disk is not mmdebstrap's failure, so it is reported first.
        Err(error @ SourceError::Scratch { .. }) => Err(ImportError::from(error).into()),
        _ if !status.success() => Err(DebianError::Failed { status, words }),
        Err(error) => Err(ImportError::from(error).into()),
        Ok(source) => Ok(source),
    }
}

/// A child process that is stopped when this is dropped.
struct Running(Child);

impl Running {
    /// Sends SIGTERM to the process group; mmdebstrap then cleans up.
    fn stop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None))
            && let Some(group) = Pid::from_raw(self.0.id() as i32)
        {
            let _ = kill_process_group(group, Signal::TERM);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
        let _ = self.0.wait();
    }
}

/// Reports the bytes read to the watcher, and stops if it says so. The watcher is also called while
/// no bytes arrive, which is most of the time.
struct Watched<F>(Option<ChildStdout>, F);

impl<F: FnMut(u64) -> bool> Read for Watched<F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Some(stdout) = &mut self.0 else {
            return Ok(0);
        };
        loop {
            let mut ready = [PollFd::new(stdout, PollFlags::IN)];
            let some = rustix::event::poll(&mut ready, Some(&POLL_INTERVAL))? > 0;
            let got = if some { stdout.read(buffer)? } else { 0 };
            if !(self.1)(got as u64) {
                return Err(io::Error::other("cancelled"));
            }
            if some {
                return Ok(got);
            }
        }
    }
}

/// The last lines of a program's standard error, joined to one.
fn stderr_tail(mut stderr: impl Read) -> String {
    let mut kept = Vec::new();
    let mut piece = [0; 4096];
    while let Ok(got) = stderr.read(&mut piece)
        && got > 0
    {
        kept.extend_from_slice(&piece[..got]);
        let excess = kept.len().saturating_sub(MAX_STDERR);
        kept.drain(..excess);
    }
    let text = String::from_utf8_lossy(&kept);
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with("I:"))
        .collect();
    lines[lines.len().saturating_sub(4)..].join("; ")
}

/// Lines of a sources.list from the host's apt. For the host's own suite they include updates and
/// security fixes; another suite is taken from the host's main archive.
fn host_sources(suite: &str) -> Result<Vec<String>, DebianError> {
    let output = Command::new("apt-get")
        .args(["indextargets", "--format"])
        .arg("$(ORIGIN) $(COMPONENT) $(RELEASE) $(REPO_URI)")
        .arg("Created-By: Packages")
        .stdin(Stdio::null())
        .output()
        .map_err(|source| DebianError::Run {
            program: "apt-get".into(),
            source,
        })?;
    let signed = if Path::new(KEYRING).exists() {
        format!("[signed-by={KEYRING}] ")
    } else {
        String::new()
    };
    let lines = sources_for(suite, &String::from_utf8_lossy(&output.stdout), &signed);
    if lines.is_empty() {
        return Err(DebianError::NoArchive);
    }
    Ok(lines)
}

/// Makes lines of a sources.list from lines of `ORIGIN COMPONENT RELEASE URI`.
fn sources_for(suite: &str, targets: &str, signed: &str) -> Vec<String> {
    let archives: Vec<(&str, &str)> = targets
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let (origin, component) = (words.next()?, words.next()?);
            let (release, uri) = (words.next()?, words.next()?);
            (origin == "Debian" && component == "main").then_some((release, uri))
        })
        .collect();
    let line = |release: &str, uri: &str| format!("deb {signed}{uri} {release} main");
    let own: Vec<String> = archives
        .iter()
        .filter(|(release, _)| {
            let rest = release.strip_prefix(suite);
            rest.is_some_and(|rest| ["", "-updates", "-security"].contains(&rest))
        })
        .map(|(release, uri)| line(release, uri))
        .collect();
    if archives.iter().any(|(release, _)| *release == suite) {
        return own;
    }
    // Another suite is in the same archive as the host's own.
    let main = archives.iter().find(|(release, _)| !release.contains('-'));
    main.map(|(_, uri)| line(suite, uri)).into_iter().collect()
}

/// Refuses names with special characters. Names go to mmdebstrap's command line, where it also
/// takes paths and patterns.
fn check_name(name: &str, what: &'static str) -> Result<(), DebianError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.:=~_".contains(&byte);
    let begins = name
        .as_bytes()
        .first()
        .is_some_and(u8::is_ascii_alphanumeric);
    if begins && name.len() <= 128 && name.bytes().all(plain) {
        Ok(())
    } else {
        Err(DebianError::BadName(name.chars().take(60).collect(), what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGETS: &str = "\
        Debian main stable http://archive.example/debian/\n\
        Debian main stable-updates http://archive.example/debian/\n\
        Debian main stable-security http://archive.example/security/\n\
        Debian contrib stable http://archive.example/debian/\n\
        Docker stable stable http://other.example/\n";

    #[test]
    fn the_host_s_archives_are_used() {
        assert_eq!(
            sources_for("stable", TARGETS, ""),
            [
                "deb http://archive.example/debian/ stable main",
                "deb http://archive.example/debian/ stable-updates main",
                "deb http://archive.example/security/ stable-security main",
            ]
        );
        assert_eq!(
            sources_for("sid", TARGETS, "[signed-by=k] "),
            ["deb [signed-by=k] http://archive.example/debian/ sid main"]
        );
        assert!(sources_for("sid", "Docker stable x http://o.example/", "").is_empty());
    }

    #[test]
    fn suite_and_package_names_are_checked() {
        for name in ["bookworm", "libstdc++6", "vim=2:9.0", "linux-image-amd64"] {
            check_name(name, "package").unwrap();
        }
        for name in [
            "",
            "-o",
            "./x.deb",
            "?essential",
            "a b",
            "a,b",
            "$(x)",
            "~i",
        ] {
            assert!(check_name(name, "package").is_err(), "{name}");
        }
    }
}
