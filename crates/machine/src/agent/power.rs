//! Shutdown of the machine.

use std::time::{Duration, Instant};

/// Ends all programs, syncs and powers off.
///
/// PID 1 may restart services meanwhile, so the kernel makes the file systems read-only (sysrq `u`)
/// before the power goes off.
///
/// Does nothing unless PID 1 is the machine's own: otherwise the programs would be the host's.
pub fn power_off(grace: Duration) {
    if !super::in_machine() {
        tracing::error!("PID 1 is not the machine's init: the power stays on");
        return;
    }
    signal_all(libc::SIGTERM);
    let deadline = Instant::now() + grace;
    while has_other_processes() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    signal_all(libc::SIGKILL);
    rustix::fs::sync();
    for key in ["s", "u"] {
        if let Err(error) = std::fs::write("/proc/sysrq-trigger", key) {
            tracing::warn!("sysrq {key}: {error}");
        }
    }
    rustix::fs::sync();
    if let Err(error) = rustix::system::reboot(rustix::system::RebootCommand::PowerOff) {
        tracing::error!("powering off failed: {error}");
    }
}

#[allow(unsafe_code)]
fn signal_all(signal: i32) {
    // SAFETY: kill touches no memory. -1 spares PID 1 and the caller.
    unsafe {
        libc::kill(-1, signal);
    }
}

/// Whether there are processes besides PID 1, this one and kernel threads.
fn has_other_processes() -> bool {
    let own = std::process::id();
    let Ok(processes) = std::fs::read_dir("/proc") else {
        return false;
    };
    processes.flatten().any(|entry| {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<u32>().ok())
        else {
            return false;
        };
        // Kernel threads and zombies have no command line.
        pid != 1
            && pid != own
            && std::fs::read(entry.path().join("cmdline")).is_ok_and(|line| !line.is_empty())
    })
}
