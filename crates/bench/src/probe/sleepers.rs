//! Measures a node with many hibernated VMs.
//!
//! Two of them were hibernated by the node. The others are copies of their folders, which share the
//! files that never change, and so have records of their own and no memory.

use super::many::{daemon, number_of, vm_of};
use super::network::{ask, import_image};
use super::node::{boot_idle, counted, jiffy, output};
use super::{now_ns, wait_until_idle};
use crate::data::FOLDER;
use crate::network::IMAGE;
use crate::plan::{DAEMON_BYTES, DAEMON_START, Sample};
use crate::traffic::ANSWER_PORT;
use anyhow::{Context, Result, bail, ensure};
use jiffy_content::model::vm::VmRecord;
use jiffy_wire::api::{Vm, VmState};
use rustix::process::{Pid, Signal};
use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// One VM of this many has a network and a published port.
const PUBLISHED_OF: u32 = 100;
/// Published port of the first of them; the others' follow.
const FIRST_PORT: u16 = 18_000;
/// VMs that the node hibernates itself: without a network, and with a published port.
const QUIET: &str = "sleeper";
const PUBLISHED: &str = "sleeper-published";
const REAL: u32 = 2;
/// The copies' context ids and vsock ids are counted from these.
const FIRST_CID: u32 = 20_000;
const FIRST_ID: u64 = 0xabc0_0000_0000;
/// Time limit of a start or of the daemon's end.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A hibernated VM that is copied.
struct Original {
    folder: PathBuf,
    record: VmRecord,
}

/// Makes `count` hibernated VMs, measures the daemon's start with them and its memory, and removes
/// them.
///
/// # Errors
///
/// If `count` is smaller than the number of VMs that really boot, `jiffy` fails, the daemon does
/// not answer, or the VMs can't be removed.
pub fn measure(count: u32) -> Result<Sample> {
    let copies = count.checked_sub(REAL).context("too few VMs")?;
    let found = real_vms().and_then(|()| with_copies(copies));
    let removed = remove(copies);
    let found = found?;
    removed?;
    Ok(found)
}

/// Starts and hibernates the VMs that are copied.
fn real_vms() -> Result<()> {
    import_image()?;
    boot_idle(QUIET)?;
    let publish = format!("{FIRST_PORT}:{ANSWER_PORT}");
    let mut words = vec!["run", "--detach", "--cold", "--name", PUBLISHED];
    words.extend(["--network", "default", "--memory", "128"]);
    words.extend(["--publish", &publish, IMAGE, "--", "/bin/answer"]);
    jiffy(&words)?;
    let until = now_ns() + TIMEOUT.as_nanos() as u64;
    while let Err(error) = ask(Ipv4Addr::LOCALHOST, FIRST_PORT) {
        ensure!(now_ns() < until, "the server does not listen: {error:#}");
        std::thread::sleep(Duration::from_millis(10));
    }
    for vm in [QUIET, PUBLISHED] {
        jiffy(&["hibernate", vm])?;
    }
    Ok(())
}

fn with_copies(copies: u32) -> Result<Sample> {
    let (quiet, published) = (Original::of(QUIET)?, Original::of(PUBLISHED)?);
    wait_until_idle()?;
    stop_daemon()?;
    for number in 1..=copies {
        match number % PUBLISHED_OF {
            0 => published.copy_published(number)?,
            _ => quiet.copy(number, quiet.record.clone())?,
        }
    }
    wait_until_idle()?;
    let start = now_ns();
    // The first command starts the daemon.
    jiffy(&["inspect", QUIET])?;
    let started = now_ns() - start;
    let all: Vec<Vm> = serde_json::from_slice(&jiffy(&["ps", "--all", "--format", "json"])?)?;
    let sleeping = all.iter().filter(|vm| vm.state == VmState::Hibernated);
    let healthy = sleeping.filter(|vm| vm.error.is_none()).count();
    ensure!(
        healthy == (copies + REAL) as usize && all.len() == healthy,
        "of {} VMs {healthy} are hibernated",
        all.len()
    );
    wait_until_idle()?;
    let status = format!("/proc/{}/status", daemon()?);
    let resident = number_of(Path::new(&status), "VmRSS:")? * 1024;
    // A copy is as good as a VM that the node hibernated.
    let last = copies / PUBLISHED_OF;
    ask(Ipv4Addr::LOCALHOST, FIRST_PORT + u16::try_from(last)?)?;
    Ok(counted(BTreeMap::from([
        (DAEMON_BYTES.into(), resident),
        (DAEMON_START.into(), started),
    ])))
}

impl Original {
    fn of(vm: &str) -> Result<Original> {
        let folder = folder(&vm_of(vm)?.id);
        let record = VmRecord::load(&folder).with_context(|| folder.display().to_string())?;
        Ok(Original { folder, record })
    }

    /// A copy with this number, and this record but for the names.
    fn copy(&self, number: u32, mut record: VmRecord) -> Result<()> {
        record.id = id(number);
        record.name = format!("{QUIET}-{number}");
        record.cid = FIRST_CID + number;
        let to = self.folder.with_file_name(&record.id);
        let memory = Path::new("hibernated");
        fs::create_dir_all(to.join(memory))?;
        let link = |file: &Path| fs::hard_link(self.folder.join(file), to.join(file));
        link(Path::new("command.log"))?;
        for file in fs::read_dir(self.folder.join(memory))? {
            link(&memory.join(file?.file_name()))?;
        }
        // It need not survive a crash of the machine.
        let synced = false;
        jiffy_content::records::vm::save(&to, record.into(), synced)?;
        Ok(())
    }

    /// A copy with a port and addresses of its own.
    fn copy_published(&self, number: u32) -> Result<()> {
        let mut record = self.record.clone();
        let nth = number / PUBLISHED_OF;
        let addresses = record.addresses.iter();
        let v4 = addresses.copied().find_map(|address| match address {
            IpAddr::V4(v4) => Some(Ipv4Addr::from_bits(v4.to_bits() + nth)),
            IpAddr::V6(_) => None,
        });
        record.addresses = vec![v4.context("the VM has no address")?.into()];
        let network = Arc::make_mut(&mut record.spec).network.as_mut();
        let port = u32::from(FIRST_PORT) + nth;
        network.context("the VM has no network")?.ports = vec![format!("{port}:{ANSWER_PORT}")];
        self.copy(number, record)
    }
}

fn id(number: u32) -> String {
    format!("{:012x}", FIRST_ID + u64::from(number))
}

fn folder(id: &str) -> PathBuf {
    Path::new(FOLDER).join("vms").join(id)
}

/// Removes the copies while no daemon runs, which is faster, and then the VMs that were copied.
fn remove(copies: u32) -> Result<()> {
    // The last copy that was woken has a process.
    for number in [copies / PUBLISHED_OF * PUBLISHED_OF, copies] {
        let _ = output(&["rm", "--force", &id(number)]);
    }
    stop_daemon()?;
    for number in 1..=copies {
        // It does not exist if an earlier step failed.
        let _ = fs::remove_dir_all(folder(&id(number)));
    }
    for vm in [QUIET, PUBLISHED] {
        let _ = output(&["rm", "--force", vm]);
    }
    Ok(())
}

/// Ends the daemon as an operator does; its VMs go on.
fn stop_daemon() -> Result<()> {
    let pid = daemon()?;
    let process = Pid::from_raw(pid as i32).context("the daemon has no process")?;
    rustix::process::kill_process(process, Signal::TERM)?;
    let until = now_ns() + TIMEOUT.as_nanos() as u64;
    while daemon().is_ok_and(|found| found == pid) {
        if now_ns() > until {
            bail!("the daemon does not end");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_content::model::vm::Spec;
    use jiffy_wire::api::NetworkUse;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_copy_has_a_record_and_a_port_of_its_own_and_shares_the_memory() {
        let vms = tempfile::tempdir().unwrap();
        let folder = vms.path().join("0123456789ab");
        fs::create_dir_all(folder.join("hibernated")).unwrap();
        fs::write(folder.join("hibernated/state"), "state").unwrap();
        fs::write(folder.join("command.log"), "log").unwrap();
        let spec = Spec {
            network: Some(NetworkUse::default()),
            ..Spec::default()
        };
        let mut record = VmRecord::new("0123456789ab".into(), PUBLISHED.into(), spec, 3);
        record.addresses = ["fd00::2", "10.0.0.254"]
            .map(|it| it.parse().unwrap())
            .into();
        let original = Original { folder, record };
        original.copy_published(2 * PUBLISHED_OF).unwrap();
        let copy = vms.path().join(id(2 * PUBLISHED_OF));
        let record = VmRecord::load(&copy).unwrap();
        assert_eq!(Some(record.id.as_str()), copy.file_name().unwrap().to_str());
        assert_eq!((record.name.as_str(), record.cid), ("sleeper-200", 20_200));
        assert_eq!(record.addresses, [IpAddr::from([10, 0, 1, 0])]);
        assert_eq!(record.spec.network.as_ref().unwrap().ports, ["18002:7000"]);
        let inode = |folder: &Path| {
            let file = fs::metadata(folder.join("hibernated/state"));
            file.unwrap().ino()
        };
        assert_eq!(inode(&copy), inode(&original.folder));
    }
}
