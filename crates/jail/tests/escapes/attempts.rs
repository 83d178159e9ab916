//! Escape attempts of a compromised program. Each reports whether it succeeded.
#![allow(unsafe_code)] // System calls, whatever they do.

use super::calls::{call, got, reply};
use super::stage::{FILE_SIZE, FILES, PROCESSES, SECRET, SHM_KEY};
use jiffy_sys::handed;
use libc::{c_int, c_long};
use std::ffi::CString;
use std::io::{self, Write};
use std::mem::zeroed;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::ptr;
use std::sync::OnceLock;

/// What the attacker knows: everything about its environment.
struct Aims {
    victim: i32,
    address: usize,
    /// The process that started it.
    host: i32,
    /// A world-readable and world-writable file.
    public: String,
    tcp: u16,
    udp: u16,
    abstract_name: String,
}

/// It succeeded, or the error.
type Outcome = Result<(), io::Error>;
type Attempt = (&'static str, fn(&Aims) -> Outcome);

/// The file that it may write to.
const FILE: c_int = jiffy_jail::FIRST_DESCRIPTOR;
/// The descriptor of its folder in procfs, after that of the file.
const OWN_PROC: c_int = FILE + 1;
/// A socket that the monitor could connect to before its guest ran.
const OWN: &str = "vsock.sock_1024";
/// A Unix socket that was made before the filter was in force.
static MADE_BEFORE: OnceLock<c_int> = OnceLock::new();

fn socket_of_unix() -> io::Result<c_int> {
    got(unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0) }.into()).map(|fd| fd as c_int)
}

/// Connects a socket to a path.
fn connect_to(socket: c_int, path: &str) -> Outcome {
    let mut address: libc::sockaddr_un = unsafe { zeroed() };
    address.sun_family = libc::AF_UNIX as _;
    for (to, from) in address.sun_path.iter_mut().zip(path.bytes()) {
        *to = from as _;
    }
    let length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    reply(unsafe { libc::connect(socket, (&raw const address).cast(), length) })
}

/// Makes all attempts, one line of output each.
pub fn run(aims: &[&str]) {
    let [filter, victim, address, host, public, tcp, udp, name] = aims else {
        panic!("{aims:?}");
    };
    let aims = Aims {
        victim: victim.parse().unwrap(),
        address: usize::from_str_radix(address.trim_start_matches("0x"), 16).unwrap(),
        host: host.parse().unwrap(),
        public: (*public).to_owned(),
        tcp: tcp.parse().unwrap(),
        udp: udp.parse().unwrap(),
        abstract_name: (*name).to_owned(),
    };
    // Before its guest runs, a monitor leaves procfs, and connects to its pager.
    handed::add_inherited(handed::PROC.into(), OWN_PROC).expect("its folder in procfs");
    jiffy_vmm::sandbox::close_proc().expect("procfs is closed");
    UnixStream::connect(OWN).expect("its own socket");
    let made = socket_of_unix().expect("a socket");
    MADE_BEFORE.set(made).unwrap();
    let with_filter = *filter == "filter";
    if with_filter {
        confine();
    }
    let more: &[Attempt] = if with_filter { FILTERED } else { &[] };
    for (name, attempt) in ATTEMPTS.iter().chain(more) {
        let line = match attempt(&aims) {
            Ok(()) => format!("ESCAPED: {name}\n"),
            Err(error) => format!("held: {name}: {error}\n"),
        };
        io::stdout().write_all(line.as_bytes()).unwrap();
    }
    println!("done");
}

/// The filter of a monitor's main thread. A refused call fails here, instead of ending the program.
fn confine() {
    extern "C" fn refused(_: c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
        // SAFETY: the kernel passes a ucontext, whose registers it restores.
        unsafe {
            let context = context.cast::<libc::ucontext_t>();
            (*context).uc_mcontext.gregs[libc::REG_RAX as usize] = -i64::from(libc::ENOSYS);
        }
    }
    // SAFETY: a handler that only changes a register, and a filter that the kernel copies.
    unsafe {
        let mut action: libc::sigaction = zeroed();
        action.sa_sigaction = refused as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
        assert_eq!(libc::sigaction(libc::SIGSYS, &action, ptr::null_mut()), 0);
    }
    let role = jiffy_vmm::sandbox::Role::Main;
    jiffy_vmm::sandbox::Sandbox::On.enter(role).unwrap();
}

const ATTEMPTS: &[Attempt] = &[
    // Files.
    ("read a file that all may read", |aims| {
        open(&aims.public, libc::O_RDONLY)
    }),
    ("write a file that all may write", |aims| {
        open(&aims.public, libc::O_RDWR)
    }),
    ("read the host's users", |_| {
        open("/etc/passwd", libc::O_RDONLY)
    }),
    ("climb out of its working directory", |_| {
        open("../../../../../../../etc/passwd", libc::O_RDONLY)
    }),
    ("climb out of its root", |_| {
        open("/../../../etc/passwd", libc::O_RDONLY)
    }),
    ("list its root's contents", |_| list("/")),
    ("list the run folder", |_| list("../../vms")),
    ("list another VM's folder", |_| list("../victim")),
    ("make a file in its root", |_| {
        open("/new", libc::O_CREAT | libc::O_RDWR)
    }),
    ("make a file in the run folder", |_| {
        open("../../new", libc::O_CREAT | libc::O_RDWR)
    }),
    ("make a file in its own folder", |_| {
        open("new", libc::O_CREAT | libc::O_RDWR)
    }),
    ("make a nameless file", |_| {
        open(".", libc::O_TMPFILE | libc::O_RDWR)
    }),
    ("make a folder", |_| {
        path("new", |path| unsafe { libc::mkdir(path, 0o700) })
    }),
    ("make a link", |_| {
        path("new", |path| unsafe {
            libc::symlink(c"/etc/passwd".as_ptr(), path)
        })
    }),
    ("make a hard link to its socket", |_| {
        path("new", |path| unsafe {
            libc::link(c"vsock.sock_1024".as_ptr(), path)
        })
    }),
    ("make a disk's device", |_| {
        path("new", |path| unsafe {
            libc::mknod(path, libc::S_IFBLK | 0o600, libc::makedev(8, 0))
        })
    }),
    ("make a memory device", |_| {
        path("/mem", |path| unsafe {
            libc::mknod(path, libc::S_IFCHR | 0o600, libc::makedev(1, 1))
        })
    }),
    ("make a fifo", |_| {
        path("new", |path| unsafe { libc::mkfifo(path, 0o600) })
    }),
    ("remove its own socket", |_| {
        path("vsock.sock_1024", |path| unsafe { libc::unlink(path) })
    }),
    ("rename its own socket", |_| {
        path("vsock.sock_1024", |path| unsafe {
            libc::rename(path, c"other".as_ptr())
        })
    }),
    ("open its socket to others", |_| {
        path("vsock.sock_1024", |path| unsafe {
            libc::chmod(path, 0o777)
        })
    }),
    ("give its socket away", |_| {
        path("vsock.sock_1024", |path| unsafe { libc::chown(path, 0, 0) })
    }),
    ("open the memory of the host", |_| {
        open("/dev/mem", libc::O_RDWR)
    }),
    ("open KVM", |_| open("/dev/kvm", libc::O_RDWR)),
    ("open a terminal", |_| open("/dev/tty", libc::O_RDWR)),
    ("open its maps in /proc", |_| {
        open("/proc/self/maps", libc::O_RDONLY)
    }),
    ("open its old root by /proc", |_| {
        open("/proc/1/root/etc/passwd", libc::O_RDONLY)
    }),
    ("open a file by its handle", |_| {
        let mut handle = [0_u32; 8];
        handle[0] = 8;
        call(
            libc::SYS_open_by_handle_at,
            [libc::AT_FDCWD as c_long, handle.as_ptr() as _, 0, 0, 0, 0],
        )
    }),
    ("leave through a descriptor", |_| {
        for number in 0..16 {
            if call(libc::SYS_fchdir, [number, 0, 0, 0, 0, 0]).is_ok() {
                return Ok(());
            }
        }
        Err(io::Error::from_raw_os_error(libc::ENOTDIR))
    }),
    ("change its root", |_| {
        path("..", |path| unsafe { libc::chroot(path) })
    }),
    ("execute a shell", |_| {
        path("/bin/sh", |path| unsafe {
            libc::execv(path, [path, ptr::null()].as_ptr())
        })
    }),
    // Mounts and namespaces.
    ("mount /proc", |_| mount(c"proc", c"/", c"proc", 0)),
    ("mount a tmpfs", |_| mount(c"tmpfs", c".", c"tmpfs", 0)),
    ("mount its root for writing", |_| {
        mount(c"", c"/", c"", libc::MS_REMOUNT | libc::MS_BIND)
    }),
    ("mount a folder on another", |_| {
        mount(c".", c"/", c"", libc::MS_BIND)
    }),
    ("unmount its root", |_| {
        path("/", |path| unsafe { libc::umount2(path, libc::MNT_DETACH) })
    }),
    ("exchange its root", |_| {
        call(
            libc::SYS_pivot_root,
            [c".".as_ptr() as _, c".".as_ptr() as _, 0, 0, 0, 0],
        )
    }),
    ("copy a mount", |_| {
        call(
            libc::SYS_open_tree,
            [libc::AT_FDCWD as _, c".".as_ptr() as _, 1, 0, 0, 0],
        )
    }),
    ("open a file system", |_| {
        call(libc::SYS_fsopen, [c"proc".as_ptr() as _, 0, 0, 0, 0, 0])
    }),
    ("create a mount namespace", |_| unshare(libc::CLONE_NEWNS)),
    ("create a user namespace", |_| unshare(libc::CLONE_NEWUSER)),
    ("create a network namespace", |_| {
        unshare(libc::CLONE_NEWNET)
    }),
    ("create a user namespace by clone", |_| {
        let flags = (libc::CLONE_NEWUSER | libc::SIGCHLD) as c_long;
        match unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } {
            0 => unsafe { libc::_exit(0) },
            1.. => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }),
    ("enter the host's namespaces", |aims| {
        let pidfd = got(unsafe { libc::syscall(libc::SYS_pidfd_open, aims.host, 0) })?;
        got(unsafe { libc::syscall(libc::SYS_setns, pidfd, libc::CLONE_NEWNS) }).map(drop)
    }),
    // Other processes.
    ("signal all processes", |_| {
        reply(unsafe { libc::kill(-1, libc::SIGTERM) })
    }),
    ("signal another VM", |aims| {
        reply(unsafe { libc::kill(aims.victim, libc::SIGKILL) })
    }),
    ("signal who started it", |aims| {
        reply(unsafe { libc::kill(aims.host, libc::SIGTERM) })
    }),
    ("signal its parent", |_| match unsafe { libc::getppid() } {
        0 => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        parent => reply(unsafe { libc::kill(parent, libc::SIGTERM) }),
    }),
    ("open a pidfd of another VM", |aims| {
        got(unsafe { libc::syscall(libc::SYS_pidfd_open, aims.victim, 0) }).map(drop)
    }),
    ("trace another VM", |aims| {
        let none = ptr::null_mut::<libc::c_void>();
        got(unsafe { libc::ptrace(libc::PTRACE_SEIZE, aims.victim, none, none) }).map(drop)
    }),
    ("read another VM's memory", |aims| {
        let mut secret = 0_u64;
        let ours = libc::iovec {
            iov_base: (&raw mut secret).cast(),
            iov_len: 8,
        };
        let theirs = libc::iovec {
            iov_base: aims.address as *mut libc::c_void,
            iov_len: 8,
        };
        let got = unsafe { libc::process_vm_readv(aims.victim, &ours, 1, &theirs, 1, 0) };
        match got == 8 && secret == SECRET {
            true => Ok(()),
            false => Err(io::Error::last_os_error()),
        }
    }),
    ("write another VM's memory", |aims| {
        let zero = 0_u64;
        let ours = libc::iovec {
            iov_base: (&raw const zero).cast_mut().cast(),
            iov_len: 8,
        };
        let theirs = libc::iovec {
            iov_base: aims.address as *mut libc::c_void,
            iov_len: 8,
        };
        got(unsafe { libc::process_vm_writev(aims.victim, &ours, 1, &theirs, 1, 0) } as c_long)
            .map(drop)
    }),
    ("limit another VM", |aims| {
        let none = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        reply(unsafe { libc::prlimit(aims.victim, libc::RLIMIT_NOFILE, &none, ptr::null_mut()) })
    }),
    ("slow another VM down", |aims| {
        reply(unsafe { libc::setpriority(libc::PRIO_PROCESS, aims.victim as _, 19) })
    }),
    ("compare itself with another VM", |aims| {
        call(libc::SYS_kcmp, [1, c_long::from(aims.victim), 0, 0, 0, 0])
    }),
    // Privileges.
    ("become root", |_| {
        reply(unsafe { libc::syscall(libc::SYS_setresuid, 0, 0, 0) } as c_int)
    }),
    ("become root's group", |_| {
        reply(unsafe { libc::syscall(libc::SYS_setresgid, 0, 0, 0) } as c_int)
    }),
    ("join a group", |_| {
        let group = 0_u32;
        reply(unsafe { libc::syscall(libc::SYS_setgroups, 1, &group) } as c_int)
    }),
    ("gain all capabilities", |_| {
        let header = [0x2008_0522_u32, 0];
        let all = [u32::MAX; 6];
        call(
            libc::SYS_capset,
            [header.as_ptr() as _, all.as_ptr() as _, 0, 0, 0, 0],
        )
    }),
    ("clear no-new-privileges", |_| {
        reply(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0) })
    }),
    ("raise its limit of descriptors", |_| {
        raise(libc::RLIMIT_NOFILE)
    }),
    ("raise its limit of processes", |_| {
        raise(libc::RLIMIT_NPROC)
    }),
    ("raise its limit of file sizes", |_| {
        raise(libc::RLIMIT_FSIZE)
    }),
    ("dump its memory into a file", |_| raise(libc::RLIMIT_CORE)),
    ("raise its priority", |_| {
        reply(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -10) })
    }),
    ("run in real time", |_| {
        let first = libc::sched_param { sched_priority: 1 };
        call(
            libc::SYS_sched_setscheduler,
            [0, libc::SCHED_FIFO.into(), (&raw const first) as _, 0, 0, 0],
        )
    }),
    ("read the keys of who started it", |_| {
        // The session keyring is new and does not contain the user's "_ses".
        let mut keys = [0_u8; 256];
        let read =
            unsafe { libc::syscall(libc::SYS_keyctl, 11, -3, keys.as_mut_ptr(), keys.len()) };
        match read {
            4.. => Ok(()),
            0..4 => Err(io::Error::from_raw_os_error(libc::ENOKEY)),
            _ => Err(io::Error::last_os_error()),
        }
    }),
    ("load a module", |_| {
        call(libc::SYS_init_module, [0, 0, c"".as_ptr() as _, 0, 0, 0])
    }),
    ("load a kernel", |_| {
        call(libc::SYS_kexec_load, [0, 0, 0, 0, 0, 0])
    }),
    ("restart the host", |_| {
        call(libc::SYS_reboot, [0xfee1_dead, 672_274_793, 0, 0, 0, 0])
    }),
    ("set the clock", |_| {
        let time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        reply(unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &time) })
    }),
    ("set the host name", |_| {
        reply(unsafe { libc::sethostname(c"mine".as_ptr(), 4) })
    }),
    ("use ports of devices", |_| {
        call(libc::SYS_iopl, [3, 0, 0, 0, 0, 0])
    }),
    ("swap to a file", |_| {
        path("new", |path| unsafe { libc::swapon(path, 0) })
    }),
    ("account for processes", |_| {
        path("/new", |path| unsafe { libc::acct(path) })
    }),
    // Network and IPC.
    ("connect to the host over TCP", |aims| {
        std::net::TcpStream::connect(("127.0.0.1", aims.tcp)).map(drop)
    }),
    ("send the host a datagram", |aims| {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
        socket.send_to(b"x", ("127.0.0.1", aims.udp)).map(drop)
    }),
    ("reach the network", |_| {
        std::net::TcpStream::connect(("192.0.2.1", 80)).map(drop)
    }),
    ("connect to an abstract socket", |aims| {
        let address = SocketAddr::from_abstract_name(&aims.abstract_name)?;
        UnixStream::connect_addr(&address).map(drop)
    }),
    ("open a raw socket", |_| {
        reply(unsafe { libc::socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP) })
    }),
    ("open a packet socket", |_| {
        reply(unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 0) })
    }),
    ("bring an interface up", interface_up),
    ("call the API", |_| {
        UnixStream::connect("../../jiffyd.sock").map(drop)
    }),
    ("command the pager", |_| {
        UnixStream::connect("../../pager.sock").map(drop)
    }),
    ("command another VM", |_| {
        UnixStream::connect("../victim/control.sock").map(drop)
    }),
    ("speak for another VM's guest", |_| {
        UnixStream::connect("../victim/vsock.sock_1024").map(drop)
    }),
    ("reach another VM's socket from the run folder", |_| {
        UnixStream::connect("vms/victim/vsock.sock_1024").map(drop)
    }),
    ("connect to the host's own services", |_| {
        UnixStream::connect("../../../../run/systemd/journal/stdout").map(drop)
    }),
    ("share memory with the host", |_| {
        reply(unsafe { libc::shmget(SHM_KEY, 4096, 0o666) })
    }),
    ("create a message queue", |_| {
        reply(unsafe {
            libc::mq_open(
                c"/queue".as_ptr(),
                libc::O_CREAT | libc::O_RDWR,
                0o600,
                ptr::null::<libc::mq_attr>(),
            )
        })
    }),
    // Resource exhaustion. Each attempt has a bound; exceeding it is an escape.
    ("create processes without end", |_| {
        bomb(PROCESSES, || match unsafe { libc::fork() } {
            0 => loop {
                unsafe { libc::pause() };
            },
            pid => got(pid.into()).map(drop),
        })
    }),
    ("create threads without end", |_| {
        bomb(PROCESSES, || {
            std::thread::Builder::new()
                .spawn(|| {
                    loop {
                        std::thread::park()
                    }
                })
                .map(drop)
        })
    }),
    ("open descriptors without end", |_| {
        let bombed = bomb(FILES, || got(unsafe { libc::dup(1) }.into()).map(drop));
        for number in 4..FILES as c_int {
            unsafe { libc::close(number) };
        }
        bombed
    }),
    ("write to a file without end", |_| {
        let page = [1_u8; 4096];
        bomb(FILE_SIZE / 4096, || {
            let written = unsafe { libc::write(FILE, page.as_ptr().cast(), page.len()) };
            got(written as c_long).map(drop)
        })
    }),
    ("make a file longer without end", |_| {
        reply(unsafe { libc::ftruncate(FILE, FILE_SIZE as i64 + 1) })
    }),
];

/// Allowed by namespaces and ids, but refused by the filter.
const FILTERED: &[Attempt] = &[
    ("open a Unix socket", |_| socket_of_unix().map(drop)),
    ("connect by path, even to its own socket", |_| {
        connect_to(*MADE_BEFORE.get().unwrap(), OWN)
    }),
    ("connect by path to another VM's socket", |_| {
        let refused = connect_to(*MADE_BEFORE.get().unwrap(), "../victim/vsock.sock_1024");
        match refused {
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => Err(error),
            // There is no such path here, but the filter must have refused it before.
            _ => Ok(()),
        }
    }),
    ("open a vsock socket", |_| {
        reply(unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0) })
    }),
    ("open a network socket", |_| {
        reply(unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0) })
    }),
    ("talk to the kernel by netlink", |_| {
        reply(unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW, 0) })
    }),
    ("load a BPF program", |_| {
        call(libc::SYS_bpf, [0, 0, 0, 0, 0, 0])
    }),
    ("create an io_uring", |_| {
        call(libc::SYS_io_uring_setup, [1, 0, 0, 0, 0, 0])
    }),
    ("open performance counters", |_| {
        call(libc::SYS_perf_event_open, [0, 0, -1, -1, 0, 0])
    }),
    ("add a key", |_| call(libc::SYS_keyctl, [0, -3, 0, 0, 0, 0])),
    ("read the kernel's log", |_| {
        call(libc::SYS_syslog, [10, 0, 0, 0, 0, 0])
    }),
    ("execute itself", |_| {
        call(
            libc::SYS_execveat,
            [1, c"".as_ptr() as _, 0, 0, libc::AT_EMPTY_PATH.into(), 0],
        )
    }),
    ("make memory executable", |_| {
        let rwx = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let mapped = unsafe { libc::mmap(ptr::null_mut(), 4096, rwx, flags, -1, 0) };
        match mapped == libc::MAP_FAILED {
            true => Err(io::Error::last_os_error()),
            false => Ok(()),
        }
    }),
];

fn path(path: &str, act: impl FnOnce(*const libc::c_char) -> c_int) -> Outcome {
    let path = CString::new(path)?;
    reply(act(path.as_ptr()))
}

fn open(name: &str, flags: c_int) -> Outcome {
    path(name, |path| unsafe { libc::open(path, flags, 0o600) })
}

/// Does anything exist there?
fn list(folder: &str) -> Outcome {
    let none = || io::Error::from_raw_os_error(libc::ENOENT);
    let first = std::fs::read_dir(folder)?.next();
    first.ok_or_else(none)?.map(drop)
}

fn mount(what: &std::ffi::CStr, at: &std::ffi::CStr, kind: &std::ffi::CStr, flags: u64) -> Outcome {
    reply(unsafe {
        libc::mount(
            what.as_ptr(),
            at.as_ptr(),
            kind.as_ptr(),
            flags,
            ptr::null(),
        )
    })
}

fn unshare(what: c_int) -> Outcome {
    reply(unsafe { libc::unshare(what) })
}

/// Tries to raise a limit to twice its value.
fn raise(limit: libc::__rlimit_resource_t) -> Outcome {
    let mut now: libc::rlimit = unsafe { zeroed() };
    reply(unsafe { libc::getrlimit(limit, &mut now) })?;
    let higher = now.rlim_max.saturating_mul(2).saturating_add(1);
    let more = libc::rlimit {
        rlim_cur: higher,
        rlim_max: higher,
    };
    reply(unsafe { libc::setrlimit(limit, &more) })
}

/// The loopback interface, which is down.
fn interface_up(_: &Aims) -> Outcome {
    let socket = got(unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM, 0) }.into())?;
    let mut request: libc::ifreq = unsafe { zeroed() };
    request.ifr_name[0] = b'l' as _;
    request.ifr_name[1] = b'o' as _;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as _;
    let done = reply(unsafe { libc::ioctl(socket as c_int, libc::SIOCSIFFLAGS, &request) });
    unsafe { libc::close(socket as c_int) };
    done
}

/// Repeats past the bound, unless it is stopped.
fn bomb(bound: u64, mut one: impl FnMut() -> Outcome) -> Outcome {
    for _ in 0..=bound {
        one()?;
    }
    Ok(())
}
