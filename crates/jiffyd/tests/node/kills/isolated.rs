//! Daemons whose VMs have jails and a network: nothing of these is left behind either.
//!
//! These tests need root. Cgroups are compared if the daemon has some, which needs version 2 of them
//! at /sys/fs/cgroup.

use super::SETTLED;
use crate::daemon::Daemon;
use crate::network::enter_namespace;
use jiffy_net::rules;
use jiffy_wire::api::{Network, NodeInfo, Vm, VmState};
use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketType, socket};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Number of user ids of a node (`jiffy_jail::identity`).
const USERS: u32 = 65_536;
/// Files of /proc/PID/net with a line for each route or neighbour, and the column of the link.
const TABLES: [(&str, usize); 3] = [("route", 0), ("ipv6_route", 9), ("arp", 5)];

/// A daemon in a network namespace that this thread enters.
pub fn daemon(options: &[&str]) -> Daemon {
    enter_namespace();
    let mut daemon = Daemon::prepared(options);
    daemon.isolates = true;
    daemon.up();
    let containment = info(&daemon).containment.unwrap();
    assert!(containment.own_user, "{:?}", containment.lacks);
    let network: Network = daemon.get("/v1/networks/default").json();
    assert_eq!(network.error, None);
    daemon
}

fn info(daemon: &Daemon) -> NodeInfo {
    daemon.get("/v1/info").json()
}

/// Checks that users of jails, run folders, cgroups, links, routes, neighbours and rules are those
/// of the VMs that are shown.
pub fn assert_matches_vms(daemon: &Daemon) {
    let until = Instant::now() + SETTLED;
    loop {
        let all: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
        let mut wrong = in_jails(daemon, &all);
        wrong.extend(in_network(&all));
        if wrong.is_empty() {
            return;
        }
        assert!(Instant::now() < until, "not as the VMs: {wrong:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn in_jails(daemon: &Daemon, all: &[Vm]) -> Vec<String> {
    let mut wrong = Vec::new();
    let run = daemon.folder.path().join("run");
    let mut users = BTreeSet::new();
    for vm in all.iter().filter(|vm| vm.pid.is_some()) {
        let user = vm.pid.and_then(user_of);
        let folder = fs::metadata(daemon.run_folder(&vm.id)).map(|folder| folder.gid());
        if folder.ok() != user || !users.insert(user) {
            wrong.push(format!("{}'s user is {user:?}", vm.name));
        }
        let limit = vm.pid.and_then(file_size_limit);
        if limit.is_none_or(|limit| limit < u64::from(vm.memory_mib) << 20) {
            wrong.push(format!("{} may write files of {limit:?} bytes", vm.name));
        }
    }
    // The first id is that of the group of all monitors.
    let first = fs::metadata(&run).unwrap().gid();
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let pid = process
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        let user = pid
            .and_then(user_of)
            .filter(|user| (first + 1..first + USERS).contains(user));
        if user.is_some() && !users.contains(&user) {
            wrong.push(format!(
                "process {pid:?} has user {user:?}, which is of no VM"
            ));
        }
    }
    let groups = cgroups(&run);
    if info(daemon).containment.unwrap().cgroups && groups != users.len() {
        wrong.push(format!("{groups} cgroups"));
    }
    wrong
}

/// The user of a process; `None` if it has ended.
fn user_of(pid: u32) -> Option<u32> {
    fs::metadata(format!("/proc/{pid}"))
        .ok()
        .map(|process| process.uid())
}

/// Bytes of the largest file that a process may write; `None` if that is not limited.
fn file_size_limit(pid: u32) -> Option<u64> {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max file size"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Number of the cgroups of monitors (`vmhost::jails` names their parent).
fn cgroups(run: &Path) -> usize {
    let name = run.to_str().unwrap().replace('/', "-");
    let all = fs::read_dir(format!("/sys/fs/cgroup/jiffy{name}"))
        .into_iter()
        .flatten();
    all.flatten().filter(|entry| entry.path().is_dir()).count()
}

/// Each VM that runs or sleeps has a link; one more may be prepared for the next VM. Each link has
/// routes, a neighbour, and rules.
fn in_network(all: &[Vm]) -> Vec<String> {
    let lives = |vm: &&Vm| !matches!(vm.state, VmState::Created | VmState::Exited);
    let wanted: BTreeSet<String> = all
        .iter()
        .filter(lives)
        .map(|vm| format!("jf-{}", vm.id))
        .collect();
    let links = links_in("dev", 0);
    let mut wrong = Vec::new();
    if !links.is_superset(&wanted) || links.len() > wanted.len() + 1 {
        wrong.push(format!("links {links:?} instead of {wanted:?}"));
    }
    for (table, column) in TABLES {
        let listed = links_in(table, column);
        if listed != links {
            wrong.push(format!("{table} {listed:?} instead of {links:?}"));
        }
    }
    let any = socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap();
    let indexes: BTreeSet<u32> = links
        .iter()
        .filter_map(|link| name_to_index(&any, link).ok())
        .collect();
    let ruled = rules::linked().unwrap();
    if ruled != indexes {
        wrong.push(format!("rules for links {ruled:?} instead of {indexes:?}"));
    }
    wrong
}

/// Links of VMs in this table of the thread's network namespace.
fn links_in(table: &str, column: usize) -> BTreeSet<String> {
    let text = fs::read_to_string(format!("/proc/thread-self/net/{table}")).unwrap();
    let names = text
        .lines()
        .filter_map(|line| line.split_whitespace().nth(column));
    let names = names.map(|name| name.trim_end_matches(':').to_owned());
    names
        .filter(|name| name.starts_with("jf-") && name != "jf-host")
        .collect()
}
