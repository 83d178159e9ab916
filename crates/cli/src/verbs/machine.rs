//! `jiffy machine`

use super::Context;
use super::context::{show, show_json};
use super::kernel::built_now;
use crate::args::folder::MachineShare;
use crate::args::{ListFormat, Machine, MachineKernel};
use crate::client::Client;
use crate::failure::{Failure, Outcome, Result};
use crate::place::machine::{failure, machine as open, start};
use crate::render::size;
use jiffy_kernel::list::Flavour;
use jiffy_machine::{Options, Share, State, Status};
use jiffy_wire::agent::ExitStatus;
use std::path::PathBuf;

/// Exit status of `status` when the machine does not run, as with systemctl.
const NOT_RUNNING: u8 = 3;

/// `jiffy machine`
///
/// # Errors
///
/// If the folders can't be used, an option is wrong, or the machine can't be started, stopped,
/// removed or reached.
pub fn machine(context: &Context, verb: Machine) -> Result<Outcome> {
    let folders = &context.folders;
    folders.has_run()?;
    let machine = open(folders)?;
    match verb {
        Machine::Start {
            cpus,
            memory,
            disk,
            kernel,
            share,
        } => {
            folders.make_run()?;
            let kernel = kernel
                .map(|kernel| kernel_file(context, kernel))
                .transpose()?;
            let options = Options {
                memory_mib: memory
                    .map(|size| to_u32(size, "MiB of memory"))
                    .transpose()?,
                cpus,
                disk_gib: disk
                    .map(|size| to_u32(size.div_ceil(1024), "GiB of disk space"))
                    .transpose()?,
                accelerator: None,
                kernel,
                shares: shares(&share)?,
            };
            let has_options = options != Options::default();
            let reached = start(folders, options, "")?;
            if reached.started {
                let client = Client::new(reached.endpoint);
                context.machine_is_new(client);
                context.block_on(|| async { Ok(Outcome::Done) })?;
            }
            if !reached.started {
                show("The machine is already running.\n")?;
                if has_options {
                    show("The new settings take effect at its next start.\n")?;
                }
            }
            Ok(Outcome::Done)
        }
        Machine::Stop => {
            if !machine.stop().map_err(failure)? {
                show("The machine was not running.\n")?;
            }
            Ok(Outcome::Done)
        }
        Machine::Status { format } => {
            let status = machine.status().map_err(failure)?;
            match format {
                ListFormat::Json => show_json(&status)?,
                ListFormat::Table => show(&describe(&status))?,
            }
            Ok(Outcome::Verdict(match status.state {
                State::Running => 0,
                _ => NOT_RUNNING,
            }))
        }
        Machine::Shell { argv } => {
            let agent = machine.agent().ok_or_else(|| {
                Failure::new("the machine is not running").hint("`jiffy machine start` starts it")
            })?;
            let code = jiffy_machine::shell::run(&agent, &argv).map_err(failure)?;
            Ok(Outcome::Ended(ExitStatus::Code(code)))
        }
        Machine::Rm { force } => {
            let running = machine.status().map_err(failure)?.pid.is_some();
            if running && !force {
                return Err(Failure::new("the machine is running")
                    .hint("`jiffy machine stop` stops it; `jiffy machine rm --force` does both"));
            }
            if !machine.remove().map_err(failure)? {
                show("There is no machine.\n")?;
            }
            Ok(Outcome::Done)
        }
    }
}

/// The file of the machine's kernel; `None` for the one that it comes with.
fn kernel_file(context: &Context, kernel: MachineKernel) -> Result<Option<PathBuf>> {
    if kernel == MachineKernel::Debian {
        return Ok(None);
    }
    if !context.folders.lib.join("jiffy-sched").exists() {
        return Err(Failure::new("jiffy-sched is not installed")
            .hint("in a checkout, `scripts/setup sched && make build`"));
    }
    built_now(context, Flavour::Sched).map(Some)
}

/// The folders of `--share`; `None` if it was not given.
fn shares(given: &[MachineShare]) -> Result<Option<Vec<Share>>> {
    let mut shares = Vec::new();
    for one in given {
        match one {
            MachineShare::Folder { path, read_only } => {
                shares.push(Share::of(path, *read_only).map_err(failure)?);
            }
            MachineShare::None if given.len() == 1 => {}
            MachineShare::None => {
                return Err(
                    Failure::new("--share none can't be given with other folders")
                        .hint("a folder of that name is ./none"),
                );
            }
        }
    }
    Ok((!given.is_empty()).then_some(shares))
}

fn to_u32(size: u64, what: &str) -> Result<u32> {
    u32::try_from(size).map_err(|_| Failure::new(format!("a machine can't have {size} {what}")))
}

fn describe(status: &Status) -> String {
    let mut out = match (status.state, status.pid) {
        (State::Stopped, _) => "The machine is not running.\n".to_owned(),
        (State::Running, Some(pid)) => format!("The machine is running (process {pid}).\n"),
        (State::HostDiskFull, _) => {
            "The machine is paused: the disk of the data folder is full.\n".to_owned()
        }
        (State::Unresponsive, Some(pid)) => {
            format!("The machine does not answer (process {pid}); `jiffy machine stop` ends it.\n")
        }
        _ => "The machine is starting.\n".to_owned(),
    };
    out.push_str(&format!(
        "  CPUs      {}\n  memory    {}\n",
        status.size.cpus,
        size(u64::from(status.size.memory_mib) << 20)
    ));
    if let Some(kernel) = &status.size.kernel {
        out.push_str(&format!("  kernel    {}\n", kernel.display()));
    }
    if let Some(used) = status.disk_used {
        out.push_str(&format!(
            "  disk      {} used of {}\n",
            size(used),
            size(u64::from(status.size.disk_gib) << 30)
        ));
    }
    describe_shares(status, &mut out);
    if let Some(seconds) = status.uptime_s {
        out.push_str(&format!("  up        {}\n", crate::render::age(0, seconds)));
    }
    if let Some(address) = status.address {
        out.push_str(&format!("  node at   {address}\n"));
    }
    out
}

/// The folders that it shares now, and others of its next start.
fn describe_shares(status: &Status, out: &mut String) {
    let now = status.shares.as_ref().unwrap_or(&status.size.shares);
    for share in now {
        let access = if share.read_only { " (read-only)" } else { "" };
        out.push_str(&format!("  shares    {}{access}\n", share.path));
    }
    if *now != status.size.shares {
        out.push_str("  shares    other folders at its next start\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_given_cleared_or_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().canonicalize().unwrap();
        let one = MachineShare::Folder {
            path: path.clone(),
            read_only: true,
        };
        let wanted = Share {
            path: path.to_str().unwrap().into(),
            read_only: true,
        };
        assert_eq!(shares(&[]).unwrap(), None);
        assert_eq!(shares(&[MachineShare::None]).unwrap(), Some(vec![]));
        assert_eq!(
            shares(std::slice::from_ref(&one)).unwrap(),
            Some(vec![wanted])
        );
        assert!(shares(&[one, MachineShare::None]).is_err());
    }

    #[test]
    fn the_status_names_the_folders() {
        let share = |text: &str| text.parse::<Share>().unwrap();
        let mut size = jiffy_machine::options::Size::default_for_host();
        size.shares = vec![share("ro:/a"), share("rw:/b")];
        let mut status = Status {
            state: State::Stopped,
            pid: None,
            size,
            shares: None,
            disk_used: None,
            uptime_s: None,
            address: None,
        };
        let said = describe(&status);
        assert!(said.contains("shares    /a (read-only)\n"), "{said}");
        assert!(said.contains("shares    /b\n"), "{said}");
        status.shares = Some(vec![share("rw:/c")]);
        let said = describe(&status);
        assert!(said.contains("shares    /c\n"), "{said}");
        assert!(said.contains("other folders at its next start"), "{said}");
        assert!(!said.contains("/a"), "{said}");
    }
}
