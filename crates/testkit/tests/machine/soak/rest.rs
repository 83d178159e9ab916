//! What a node has at rest, and has to have again.

use crate::support::{Jiffy, PATIENCE};
use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// What the daemon may grow by in a round, and the machine lose over all of them.
const GROWTH_KIB: u64 = 16 << 10;
const LOST_KIB: u64 = 96 << 10;

pub struct Rest {
    now: Now,
    daemon_kib: u64,
    available_kib: u64,
}

/// What can be compared.
#[derive(Clone, PartialEq, Eq)]
struct Now {
    monitors: usize,
    /// Of data, run and temporary folders, but for golden snapshots and logs.
    files: Vec<String>,
    sockets: usize,
    mounts: Vec<String>,
    loop_devices: String,
    /// How many of each name, also of those that nobody has waited for.
    processes: BTreeMap<String, usize>,
    daemon_descriptors: u64,
}

impl Rest {
    /// Once it is. `keepers` are ids of VMs that stay.
    pub fn of(jiffy: &Jiffy, keepers: &[String]) -> Rest {
        let mut now = Now::of(jiffy, keepers);
        loop {
            sleep(Duration::from_millis(200));
            let next = Now::of(jiffy, keepers);
            if next == now {
                break;
            }
            now = next;
        }
        Rest {
            now,
            daemon_kib: of_the_daemon(jiffy, "awk '/^VmRSS/ { print $2 }' /proc/$pid/status"),
            available_kib: available_kib(jiffy),
        }
    }

    /// Waits until it is as it was, and says what is not. Another daemon has not started
    /// the keepers and holds less of them, but perhaps a pager; and its memory is not
    /// compared.
    pub fn is_again(
        &self,
        jiffy: &Jiffy,
        keepers: &[String],
        same_daemon: bool,
    ) -> Result<(), String> {
        let deadline = Instant::now() + PATIENCE;
        let mut now = Now::of(jiffy, keepers);
        while !now.is_as(&self.now, same_daemon) {
            if Instant::now() >= deadline {
                return Err(self.now.differences(&now));
            }
            sleep(Duration::from_millis(200));
            now = Now::of(jiffy, keepers);
        }
        let rest = Rest::of(jiffy, keepers);
        if same_daemon && rest.daemon_kib > self.daemon_kib + GROWTH_KIB {
            return Err(format!(
                "jiffyd grew from {} to {} KiB",
                self.daemon_kib, rest.daemon_kib
            ));
        }
        super::say(&format!(
            "jiffyd: {} and {} KiB, {} descriptors; available: {} and {} KiB",
            self.daemon_kib,
            rest.daemon_kib,
            rest.now.daemon_descriptors,
            self.available_kib,
            rest.available_kib
        ));
        match self.available_kib.saturating_sub(rest.available_kib) {
            lost if lost > LOST_KIB => Err(format!("{lost} KiB of the machine's memory are gone")),
            _ => Ok(()),
        }
    }
}

impl Now {
    fn of(jiffy: &Jiffy, keepers: &[String]) -> Now {
        let traces = jiffy.traces();
        let script = "find /var/lib/jiffy -mindepth 1 | \
                      grep -v -e /golden/ -e /registry -e /vms/ -e /snapshots/";
        let mut files = traces.files;
        files.extend(jiffy.sh(script).lines().map(str::to_owned));
        files.retain(|file| keepers.iter().all(|id| !file.contains(id.as_str())));
        files.sort();
        let names = jiffy.sh("for status in /proc/[0-9]*/status; do \
             awk '/^Name:/ { name = $2 } /^State:/ { state = $2 } /^PPid:/ { parent = $2 } \
               END { if (parent != 2) print state == \"Z\" ? name \"-zombie\" : name }' $status; \
             done 2>/dev/null | grep -v -x -e sh -e awk -e grep -e kthreadd -e jiffy-vmm -e jiffy-pager");
        let mut processes = BTreeMap::new();
        for name in names.lines().filter(|name| !name.is_empty()) {
            *processes.entry(name.to_owned()).or_default() += 1;
        }
        Now {
            monitors: traces.vmms,
            files,
            sockets: traces.sockets,
            mounts: traces.mounts,
            loop_devices: jiffy.sh("cat /sys/block/loop*/loop/backing_file 2>/dev/null || true"),
            processes,
            daemon_descriptors: of_the_daemon(jiffy, "ls /proc/$pid/fd | wc -l"),
        }
    }

    fn is_as(&self, before: &Now, same_daemon: bool) -> bool {
        let may_differ = !same_daemon && self.daemon_descriptors <= before.daemon_descriptors + 1;
        let like_before = Now {
            daemon_descriptors: match may_differ {
                true => self.daemon_descriptors,
                false => before.daemon_descriptors,
            },
            ..before.clone()
        };
        *self == like_before
    }

    fn differences(&self, now: &Now) -> String {
        let lacks = |all: &[String], file: &String| !all.contains(file);
        let left: Vec<_> = now
            .files
            .iter()
            .filter(|file| lacks(&self.files, file))
            .collect();
        let lost: Vec<_> = self
            .files
            .iter()
            .filter(|file| lacks(&now.files, file))
            .collect();
        format!(
            "it is not as before: files left {left:?}, lost {lost:?}; monitors {} and {}; \
             sockets {} and {}; descriptors of jiffyd {} and {}; loop devices {:?} and {:?}; \
             processes {:?} and {:?}; mounts {:?} and {:?}",
            self.monitors,
            now.monitors,
            self.sockets,
            now.sockets,
            self.daemon_descriptors,
            now.daemon_descriptors,
            self.loop_devices,
            now.loop_devices,
            self.processes,
            now.processes,
            self.mounts,
            now.mounts,
        )
    }
}

/// A number that a line of shell prints of `$pid`.
fn of_the_daemon(jiffy: &Jiffy, script: &str) -> u64 {
    let script = format!("for pid in $(pidof jiffyd); do {script}; done");
    jiffy.sh(&script).trim().parse().unwrap_or(0)
}

fn available_kib(jiffy: &Jiffy) -> u64 {
    let script = "sync; echo 3 > /proc/sys/vm/drop_caches; \
                  awk '/^MemAvailable/ { print $2 }' /proc/meminfo";
    jiffy.sh(script).parse().expect("a number")
}
