//! `jiffy disk`.

use clap::{Args, Subcommand, ValueHint};
use std::path::PathBuf;

/// `jiffy disk`
#[derive(Debug, Subcommand)]
pub enum Disk {
    /// Serve an image or a file as a vhost-user disk for other VMMs
    Serve(Serve),
    /// Attach a volume to an existing VM: not supported, explains why
    Attach(HotPlug),
    /// Detach a volume from an existing VM: not supported, explains why
    Detach(HotPlug),
}

/// `jiffy disk serve`
#[derive(Debug, Args)]
#[command(after_long_help = SERVE_HELP)]
pub struct Serve {
    /// An image (`jiffy image ls`), or the path of a file, which must contain a slash
    #[arg(value_name = "IMAGE|FILE", value_hint = ValueHint::FilePath)]
    pub what: PathBuf,
    /// Unix socket to listen on; it is removed when the server ends
    #[arg(long, value_name = "SOCKET", value_hint = ValueHint::AnyPath)]
    pub vhost_user: PathBuf,
    /// Refuse writes, as without --writable
    #[arg(long, conflicts_with = "writable")]
    pub read_only: bool,
    /// Let guests write to the file
    #[arg(long)]
    pub writable: bool,
}

const SERVE_HELP: &str = "\
The server serves one VMM at a time; when it disconnects, the next can connect. \
The guest's memory must be shared (memfd, share=on). With QEMU, for example:

    qemu-system-x86_64 -object memory-backend-memfd,id=ram,size=512M,share=on \\
      -machine q35,memory-backend=ram -m 512M \\
      -chardev socket,id=disk,path=SOCKET \\
      -device vhost-user-blk-pci,chardev=disk …";

/// `jiffy disk attach`, `jiffy disk detach`
#[derive(Debug, Args)]
pub struct HotPlug {
    /// The VM: its name, its id or a unique prefix of its id
    #[arg(value_name = "VM")]
    pub vm: String,
    /// The volume
    #[arg(value_name = "VOLUME")]
    pub volume: String,
}
