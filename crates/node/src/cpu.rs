//! This host's processor, as its KVM shows it to guests, and whether a captured guest
//! can be restored on it.

use jiffy_content::error::{Error, Result};
use jiffy_wire::cpu::{Host, Profile};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;
use tokio::sync::OnceCell;
use tokio::time::timeout;
use tracing::debug;

/// How long KVM has to answer; it takes some milliseconds, and more on a busy host.
const QUERY_TIMEOUT: Duration = Duration::from_secs(30);

/// The result of `jiffy-vmm cpu` on this host.
#[derive(Debug)]
pub struct Processor {
    vmm: PathBuf,
    host: OnceCell<Host>,
}

impl Processor {
    /// A processor that was not queried yet.
    pub fn new(vmm: PathBuf) -> Processor {
        Processor {
            vmm,
            host: OnceCell::new(),
        }
    }

    /// The features that guests can have here. Queried once.
    ///
    /// # Errors
    ///
    /// If they are not known, for example without KVM: why.
    pub async fn host(&self) -> std::result::Result<&Host, String> {
        let asked = self.host.get_or_try_init(|| ask(&self.vmm)).await;
        asked.inspect_err(|why| debug!(why, "this host's processor is not known"))
    }

    /// Names of features that a captured guest needs and this host lacks. Empty if the host's are
    /// not known; the VMM checks again at the restore.
    pub async fn lacking(&self, guest: &Profile) -> Vec<String> {
        match self.host().await {
            Ok(host) => guest.lacking(&host.restorable),
            Err(_) => Vec::new(),
        }
    }

    /// Checks that this host's processor can run a captured VM, which `what` names.
    ///
    /// # Errors
    ///
    /// If it lacks a feature that the guest has.
    pub async fn check(&self, what: &str, guest: Option<&Profile>) -> Result<()> {
        let Some(guest) = guest else {
            return Ok(());
        };
        let lacking = self.lacking(guest).await;
        if lacking.is_empty() {
            return Ok(());
        }
        Err(Error::wrong_state(format!(
            "{what} can't be restored on this host: it lacks {}.",
            lacking.join(", ")
        ))
        .hint("Restore it on a host whose processor has these features, or boot a new VM; `jiffy run --cpu-profile` limits a VM to features that several hosts have."))
    }
}

async fn ask(vmm: &Path) -> std::result::Result<Host, String> {
    let mut asking = Command::new(vmm);
    asking
        .arg("cpu")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let output = timeout(QUERY_TIMEOUT, asking.output())
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
