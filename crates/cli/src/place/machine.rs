//! The node in the machine.

use super::folders::Folders;
use crate::client::Endpoint;
use crate::failure::{Failure, Result, reason, report};
use indicatif::{ProgressBar, ProgressStyle};
use jiffy_machine::{
    Forward, Machine, MachineError, Options, Paths, PortsLock, Share, Stage, shares,
};
use std::collections::BTreeSet;
use std::error::Error;
use std::path::Path;
use std::time::Duration;

/// Where the keys of signed images are; see `jiffyd --signed`.
const SIGNED: &str = "JIFFY_SIGNED";
/// Other variables of jiffyd that the one in the machine does not get.
const UNKNOWN_THERE: [&str; 23] = [
    "JIFFY_CACHE",
    "JIFFY_CONNECTIONS",
    "JIFFY_CPU_SHARE",
    "JIFFY_HIBERNATE_RAW",
    "JIFFY_JAIL",
    "JIFFY_MEMORY_LIMIT",
    "JIFFY_MEMORY_OVERCOMMIT",
    "JIFFY_MEMORY_RESERVE",
    "JIFFY_MEMORY_WAIT",
    "JIFFY_PEER",
    "JIFFY_PROXY",
    "JIFFY_PROXY_CERT",
    "JIFFY_PROXY_DOMAIN",
    "JIFFY_PROXY_KEY",
    "JIFFY_PROXY_TOKEN",
    "JIFFY_QUEUE_LIMIT",
    "JIFFY_SCHEDULER",
    "JIFFY_SPARE",
    "JIFFY_STANDBY",
    "JIFFY_START_TIMEOUT",
    "JIFFY_VM_IPV4",
    "JIFFY_VM_IPV6",
    "JIFFY_VM_NETWORK",
];

/// The machine's node, and whether the machine had to be started.
pub struct Reached {
    /// Where the node listens.
    pub endpoint: Endpoint,
    /// Whether the machine was started.
    pub started: bool,
}

/// The machine that belongs to these folders.
///
/// # Errors
///
/// If there is no data folder.
pub fn machine(folders: &Folders) -> Result<Machine> {
    Ok(Machine::open(Paths {
        data: folders.data()?.to_owned(),
        run: folders.run.clone(),
        lib: folders.lib.clone(),
        share: folders.share.clone(),
    }))
}

/// Reaches the machine's node. The machine is started if it does not run; this is reported once on
/// stderr, with the reason `why` VMs run there.
///
/// # Errors
///
/// If it can't be started (see [`start`]).
pub fn reach(folders: &Folders, why: &str) -> Result<Reached> {
    if let Some(endpoint) = running(folders) {
        return Ok(Reached {
            endpoint,
            started: false,
        });
    }
    start(folders, Options::default(), &format!("{why}; "))
}

/// Starts the machine, or finds it running.
///
/// # Errors
///
/// If the environment demands signed images, which the machine can't check, or [`Machine::start`]
/// fails.
pub fn start(folders: &Folders, options: Options, why: &str) -> Result<Reached> {
    if running(folders).is_none() {
        let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        if let Some(warning) = check_variables(is_set)? {
            report(&warning, None);
        }
    }
    let mut progress = None;
    let started = machine(folders)?.start(options, &mut |stage| {
        progress
            .get_or_insert_with(|| Progress::new(why))
            .stage(stage);
    });
    let was_started = progress.is_some();
    if let Some(progress) = progress {
        progress.end();
    }
    let endpoint = started.map_err(failure)?;
    Ok(Reached {
        endpoint: Endpoint::Tcp {
            address: endpoint.address,
            token: endpoint.token,
        },
        started: was_started,
    })
}

/// Refuses a start that would drop the protection by signatures; returns a warning about other
/// variables that have no effect.
fn check_variables(is_set: impl Fn(&str) -> bool) -> Result<Option<String>> {
    if is_set(SIGNED) {
        return Err(Failure::new(format!(
            "{SIGNED} has no effect in the machine, which would run unsigned images"
        ))
        .hint(format!(
            "unset {SIGNED} to start the machine without it, or use a host with KVM"
        )));
    }
    let unknown: Vec<&str> = UNKNOWN_THERE
        .into_iter()
        .filter(|name| is_set(name))
        .collect();
    Ok(match unknown[..] {
        [] => None,
        [one] => Some(format!("{one} has no effect in the machine")),
        _ => Some(format!(
            "{} have no effect in the machine",
            unknown.join(", ")
        )),
    })
}

/// Called when the node is slow to answer: the machine may be paused because this host's disk was
/// full. Resumes it then.
///
/// # Errors
///
/// If it can't be resumed: the disk is still full, or the machine's control socket fails.
pub fn nudge(folders: &Folders) -> Result<()> {
    let machine = machine(folders)?;
    match machine.why_it_ended() {
        Some(MachineError::HostDiskFull { .. }) => machine
            .start(Options::default(), &mut |_| {})
            .map(|_| ())
            .map_err(failure),
        // If the machine has ended, the connection breaks.
        _ => Ok(()),
    }
}

/// Locks the list of forwarded ports; `None` if another command holds it.
///
/// # Errors
///
/// If the lock file can't be used.
pub fn try_lock_ports(folders: &Folders) -> Result<Option<PortsLock>> {
    machine(folders)?.try_lock_ports().map_err(failure)
}

/// Forwards these ports of this host to the machine, and no other ports of VMs.
///
/// # Errors
///
/// If the machine does not run, or a port is not available on this host.
pub fn forward(folders: &Folders, lock: &PortsLock, ports: &BTreeSet<Forward>) -> Result<()> {
    machine(folders)?.forward(lock, ports).map_err(failure)
}

/// The path in the machine of a folder of this host, for a VM that may change it unless `read_only`.
///
/// # Errors
///
/// If the folder does not exist, is not shared with the machine, or is shared for reading only and
/// the VM may change it.
pub fn shared_path(folders: &Folders, source: &str, read_only: bool) -> Result<String> {
    let shares = machine(folders)?.shares();
    let path = std::fs::canonicalize(source)
        .map_err(|error| Failure::io(format_args!("the folder {source} can't be shared"), error))?;
    path_in_machine(&shares, source, &path, read_only)
}

/// `path` is `source` without links.
fn path_in_machine(shares: &[Share], source: &str, path: &Path, read_only: bool) -> Result<String> {
    let Some(share) = shares::holder(shares, path) else {
        let new = format!("{}{}", path.display(), if read_only { ":ro" } else { "" });
        let others = shares.iter().map(as_option);
        return Err(Failure::new(format!(
            "{source} is not shared with the machine, in which VMs run on this host"
        ))
        .hint(restart(others.chain([new]))));
    };
    if share.read_only && !read_only {
        let all = shares.iter().map(|one| match one == share {
            true => share.path.clone(),
            false => as_option(one),
        });
        return Err(Failure::new(format!(
            "{source} is shared with the machine for reading only, so a VM can't change it"
        ))
        .hint(format!("write HOST:GUEST:ro, or {}", restart(all))));
    }
    let path = shares::in_machine(path).into_os_string().into_string();
    path.map_err(|path| Failure::new(format!("{path:?} can't be shared: it is not UTF-8")))
}

/// As a value of `--share`.
fn as_option(share: &Share) -> String {
    let suffix = if share.read_only { ":ro" } else { "" };
    format!("{}{suffix}", share.path)
}

/// The commands after which the machine shares these folders.
fn restart(shares: impl Iterator<Item = String>) -> String {
    let options: String = shares.map(|share| format!(" --share {share}")).collect();
    format!("`jiffy machine stop && jiffy machine start{options}`")
}

/// The machine's node if it runs.
pub fn running(folders: &Folders) -> Option<Endpoint> {
    let endpoint = machine(folders).ok()?.endpoint()?;
    Some(Endpoint::Tcp {
        address: endpoint.address,
        token: endpoint.token,
    })
}

/// Why the machine does not answer, if it has ended or is paused.
pub fn why_it_ended(folders: &Folders) -> Option<Failure> {
    let cause = match machine(folders).ok()?.why_it_ended()? {
        MachineError::Died { console, .. } => {
            Failure::new("the machine ended unexpectedly, and the VMs in it with it").hint(format!(
                "the next command starts it again; its console is in {}",
                console.display()
            ))
        }
        error => failure(error),
    };
    Some(cause.kind(crate::failure::Kind::Unreachable))
}

/// Converts an error of the machine, with its cause and a hint.
pub fn failure(error: MachineError) -> Failure {
    let mut message = error.to_string();
    if let Some(source) = error.source() {
        let why = match source.downcast_ref::<std::io::Error>() {
            Some(error) => reason(error),
            None => source.to_string(),
        };
        message.push_str(": ");
        message.push_str(&why);
    }
    let failure = Failure::new(message);
    match error.hint() {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

/// Prints one sentence, and on a terminal a spinner until the machine is ready.
struct Progress {
    bar: ProgressBar,
}

impl Progress {
    fn new(why: &str) -> Progress {
        // This line stays when the spinner is removed.
        eprintln!("jiffy: {why}starting the machine");
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("  {spinner} {msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(120));
        Progress { bar }
    }

    fn stage(&self, stage: Stage) {
        self.bar.set_message(match stage {
            Stage::Disk => "creating its disk",
            Stage::Qemu => "booting its system",
            Stage::System { .. } => "waiting for its node",
            Stage::Ready { .. } => "ready",
        });
    }

    fn end(self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_below_a_share_has_a_path_in_the_machine() {
        let shares = ["rw:/a", "ro:/a/b", "ro:/c"].map(|text| text.parse().unwrap());
        let path = |source: &str, read_only| {
            path_in_machine(&shares, source, Path::new(source), read_only)
        };
        assert_eq!(path("/a", false).unwrap(), "/host/a");
        assert_eq!(path("/a/x y", true).unwrap(), "/host/a/x y");
        assert_eq!(path("/a/b/x", true).unwrap(), "/host/a/b/x");
        let refused = path("/a/b/x", false).unwrap_err();
        assert!(refused.message.contains("for reading only"), "{refused}");
        let hint = refused.hint.unwrap();
        assert!(
            hint.contains("--share /a --share /a/b --share /c:ro`"),
            "{hint}"
        );
        let refused = path("/d", true).unwrap_err();
        assert!(refused.message.contains("/d is not shared"), "{refused}");
        let hint = refused.hint.unwrap();
        assert!(
            hint.contains("jiffy machine stop && jiffy machine start"),
            "{hint}"
        );
        assert!(hint.contains("--share /c:ro --share /d:ro`"), "{hint}");
    }

    #[test]
    fn variables_that_do_not_reach_the_machine_are_refused_or_named() {
        let with = |set: &'static [&str]| check_variables(|name| set.contains(&name));
        let others = ["JIFFY_DATA", "JIFFY_RUN", "JIFFY_LIB", "JIFFY_SHARE"];
        // Requests contain the registry.
        let has_effect = |name: &str| others.contains(&name) || name == "JIFFY_REGISTRY";
        assert_eq!(check_variables(has_effect).unwrap(), None);
        assert_eq!(
            with(&["JIFFY_PEER"]).unwrap().unwrap(),
            "JIFFY_PEER has no effect in the machine"
        );
        assert_eq!(
            with(&["JIFFY_PEER", "JIFFY_MEMORY_LIMIT"])
                .unwrap()
                .unwrap(),
            "JIFFY_MEMORY_LIMIT, JIFFY_PEER have no effect in the machine"
        );
        let refused = with(&["JIFFY_SIGNED"]).unwrap_err();
        assert!(refused.message.contains("unsigned images"), "{refused}");

        let options = Path::new(env!("CARGO_MANIFEST_DIR")).join("../jiffyd/src/options.rs");
        let options = std::fs::read_to_string(options).unwrap();
        let pieces = options.split("env = \"").skip(1);
        let names: Vec<&str> = pieces
            .map(|rest| rest.split('"').next().unwrap())
            .filter(|name| !has_effect(name))
            .collect();
        assert_eq!(names.len(), UNKNOWN_THERE.len() + 1);
        for name in names {
            assert!(name == SIGNED || UNKNOWN_THERE.contains(&name), "{name}");
        }
    }

    #[test]
    fn a_missing_folder_is_named() {
        let root = tempfile::tempdir().unwrap();
        let folders = Folders::below(root.path());
        let missing = root.path().join("missing");
        let failure = shared_path(&folders, missing.to_str().unwrap(), false).unwrap_err();
        assert!(failure.message.contains("missing"), "{failure}");
        let here = root.path().to_str().unwrap();
        let failure = shared_path(&folders, here, false).unwrap_err();
        assert!(failure.message.contains("not shared"), "{failure}");
    }
}
