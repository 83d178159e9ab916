//! Finds out whether this host has a real KVM. `jiffy-vmm probe` runs once per boot; its result is
//! stored.

use super::folders::Folders;
use super::wait::read_until;
use crate::failure::{Failure, Result, reason};
use jiffy_sys::clock::boot_id;
use jiffy_wire::vmm::{KvmKind, KvmProbe};
use rustix::fs::{Access, AtFlags, CWD, accessat};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Path of the KVM device.
pub const DEVICE: &str = "/dev/kvm";
/// The hint when /dev/kvm exists and can't be opened.
pub const JOIN: &str = "join its group: `usermod -aG kvm $USER`, then log in again";
/// Timeout of the probe, which takes some milliseconds, and more on a busy host.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);
/// Most bytes of the probe's answer; it has a few hundred.
const MAX_ANSWER: usize = 64 * 1024;

/// The stored result of a probe, and the device it is about.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Verdict {
    boot_id: String,
    /// Device, inode, device number and change time of /dev/kvm: one of them changes when the
    /// module is loaded again or permissions change.
    device: (u64, u64, u64, i64, i64),
    kind: KvmKind,
}

/// The kind of KVM this host has: the stored result if there was a probe since boot.
///
/// # Errors
///
/// If the probe is needed, and fails (see [`probe`]).
pub fn kind(folders: &Folders) -> Result<KvmKind> {
    kind_of(Path::new(DEVICE), folders)
}

fn kind_of(path: &Path, folders: &Folders) -> Result<KvmKind> {
    // Not stored: the check is quick, and its result can change while the device does not (a user
    // joins its group).
    if !usable(path) {
        return Ok(KvmKind::None);
    }
    let Some(device) = device_identity(path) else {
        return Ok(KvmKind::None);
    };
    let boot_id = boot_id().unwrap_or_default();
    let file = folders.run.join("kvm.json");
    if let Some(known) = cached(&file)
        && known.boot_id == boot_id
        && known.device == device
    {
        return Ok(known.kind);
    }
    let kind = probe(folders)?.kind;
    if kind != KvmKind::None {
        let verdict = Verdict {
            boot_id,
            device,
            kind,
        };
        // If it can't be stored, the next command probes again.
        if folders.make_run().is_ok()
            && let Ok(text) = serde_json::to_vec(&verdict)
        {
            let _ = jiffy_sys::durable::replace(&file, &text);
        }
    }
    Ok(kind)
}

/// Whether this process may open the device.
pub fn usable(device: &Path) -> bool {
    accessat(
        CWD,
        device,
        Access::READ_OK | Access::WRITE_OK,
        AtFlags::EACCESS,
    )
    .is_ok()
}

/// Whether the device exists and this process may not open it.
pub fn is_refused() -> bool {
    let device = Path::new(DEVICE);
    device.exists() && !usable(device)
}

/// Runs `jiffy-vmm probe`, which runs a tiny guest.
///
/// # Errors
///
/// If jiffy-vmm is missing, fails, does not end in time, or writes what this jiffy does not
/// understand.
pub fn probe(folders: &Folders) -> Result<KvmProbe> {
    let program = folders.program("jiffy-vmm")?;
    let failed = |why: String| {
        Failure::new(format!("{} probe {why}", program.display()))
            .hint("jiffy and jiffy-vmm may be of different versions: install all of Jiffy (`make install`)")
    };
    let mut child = Command::new(&program)
        .arg("probe")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| Failure::io(format_args!("{} can't run", program.display()), error))?;
    let output = child.stdout.take().expect("stdout is a pipe");
    let end = Instant::now() + PROBE_TIMEOUT;
    let mut text = Vec::new();
    let mut buffer = [0; 4096];
    while text.len() < MAX_ANSWER {
        match read_until(&output, &mut buffer, end) {
            Ok(0) => break,
            Ok(count) => text.extend_from_slice(&buffer[..count]),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(failed(match error.kind() {
                    ErrorKind::TimedOut => {
                        format!("did not end within {} seconds", PROBE_TIMEOUT.as_secs())
                    }
                    _ => format!("wrote output that can't be read: {}", reason(&error)),
                }));
            }
        }
    }
    drop(output);
    let status = child.wait();
    serde_json::from_slice(&text).map_err(|_| match status {
        Ok(status) if !status.success() => failed(format!("failed ({status})")),
        _ => failed("wrote output that this jiffy does not understand".into()),
    })
}

fn device_identity(device: &Path) -> Option<(u64, u64, u64, i64, i64)> {
    let facts = fs::metadata(device).ok()?;
    Some((
        facts.dev(),
        facts.ino(),
        facts.rdev(),
        facts.ctime(),
        facts.ctime_nsec(),
    ))
}

fn cached(file: &Path) -> Option<Verdict> {
    serde_json::from_slice(&fs::read(file).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// Folders with a `jiffy-vmm` that gives this answer and logs each call.
    fn folders(root: &Path, answer: &str) -> Folders {
        let lib = root.join("lib");
        fs::create_dir_all(&lib).unwrap();
        let asked = root.join("asked");
        let script = format!("#!/bin/sh\necho \"$@\" >> {}\n{answer}\n", asked.display());
        jiffy_sys::testing::write_program(&lib.join("jiffy-vmm"), &script);
        Folders::below(root)
    }

    fn probe_says(kind: &str) -> String {
        format!(
            "echo '{{\"kind\":\"{kind}\",\"detail\":\"x\",\"ring0_ps_per_iteration\":null,\
             \"syscall_enters_ring0\":null,\"took_us\":1}}'"
        )
    }

    fn times_asked(root: &Path) -> usize {
        fs::read_to_string(root.join("asked")).map_or(0, |text| text.lines().count())
    }

    fn device(root: &Path) -> PathBuf {
        let device = root.join("kvm");
        fs::write(&device, b"").unwrap();
        device
    }

    #[test]
    fn a_probe_result_is_cached_until_the_device_changes() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let device = device(root);
        let folders = folders(root, &probe_says("emulated"));
        for _ in 0..3 {
            assert_eq!(kind_of(&device, &folders).unwrap(), KvmKind::Emulated);
        }
        assert_eq!(times_asked(root), 1);
        // It is not removed, or the next file might get its inode, and within the same tick.
        fs::rename(&device, root.join("old")).unwrap();
        assert_eq!(kind_of(&device, &folders).unwrap(), KvmKind::None);
        fs::write(root.join("another"), b"").unwrap();
        fs::rename(root.join("another"), &device).unwrap();
        assert_eq!(kind_of(&device, &folders).unwrap(), KvmKind::Emulated);
        assert_eq!(times_asked(root), 2);
    }

    #[test]
    fn a_damaged_cache_file_makes_the_probe_run_again() {
        let root = tempfile::tempdir().unwrap();
        let device = device(root.path());
        let folders = folders(root.path(), &probe_says("real"));
        assert_eq!(kind_of(&device, &folders).unwrap(), KvmKind::Real);
        fs::write(folders.run.join("kvm.json"), b"{").unwrap();
        assert_eq!(kind_of(&device, &folders).unwrap(), KvmKind::Real);
        assert_eq!(times_asked(root.path()), 2);
    }

    #[test]
    fn a_failed_probe_is_an_error_and_not_cached() {
        let root = tempfile::tempdir().unwrap();
        let device = device(root.path());
        for (answer, said) in [
            ("exit 3", "exit status: 3"),
            ("echo nonsense", "understand"),
        ] {
            let folders = folders(root.path(), answer);
            let failure = kind_of(&device, &folders).unwrap_err();
            assert!(failure.message.contains(said), "{failure}");
            assert!(!folders.run.join("kvm.json").exists());
        }
    }
}
