//! System calls that change a file or another process.

use nix::libc::{self, user_regs_struct};
use nix::sys::ptrace;
use nix::unistd::Pid;
use std::fmt;
use std::fs;
use std::str::FromStr;

/// A kind of call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// Creates or truncates a file.
    Create,
    Write,
    /// Changes a file's length.
    Resize,
    /// Copies or clones from file to file.
    Copy,
    Sync,
    Rename,
    Link,
    Unlink,
    MakeFolder,
    /// Changes mode, owner, times or attributes.
    Attributes,
    Bind,
    /// Connects to another process.
    Connect,
    /// Writes to a socket.
    Send,
    /// Changes the host's network.
    Netlink,
    /// Changes a setting of the kernel.
    Setting,
    /// Creates a link whose other end is a descriptor.
    Tap,
    /// Creates a process that has not executed a program yet.
    Spawn,
    /// That call returns: the program is executed.
    Spawned,
    Signal,
    Priority,
}

const NAMES: [(Call, &str); 20] = [
    (Call::Create, "create"),
    (Call::Write, "write"),
    (Call::Resize, "resize"),
    (Call::Copy, "copy"),
    (Call::Sync, "sync"),
    (Call::Rename, "rename"),
    (Call::Link, "link"),
    (Call::Unlink, "unlink"),
    (Call::MakeFolder, "mkdir"),
    (Call::Attributes, "attributes"),
    (Call::Bind, "bind"),
    (Call::Connect, "connect"),
    (Call::Send, "send"),
    (Call::Netlink, "netlink"),
    (Call::Setting, "setting"),
    (Call::Tap, "tap"),
    (Call::Spawn, "spawn"),
    (Call::Spawned, "spawned"),
    (Call::Signal, "signal"),
    (Call::Priority, "priority"),
];

impl fmt::Display for Call {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (_, name) = NAMES.iter().find(|(call, _)| call == self).unwrap();
        to.write_str(name)
    }
}

impl FromStr for Call {
    type Err = String;

    fn from_str(text: &str) -> Result<Call, String> {
        let found = NAMES.iter().find(|(_, name)| *name == text);
        found
            .map(|(call, _)| *call)
            .ok_or_else(|| format!("there is no call {text}"))
    }
}

/// `TUNSETIFF` of linux/if_tun.h.
const TUNSETIFF: u64 = 0x4004_54ca;
/// `NLM_F_DUMP` of linux/netlink.h: the request only reads.
const DUMP: u64 = 0x300;

/// The call that a thread is about to make, if it may change something.
pub fn called(thread: Pid, registers: &user_regs_struct) -> Option<Call> {
    let [first, second, third] = [registers.rdi, registers.rsi, registers.rdx];
    let makes = |flags: u64| flags as i32 & (libc::O_CREAT | libc::O_TRUNC) != 0;
    match registers.orig_rax as i64 {
        libc::SYS_creat | libc::SYS_mknod | libc::SYS_mknodat => Some(Call::Create),
        libc::SYS_open => makes(second).then_some(Call::Create),
        libc::SYS_openat => makes(third).then_some(Call::Create),
        libc::SYS_write
        | libc::SYS_writev
        | libc::SYS_pwrite64
        | libc::SYS_pwritev
        | libc::SYS_pwritev2 => written(thread, first),
        libc::SYS_sendto if is_netlink(thread, first) => changes_network(thread, second),
        libc::SYS_sendto | libc::SYS_sendmsg | libc::SYS_sendmmsg => Some(Call::Send),
        libc::SYS_sendfile | libc::SYS_splice | libc::SYS_copy_file_range => Some(Call::Copy),
        libc::SYS_ioctl => match second {
            libc::FICLONE | libc::FICLONERANGE => Some(Call::Copy),
            TUNSETIFF => Some(Call::Tap),
            _ => None,
        },
        libc::SYS_truncate | libc::SYS_ftruncate | libc::SYS_fallocate => Some(Call::Resize),
        libc::SYS_fsync
        | libc::SYS_fdatasync
        | libc::SYS_sync_file_range
        | libc::SYS_syncfs
        | libc::SYS_sync => Some(Call::Sync),
        libc::SYS_rename | libc::SYS_renameat | libc::SYS_renameat2 => Some(Call::Rename),
        libc::SYS_link | libc::SYS_linkat | libc::SYS_symlink | libc::SYS_symlinkat => {
            Some(Call::Link)
        }
        libc::SYS_unlink | libc::SYS_unlinkat | libc::SYS_rmdir => Some(Call::Unlink),
        libc::SYS_mkdir | libc::SYS_mkdirat => Some(Call::MakeFolder),
        libc::SYS_chmod
        | libc::SYS_fchmod
        | libc::SYS_fchmodat
        | libc::SYS_fchmodat2
        | libc::SYS_chown
        | libc::SYS_fchown
        | libc::SYS_lchown
        | libc::SYS_fchownat
        | libc::SYS_utimensat
        | libc::SYS_setxattr
        | libc::SYS_lsetxattr
        | libc::SYS_fsetxattr => Some(Call::Attributes),
        libc::SYS_bind => Some(Call::Bind),
        libc::SYS_connect => Some(Call::Connect),
        libc::SYS_fork | libc::SYS_vfork => Some(Call::Spawned),
        libc::SYS_clone => makes_process(first),
        // The flags are the first field of `clone_args`.
        libc::SYS_clone3 => makes_process(ptrace::read(thread, first as _).ok()? as u64),
        libc::SYS_kill | libc::SYS_tkill | libc::SYS_tgkill | libc::SYS_pidfd_send_signal => {
            Some(Call::Signal)
        }
        libc::SYS_setpriority => Some(Call::Priority),
        _ => None,
    }
}

fn makes_process(flags: u64) -> Option<Call> {
    (flags & libc::CLONE_THREAD as u64 == 0).then_some(Call::Spawned)
}

/// A write to a file or a socket, except the log.
fn written(thread: Pid, descriptor: u64) -> Option<Call> {
    if descriptor == libc::STDERR_FILENO as u64 {
        return None;
    }
    let target = fs::read_link(format!("/proc/{thread}/fd/{descriptor}")).ok()?;
    let target = target.to_str()?;
    let is_file = target.starts_with('/')
        && !["/dev/", "/proc/", "/memfd:"]
            .iter()
            .any(|other| target.starts_with(other));
    match () {
        () if is_file => Some(Call::Write),
        () if target.starts_with("/proc/sys/") => Some(Call::Setting),
        () if target.starts_with("socket:") => Some(Call::Send),
        () => None,
    }
}

/// Is this a socket to the kernel (netlink(7))?
fn is_netlink(thread: Pid, descriptor: u64) -> bool {
    let target = fs::read_link(format!("/proc/{thread}/fd/{descriptor}")).unwrap_or_default();
    let number = target.to_str().and_then(|name| {
        let number = name.strip_prefix("socket:[")?;
        number.strip_suffix(']')
    });
    // The last column is the socket's number.
    let all = fs::read_to_string(format!("/proc/{thread}/net/netlink")).unwrap_or_default();
    let mut numbers = all
        .lines()
        .filter_map(|line| line.split_whitespace().last());
    number.is_some_and(|number| numbers.any(|other| other == number))
}

/// A request that changes something, by the flags of its first message's header.
fn changes_network(thread: Pid, request: u64) -> Option<Call> {
    let header = ptrace::read(thread, request as _).ok()? as u64;
    (header >> 48 & DUMP != DUMP).then_some(Call::Netlink)
}
