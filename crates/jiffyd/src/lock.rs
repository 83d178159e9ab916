//! The lock that allows one daemon per data folder.

use anyhow::{Context, bail};
use jiffy_content::paths::Paths;
use jiffy_vmhost::process::{DYING_POLL, DYING_TIME, is_alive};
use rustix::fs::FlockOperation;
use std::fs::OpenOptions;
use std::io::{Read, Seek, Write};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

/// How long an ending daemon may take to release the lock: a service manager may start the next one
/// meanwhile.
const ENDING_TIME: Duration = Duration::from_secs(10);
/// Number of the lock's descriptor, above all that programs of the daemon get, if the limit of open
/// files allows it.
const NUMBER: RawFd = 500;

/// Held while a daemon owns a data folder.
#[derive(Debug)]
pub struct Lock {
    _descriptor: OwnedFd,
}

/// Locks the data folder; the error names the daemon that has it.
pub fn lock(paths: &Paths) -> anyhow::Result<Lock> {
    let path = paths.data.join("jiffyd.lock");
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .with_context(|| format!("opening {}", path.display()))?;
    let begun = Instant::now();
    while rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        let mut holder = String::new();
        let _ = file
            .rewind()
            .and_then(|()| file.read_to_string(&mut holder));
        let holder = holder.trim();
        // A process that a killed daemon had just forked keeps the lock until it executes its
        // program.
        let is_dead = !holder.is_empty() && holder.parse().ok().is_none_or(|pid| !is_alive(pid));
        let limit = if is_dead { DYING_TIME } else { ENDING_TIME };
        if begun.elapsed() < limit {
            std::thread::sleep(DYING_POLL);
            continue;
        }
        let holder = match holder {
            "" => String::new(),
            pid => format!(" (process {pid})"),
        };
        bail!(
            "Another jiffyd{holder} already uses the data folder {}.",
            paths.data.display()
        );
    }
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())?;
    // A child that sets up its descriptors would overwrite a lower number and so release the lock
    // before it executes its program: until then it can't be found by its command line.
    let descriptor = jiffy_sys::descriptors::with_number(&file, NUMBER)
        .context("moving the descriptor of the data folder's lock")?;
    Ok(Lock {
        _descriptor: descriptor,
    })
}
