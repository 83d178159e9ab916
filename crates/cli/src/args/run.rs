//! `jiffy run` and `create`: the options of a new VM.

use super::{
    DiskUse, HugePages, IdleActionChoice, JsonFormat, KernelChoice, TimelineOutput, disk_limit,
    disk_use,
    folder::{self, folder_use},
    image, mebibytes, network, queue, run_timeline_output, seconds,
};
use clap::{Args, ValueHint};
use jiffy_wire::api::FolderUse;
use jiffy_wire::vmm::DiskLimit;
use std::path::PathBuf;

/// Options of a new VM, for `run` and `create`.
#[derive(Debug, Args)]
pub struct VmOptions {
    /// Name of the VM [default: a generated name]
    #[arg(long)]
    pub name: Option<String>,
    /// Remove the VM when it has ended
    #[arg(long)]
    pub rm: bool,
    /// vCPUs, 1 to 32 [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=32))]
    pub cpus: Option<u8>,
    /// The most vCPUs that `jiffy update --cpus` may give it while it runs
    /// [default: as many as it starts with]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=32))]
    pub max_cpus: Option<u8>,
    /// RAM: 256, 256M, 2G (without a letter: MiB) [default: 128M]
    #[arg(long, short, value_name = "SIZE", value_parser = mebibytes)]
    pub memory: Option<u64>,
    /// The most RAM that `jiffy update --memory` may give it while it runs, at most 16 times what
    /// it starts with [default: as much as it starts with]
    #[arg(long, value_name = "SIZE", value_parser = mebibytes, conflicts_with = "huge_pages")]
    pub max_memory: Option<u64>,
    /// Guest kernel: a name (`jiffy kernel list`), `full` (the newest built here), or
    /// the path of an image
    #[arg(long, value_name = "NAME|PATH", value_hint = ValueHint::FilePath)]
    pub kernel: Option<KernelChoice>,
    /// Image of the root file system: a name (`jiffy image ls`), or a reference
    /// like HOST/REPO:TAG. It can also be the first word after the options
    #[arg(long, value_name = "IMAGE")]
    pub image: Option<String>,
    /// The image was the first word after the options.
    #[arg(skip)]
    pub image_is_a_word: bool,
    /// The image may have been meant as the value of the option before it: `--root-disk=8G`.
    #[arg(skip)]
    pub meant_as_value: Option<String>,
    /// When to ask the registry for the image
    #[arg(long, value_name = "WHEN", value_enum, default_value = "missing")]
    pub pull: image::PullWhen,
    /// Use the image or snapshot only if it is signed with this public key; the registry
    /// is asked each time, also for one that is stored here
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub verify_key: Option<PathBuf>,
    /// Program that replaces the image's entrypoint; empty for none
    #[arg(long, value_name = "PROGRAM")]
    pub entrypoint: Option<String>,
    /// Attach a volume; with a size, it is created if it is missing. Options:
    /// mount=PATH, and limits bps=50M and iops=1000. Repeatable: /dev/vdb,
    /// /dev/vdc, …
    #[arg(long, value_name = "NAME[:SIZE][:ro][,OPTION…]", value_parser = disk_use)]
    pub disk: Vec<DiskUse>,
    /// Share a folder of this host with the VM, which then can't be captured, unless
    /// OPTIONS say capture; ro shares it read-only. Repeatable
    #[arg(
        long = "volume",
        short = 'v',
        value_name = "HOST:GUEST[:OPTIONS]",
        value_parser = folder_use
    )]
    pub folder: Vec<FolderUse>,
    /// The same, as Docker writes it:
    /// type=bind,source=HOST,target=GUEST[,readonly][,capture]
    #[allow(rustdoc::broken_intra_doc_links)] // Help: the brackets are no links.
    #[arg(long, value_name = "OPTION,…", value_parser = folder::mount)]
    pub mount: Vec<FolderUse>,
    /// Store the VM's changes to its root on a disk instead of in its memory; the
    /// disk is removed with the VM
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
    /// Run on a copy of the image that shares its blocks (reflink); the image must
    /// hold a writable file system
    #[arg(long)]
    pub root_copy: bool,
    /// With --root-copy: copy the whole image where the file system can't share blocks
    #[arg(long, requires = "root_copy")]
    pub copy: bool,
    /// Rate limit of each disk of the root file system: bps=50M, iops=1000
    #[arg(long, value_name = "LIMIT[,LIMIT]", value_parser = disk_limit)]
    pub root_limit: Option<DiskLimit>,
    /// Give the VM a serial console (`jiffy logs --console`)
    #[arg(long)]
    pub console: bool,
    /// Run the image's own init as PID 1
    #[arg(
        long,
        value_name = "PATH",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "/sbin/init"
    )]
    pub init: Option<String>,
    /// Host name in the guest [default: the VM's name]
    #[arg(long, value_name = "NAME")]
    pub hostname: Option<String>,
    /// Additional kernel parameter. Repeatable
    #[arg(long, value_name = "PARAMETER", allow_hyphen_values = true)]
    pub kernel_arg: Vec<String>,
    /// CPU profile that the VM's processor is limited to: x86-64-v2, x86-64-v3,
    /// x86-64-v4, or a file of profiles (`jiffy doctor --cpu --format json`), of which
    /// the VM gets the common features. VMs that move between hosts need one
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
    /// When nothing has used the VM for this time (90s, 5m, 2h): hibernate it. The
    /// next exec, cp, attach or connection to a published port wakes it
    #[arg(long, value_name = "TIME", value_parser = seconds)]
    pub idle: Option<u32>,
    /// What to do with an idle VM. A VM that was stopped is not woken
    #[arg(
        long,
        value_name = "ACTION",
        value_enum,
        default_value = "hibernate",
        requires = "idle"
    )]
    pub idle_action: IdleActionChoice,
    /// Owner of the VM: when VMs wait for memory or vCPUs, those of different owners
    /// take turns [default: the user]
    #[arg(long, value_name = "NAME")]
    pub owner: Option<String>,
    /// Priority of the VM among those that wait for memory and vCPUs, at its start and
    /// when it is woken
    #[arg(long, value_enum, value_name = "PRIORITY", default_value = "normal")]
    pub priority: queue::PriorityChoice,
    #[command(flatten)]
    pub network: network::NetworkOptions,
}

/// Environment, working directory and user of a command.
#[derive(Debug, Args)]
pub struct CommandOptions {
    /// Set an environment variable; NAME alone copies the value from this shell. Repeatable
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub env: Vec<String>,
    /// Working directory
    #[arg(short, long, value_name = "FOLDER")]
    pub workdir: Option<String>,
    /// User: name, uid, name:group or uid:gid
    #[arg(short, long)]
    pub user: Option<String>,
}

/// Whether a command gets stdin and a terminal.
#[derive(Debug, Args)]
pub struct StdioOptions {
    /// Forward stdin; the default when stdin is a pipe or a file
    #[arg(short, long)]
    pub interactive: bool,
    /// Run on a terminal; the default when stdin and stdout are terminals
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
    /// Restore a snapshot instead of booting: a name, or a reference, which is
    /// pulled if it is not stored here. A command replaces the captured one;
    /// without a command, connect to the captured one
    #[arg(
        long,
        value_name = "SNAPSHOT",
        conflicts_with_all = [
            "cold", "cpus", "max_cpus", "memory", "max_memory", "kernel", "image", "entrypoint", "disk", "root_disk", "root_copy",
            "root_limit", "console", "init",
            "kernel_arg", "cpu_profile", "huge_pages",
        ]
    )]
    pub from: Option<String>,
    /// Boot, even if there is a golden snapshot of this kind of VM (also
    /// JIFFY_COLD=1)
    #[arg(long)]
    pub cold: bool,
    #[command(flatten)]
    pub time: queue::WaitTime,
    /// Don't show the place in the queue while the VM waits for memory and vCPUs
    #[arg(short, long)]
    pub quiet: bool,
    /// Print the VM's id and return; the VM keeps running. With -i and -t its
    /// command waits for `jiffy attach`
    #[arg(short, long)]
    pub detach: bool,
    /// Write the timeline to stderr or to a file: table, json, perfetto;
    /// json:FILE. With deep: also what the monitor's threads did, and the exits by
    /// reason; deep:FILE writes a file for ui.perfetto.dev. With --detach only --timeline
    /// and --timeline=deep: they record it for `jiffy timeline`
    #[arg(
        long,
        value_name = "FORMAT[:FILE]",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "table",
        value_parser = run_timeline_output
    )]
    pub timeline: Option<TimelineOutput>,
    /// With json: print one object with the VM, its exit status and its output
    #[arg(long, value_enum, value_name = "FORMAT", conflicts_with = "tty")]
    pub format: Option<JsonFormat>,
    /// The image, then the command. After `--`: the command only, in the image
    /// base. Without a command, the image's own runs, or else a shell; with
    /// --detach no shell: the VM then waits for `jiffy exec`
    #[arg(trailing_var_arg = true, value_name = "IMAGE [CMD]|-- CMD")]
    pub argv: Vec<String>,
}

const RUN_HELP: &str = "Examples:
  jiffy run -- CMD                 CMD in the image that comes with jiffy
  jiffy run debian [--] CMD        CMD in an image of `jiffy image ls`
  jiffy run localhost:5000/web:2   the command of an image from a registry

CMD is appended to the image's entrypoint. JIFFY_REGISTRY names the registry of \
references without a host.

INT, TERM, HUP, QUIT, USR1 and USR2 are forwarded to the command. If the command \
ignores Ctrl-C, a second one within a second ends the VM. On a terminal, Ctrl-P \
Ctrl-Q detaches; the VM keeps running (`jiffy attach` connects to it again).

Stdin is forwarded when it is not a terminal: in a shell loop that reads a \
file, redirect it (`< /dev/null`).";

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
    /// The image, then the command. After `--`: the command only, in the image
    /// base. Without a command, the image's own runs; if it has none, the VM waits
    /// for `jiffy exec`
    #[arg(trailing_var_arg = true, value_name = "IMAGE [CMD]|-- CMD")]
    pub argv: Vec<String>,
}
