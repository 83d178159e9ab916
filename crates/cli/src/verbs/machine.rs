//! `jiffy machine`

use super::Context;
use super::context::{show, show_json};
use crate::args::{ListFormat, Machine};
use crate::client::Client;
use crate::failure::{Failure, Outcome, Result};
use crate::place::machine::{failure, machine as open, start};
use crate::render::size;
use jiffy_machine::{Options, State, Status};
use jiffy_wire::agent::ExitStatus;

/// Exit status of `status` when the machine does not run, as with systemctl.
const NOT_RUNNING: u8 = 3;

/// `jiffy machine`
pub fn machine(context: &Context, verb: Machine) -> Result<Outcome> {
    let folders = &context.folders;
    folders.has_run()?;
    let machine = open(folders)?;
    match verb {
        Machine::Start { cpus, memory, disk } => {
            folders.make_run()?;
            let options = Options {
                memory_mib: memory
                    .map(|size| to_u32(size, "MiB of memory"))
                    .transpose()?,
                cpus,
                disk_gib: disk
                    .map(|size| to_u32(size.div_ceil(1024), "GiB of disk space"))
                    .transpose()?,
                accelerator: None,
            };
            let reached = start(folders, options, "")?;
            if reached.started {
                let client = Client::new(reached.endpoint);
                context.machine_is_new(client);
                context.block_on(|| async { Ok(Outcome::Done) })?;
            }
            if !reached.started {
                show("The machine is already running.\n")?;
                if options != Options::default() {
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
        _ => "The machine is starting.\n".to_owned(),
    };
    out.push_str(&format!(
        "  CPUs      {}\n  memory    {}\n",
        status.size.cpus,
        size(u64::from(status.size.memory_mib) << 20)
    ));
    if let Some(used) = status.disk_used {
        out.push_str(&format!(
            "  disk      {} used of {}\n",
            size(used),
            size(u64::from(status.size.disk_gib) << 30)
        ));
    }
    if let Some(seconds) = status.uptime_s {
        out.push_str(&format!("  up        {}\n", crate::render::age(0, seconds)));
    }
    if let Some(address) = status.address {
        out.push_str(&format!("  node at   {address}\n"));
    }
    out
}
