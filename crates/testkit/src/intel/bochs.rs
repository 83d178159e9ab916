//! Runs Bochs: its program, configuration and process.

use super::IntelOptions;
use crate::host_kernel::checkout_script;
use anyhow::{Context, Result, bail, ensure};
use jiffy_machine::instance;
use std::fmt::Write as _;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Files in a machine's folder for its first and second serial port.
pub const SERIAL: &str = "serial";
pub const CONSOLE: &str = "console.log";
/// The disc that Bochs boots.
pub const DISC: &str = "boot.iso";
const CONFIGURATION: &str = "bochsrc";
const LOG: &str = "bochs.log";
const MSRS: &str = "pmu.msrs";
/// Commands for the debugger, if this Bochs has one.
const DEBUGGER: &str = "continue";

/// Instructions per second of machine time; the time stamp counter counts them.
pub const IPS: u32 = 50_000_000;
/// RAM in MiB: tests use a page of 1 GiB. Bochs takes at most 2,048 MiB of the host's memory and
/// puts the rest into a file.
const MEMORY_MIB: u32 = 3072;
const HOST_MEMORY_MIB: u32 = 2048;

/// A processor that Bochs emulates and kvm-intel supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Model {
    /// Core i7-4770, 2013: AVX2.
    Haswell,
    /// Core i5-1135G7, 2020: AVX-512, PKU.
    TigerLake,
}

impl Model {
    /// The model's name in Bochs.
    fn name(self) -> &'static str {
        match self {
            Model::Haswell => "corei7_haswell_4770",
            Model::TigerLake => "tigerlake",
        }
    }

    /// Kernel parameters for the model. Bochs' APICv is incomplete and makes VM entries fail.
    pub(super) fn kernel_args(self) -> &'static str {
        match self {
            Model::Haswell => "",
            Model::TigerLake => "kvm_intel.enable_apicv=0",
        }
    }
}

/// MSRs of a PMU (Intel SDM volume 4, chapter 2): four counters and their event selectors, the
/// fixed counters, the global registers. Bochs has none of them. Plain storage is enough for Linux,
/// which writes to a counter and reads it back (`check_hw_exists` in arch/x86/events/core.c).
const PMU: &[std::ops::RangeInclusive<u32>] = &[
    0xc1..=0xc4,
    0x4c1..=0x4c4,
    0x186..=0x189,
    0x309..=0x30b,
    0x38d..=0x390,
];
/// IA32_PERF_CAPABILITIES, and its bit for full-width counters.
const PERF_CAPABILITIES: u32 = 0x345;
const FULL_WIDTH_WRITES: u32 = 1 << 13;

/// Bochs' file of MSRs: address, type, value after reset, bits that can't be set, bits that are
/// ignored; each value has its upper half first.
fn pmu() -> String {
    let mut text = String::new();
    for msr in PMU.iter().cloned().flatten() {
        let _ = writeln!(text, "{msr:#x} 0 0 0 0 0 0 0");
    }
    let _ = writeln!(
        text,
        "{PERF_CAPABILITIES:#x} 0 0 {FULL_WIDTH_WRITES:x} 0 0 ffffffff ffffffff"
    );
    text
}

/// A Bochs on this host.
#[derive(Debug)]
pub struct Bochs {
    program: PathBuf,
    /// Whether it is Debian's package, which has a debugger and needs a terminal.
    debians: bool,
}

impl Bochs {
    /// Finds `$JIFFY_BOCHS`, or builds Bochs with `scripts/bochs`.
    ///
    /// # Errors
    ///
    /// If `scripts/bochs` fails, or the program does not exist.
    pub fn find() -> Result<Bochs> {
        let program = match std::env::var_os("JIFFY_BOCHS") {
            Some(program) => PathBuf::from(program),
            None => checkout_script("bochs", &[])?,
        };
        ensure!(
            program.is_file(),
            "there is no Bochs at {}",
            program.display()
        );
        Ok(Bochs {
            debians: program.file_name().is_some_and(|name| name == "bochs-bin"),
            program,
        })
    }

    /// Boots the disc in `folder`.
    ///
    /// # Errors
    ///
    /// If a file can't be written in `folder`, a file of Bochs is missing, or it can't be started.
    pub fn start(&self, folder: &Path, options: &IntelOptions) -> Result<Machine> {
        for file in [SERIAL, CONSOLE] {
            File::create(folder.join(file))?;
        }
        if options.vpmu {
            std::fs::write(folder.join(MSRS), pmu())?;
        }
        let configuration = self.configuration(options)?;
        std::fs::write(folder.join(CONFIGURATION), configuration)?;
        let mut command = self.command(folder)?;
        instance::end_with_parent(&mut command);
        let child = command
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("starting {}", self.program.display()))?;
        Ok(Machine {
            child,
            log: folder.join(LOG),
        })
    }

    fn command(&self, folder: &Path) -> Result<Command> {
        if !self.debians {
            let mut command = Command::new(&self.program);
            command.args(["-q", "-f", CONFIGURATION]);
            return Ok(command);
        }
        std::fs::write(folder.join(DEBUGGER), "continue\n")?;
        // `script` provides a terminal.
        let mut command = Command::new("script");
        let program = self.program.to_str().context("the path is not UTF-8")?;
        let line = format!("exec '{program}' -q -f {CONFIGURATION} -rc {DEBUGGER}");
        command
            .args(["-qfc", &line, "/dev/null"])
            .env("TERM", "xterm");
        Ok(command)
    }

    fn configuration(&self, options: &IntelOptions) -> Result<String> {
        let model = options.model.name();
        let display = if self.debians { "term" } else { "nogui" };
        let msrs = if options.vpmu {
            format!(", msrs={MSRS}")
        } else {
            String::new()
        };
        let bios = firmware("bochsbios", &["/usr/share/bochs/BIOS-bochs-latest"])?;
        let video = firmware(
            "vgabios",
            &[
                "/usr/share/vgabios/vgabios.bin",
                "/usr/share/bochs/VGABIOS-lgpl-latest",
            ],
        )?;
        Ok(format!(
            "display_library: {display}\n\
             cpu: model={model}, count=1, ips={IPS}, reset_on_triple_fault=0, ignore_bad_msrs=1{msrs}\n\
             memory: guest={MEMORY_MIB}, host={HOST_MEMORY_MIB}\n\
             romimage: file={bios}\n\
             vgaromimage: file={video}\n\
             ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14\n\
             ata0-master: type=cdrom, path={DISC}, status=inserted\n\
             boot: cdrom\n\
             com1: enabled=1, mode=file, dev={SERIAL}\n\
             com2: enabled=1, mode=file, dev={CONSOLE}\n\
             clock: sync=none, time0=utc\n\
             log: {LOG}\n\
             panic: action=fatal\n\
             error: action=ignore\n\
             info: action=ignore\n\
             debug: action=ignore\n"
        ))
    }
}

/// The first of these files that exists; an error that names the package if there is none.
fn firmware(package: &str, paths: &[&'static str]) -> Result<&'static str> {
    match paths.iter().find(|path| Path::new(path).is_file()) {
        Some(path) => Ok(path),
        None => bail!("there is no {}: apt-get install {package}", paths[0]),
    }
}

/// A running Bochs. It is killed when this is dropped or when the thread that started it ends.
#[derive(Debug)]
pub struct Machine {
    child: Child,
    log: PathBuf,
}

impl Machine {
    /// The reason if it has ended; `None` while it runs.
    ///
    /// # Errors
    ///
    /// If `waitpid` fails.
    pub fn has_ended(&mut self) -> Result<Option<String>> {
        let Some(status) = self.child.try_wait()? else {
            return Ok(None);
        };
        let log = std::fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        // A panic message of Bochs: `00012345p[CPU0  ] >>PANIC<< exception`.
        let words = log
            .lines()
            .rfind(|line| line.contains(">>PANIC<<"))
            .map_or_else(|| status.to_string(), |line| line.trim().to_owned());
        Ok(Some(words))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpuid_reports_four_pmu_counters_and_their_width() {
        let text = pmu();
        assert_eq!(text.lines().count(), 4 + 4 + 4 + 3 + 4 + 1);
        assert!(text.lines().all(|line| line.split(' ').count() == 8));
        assert!(text.ends_with("0x345 0 0 2000 0 0 ffffffff ffffffff\n"));
    }
}
