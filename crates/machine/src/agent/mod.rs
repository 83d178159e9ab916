//! `jiffy-machine-agent`: runs inside the machine, reports readiness, runs programs for
//! the host (`jiffy machine shell`, the test harness), and powers off.
//!
//! * [`heartbeat`]: interrupts idle CPUs.
//! * [`ready`]: pushes readiness to the host.
//! * [`shares`]: mounts folders of the host.
//! * [`serve`]: connections and requests.
//! * [`exec`]: runs one program with its streams.
//! * [`power`]: shuts the machine down.

pub mod exec;
pub mod heartbeat;
pub mod power;
pub mod ready;
pub mod serve;
pub mod shares;
#[cfg(test)]
mod tests;

use std::path::Path;

/// Whether PID 1 is the machine's own. On a host the agent must not change anything.
fn in_machine() -> bool {
    std::fs::read_link("/proc/1/exe").is_ok_and(|init| init == Path::new("/init"))
}

/// Allows transparent huge pages for VMs' memory: a page fault then maps 512 pages instead of one.
pub fn allow_huge_pages() {
    const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    if in_machine()
        && let Err(error) = std::fs::write(SETTING, "advise")
    {
        tracing::warn!("{SETTING}: {error}");
    }
}
