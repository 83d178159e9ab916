//! `jiffy-lab`: boots a machine for one task.

use anyhow::{Result, ensure};
use clap::{Args, Parser, Subcommand, ValueEnum};
use jiffy_machine::Accelerator;
use jiffy_machine::image::build::Addition;
use jiffy_testkit::intel::{self, IntelOptions, Model, Program};
use jiffy_testkit::libtest::{self, Counts};
use jiffy_testkit::{Lab, LabOptions};
use jiffy_wire::agent::Stream;
use std::io::{IsTerminal, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Runs programs and tests in a machine with a complete KVM
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run one program and exit with its status
    Run {
        #[command(flatten)]
        machine: MachineArgs,
        /// Pass stdin to the program
        #[arg(short = 'i', long)]
        stdin: bool,
        /// Time limit in seconds; on Intel it includes the boot
        #[arg(long, default_value_t = 600)]
        time_limit: u64,
        /// Print the boot time on stderr
        #[arg(long)]
        timing: bool,
        /// The program and its arguments
        #[arg(required = true, last = true)]
        argv: Vec<String>,
    },
    /// Run Rust test binaries and sum their results
    RunTests {
        #[command(flatten)]
        machine: MachineArgs,
        /// Time limit of each binary in seconds; on Intel of all binaries, including the boot
        #[arg(long, default_value_t = 900)]
        time_limit: u64,
        /// Static test binaries
        #[arg(required = true)]
        binaries: Vec<PathBuf>,
        /// Arguments for each binary
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// Open a shell
    Shell {
        #[command(flatten)]
        machine: MachineArgs,
    },
}

/// The virtualisation extension that the machine's KVM uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Processor {
    /// kvm-amd: SVM, emulated by QEMU
    Amd,
    /// kvm-intel: VMX, emulated by Bochs; without agent, disk and network
    Intel,
}

/// A model of Intel's processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum IntelModel {
    /// Core i7-4770 (2013): AVX2
    Haswell,
    /// Tiger Lake (2020): AVX-512, PKU
    TigerLake,
}

#[derive(Debug, Args)]
struct MachineArgs {
    /// Vendor of the machine's processor
    #[arg(long, value_enum, default_value_t = Processor::Amd)]
    processor: Processor,
    /// Model of the processor; only for Intel
    #[arg(long, value_enum, default_value_t = IntelModel::Haswell)]
    model: IntelModel,
    /// Give KVM and its VMs a PMU, whose counters do not count; only for Intel
    #[arg(long)]
    vpmu: bool,
    /// Boot the newest of Debian's cloud kernels of this series, 6.1 or 6.12, or sched, the one
    /// with sched_ext [default: the machine's own, on Intel 6.12]
    #[arg(long, value_name = "SERIES")]
    kernel: Option<String>,
    /// Additional parameters for the machine's kernel
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    kernel_args: String,
    /// Use the instruction clock: 1 ns is one instruction; without a disk, and with output only
    /// after the program has ended
    #[arg(long)]
    icount: bool,
    /// RAM in MiB [default: 4096; always 3072 on Intel]
    #[arg(long)]
    memory: Option<u32>,
    /// Number of CPUs; with --icount, several need QEMU 10
    #[arg(long, default_value_t = 1)]
    cpus: u8,
    /// Size in GiB of an empty XFS disk at /var/lib/jiffy; 0 for none
    #[arg(long, value_name = "GIB")]
    disk: Option<u32>,
    /// Run jiffyd as a service, as in a user's machine
    #[arg(long)]
    node: bool,
    /// Include Jiffy's programs, as in the other machine; only for Intel
    #[arg(long)]
    with_jiffy: bool,
    /// A file or folder of the host, and its absolute path in the machine. Repeatable
    #[arg(long = "file", value_name = "HOST:GUEST", value_parser = addition)]
    files: Vec<Addition>,
    /// Folder with the machine's vmlinux and initramfs.cpio [default: the folder in dist/]
    #[arg(long)]
    image: Option<PathBuf>,
}

fn addition(text: &str) -> Result<Addition, String> {
    match text.split_once(':') {
        Some((host, guest)) if guest.starts_with('/') => Ok(Addition {
            host: host.into(),
            guest: guest.into(),
        }),
        _ => Err("expected HOST:/PATH/IN/THE/MACHINE".into()),
    }
}

impl MachineArgs {
    fn is_intel(&self) -> bool {
        self.processor == Processor::Intel
    }

    fn boot(self) -> Result<Lab> {
        ensure!(
            !self.vpmu && self.model == IntelModel::Haswell && !self.with_jiffy,
            "--vpmu, --model and --with-jiffy are for --processor intel"
        );
        let defaults = LabOptions::default();
        Lab::boot(LabOptions {
            image: self.image.unwrap_or(defaults.image),
            kernel: self.kernel,
            kernel_args: self.kernel_args,
            memory_mib: self.memory.unwrap_or(defaults.memory_mib),
            cpus: self.cpus,
            accelerator: if self.icount {
                Accelerator::TcgInstructionClock
            } else {
                Accelerator::Tcg
            },
            disk_gib: self.disk.filter(|size| *size > 0 && !self.icount),
            node: self.node,
            files: self.files,
        })
    }

    fn intel(self, time_limit: u64) -> Result<IntelOptions> {
        let other = [
            (self.icount, "--icount"),
            (self.memory.is_some(), "--memory"),
            (self.cpus != 1, "--cpus"),
            (self.disk.is_some_and(|size| size > 0), "--disk"),
            (self.node, "--node"),
            (self.image.is_some(), "--image"),
        ];
        for (given, option) in other {
            ensure!(!given, "{option} is not for --processor intel");
        }
        let defaults = IntelOptions::default();
        Ok(IntelOptions {
            model: match self.model {
                IntelModel::Haswell => Model::Haswell,
                IntelModel::TigerLake => Model::TigerLake,
            },
            vpmu: self.vpmu,
            kernel: self.kernel.unwrap_or(defaults.kernel),
            kernel_args: self.kernel_args,
            with_jiffy: self.with_jiffy,
            files: self.files,
            time_limit: Duration::from_secs(time_limit),
        })
    }
}

fn main() -> ExitCode {
    match run(Cli::parse().verb) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("jiffy-lab: {error:#}");
            ExitCode::from(125)
        }
    }
}

fn run(verb: Verb) -> Result<u8> {
    match verb {
        Verb::Run {
            machine,
            stdin,
            time_limit,
            timing,
            argv,
        } if machine.is_intel() => {
            ensure!(
                !stdin && !timing,
                "neither --stdin nor --timing is for --processor intel"
            );
            run_on_intel(&machine.intel(time_limit)?, argv)
        }
        Verb::Run {
            machine,
            stdin,
            time_limit,
            timing,
            argv,
        } => run_in_machine(
            machine,
            argv,
            stdin,
            timing,
            Duration::from_secs(time_limit),
        ),
        Verb::RunTests {
            machine,
            time_limit,
            binaries,
            arguments,
        } => {
            let (place, counts) = if machine.is_intel() {
                let options = machine.intel(time_limit)?;
                let counts = libtest::run_on_intel(&options, &binaries, &arguments)?;
                ("on Intel", counts)
            } else {
                let limit = Duration::from_secs(time_limit);
                (
                    "in the machine",
                    run_tests(machine, &binaries, &arguments, limit)?,
                )
            };
            println!(
                "{place}: {} passed, {} failed, {} ignored",
                counts.passed, counts.failed, counts.ignored
            );
            Ok(u8::from(counts.failed > 0))
        }
        Verb::Shell { machine } => {
            ensure!(
                !machine.is_intel(),
                "there is no shell with --processor intel"
            );
            let lab = machine.boot()?;
            let code = jiffy_machine::shell::run(lab.agent(), &[])?;
            Ok(u8::try_from(code).unwrap_or(255))
        }
    }
}

fn run_in_machine(
    machine: MachineArgs,
    argv: Vec<String>,
    stdin: bool,
    timing: bool,
    time_limit: Duration,
) -> Result<u8> {
    let keep = machine.icount;
    let lab = machine.boot()?;
    if timing {
        eprintln!("booted in {:.2} s", lab.boot_time().as_secs_f64());
    }
    let mut command = lab.command(argv).time_limit(time_limit);
    if stdin && !std::io::stdin().is_terminal() {
        let mut bytes = Vec::new();
        std::io::stdin().read_to_end(&mut bytes)?;
        command = command.stdin(bytes);
    }
    if keep {
        command = command.keep_output();
    }
    let status = command.start()?.relay(|stream, data| {
        let _ = match stream {
            Stream::Stdout => std::io::stdout().write_all(data),
            Stream::Stderr => std::io::stderr().write_all(data),
        };
        let _ = std::io::stdout().flush();
    })?;
    Ok(u8::try_from(status.shell_code()).unwrap_or(255))
}

fn run_on_intel(options: &IntelOptions, argv: Vec<String>) -> Result<u8> {
    let program = Program {
        argv,
        env: Vec::new(),
    };
    let statuses = intel::run(options, &[program], &mut |_, bytes| {
        let _ = std::io::stdout().write_all(bytes);
        let _ = std::io::stdout().flush();
    })?;
    Ok(statuses
        .first()
        .and_then(|status| u8::try_from(*status).ok())
        .unwrap_or(255))
}

fn run_tests(
    machine: MachineArgs,
    binaries: &[PathBuf],
    arguments: &[String],
    limit: Duration,
) -> Result<Counts> {
    let lab = machine.boot()?;
    let mut counts = Counts::default();
    for binary in binaries {
        counts += libtest::run(&lab, binary, arguments, limit)?;
    }
    if counts.failed > 0 {
        eprintln!("the machine's console:\n{}", lab.console());
    }
    Ok(counts)
}
