//! The command line.

use clap::Parser;
use std::os::fd::RawFd;

/// Serve a folder to the virtio-fs device of one VM, or to the machine
#[derive(Debug, Parser)]
#[command(name = "jiffy-files", version)]
pub struct Options {
    /// Inherited socket on which requests come (AF_UNIX, SOCK_SEQPACKET or
    /// SOCK_STREAM)
    #[arg(long, value_name = "NUMBER")]
    pub socket_fd: RawFd,
    /// Inherited descriptor of the folder
    #[arg(long, value_name = "NUMBER")]
    pub folder_fd: RawFd,
    /// Refuse all changes
    #[arg(long)]
    pub read_only: bool,
    /// Act as the user that started this program, for all users of the guest [default: as root,
    /// with the ids of the guest's users]
    #[arg(long)]
    pub squash: bool,
}
