//! The state of an idle node, to which it must return.

use crate::support::{Jiffy, TIMEOUT};
use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Most KiB by which the daemon's memory may grow and the machine's available memory may shrink,
/// in a round; the second also in all rounds.
const GROWTH_KIB: u64 = 16 << 10;
const LOST_KIB: u64 = 96 << 10;
/// Most connections to a VM's sockets that a restarted daemon adds: three channels, and that of the
/// guest's init, which was handed over before.
const RENEWED: usize = 4;

pub struct Baseline {
    now: NodeState,
    /// The daemon's descriptors, one per line.
    descriptors: String,
    daemon_kib: u64,
    available_kib: u64,
}

/// State that is compared.
#[derive(Clone, PartialEq, Eq)]
struct NodeState {
    monitors: usize,
    /// Files in the data, run and temporary folders, except golden snapshots and logs.
    files: Vec<String>,
    sockets: Vec<String>,
    mounts: Vec<String>,
    /// Number of VMs' links.
    links: usize,
    loop_devices: String,
    /// Number of processes by name, zombies included.
    processes: BTreeMap<String, usize>,
    daemon_descriptors: u64,
}

impl Baseline {
    /// The state once it does not change any more. `keepers` are ids of VMs that stay.
    pub fn of(jiffy: &Jiffy, keepers: &[String]) -> Baseline {
        let mut now = NodeState::of(jiffy, keepers);
        loop {
            sleep(Duration::from_millis(200));
            let next = NodeState::of(jiffy, keepers);
            if next == now {
                break;
            }
            now = next;
        }
        Baseline {
            now,
            descriptors: descriptors(jiffy),
            daemon_kib: of_the_daemon(jiffy, "awk '/^VmRSS/ { print $2 }' /proc/$pid/status"),
            available_kib: available_kib(jiffy),
        }
    }

    /// Waits until the state is the same again; the error names the differences. A restarted daemon
    /// did not start the keepers, so it holds fewer descriptors of them, but may hold one of a
    /// pager, and it is connected to them by their sockets; its memory is not compared.
    pub fn wait_until_restored(
        &self,
        jiffy: &Jiffy,
        keepers: &[String],
        same_daemon: bool,
    ) -> Result<(), String> {
        let deadline = Instant::now() + TIMEOUT;
        let mut now = NodeState::of(jiffy, keepers);
        let renewed = match same_daemon {
            true => 0,
            false => RENEWED * keepers.len(),
        };
        while !now.matches(&self.now, same_daemon, renewed) {
            if Instant::now() >= deadline {
                return Err(format!(
                    "{}; jiffyd had\n{}and has\n{}",
                    self.now.differences(&now),
                    self.descriptors,
                    descriptors(jiffy)
                ));
            }
            sleep(Duration::from_millis(200));
            now = NodeState::of(jiffy, keepers);
        }
        let now = Baseline::of(jiffy, keepers);
        if same_daemon && now.daemon_kib > self.daemon_kib + GROWTH_KIB {
            return Err(format!(
                "jiffyd grew from {} to {} KiB",
                self.daemon_kib, now.daemon_kib
            ));
        }
        super::say(&format!(
            "jiffyd: {} and {} KiB, {} descriptors; available: {} and {} KiB",
            self.daemon_kib,
            now.daemon_kib,
            now.now.daemon_descriptors,
            self.available_kib,
            now.available_kib
        ));
        match self.available_kib.saturating_sub(now.available_kib) {
            lost if lost > LOST_KIB => Err(format!("{lost} KiB of the machine's memory are lost")),
            _ => Ok(()),
        }
    }
}

impl NodeState {
    fn of(jiffy: &Jiffy, keepers: &[String]) -> NodeState {
        let traces = jiffy.traces();
        let script = "find /var/lib/jiffy -mindepth 1 | \
                      grep -v -e /golden/ -e /registry -e /vms/ -e /snapshots/";
        let mut files = traces.files;
        files.extend(jiffy.sh(script).lines().map(str::to_owned));
        files.retain(|file| keepers.iter().all(|id| !file.contains(id.as_str())));
        // A pager that is not killed writes the recording of a keeper's restore when it ends.
        files.retain(|file| !file.ends_with("/recording"));
        files.sort();
        let names = jiffy.sh("for status in /proc/[0-9]*/status; do \
             awk '/^Name:/ { name = $2 } /^State:/ { state = $2 } /^PPid:/ { parent = $2 } \
               END { if (parent != 2) print state == \"Z\" ? name \"-zombie\" : name }' $status; \
             done 2>/dev/null | grep -v -x -e sh -e awk -e grep -e kthreadd -e jiffy-vmm \
             -e jiffy-pager -e jiffy-origins");
        let mut processes = BTreeMap::new();
        for name in names.lines().filter(|name| !name.is_empty()) {
            *processes.entry(name.to_owned()).or_default() += 1;
        }
        NodeState {
            monitors: traces.vmms,
            files,
            sockets: traces.sockets,
            mounts: traces.mounts,
            links: jiffy.sh("ls /sys/class/net").matches("jf-").count(),
            loop_devices: jiffy.sh("cat /sys/block/loop*/loop/backing_file 2>/dev/null || true"),
            processes,
            daemon_descriptors: of_the_daemon(jiffy, "ls /proc/$pid/fd | wc -l"),
        }
    }

    fn matches(&self, before: &NodeState, same_daemon: bool, renewed: usize) -> bool {
        let may_differ = !same_daemon && self.daemon_descriptors <= before.daemon_descriptors + 1;
        // Fewer are no leak: a connection of the daemon's own may have been open before.
        let may_have = self.sockets.len() <= before.sockets.len() + renewed;
        let like_before = NodeState {
            sockets: match may_have {
                true => self.sockets.clone(),
                false => before.sockets.clone(),
            },
            daemon_descriptors: match may_differ {
                true => self.daemon_descriptors,
                false => before.daemon_descriptors,
            },
            ..before.clone()
        };
        *self == like_before
    }

    fn differences(&self, now: &NodeState) -> String {
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
            "the state differs: files left {left:?}, lost {lost:?}; monitors {} and {}; \
             sockets {:?} and {:?}; links {} and {}; descriptors of jiffyd {} and {}; loop devices {:?} and {:?}; \
             processes {:?} and {:?}; mounts {:?} and {:?}",
            self.monitors,
            now.monitors,
            self.sockets,
            now.sockets,
            self.links,
            now.links,
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

/// A number that a shell script prints for the daemon's `$pid`.
fn of_the_daemon(jiffy: &Jiffy, script: &str) -> u64 {
    let script = format!("for pid in $(pidof jiffyd); do {script}; done");
    jiffy.sh(&script).trim().parse().unwrap_or(0)
}

/// The daemon's descriptors, counted by kind.
fn descriptors(jiffy: &Jiffy) -> String {
    let script =
        "ls -l /proc/$(pidof jiffyd)/fd | sed 's/.* -> //; s/:\\[[0-9]*\\]//' | sort | uniq -c";
    jiffy.sh(script)
}

fn available_kib(jiffy: &Jiffy) -> u64 {
    let script = "sync; echo 3 > /proc/sys/vm/drop_caches; \
                  awk '/^MemAvailable/ { print $2 }' /proc/meminfo";
    jiffy.sh(script).parse().expect("a number")
}
