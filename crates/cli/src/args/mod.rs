//! What the user may type.

pub mod bench;
pub mod disk;
pub mod image;
mod later;
pub mod snapshot;
mod values;

pub use later::Later;
pub use values::{
    DiskUse, HugePages, KernelChoice, MachineUse, Place, TimelineOutput, disk_limit, disk_use,
    mebibytes, place, signal_number, timeline_output,
};

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use jiffy_wire::vmm::DiskLimit;
use std::ffi::OsString;
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

impl Cli {
    /// This process's command line; ends the process if it makes no sense.
    pub fn of_this_process() -> Cli {
        let words: Vec<OsString> = std::env::args_os().collect();
        let mut cli = Cli::parse_from(&words);
        cli.settle(&words);
        cli
    }

    /// Finds the image among the words behind the options of `run` and
    /// `create`: the first, unless `--` stands before it.
    fn settle(&mut self, words: &[OsString]) {
        let (vm, argv) = match &mut self.verb {
            Verb::Run(Later(run)) if run.from.is_none() => (&mut run.vm, &mut run.argv),
            Verb::Create(Later(create)) => (&mut create.vm, &mut create.argv),
            _ => return,
        };
        // Whatever follows the first of them was taken as it is.
        let before = words.len().checked_sub(argv.len() + 1);
        let escaped = before.is_some_and(|before| words[before] == "--");
        if escaped || vm.image.is_some() || argv.is_empty() {
            return;
        }
        vm.image = Some(argv.remove(0));
        vm.image_is_a_word = true;
        if argv.first().is_some_and(|word| word == "--") {
            argv.remove(0);
        }
    }
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Make a VM, start it and run a command in it
    Run(Later<Run>),
    /// Make a VM without starting it
    Create(Later<Create>),
    /// Start VMs that were made or have ended
    Start(Later<Start>),
    /// Run a further command in a running VM
    Exec(Later<Exec>),
    /// List VMs
    Ps(Later<Ps>),
    /// Show what a VM's command, console or VMM wrote
    Logs(Later<Logs>),
    /// Copy files and folders into or out of a VM
    Cp(Later<Cp>),
    /// Show all about VMs, as JSON
    Inspect(Later<Inspect>),
    /// End VMs in order
    Stop(Later<Stop>),
    /// End VMs at once, or send a signal to their command
    Kill(Later<Kill>),
    /// Remove VMs
    Rm(Later<Rm>),
    /// Wait until VMs have ended and print their exit statuses
    Wait(Later<Wait>),
    /// Connect to the command of a running VM
    Attach(Later<Attach>),
    /// Stop the vCPUs of VMs until they are resumed
    Pause(Later<snapshot::Vms>),
    /// Let paused VMs go on
    Resume(Later<snapshot::Vms>),
    /// Make live clones of a running VM
    Fork(Later<snapshot::Fork>),
    /// Write the memory of VMs to disk and give it back to the host
    Hibernate(Later<snapshot::Hibernate>),
    /// Let hibernated VMs go on
    Wake(Later<snapshot::Vms>),
    /// Snapshots: captured VMs to go on from
    #[command(subcommand)]
    Snapshot(Later<snapshot::Snapshot>),
    /// Show where the time of a VM's start went
    Timeline(Later<Timeline>),
    /// Guest kernels
    #[command(subcommand)]
    Kernel(Later<Kernel>),
    /// Images
    #[command(subcommand)]
    Image(Later<image::Image>),
    /// Fetch an image or a snapshot from a registry
    Pull(Later<image::Pull>),
    /// Send an image or a snapshot to a registry
    Push(Later<image::Push>),
    /// Make an image of what a VM has changed in its root file system
    Commit(Later<image::Commit>),
    /// Volumes: disks that outlive VMs
    #[command(subcommand)]
    Volume(Later<Volume>),
    /// Disks: served to other monitors
    #[command(subcommand)]
    Disk(Later<disk::Disk>),
    /// The Linux machine in which VMs run where there is no real KVM
    #[command(subcommand)]
    Machine(Later<Machine>),
    /// Check what this host offers and say what to do about the rest
    Doctor(Later<Doctor>),
    /// Measure on this host
    #[command(subcommand)]
    Bench(Later<bench::Bench>),
    /// Show the versions of jiffy and, if it runs, of its node
    Version(Later<Version>),
    /// Print a completion script for a shell
    Completions(Later<Completions>),
}

/// What `run` and `create` make a VM from.
#[derive(Debug, Args)]
pub struct VmOptions {
    /// Name of the VM; without one, jiffy makes one up
    #[arg(long)]
    pub name: Option<String>,
    /// Remove the VM once it has ended
    #[arg(long)]
    pub rm: bool,
    /// vCPUs, 1 to 32
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=32))]
    pub cpus: Option<u8>,
    /// RAM: 256, 256M, 2G (without a letter: MiB)
    #[arg(long, short, value_name = "SIZE", value_parser = mebibytes)]
    pub memory: Option<u64>,
    /// Guest kernel: a name (`jiffy kernel list`) or the path of an image
    #[arg(long, value_name = "NAME|PATH", value_hint = ValueHint::FilePath)]
    pub kernel: Option<KernelChoice>,
    /// Image of the root file system: a name (`jiffy image ls`), or a reference
    /// like HOST/REPO:TAG. May be given as the first word, too
    #[arg(long, value_name = "IMAGE")]
    pub image: Option<String>,
    /// The image was the first word behind the options.
    #[arg(skip)]
    pub image_is_a_word: bool,
    /// When to ask the registry for the image
    #[arg(long, value_name = "WHEN", value_enum, default_value = "missing")]
    pub pull: image::PullWhen,
    /// Take the image or snapshot only if this public key has signed it, also one that
    /// is here; the registry is asked each time
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub verify_key: Option<PathBuf>,
    /// A program in place of the image's entrypoint; empty for none
    #[arg(long, value_name = "PROGRAM")]
    pub entrypoint: Option<String>,
    /// Attach a volume; with a size, it is made when missing. Options:
    /// mount=PATH, and limits bps=50M and iops=1000. Repeatable: /dev/vdb,
    /// /dev/vdc, …
    #[arg(long, value_name = "NAME[:SIZE][:ro][,OPTION…]", value_parser = disk_use)]
    pub disk: Vec<DiskUse>,
    /// Keep what the VM changes in its root on a disk of its own instead of in
    /// its memory; it goes with the VM
    #[arg(
        long,
        value_name = "SIZE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "4G",
        value_parser = mebibytes,
        conflicts_with = "root_copy"
    )]
    pub root_disk: Option<u64>,
    /// Run on a copy of the image that shares its blocks; the image must hold a
    /// file system that can be written to
    #[arg(long)]
    pub root_copy: bool,
    /// With --root-copy: copy the image whole where no blocks can be shared
    #[arg(long, requires = "root_copy")]
    pub copy: bool,
    /// Limit the use of the root's disks: bps=50M, iops=1000
    #[arg(long, value_name = "LIMIT[,LIMIT]", value_parser = disk_limit)]
    pub root_limit: Option<DiskLimit>,
    /// Give the VM a serial console (`jiffy logs --console`)
    #[arg(long)]
    pub console: bool,
    /// Hand PID 1 to the image's own init
    #[arg(
        long,
        value_name = "PATH",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "/sbin/init"
    )]
    pub init: Option<String>,
    /// Host name in the guest; without one, the VM's name
    #[arg(long, value_name = "NAME")]
    pub hostname: Option<String>,
    /// A further kernel parameter. Repeatable
    #[arg(long, value_name = "PARAMETER", allow_hyphen_values = true)]
    pub kernel_arg: Vec<String>,
    /// Show the VM no more of the host's processor than this: x86-64-v2, x86-64-v3,
    /// x86-64-v4, or a file of profiles (`jiffy doctor --cpu --format json`), of which it
    /// gets what all have in common. VMs that are to move between hosts need it
    #[arg(long, value_name = "NAME|FILE")]
    pub cpu_profile: Option<String>,
    /// Back the VM's RAM with huge pages
    #[arg(
        long,
        value_name = "SIZE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "2M",
        value_enum
    )]
    pub huge_pages: Option<HugePages>,
}

/// What a command in a VM is started with.
#[derive(Debug, Args)]
pub struct CommandOptions {
    /// Set an environment variable; NAME alone takes this shell's value. Repeatable
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub env: Vec<String>,
    /// Working directory
    #[arg(short, long, value_name = "FOLDER")]
    pub workdir: Option<String>,
    /// User: name, uid, name:group or uid:gid
    #[arg(short, long)]
    pub user: Option<String>,
}

/// How a command is connected to this terminal.
#[derive(Debug, Args)]
pub struct StdioOptions {
    /// Forward stdin; implied when stdin is a pipe or a file
    #[arg(short, long)]
    pub interactive: bool,
    /// Run on a terminal; implied when stdin and stdout are terminals
    #[arg(short, long)]
    pub tty: bool,
    /// Never run on a terminal
    #[arg(short = 'T', long, conflicts_with = "tty")]
    pub no_tty: bool,
}

/// `jiffy run`
#[derive(Debug, Args)]
#[command(after_long_help = RUN_HELP)]
pub struct Run {
    #[command(flatten)]
    pub vm: VmOptions,
    #[command(flatten)]
    pub command: CommandOptions,
    #[command(flatten)]
    pub stdio: StdioOptions,
    /// Go on from a snapshot (also a reference: it is pulled when it is not
    /// here) instead of booting. A command takes the place of
    /// the one that was captured; without one, connect to that
    #[arg(
        long,
        value_name = "SNAPSHOT",
        conflicts_with_all = [
            "cold", "cpus", "memory", "kernel", "image", "entrypoint", "disk", "root_disk", "root_copy",
            "root_limit", "console", "init",
            "kernel_arg", "cpu_profile", "huge_pages",
        ]
    )]
    pub from: Option<String>,
    /// Boot, even where jiffy keeps a booted guest of the same kind (also
    /// JIFFY_COLD=1)
    #[arg(long)]
    pub cold: bool,
    /// Print the VM's id and return; the VM goes on. With -i and -t its
    /// command waits for `jiffy attach`
    #[arg(short, long)]
    pub detach: bool,
    /// Show on stderr where the time went, or write it to a file: table, json,
    /// perfetto; json:FILE
    #[arg(
        long,
        value_name = "FORMAT[:FILE]",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "table",
        value_parser = timeline_output
    )]
    pub timeline: Option<TimelineOutput>,
    /// With json: print one object with the VM, its exit status and its output
    #[arg(long, value_enum, value_name = "FORMAT", conflicts_with = "tty")]
    pub format: Option<JsonFormat>,
    /// The image, then the command; behind `--` the command only, in the image
    /// base. Without a command the image's own, else a shell, or with --detach
    /// nothing: the VM then waits for `jiffy exec`
    #[arg(trailing_var_arg = true, value_name = "IMAGE [CMD]|-- CMD")]
    pub argv: Vec<String>,
}

const RUN_HELP: &str = "\
  jiffy run -- CMD                 in the image that comes with jiffy
  jiffy run debian [--] CMD        in an image of `jiffy image ls`
  jiffy run localhost:5000/web:2   in one from a registry: what it is made to run

An image's entrypoint comes before CMD. A name without a registry is looked up \
in the one that JIFFY_REGISTRY names.

INT, TERM, HUP, QUIT, USR1 and USR2 are forwarded to the command. A second \
Ctrl-C within a second, for a command that ignores the first, ends the VM. On \
a terminal Ctrl-P Ctrl-Q leaves the VM running (`jiffy attach` returns to it).

Stdin is forwarded when it is not a terminal: in a shell loop that reads a \
file, give `jiffy` its own (`< /dev/null`).";

/// `jiffy create`
#[derive(Debug, Args)]
pub struct Create {
    #[command(flatten)]
    pub vm: VmOptions,
    #[command(flatten)]
    pub command: CommandOptions,
    /// Keep stdin open for `jiffy start -i` and `jiffy attach`
    #[arg(short, long)]
    pub interactive: bool,
    /// Run the command on a terminal
    #[arg(short, long)]
    pub tty: bool,
    /// Output: the id, or json
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<JsonFormat>,
    /// The image, then the command; behind `--` the command only, in the image
    /// base. Without a command the image's own; if it has none the VM waits for
    /// `jiffy exec`
    #[arg(trailing_var_arg = true, value_name = "IMAGE [CMD]|-- CMD")]
    pub argv: Vec<String>,
}

/// `jiffy start`
#[derive(Debug, Args)]
pub struct Start {
    /// Connect to the VM's command, as `jiffy attach`
    #[arg(short, long)]
    pub attach: bool,
    /// Forward stdin; with --attach
    #[arg(short, long, requires = "attach")]
    pub interactive: bool,
    /// Names, ids or beginnings of ids
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
}

/// `jiffy exec`
#[derive(Debug, Args)]
#[command(after_long_help = "A second Ctrl-C within a second, for a command \
that ignores the first, closes the connection; the command then gets HUP.")]
pub struct Exec {
    #[command(flatten)]
    pub command: CommandOptions,
    #[command(flatten)]
    pub stdio: StdioOptions,
    /// Its name, id or the beginning of its id
    #[arg(value_name = "VM")]
    pub vm: String,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub argv: Vec<String>,
}

/// `jiffy ps`
#[derive(Debug, Args)]
pub struct Ps {
    /// VMs that don't run, too
    #[arg(short, long)]
    pub all: bool,
    /// Ids only
    #[arg(short, long, conflicts_with = "format")]
    pub quiet: bool,
    /// How to show it
    #[arg(long, value_enum, default_value = "table")]
    pub format: ListFormat,
}

/// `jiffy logs`
#[derive(Debug, Args)]
pub struct Logs {
    /// Go on as more is written, until the VM ends
    #[arg(short, long)]
    pub follow: bool,
    /// Only the last N lines
    #[arg(short = 'n', long, value_name = "N")]
    pub tail: Option<u64>,
    /// The guest's serial console (needs `--console` at `run`)
    #[arg(long, conflicts_with = "vmm")]
    pub console: bool,
    /// The log of the VM's own jiffy-vmm process
    #[arg(long)]
    pub vmm: bool,
    /// Its name, id or the beginning of its id
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
    /// A path here, VM:PATH, or - for a tar on stdin
    #[arg(value_name = "SRC", value_parser = place, value_hint = ValueHint::AnyPath)]
    pub source: Place,
    /// A path here, VM:PATH, or - for a tar on stdout
    #[arg(value_name = "DST", value_parser = place, value_hint = ValueHint::AnyPath)]
    pub destination: Place,
}

const CP_HELP: &str = "\
One of SRC and DST is in a VM. Into an existing folder the source goes under \
its own name; a SRC that ends in /. gives its contents instead. Modes, times \
and symbolic links are kept. Without --archive what is written here belongs to \
you, and what is written in the VM to its root. A path here with a colon in its \
first part is written ./a:b.";

/// `jiffy inspect`
#[derive(Debug, Args)]
pub struct Inspect {
    /// Names, ids or beginnings of ids
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
}

/// `jiffy stop`
#[derive(Debug, Args)]
pub struct Stop {
    /// Seconds its programs have to end before they are killed
    #[arg(short, long, value_name = "SECONDS", default_value_t = 10)]
    pub time: u32,
    /// Names, ids or beginnings of ids
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
}

/// `jiffy kill`
#[derive(Debug, Args)]
pub struct Kill {
    /// Send this signal (TERM, SIGTERM or 15) to the VM's command instead
    #[arg(short, long, value_name = "SIGNAL", value_parser = signal_number)]
    pub signal: Option<i32>,
    /// Names, ids or beginnings of ids
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
}

/// `jiffy rm`
#[derive(Debug, Args)]
pub struct Rm {
    /// End them first if they run; no complaint about those that don't exist
    #[arg(short, long)]
    pub force: bool,
    /// Names, ids or beginnings of ids
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
}

/// `jiffy wait`
#[derive(Debug, Args)]
pub struct Wait {
    /// Names, ids or beginnings of ids
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
}

/// `jiffy attach`
#[derive(Debug, Args)]
#[command(after_long_help = "On a terminal Ctrl-P Ctrl-Q leaves; the VM goes on.")]
pub struct Attach {
    /// Don't forward stdin
    #[arg(long)]
    pub no_stdin: bool,
    /// Its name, id or the beginning of its id
    #[arg(value_name = "VM")]
    pub vm: String,
}

/// `jiffy timeline`
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Timeline {
    #[command(subcommand)]
    pub order: Option<TimelineOrder>,
    /// How to show it
    #[arg(long, value_enum, default_value = "table")]
    pub format: TimelineFormat,
    /// Its name, id or the beginning of its id
    #[arg(value_name = "VM", required = true)]
    pub vm: Option<String>,
}

/// Orders of a timeline, as systemd-analyze has them.
#[derive(Debug, Subcommand)]
pub enum TimelineOrder {
    /// The steps, longest first
    Blame {
        /// Its name, id or the beginning of its id
        #[arg(value_name = "VM")]
        vm: String,
    },
    /// The chain of steps that had to wait for one another
    CriticalChain {
        /// Its name, id or the beginning of its id
        #[arg(value_name = "VM")]
        vm: String,
    },
}

/// `jiffy kernel`
#[derive(Debug, Subcommand)]
pub enum Kernel {
    /// Build a guest kernel from the distribution's Linux source and print its
    /// path; nothing is built twice
    Build {
        /// base, or full: base plus what Docker inside needs
        #[arg(default_value = "base")]
        variant: String,
    },
    /// List the node's kernels, if it runs, and those built here
    List {
        /// How to show it
        #[arg(long, value_enum, default_value = "table")]
        format: ListFormat,
    },
    /// Name what a kernel image or configuration lacks for Jiffy. Exit status
    /// 1: no guest comes up with it
    Check {
        /// A vmlinux or bzImage, or a .config
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
        /// What Docker inside a guest needs, too
        #[arg(long)]
        docker: bool,
        /// How to show it
        #[arg(long, value_enum, default_value = "table")]
        format: ListFormat,
    },
}

/// `jiffy volume`
#[derive(Debug, Subcommand)]
pub enum Volume {
    /// Make a volume, with an ext4 file system
    Create {
        /// The name it gets
        name: String,
        /// Its size: 256, 256M, 2G (without a letter: MiB)
        #[arg(value_parser = mebibytes)]
        size: u64,
        /// Leave it empty
        #[arg(long)]
        raw: bool,
        /// Output: the name, or json
        #[arg(long, value_enum, value_name = "FORMAT")]
        format: Option<JsonFormat>,
    },
    /// Change the size of a volume that no VM uses. It shrinks only where
    /// nothing was ever written
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
        /// How to show it
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
        /// vCPUs
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=32))]
        cpus: Option<u8>,
        /// RAM: 4096, 4096M, 4G (without a letter: MiB)
        #[arg(long, short, value_name = "SIZE", value_parser = mebibytes)]
        memory: Option<u64>,
        /// Largest size of its disk, when it is first made: 64G
        #[arg(long, value_name = "SIZE", value_parser = mebibytes)]
        disk: Option<u64>,
    },
    /// Stop the machine and the VMs in it; its disk stays
    Stop,
    /// Say whether the machine runs. Exit status 0: it does; 3: it does not
    Status {
        /// How to show it
        #[arg(long, value_enum, default_value = "table")]
        format: ListFormat,
    },
    /// A shell in the machine, or a command
    Shell {
        /// A command instead of a shell
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            value_name = "CMD"
        )]
        argv: Vec<String>,
    },
    /// Remove the machine and its disk: all VMs, images and volumes in it
    Rm {
        /// Stop it first if it runs
        #[arg(short, long)]
        force: bool,
    },
}

/// `jiffy doctor`
#[derive(Debug, Args)]
#[command(
    after_help = "Exit status: 0 when VMs run on this host itself, 3 when they run only in \
the machine, 4 when they don't run at all."
)]
pub struct Doctor {
    /// Show what VMs can have of the processor where they run, and which profiles
    /// (`--cpu-profile`) it has; in JSON, a profile for a file
    #[arg(long)]
    pub cpu: bool,
    /// How to show it
    #[arg(long, value_enum, default_value = "table")]
    pub format: ListFormat,
}

/// `jiffy version`
#[derive(Debug, Args)]
pub struct Version {
    /// How to show it
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

/// Formats of lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ListFormat {
    Table,
    Json,
}

/// The only other format of commands that print little.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum JsonFormat {
    Json,
}

/// Formats of timelines.
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
