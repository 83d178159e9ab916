//! `jiffy-lab`: boots a machine for one task and takes it down again.

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use jiffy_machine::Accelerator;
use jiffy_machine::image::build::Addition;
use jiffy_testkit::libtest::{self, Counts};
use jiffy_testkit::{Lab, LabOptions};
use jiffy_wire::agent::Stream;
use std::io::{IsTerminal, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Runs programs and tests in a machine of their own, which has a real KVM.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Boot, run one program, print its output, end with its status.
    Run {
        #[command(flatten)]
        machine: MachineArgs,
        /// Pass our stdin to the program.
        #[arg(short = 'i', long)]
        stdin: bool,
        /// End it after so many seconds.
        #[arg(long, default_value_t = 600)]
        time_limit: u64,
        /// Say on stderr how long the boot took.
        #[arg(long)]
        timing: bool,
        /// The program and its arguments.
        #[arg(required = true, last = true)]
        argv: Vec<String>,
    },
    /// Boot, run Rust test binaries one after the other, sum their results.
    RunTests {
        #[command(flatten)]
        machine: MachineArgs,
        /// End each binary after so many seconds.
        #[arg(long, default_value_t = 900)]
        time_limit: u64,
        /// Static test binaries.
        #[arg(required = true)]
        binaries: Vec<PathBuf>,
        /// Arguments for each of them.
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// Boot and open a shell.
    Shell {
        #[command(flatten)]
        machine: MachineArgs,
    },
}

#[derive(Debug, Args)]
struct MachineArgs {
    /// Count instructions instead of time: 1 ns is one instruction. No disk;
    /// output comes when the program has ended.
    #[arg(long)]
    icount: bool,
    /// RAM in MiB.
    #[arg(long, default_value_t = 4096)]
    memory: u32,
    /// CPUs.
    #[arg(long, default_value_t = 1)]
    cpus: u8,
    /// An empty XFS disk of so many GiB at /var/lib/jiffy; 0 for none.
    #[arg(long, value_name = "GIB")]
    disk: Option<u32>,
    /// Run jiffyd as a service, as the user's machine does.
    #[arg(long)]
    node: bool,
    /// A file or folder of the host, and its absolute path in the machine.
    #[arg(long = "file", value_name = "HOST:GUEST", value_parser = addition)]
    files: Vec<Addition>,
    /// Folder with the machine's vmlinux and initramfs.cpio.
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
    fn boot(self) -> Result<Lab> {
        let defaults = LabOptions::default();
        Lab::boot(LabOptions {
            image: self.image.unwrap_or(defaults.image),
            memory_mib: self.memory,
            cpus: if self.icount { 1 } else { self.cpus },
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
        } => {
            let keep = machine.icount;
            let lab = machine.boot()?;
            if timing {
                eprintln!("booted in {:.2} s", lab.boot_time().as_secs_f64());
            }
            let mut command = lab
                .command(argv)
                .time_limit(Duration::from_secs(time_limit));
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
        Verb::RunTests {
            machine,
            time_limit,
            binaries,
            arguments,
        } => {
            let lab = machine.boot()?;
            let mut counts = Counts::default();
            for binary in &binaries {
                counts += libtest::run(&lab, binary, &arguments, Duration::from_secs(time_limit))?;
            }
            println!(
                "in the machine: {} passed, {} failed, {} ignored",
                counts.passed, counts.failed, counts.ignored
            );
            if counts.failed > 0 {
                eprintln!("the machine's console:\n{}", lab.console());
            }
            Ok(u8::from(counts.failed > 0))
        }
        Verb::Shell { machine } => {
            let lab = machine.boot()?;
            let code = jiffy_machine::shell::run(lab.agent(), &[])?;
            Ok(u8::try_from(code).unwrap_or(255))
        }
    }
}
