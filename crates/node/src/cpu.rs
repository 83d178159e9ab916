//! This host's processor, as its KVM shows it to guests, and whether a captured guest
//! can go on with it.

use jiffy_content::error::{Error, Result};
use jiffy_wire::cpu::{Host, Profile};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;
use tokio::sync::OnceCell;
use tokio::time::timeout;
use tracing::debug;

/// Asking KVM takes some milliseconds.
const PATIENCE: Duration = Duration::from_secs(5);

/// What `jiffy-vmm cpu` says of this host.
#[derive(Debug)]
pub struct Processor {
    vmm: PathBuf,
    host: OnceCell<Host>,
}

impl Processor {
    /// Nobody is asked yet.
    pub fn new(vmm: PathBuf) -> Processor {
        Processor {
            vmm,
            host: OnceCell::new(),
        }
    }

    /// What guests can have here, or why that can't be known, as where there is no KVM.
    /// Asked once.
    pub async fn host(&self) -> std::result::Result<&Host, String> {
        let asked = self.host.get_or_try_init(|| ask(&self.vmm)).await;
        asked.inspect_err(|why| debug!(why, "this host's processor is not known"))
    }

    /// What this host lacks for a captured guest, by name. Where it is not known the VMM
    /// says so when the guest is restored.
    pub async fn lacking(&self, guest: &Profile) -> Vec<String> {
        match self.host().await {
            Ok(host) => guest.lacking(&host.restorable),
            Err(_) => Vec::new(),
        }
    }

    /// Refuses a captured VM that can't go on here.
    pub async fn check(&self, what: &str, guest: Option<&Profile>) -> Result<()> {
        let Some(guest) = guest else {
            return Ok(());
        };
        let lacking = self.lacking(guest).await;
        if lacking.is_empty() {
            return Ok(());
        }
        Err(Error::wrong_state(format!(
            "{what} can't go on on this host: it lacks {}.",
            lacking.join(", ")
        ))
        .hint("Restore it on a host with such a processor, or boot the VM anew; `--cpu-profile` gives VMs a processor that several hosts have."))
    }
}

async fn ask(vmm: &Path) -> std::result::Result<Host, String> {
    let mut asking = Command::new(vmm);
    asking
        .arg("cpu")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let output = timeout(PATIENCE, asking.output())
        .await
        .map_err(|_| "jiffy-vmm took too long".to_owned())?
        .map_err(|error| error.to_string())?;
    let host: Host = match output.status.success() {
        true => serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())?,
        false => return Err(format!("jiffy-vmm failed ({})", output.status)),
    };
    host.shown.check()?;
    host.restorable.check()?;
    Ok(host)
}
