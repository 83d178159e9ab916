//! `jiffy disk`.

use clap::{Args, Subcommand, ValueHint};
use std::path::PathBuf;

/// `jiffy disk`
#[derive(Debug, Subcommand)]
pub enum Disk {
    /// Serve an image, or a file, as a disk of other monitors (vhost-user)
    Serve(Serve),
    /// Attach a volume to a VM that is there: not possible, and says why
    Attach(HotPlug),
    /// Detach a volume from a VM that is there: not possible, and says why
    Detach(HotPlug),
}

/// `jiffy disk serve`
#[derive(Debug, Args)]
#[command(after_long_help = SERVE_HELP)]
pub struct Serve {
    /// An image (`jiffy image ls`), or the path of a file, with a slash
    #[arg(value_name = "IMAGE|FILE", value_hint = ValueHint::FilePath)]
    pub what: PathBuf,
    /// Where to listen: a Unix socket, which goes when this ends
    #[arg(long, value_name = "SOCKET", value_hint = ValueHint::AnyPath)]
    pub vhost_user: PathBuf,
    /// Refuse writes, as is the case for images
    #[arg(long, conflicts_with = "writable")]
    pub read_only: bool,
    /// Let guests write to the file
    #[arg(long)]
    pub writable: bool,
}

const SERVE_HELP: &str = "\
One monitor at a time is served; when it leaves, the next can connect. Its \
guest's memory must be shared with it. QEMU, for example:

    qemu-system-x86_64 -object memory-backend-memfd,id=ram,size=512M,share=on \\
      -machine q35,memory-backend=ram -m 512M \\
      -chardev socket,id=disk,path=SOCKET \\
      -device vhost-user-blk-pci,chardev=disk …";

/// `jiffy disk attach`, `jiffy disk detach`
#[derive(Debug, Args)]
pub struct HotPlug {
    /// Its name, id or the beginning of its id
    #[arg(value_name = "VM")]
    pub vm: String,
    /// The volume
    #[arg(value_name = "VOLUME")]
    pub volume: String,
}
