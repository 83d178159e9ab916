//! Reads memory and CPU figures of the guest from /proc.

use crate::{files, syscalls};
use jiffy_wire::agent::Stat;

const LARGEST: usize = 1024 * 1024;
/// USER_HZ: /proc/stat counts in hundredths of a second.
const TICK_NS: u64 = 10_000_000;

/// Reads the figures; a figure that can't be read is zero.
pub fn read() -> Stat {
    let file = |path| files::read_text(path, LARGEST).unwrap_or_default();
    let info = rustix::system::sysinfo();
    let mut stat = parse(&file(c"/proc/meminfo"), &file(c"/proc/stat"));
    stat.uptime_ns = syscalls::monotonic_ns();
    stat.processes = u32::from(info.procs);
    // Loads are in units of 1/65536 (sysinfo(2)).
    stat.load_1m_hundredths = ((info.loads[0] as u64).saturating_mul(100) >> 16) as u32;
    stat
}

fn parse(meminfo: &str, proc_stat: &str) -> Stat {
    let memory = |name: &str| {
        meminfo
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
            .unwrap_or(0)
            .saturating_mul(1024)
    };
    let total: &str = proc_stat
        .lines()
        .find(|line| line.starts_with("cpu "))
        .unwrap_or("");
    let ticks = |field: usize| {
        let value = total
            .split_whitespace()
            .nth(field + 1)
            .and_then(|text| text.parse::<u64>().ok());
        value.unwrap_or(0).saturating_mul(TICK_NS)
    };
    // user nice system idle iowait irq softirq steal (proc_stat(5))
    Stat {
        memory_total: memory("MemTotal"),
        memory_available: memory("MemAvailable"),
        memory_free: memory("MemFree"),
        cpu_user_ns: ticks(0).saturating_add(ticks(1)),
        cpu_system_ns: ticks(2).saturating_add(ticks(5)).saturating_add(ticks(6)),
        cpu_idle_ns: ticks(3).saturating_add(ticks(4)),
        ..Stat::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn meminfo_and_stat_are_parsed() {
        let stat = parse(
            "MemTotal:         127440 kB\nMemFree:           99 kB\nMemAvailable:     88888 kB\n",
            "cpu  3 1 10 1000 5 1 2 0 0 0\ncpu0 3 1 10 1000 5 1 2 0 0 0\n",
        );
        assert_eq!(stat.memory_total, 127440 * 1024);
        assert_eq!(stat.memory_free, 99 * 1024);
        assert_eq!(stat.memory_available, 88888 * 1024);
        assert_eq!(stat.cpu_user_ns, 4 * TICK_NS);
        assert_eq!(stat.cpu_system_ns, 13 * TICK_NS);
        assert_eq!(stat.cpu_idle_ns, 1005 * TICK_NS);
    }

    #[test]
    fn memory_of_the_running_system_is_read() {
        let stat = read();
        assert!(stat.memory_total >= stat.memory_available && stat.memory_available > 0);
        assert!(stat.processes > 0 && stat.uptime_ns > 0);
    }

    proptest! {
        #[test]
        fn any_stat_text_is_parsed_without_panic(meminfo in "[A-Za-z0-9: \n]{0,80}", stat in "[cpu0-9 \n]{0,80}") {
            let _ = parse(&meminfo, &stat);
        }
    }
}
