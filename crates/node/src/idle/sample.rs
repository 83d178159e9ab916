//! How much of the host a VM has used until now. The numbers are the kernel's counters of its VMM,
//! so reading them costs the VM nothing.

use jiffy_content::clock::monotonic_ns;
use std::fs;
use std::time::Duration;

/// Length of the kernel's unit of CPU time in /proc (USER_HZ is 100 on x86), milliseconds.
const TICK_MS: u64 = 10;

/// Size of a page, KiB.
const PAGE_KIB: u64 = 4;

/// What was used from the VMM's start to this moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// The moment (host CLOCK_MONOTONIC).
    pub at_ns: u64,
    /// Process id of the VMM.
    pub pid: u32,
    /// CPU time of all its threads.
    pub cpu: Duration,
    /// Bytes that it has read from disks and written to files.
    pub disk: u64,
    /// Bytes that it, and the processes that work for it, have read and written by system calls, also
    /// where no disk was needed: cached chunks, shared folders, frames to and from a passt.
    pub moved: u64,
    /// Bytes in both directions over its link.
    pub network: u64,
}

impl Sample {
    /// A sample of the VMM with this process id, for which `helpers` work, and whose link has carried
    /// these bytes. `None` if there is no such process.
    pub fn of(pid: u32, helpers: &[u32], network: u64) -> Option<Sample> {
        let cpu = cpu_time(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
        // /proc/PID/io of another user's process can't be read; then only CPU time counts.
        let io = |pid: u32| fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
        let own = io(pid);
        let of_helpers = helpers.iter().map(|pid| moved_bytes(&io(*pid)));
        Some(Sample {
            at_ns: monotonic_ns(),
            pid,
            cpu,
            disk: disk_bytes(&own),
            moved: of_helpers.fold(moved_bytes(&own), u64::saturating_add),
            network,
        })
    }
}

/// KiB of the host's memory that a process has.
pub fn resident_kib(pid: u32) -> Option<u64> {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = statm.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(pages.saturating_mul(PAGE_KIB))
}

/// `utime` and `stime` of proc_pid_stat(5). The name before them may hold any character.
fn cpu_time(stat: &str) -> Option<Duration> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    let all = ticks()?.saturating_add(ticks()?);
    Some(Duration::from_millis(all.saturating_mul(TICK_MS)))
}

fn disk_bytes(io: &str) -> u64 {
    sum_of(io, ["read_bytes", "write_bytes"])
}

fn moved_bytes(io: &str) -> u64 {
    sum_of(io, ["rchar", "wchar"])
}

/// The sum of these values of proc_pid_io(5).
fn sum_of(io: &str, wanted: [&str; 2]) -> u64 {
    let values = io.lines().filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        wanted
            .contains(&name)
            .then(|| value.trim().parse::<u64>().ok())?
    });
    values.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_parsed_from_kernel_files() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 9 0 0 0 150 50 0 0 20 0 3 0 1 2 3";
        assert_eq!(cpu_time(stat), Some(Duration::from_secs(2)));
        assert_eq!(cpu_time("7 (a) S 1"), None);
        // More than a year of eight processors.
        let long = "7 (a) S 1 7 7 0 -1 4194560 9 0 0 0 25000000000 0 0 0 20 0 3";
        assert_eq!(cpu_time(long), Some(Duration::from_secs(250_000_000)));
        let io =
            "rchar: 5\nwchar: 6\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 1\n";
        assert_eq!(disk_bytes(io), 12_288);
        assert_eq!(moved_bytes(io), 11);
        let own = Sample::of(std::process::id(), &[], 3).expect("this process");
        assert_eq!(own.network, 3);
        assert_eq!(Sample::of(u32::MAX, &[], 0), None);
    }

    #[test]
    fn what_helpers_move_counts() {
        let mut helper = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let pid = helper.id();
        let moved = |helpers: &[u32]| Sample::of(pid, helpers, 0).unwrap().moved;
        let before = moved(&[]);
        let mut input = helper.stdin.take().unwrap();
        std::io::Write::write_all(&mut input, &[1; 32 << 10]).unwrap();
        // Read from the pipe, and written to /dev/null.
        while moved(&[]) < before + (64 << 10) {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(moved(&[pid]), 2 * moved(&[]));
        assert_eq!(moved(&[u32::MAX]), moved(&[]), "it has ended");
        drop(input);
        helper.wait().unwrap();
    }
}
