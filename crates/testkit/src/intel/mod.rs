//! The lab's second kind of machine: Bochs emulates an Intel processor with VMX and EPT, so that
//! `/dev/kvm` is kvm-intel's.
//!
//! Bochs has no device for an agent. The programs to run are in the initramfs, and their output is
//! read from a serial port.

mod bochs;
mod medium;
mod output;

pub use bochs::Model;

use crate::host_kernel;
use crate::lab::dist;
use anyhow::{Context, Result, bail, ensure};
use bochs::Bochs;
use jiffy_machine::image::build::Addition;
use output::{Event, Reader};
use rustix::fs::FlockOperation;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Interval of polling the machine's output.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Options of an Intel machine.
#[derive(Debug, Clone)]
pub struct IntelOptions {
    /// The processor.
    pub model: Model,
    /// Whether KVM finds a PMU and gives VMs one. Its counters count nothing.
    pub vpmu: bool,
    /// Series of Debian's kernel: `6.1`, `6.12`.
    pub kernel: String,
    /// Further kernel parameters.
    pub kernel_args: String,
    /// Whether Jiffy's programs, kernel and image are included, at the machine's paths.
    pub with_jiffy: bool,
    /// Additional files.
    pub files: Vec<Addition>,
    /// Time limit, including the boot.
    pub time_limit: Duration,
}

impl Default for IntelOptions {
    fn default() -> IntelOptions {
        IntelOptions {
            model: Model::Haswell,
            vpmu: false,
            kernel: "6.12".into(),
            kernel_args: String::new(),
            with_jiffy: false,
            files: Vec::new(),
            time_limit: Duration::from_secs(900),
        }
    }
}

/// A program to run in the machine.
#[derive(Debug, Clone)]
pub struct Program {
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// Additions to its environment, `NAME=value`.
    pub env: Vec<String>,
}

/// Boots a machine and runs programs one after the other, in `/tmp` and without input. `on_output`
/// is called with a program's index and a piece of its stdout or stderr. Returns their exit
/// statuses as a shell shows them.
///
/// # Errors
///
/// If there is no Bochs or no kernel, the disc can't be made, the guest's kernel panics, Bochs ends
/// early, or the programs do not end within `options.time_limit`.
pub fn run(
    options: &IntelOptions,
    programs: &[Program],
    on_output: &mut dyn FnMut(usize, &[u8]),
) -> Result<Vec<i32>> {
    let deadline = Instant::now() + options.time_limit;
    let bochs = Bochs::find()?;
    let folder = tempfile::Builder::new()
        .prefix(crate::lab::PREFIX)
        .tempdir()
        .context("making a temporary folder")?;
    // Other labs remove old folders whose pid file is not locked.
    let lock = File::create(folder.path().join("pid"))?;
    rustix::fs::fcntl_lock(&lock, FlockOperation::NonBlockingLockExclusive)?;
    let files = medium::Files {
        package: host_kernel::package(&options.kernel)?,
        dist: dist(),
    };
    let token = jiffy_machine::instance::new_token()?;
    medium::build(folder.path(), &files, options, programs, &token)?;
    // Bochs ends when this value is dropped.
    let mut machine = bochs.start(folder.path(), options)?;
    let mut session = Session {
        folder: folder.path(),
        serial: File::open(folder.path().join(bochs::SERIAL))?,
        reader: Reader::new(&token),
        statuses: Vec::new(),
    };
    loop {
        let ended = machine.has_ended()?;
        session.read(on_output)?;
        if session.statuses.len() == programs.len() {
            return Ok(session.statuses);
        }
        let doing = session.doing(programs);
        if let Some(panic) = session.panic() {
            bail!("the kernel of the Intel machine panicked {doing}: {panic}");
        }
        if let Some(why) = ended {
            bail!(
                "Bochs ended {doing}: {why}\nits console:\n{}",
                session.console()
            );
        }
        ensure!(
            Instant::now() < deadline,
            "the Intel machine did not finish within {} s, {doing}; its console:\n{}",
            options.time_limit.as_secs(),
            session.console()
        );
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// State of a running machine.
struct Session<'a> {
    folder: &'a Path,
    serial: File,
    reader: Reader,
    statuses: Vec<i32>,
}

impl Session<'_> {
    fn read(&mut self, on_output: &mut dyn FnMut(usize, &[u8])) -> Result<()> {
        let mut fresh = Vec::new();
        self.serial.read_to_end(&mut fresh)?;
        self.reader.push(&fresh);
        while let Some(event) = self.reader.next() {
            match event {
                Event::Output(bytes) => on_output(self.statuses.len(), &bytes),
                Event::Ended(status) => self.statuses.push(status),
                Event::NoKvm => bail!(
                    "the Intel machine booted without /dev/kvm; its console:\n{}",
                    self.console()
                ),
            }
        }
        Ok(())
    }

    fn doing(&self, programs: &[Program]) -> String {
        if !self.reader.has_booted() {
            return "while it booted".into();
        }
        let program = programs.get(self.statuses.len());
        let name = program.and_then(|program| program.argv.first());
        format!(
            "while it ran {}",
            name.map_or("nothing", |name| name.as_str())
        )
    }

    fn console(&self) -> String {
        crate::lab::tail(&self.folder.join(bochs::CONSOLE))
    }

    fn panic(&self) -> Option<String> {
        let console = self.console();
        let line = console
            .lines()
            .find(|line| line.contains("Kernel panic - "))?;
        Some(line.trim().into())
    }
}

/// A file of the host to add to the initramfs.
pub(crate) fn file(path: PathBuf, guest: impl Into<String>) -> Addition {
    Addition {
        host: path,
        guest: guest.into(),
    }
}
