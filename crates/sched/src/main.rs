//! `jiffy-sched`: loads the scheduling policy and tells it the classes of processes.
//!
//! `jiffyd` starts it, writes to its stdin and reads its stdout (`jiffy_wire::sched`). The policy
//! schedules the host while this process holds its link. When the process ends, for whatever reason,
//! the kernel closes the link and goes back to its own scheduler. It ends when its stdin is closed,
//! and so when the daemon ends.

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use jiffy_jail::confine;
use jiffy_sched::told::Entries;
use jiffy_wire::lines::{self, Lines};
use jiffy_wire::sched::{Class, LONGEST_LINE, PolicyEvent, SetClass};
use libbpf_rs::{
    Link, Map, MapCore, MapFlags, Object, ObjectBuilder, OpenObject, PrintLevel, num_possible_cpus,
    set_print,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use std::ffi::OsStr;
use std::io::{Write, stdin, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// How often to look whether the kernel has ended the policy, nanoseconds.
const LOOK: i64 = 200_000_000;

/// Schedules this host by classes that jiffyd tells on stdin (docs/scheduler.md)
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    /// The compiled policy
    #[arg(long, value_name = "FILE")]
    policy: PathBuf,
    /// CPU time of a launch in milliseconds, after which it is steady
    #[arg(
        long,
        value_name = "MS",
        env = "JIFFY_LAUNCH_BUDGET",
        default_value_t = 2000
    )]
    budget: u32,
    /// Never run background tasks, so that the kernel ends the policy; for its test
    #[arg(long, hide = true)]
    starve_background: bool,
}

fn main() -> ExitCode {
    let ended = run(&Options::parse());
    let Err(error) = ended else {
        return ExitCode::SUCCESS;
    };
    let reason = format!("{error:#}");
    eprintln!("jiffy-sched: {reason}");
    let _ = report(&PolicyEvent::Ended { reason });
    ExitCode::FAILURE
}

fn run(options: &Options) -> Result<()> {
    set_print(Some((PrintLevel::Warn, |_, text| eprint!("{text}"))));
    let mut object = open(options)?
        .load()
        .context("the kernel refuses the policy")?;
    let _link = attach(&mut object)?;
    let told = map(&object, "told")?;
    let ended = map(&object, ".data.ended")?;
    let mut entries = Entries::new(u64::from(options.budget) * 1_000_000);
    let mut apply = |set: SetClass| -> Result<()> {
        let (key, value) = entries.entry(set);
        told.update(&key, &value, MapFlags::ANY)
            .context("the policy's map can't be written")?;
        // The policy removes a process that ends; this one may have ended before.
        if has_ended(set.pid) {
            let _ = told.delete(&key);
        }
        Ok(())
    };
    apply(SetClass {
        pid: std::process::id(),
        class: Class::Urgent,
    })?;
    // What follows needs no file and no capability: the maps are open.
    confine::seal().context("jiffy-sched can't be confined")?;
    report(&PolicyEvent::Loaded)?;
    let input = stdin();
    let mut lines = Lines::new(LONGEST_LINE);
    loop {
        if let Some(reason) = why_it_ended(&ended)? {
            bail!("the kernel ended the policy: {reason}");
        }
        let mut ready = [PollFd::new(&input, PollFlags::IN)];
        let limit = Timespec {
            tv_sec: 0,
            tv_nsec: LOOK,
        };
        match poll(&mut ready, Some(&limit)) {
            Ok(0) | Err(Errno::INTR) => continue,
            Ok(_) => {}
            Err(error) => bail!("stdin can't be watched: {error}"),
        }
        let mut bytes = [0; LONGEST_LINE];
        let length = rustix::io::read(&input, &mut bytes).context("stdin can't be read")?;
        if length == 0 {
            return Ok(());
        }
        lines.push(&bytes[..length]);
        while let Some(line) = lines.next_line().context("stdin")? {
            apply(serde_json::from_slice(&line).context("a line on stdin is not a message")?)?;
        }
    }
}

/// Asks the kernel and not /proc, which may hide the processes of other users (`hidepid=2`): this
/// process has no capabilities, and a monitor in a jail is a user of its own.
fn has_ended(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_none_or(|pid| test_kill_process(pid) == Err(Errno::SRCH))
}

/// Opens the policy and writes its settings.
fn open(options: &Options) -> Result<OpenObject> {
    let path = &options.policy;
    ensure!(
        Path::new("/sys/kernel/sched_ext").exists(),
        "this kernel has no sched_ext: it needs Linux 6.12 with CONFIG_SCHED_CLASS_EXT=y"
    );
    let mut object = ObjectBuilder::default()
        .open_file(path)
        .with_context(|| format!("{} can't be read", path.display()))?;
    let processors = u32::try_from(num_possible_cpus().context("counting the processors")?)?;
    for mut map in object.maps_mut() {
        if map.name() == OsStr::new("cpus") {
            map.set_max_entries(processors)?;
        } else if map.name() == OsStr::new(".rodata.settings") {
            let settings = [processors, u32::from(options.starve_background)];
            let settings: Vec<u8> = settings
                .iter()
                .flat_map(|word| word.to_ne_bytes())
                .collect();
            map.set_initial_value(&settings)?;
        }
    }
    Ok(object)
}

fn map<'a>(object: &'a Object, name: &str) -> Result<Map<'a>> {
    let found = object.maps().find(|map| map.name() == OsStr::new(name));
    found.with_context(|| format!("the policy has no map {name}"))
}

fn attach(object: &mut Object) -> Result<Link> {
    let mut maps = object.maps_mut();
    let ops = maps.find(|map| map.name() == OsStr::new("jiffy"));
    let mut ops = ops.context("the policy has no operations")?;
    ops.attach_struct_ops()
        .context("the kernel does not take the policy; another one may be loaded")
}

/// The kernel's reason, once it has ended the policy (`enum scx_exit_kind`; its log says more).
fn why_it_ended(ended: &Map<'_>) -> Result<Option<String>> {
    let value = ended
        .lookup(&0u32.to_ne_bytes(), MapFlags::ANY)
        .context("the policy's state can't be read")?;
    let kind = value.and_then(|value| value.first_chunk().copied());
    Ok(match kind.map(u32::from_ne_bytes) {
        None | Some(0) => None,
        Some(67) => Some("by the magic SysRq key S".into()),
        Some(1026) => Some("a task did not run for 5 s".into()),
        Some(kind @ 1024..) => Some(format!("the policy failed (kind {kind})")),
        Some(kind) => Some(format!("it was unregistered (kind {kind})")),
    })
}

fn report(event: &PolicyEvent) -> Result<()> {
    let line = lines::encode(event)?;
    let mut out = stdout().lock();
    out.write_all(&line).and_then(|()| out.flush())?;
    Ok(())
}
