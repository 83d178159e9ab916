//! Verbs and options.

pub mod bench;
pub mod disk;
pub mod events;
pub mod folder;
pub mod image;
mod later;
pub mod network;
pub mod queue;
mod run;
pub mod sched;
mod settle;
pub mod snapshot;
pub mod ssh;
pub mod update;
mod values;

pub use later::Later;
pub use run::{CommandOptions, Create, Run, StdioOptions, VmOptions};
pub use values::{
    DiskUse, HugePages, IdleActionChoice, KernelChoice, MachineUse, Place, TimelineOutput,
    disk_limit, disk_use, mebibytes, place, run_timeline_output, seconds, signal_number,
    timeline_output,
};

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use std::path::PathBuf;

/// Linux microVMs in milliseconds.
///
/// Exit status: the command's own for `run`, `exec` and `attach`; 125 when
/// jiffy itself fails, 126 when the command can't be executed, 127 when it
/// can't be found, 128+N when signal N ended it; 2 for bad usage.
#[derive(Debug, Parser)]
#[command(name = "jiffy", version, disable_help_subcommand = true)]
pub struct Cli {
    /// Run VMs in the machine: auto (when this host has no real KVM), always
    /// or never
    #[arg(
        long,
        global = true,
        env = "JIFFY_MACHINE",
        value_enum,
        value_name = "WHEN",
        default_value = "auto",
        hide_env_values = true,
        hide_possible_values = true,
        display_order = 900
    )]
    pub machine: MachineUse,
    #[command(subcommand)]
    pub verb: Verb,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Create a VM, start it and run a command in it
    Run(Later<Run>),
    /// Create a VM without starting it
    Create(Later<Create>),
    /// Start VMs that were created or have ended
    Start(Later<Start>),
    /// Run another command in a running VM
    Exec(Later<Exec>),
    /// List VMs
    Ps(Later<Ps>),
    /// Show the output of a VM's command, console or VMM
    Logs(Later<Logs>),
    /// Copy files and folders into or out of a VM
    Cp(Later<Cp>),
    /// Log in to a VM, or run a command in it, with the OpenSSH client
    Ssh(Later<ssh::Ssh>),
    /// Print the configuration with which ssh, scp, rsync, git and VS Code reach VMs
    SshConfig(Later<ssh::SshConfig>),
    /// Serve SSH for a VM on stdin and stdout, as a ProxyCommand of ssh
    SshProxy(Later<ssh::SshProxy>),
    /// List requests that wait for memory or vCPUs
    Queue(Later<queue::Queue>),
    /// Show what happens to VMs, images, snapshots, volumes and networks, as it happens
    Events(Later<events::Events>),
    /// Show the details of VMs, as JSON
    Inspect(Later<Inspect>),
    /// Shut VMs down: SIGTERM to programs, sync, power off
    Stop(Later<Stop>),
    /// End VMs at once, or send a signal to their first command
    Kill(Later<Kill>),
    /// Remove VMs
    Rm(Later<Rm>),
    /// Wait until VMs have ended and print their exit statuses
    Wait(Later<Wait>),
    /// Connect to the first command of a running VM
    Attach(Later<Attach>),
    /// Pause the vCPUs of VMs
    Pause(Later<snapshot::Vms>),
    /// Resume paused VMs
    #[command(visible_alias = "unpause")]
    Resume(Later<snapshot::Vms>),
    /// Change the limits of VMs while they run
    Update(Later<update::Update>),
    /// Create live clones of a running VM
    Fork(Later<snapshot::Fork>),
    /// Write the memory of VMs to disk and release it on the host
    Hibernate(Later<snapshot::Hibernate>),
    /// Wake hibernated VMs
    Wake(Later<snapshot::Wake>),
    /// Create and manage snapshots, from which new VMs start
    #[command(subcommand)]
    Snapshot(Later<snapshot::Snapshot>),
    /// Show the timeline of a VM's start
    Timeline(Later<Timeline>),
    /// Record what runs on the CPUs of the VMs' host
    #[command(subcommand)]
    Sched(Later<sched::Sched>),
    /// Build, check and list guest kernels
    #[command(subcommand)]
    Kernel(Later<Kernel>),
    /// Manage images
    #[command(subcommand)]
    Image(Later<image::Image>),
    /// Pull an image or a snapshot from a registry
    Pull(Later<image::Pull>),
    /// Push an image or a snapshot to a registry
    Push(Later<image::Push>),
    /// Create an image from a VM's root file system with its changes
    Commit(Later<image::Commit>),
    /// Manage volumes: disks that outlive VMs
    #[command(subcommand)]
    Volume(Later<Volume>),
    /// Manage networks, and what VMs may reach
    #[command(subcommand)]
    Network(Later<network::Network>),
    /// List the published ports of a VM
    Port(Later<network::Port>),
    /// Serve disks to other VMMs (vhost-user)
    #[command(subcommand)]
    Disk(Later<disk::Disk>),
    /// Manage the Linux machine in which VMs run where the host has no KVM of its own
    #[command(subcommand)]
    Machine(Later<Machine>),
    /// Check what this host offers, and what to do about what is missing
    Doctor(Later<Doctor>),
    /// Run benchmarks on this host
    #[command(subcommand)]
    Bench(Later<bench::Bench>),
    /// Show the versions of jiffy and, if it runs, of its node
    Version(Later<Version>),
    /// Print a completion script for a shell
    Completions(Later<Completions>),
}

/// `jiffy start`
#[derive(Debug, Args)]
pub struct Start {
    /// Connect to the VM's first command, like `jiffy attach`
    #[arg(short, long)]
    pub attach: bool,
    /// Forward stdin; with --attach
    #[arg(short, long, requires = "attach")]
    pub interactive: bool,
    #[command(flatten)]
    pub wait: queue::WaitOptions,
    /// VMs: names, ids or unique prefixes of ids
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
}

/// `jiffy exec`
#[derive(Debug, Args)]
#[command(
    after_long_help = "If the command ignores Ctrl-C, a second one within \
a second closes the connection, and the command gets HUP."
)]
pub struct Exec {
    #[command(flatten)]
    pub command: CommandOptions,
    #[command(flatten)]
    pub stdio: StdioOptions,
    #[command(flatten)]
    pub time: queue::WaitTime,
    /// The VM: its name, its id or a unique prefix of its id
    #[arg(value_name = "VM")]
    pub vm: String,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub argv: Vec<String>,
}

/// `jiffy ps`
#[derive(Debug, Args)]
pub struct Ps {
    /// Also list VMs that have exited or were never started
    #[arg(short, long)]
    pub all: bool,
    /// Print only ids
    #[arg(short, long, conflicts_with = "format")]
    pub quiet: bool,
    /// Output format
    #[arg(long, value_enum, default_value = "table")]
    pub format: ListFormat,
}

/// `jiffy logs`
#[derive(Debug, Args)]
pub struct Logs {
    /// Follow the output until the VM ends
    #[arg(short, long)]
    pub follow: bool,
    /// Print only the last N lines
    #[arg(short = 'n', long, value_name = "N")]
    pub tail: Option<u64>,
    /// The guest's serial console (needs `--console` at `run`)
    #[arg(long, conflicts_with = "vmm")]
    pub console: bool,
    /// The log of the VM's own jiffy-vmm process
    #[arg(long)]
    pub vmm: bool,
    /// The VM: its name, its id or a unique prefix of its id
    #[arg(value_name = "VM")]
    pub vm: String,
}

/// `jiffy cp`
#[derive(Debug, Args)]
#[command(after_long_help = CP_HELP)]
pub struct Cp {
    /// Keep owners, and set-user-ID and set-group-ID bits
    #[arg(short, long)]
    pub archive: bool,
    #[command(flatten)]
    pub time: queue::WaitTime,
    /// A path on this host, VM:PATH, or - for a tar on stdin
    #[arg(value_name = "SRC", value_parser = place, value_hint = ValueHint::AnyPath)]
    pub source: Place,
    /// A path on this host, VM:PATH, or - for a tar on stdout
    #[arg(value_name = "DST", value_parser = place, value_hint = ValueHint::AnyPath)]
    pub destination: Place,
}

const CP_HELP: &str = "\
One of SRC and DST is in a VM. If DST is an existing folder, SRC is copied into \
it under its own name; with a SRC that ends in /. only its contents are copied. \
Modes, times and symbolic links are kept. Without --archive, files on this host \
belong to you, and files in the VM to root. Write a local path with a colon in \
its first component as ./a:b.";

/// `jiffy inspect`
#[derive(Debug, Args)]
pub struct Inspect {
    /// VMs: names, ids or unique prefixes of ids
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
}

/// `jiffy stop`
#[derive(Debug, Args)]
pub struct Stop {
    /// Seconds that programs have to end before they are killed
    #[arg(short, long, value_name = "SECONDS", default_value_t = 10)]
    pub time: u32,
    /// VMs: names, ids or unique prefixes of ids
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
}

/// `jiffy kill`
#[derive(Debug, Args)]
pub struct Kill {
    /// Send this signal (TERM, SIGTERM or 15) to the VM's first command instead
    #[arg(short, long, value_name = "SIGNAL", value_parser = signal_number)]
    pub signal: Option<i32>,
    /// VMs: names, ids or unique prefixes of ids
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
}

/// `jiffy rm`
#[derive(Debug, Args)]
pub struct Rm {
    /// End running VMs first; ignore VMs that do not exist
    #[arg(short, long)]
    pub force: bool,
    /// VMs: names, ids or unique prefixes of ids
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
}

/// `jiffy wait`
#[derive(Debug, Args)]
pub struct Wait {
    /// VMs: names, ids or unique prefixes of ids
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
}

const ATTACH_HELP: &str = "\
Without --no-stdin, Ctrl-C and other signals are forwarded to the command, and its input ends when \
jiffy leaves. If the command is on a terminal, Ctrl-P Ctrl-Q detaches, and it keeps its input.";

/// `jiffy attach`
#[derive(Debug, Args)]
#[command(after_long_help = ATTACH_HELP)]
pub struct Attach {
    /// Only show the output: forward neither stdin nor signals, so that Ctrl-C leaves
    /// the command and its input as they are
    #[arg(long)]
    pub no_stdin: bool,
    #[command(flatten)]
    pub time: queue::WaitTime,
    /// The VM: its name, its id or a unique prefix of its id
    #[arg(value_name = "VM")]
    pub vm: String,
}

/// `jiffy timeline`
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Timeline {
    #[command(subcommand)]
    pub order: Option<TimelineOrder>,
    /// Output format
    #[arg(long, value_enum, default_value = "table")]
    pub format: TimelineFormat,
    /// The VM: its name, its id or a unique prefix of its id
    #[arg(value_name = "VM", required = true)]
    pub vm: Option<String>,
}

/// Views of a timeline, like those of systemd-analyze.
#[derive(Debug, Subcommand)]
pub enum TimelineOrder {
    /// List the steps, longest first
    Blame {
        /// The VM: its name, its id or a unique prefix of its id
        #[arg(value_name = "VM")]
        vm: String,
    },
    /// Show the critical chain: the steps that waited for one another
    CriticalChain {
        /// The VM: its name, its id or a unique prefix of its id
        #[arg(value_name = "VM")]
        vm: String,
    },
}

/// `jiffy kernel`
#[derive(Debug, Subcommand)]
pub enum Kernel {
    /// Build a guest kernel from the distribution's Linux source and print its
    /// path; a kernel that was built before is reused
    Build {
        /// base; full: base and what Docker inside a guest needs; or sched: the machine's kernel
        /// with sched_ext
        #[arg(default_value = "base")]
        variant: String,
    },
    /// List the node's kernels, if it runs, and those in this user's cache
    #[command(visible_alias = "ls")]
    List {
        /// Output format
        #[arg(long, value_enum, default_value = "table")]
        format: ListFormat,
    },
    /// List the options that a kernel image or configuration lacks for Jiffy.
    /// Exit status 1: guests do not boot with it
    Check {
        /// A vmlinux or bzImage, or a .config
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
        /// Also check the options that Docker inside a guest needs
        #[arg(long)]
        docker: bool,
        /// Output format
        #[arg(long, value_enum, default_value = "table")]
        format: ListFormat,
    },
}

/// `jiffy volume`
#[derive(Debug, Subcommand)]
pub enum Volume {
    /// Create a volume with an ext4 file system
    Create {
        /// Name of the new volume
        name: String,
        /// Its size: 256, 256M, 2G (without a letter: MiB)
        #[arg(value_parser = mebibytes)]
        size: u64,
        /// Create it without a file system
        #[arg(long)]
        raw: bool,
        /// Output: the name, or json
        #[arg(long, value_enum, value_name = "FORMAT")]
        format: Option<JsonFormat>,
    },
    /// Resize a volume that no VM uses. It can shrink only by blocks that were
    /// never written
    Resize {
        /// Its name
        name: String,
        /// Its new size: 256, 256M, 2G (without a letter: MiB)
        #[arg(value_parser = mebibytes)]
        size: u64,
        /// Output: the name, or json
        #[arg(long, value_enum, value_name = "FORMAT")]
        format: Option<JsonFormat>,
    },
    /// List volumes
    Ls {
        /// Output format
        #[arg(long, value_enum, default_value = "table")]
        format: ListFormat,
    },
    /// Remove volumes and all data on them
    Rm {
        /// Their names
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
}

/// `jiffy machine`
#[derive(Debug, Subcommand)]
pub enum Machine {
    /// Start the machine
    Start {
        /// vCPUs. With more than one, QEMU 7.2 (Debian 12) hangs VMs in the machine
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=32))]
        cpus: Option<u8>,
        /// RAM: 4096, 4096M, 4G (without a letter: MiB)
        #[arg(long, short, value_name = "SIZE", value_parser = mebibytes)]
        memory: Option<u64>,
        /// Maximum size of its disk, set when the disk is created: 64G
        #[arg(long, value_name = "SIZE", value_parser = mebibytes)]
        disk: Option<u64>,
        /// Its kernel: debian, or sched, Linux with sched_ext, and jiffy-sched to schedule VMs
        /// there (docs/scheduler.md). The first time, that kernel is built; this takes 14
        /// minutes of one processor
        #[arg(long, value_enum, value_name = "KERNEL", hide_possible_values = true)]
        kernel: Option<MachineKernel>,
        /// Share a folder of this host with everything in the machine, so that VMs can share it
        /// or what is below it (`run -v`): DIR, DIR:ro, or none; may be repeated
        #[arg(
            long,
            value_name = "DIR",
            value_parser = folder::machine_share,
            value_hint = ValueHint::DirPath
        )]
        share: Vec<folder::MachineShare>,
    },
    /// Stop the machine and the VMs in it; its disk is kept
    Stop,
    /// Show the machine's status. Exit status 0: it runs; 3: it does not
    Status {
        /// Output format
        #[arg(long, value_enum, default_value = "table")]
        format: ListFormat,
    },
    /// Run a shell, or a command, in the machine
    Shell {
        /// Command to run instead of a shell
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            value_name = "CMD"
        )]
        argv: Vec<String>,
    },
    /// Remove the machine and its disk: all VMs, images and volumes in it
    Rm {
        /// Stop the machine first if it runs
        #[arg(short, long)]
        force: bool,
    },
}

/// A kernel of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MachineKernel {
    /// The one that Jiffy comes with.
    Debian,
    /// The one with sched_ext.
    Sched,
}

/// `jiffy doctor`
#[derive(Debug, Args)]
#[command(
    after_help = "Exit status: 0 when VMs run on this host itself, 3 when they run only in \
the machine, 4 when they don't run at all."
)]
pub struct Doctor {
    /// Show the CPU features that VMs can have on their host, and which profiles
    /// (`--cpu-profile`) it supports; with json, print a profile for a file
    #[arg(long)]
    pub cpu: bool,
    /// Output format
    #[arg(long, value_enum, default_value = "table")]
    pub format: ListFormat,
}

/// `jiffy version`
#[derive(Debug, Args)]
pub struct Version {
    /// Output format
    #[arg(long, value_enum, default_value = "table")]
    pub format: ListFormat,
}

/// `jiffy completions`
#[derive(Debug, Args)]
#[command(
    after_help = "bash: jiffy completions bash > /etc/bash_completion.d/jiffy\n\
zsh:  jiffy completions zsh > \"${fpath[1]}/_jiffy\"\n\
fish: jiffy completions fish > ~/.config/fish/completions/jiffy.fish"
)]
pub struct Completions {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Shells with completion scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// Output formats of lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ListFormat {
    Table,
    Json,
}

/// Output format of commands that print a name or id without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum JsonFormat {
    Json,
}

/// Output formats of timelines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TimelineFormat {
    /// Rows with bars
    Table,
    /// Spans in nanoseconds
    Json,
    /// Chrome trace events, for ui.perfetto.dev
    Perfetto,
}

#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;
