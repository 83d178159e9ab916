//! Escape attempts of a compromised process. Each reports whether it succeeded.
#![allow(unsafe_code)] // System calls, whatever they do.

use super::calls::{call, got, reply};
use super::{SECRET, folder};
use jiffy_jail::rooted::Rooted;
use jiffy_sys::fork::{Fork, fork};
use jiffy_sys::sealed::{Sealed, Unsealed};
use libc::{c_int, c_long};
use std::ffi::CString;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::ptr;

/// What the attacker knows: everything about its environment.
pub struct Aims {
    /// The folder that it may access.
    pub own: PathBuf,
    /// A folder that it may not access.
    pub other: PathBuf,
    victim: i32,
    address: usize,
    tcp: u16,
    /// What a server of a folder has.
    pub rooted: Option<Rooted>,
}

/// It succeeded, or the error.
pub type Outcome = Result<(), io::Error>;
pub type Attempt = (&'static str, fn(&Aims) -> Outcome);

/// Confines itself, and makes all attempts, one line of output each.
pub fn run(who: &str, aims: &[&str]) {
    let [own, other, victim, address, tcp] = aims else {
        panic!("{aims:?}");
    };
    let mut aims = Aims {
        own: own.into(),
        other: other.into(),
        victim: victim.parse().unwrap(),
        address: usize::from_str_radix(address.trim_start_matches("0x"), 16).unwrap(),
        tcp: tcp.parse().unwrap(),
        rooted: None,
    };
    fs::write(aims.own.join("file"), "own").unwrap();
    let mut open = fs::File::open(aims.own.join("file")).unwrap();
    let (bounded, filtered) = match who {
        "pager" => (
            jiffy_pager::confinement::enter(std::slice::from_ref(&aims.own)).unwrap(),
            true,
        ),
        "disk" => (jiffy_disk::confinement::of_server(&aims.own).unwrap(), true),
        "monitor" => {
            let bounded = jiffy_disk::confinement::of_server(&aims.own).unwrap();
            jiffy_disk::confinement::of_monitor().unwrap();
            (bounded, true)
        }
        "origins" => (jiffy_pager::origins::confinement::enter().unwrap(), true),
        "files" | "files-read-only" | "files-squashed" => {
            let rooted = folder::confine(who, &aims.own);
            let bounded = rooted.has_landlock;
            aims.rooted = Some(rooted);
            (bounded, true)
        }
        "import" => {
            jiffy_import::confinement::enter().unwrap();
            jiffy_import::confinement::filter().unwrap();
            // The filter alone keeps files out of reach.
            (true, true)
        }
        _ => panic!("{who}"),
    };
    // Its legitimate work still succeeds.
    if let Some(rooted) = &aims.rooted {
        folder::work(rooted, who == "files-read-only");
    } else if who == "origins" {
        assert_eq!(fs::read(aims.own.join("file")).unwrap(), b"own");
        TcpStream::connect(("localhost", aims.tcp)).unwrap();
        std::thread::spawn(|| ()).join().unwrap();
        Unsealed::new("bytes", 10).unwrap().seal().unwrap();
    } else if who == "import" {
        let mut text = String::new();
        open.read_to_string(&mut text).unwrap();
        assert_eq!(text, "own");
        std::thread::spawn(|| ()).join().unwrap();
    } else if who == "disk" {
        match fork().unwrap() {
            Fork::Child => std::process::exit(0),
            Fork::Parent(child) => assert!(child.wait().unwrap().success()),
        }
        fs::remove_file(aims.own.join("file")).unwrap();
    } else if who != "monitor" {
        assert_eq!(fs::read(aims.own.join("file")).unwrap(), b"own");
        fs::rename(aims.own.join("file"), aims.own.join("renamed")).unwrap();
    }
    if who == "pager" {
        let bytes = Unsealed::new("bytes", 10).unwrap().seal().unwrap();
        Sealed::map(&bytes, 0..10).unwrap();
        UnixListener::bind(aims.own.join("socket")).unwrap();
        std::thread::spawn(|| ()).join().unwrap();
    }
    let files_are_bounded = bounded || who == "monitor";
    // It has to read all files, and to connect to registries.
    let only_reads = who == "origins";
    let mut attempts = ALWAYS.to_vec();
    if !files_are_bounded {
        say("no Landlock here: files are not tried\n");
    }
    for (group, applies) in [
        (FILES, files_are_bounded),
        (CALLS, filtered),
        (PROCESSES, filtered && who != "disk"),
        (READING, files_are_bounded && !only_reads),
        (NETWORKS, filtered && !only_reads),
        (folder::BEYOND, aims.rooted.is_some()),
        (folder::CHANGES, who == "files-read-only"),
        (ALONE, who == "import"),
    ] {
        if applies {
            attempts.extend(group);
        }
    }
    for (name, attempt) in attempts {
        say(&match attempt(&aims) {
            Ok(()) => format!("ESCAPED: {who}: {name}\n"),
            Err(error) => format!("held: {who}: {name}: {error}\n"),
        });
    }
    say("done\n");
}

fn say(line: &str) {
    io::stdout().write_all(line.as_bytes()).unwrap();
}

/// Refused by Landlock, also where all files can be read.
const FILES: &[Attempt] = &[
    ("write a file that all may write", |aims| {
        fs::write(aims.other.join("public"), "x")
    }),
    ("shorten a file that all may write", |aims| {
        let path = c_path(&aims.other.join("public"));
        // SAFETY: a string.
        reply(unsafe { libc::truncate(path.as_ptr(), 0) })
    }),
    ("make a file elsewhere", |aims| {
        fs::write(aims.other.join("new"), "x")
    }),
    ("make a folder elsewhere", |aims| {
        fs::create_dir(aims.other.join("new"))
    }),
    ("move another file to itself", |aims| {
        fs::rename(aims.other.join("public"), aims.own.join("public"))
    }),
    ("link another file to itself", |aims| {
        fs::hard_link(aims.other.join("public"), aims.own.join("public"))
    }),
    ("remove another file", |aims| {
        fs::remove_file(aims.other.join("public"))
    }),
    ("remove another's socket", |aims| {
        fs::remove_file(aims.other.join("api.sock"))
    }),
    ("read another's environment", |aims| {
        fs::read(format!("/proc/{}/environ", aims.victim)).map(drop)
    }),
    ("open another's memory", |aims| {
        fs::read(format!("/proc/{}/mem", aims.victim)).map(drop)
    }),
    ("open the host's memory", |_| {
        fs::File::open("/proc/kcore").map(drop)
    }),
    ("change the kernel's settings", |_| {
        fs::OpenOptions::new()
            .write(true)
            .open("/proc/sys/kernel/hostname")
            .map(drop)
    }),
    ("execute a shell", |_| {
        Command::new("/bin/sh").args(["-c", ":"]).status().map(drop)
    }),
    ("execute a program of its own", |aims| {
        let program = aims.own.join("program");
        fs::copy("/proc/self/exe", &program)?;
        Command::new(program).arg("--list").status().map(drop)
    }),
];

/// Reads beyond its folder, refused by Landlock.
const READING: &[Attempt] = &[
    ("read the host's users", |_| {
        fs::read("/etc/passwd").map(drop)
    }),
    ("read a file that all may read", |aims| {
        fs::read(aims.other.join("public")).map(drop)
    }),
    ("climb out of its folder", |aims| {
        fs::read(aims.own.join("../other/public")).map(drop)
    }),
    ("follow a link out of its folder", |aims| {
        let link = aims.own.join("link");
        std::os::unix::fs::symlink(aims.other.join("public"), &link)?;
        fs::read(link).map(drop)
    }),
    ("list another folder", |aims| {
        fs::read_dir(&aims.other).map(drop)
    }),
];

/// Refused for lack of capabilities, or by Landlock without files.
const ALWAYS: &[Attempt] = &[
    ("trace another process", |aims| {
        let none = ptr::null_mut::<libc::c_void>();
        // SAFETY: no memory of this process is passed.
        got(unsafe { libc::ptrace(libc::PTRACE_ATTACH, aims.victim, none, none) }).map(drop)
    }),
    ("make a device", |aims| {
        let path = c_path(&aims.own.join("device"));
        // SAFETY: a string.
        reply(unsafe { libc::mknod(path.as_ptr(), libc::S_IFBLK | 0o600, libc::makedev(8, 0)) })
    }),
    ("mount a folder", |aims| {
        let (from, to) = (c_path(&aims.other), c_path(&aims.own));
        let none = ptr::null();
        // SAFETY: strings.
        reply(unsafe { libc::mount(from.as_ptr(), to.as_ptr(), none, libc::MS_BIND, none.cast()) })
    }),
    ("change its root", |aims| {
        let path = c_path(&aims.own);
        // SAFETY: a string.
        reply(unsafe { libc::chroot(path.as_ptr()) })
    }),
    ("create a mount namespace", |_| {
        // SAFETY: a number.
        reply(unsafe { libc::unshare(libc::CLONE_NEWNS) })
    }),
    ("gain all capabilities", |_| {
        let header = [0x2008_0522_u32, 0];
        let all = [u32::MAX; 6];
        let [header, all] = [header.as_ptr(), all.as_ptr()];
        call(libc::SYS_capset, [header as _, all as _, 0, 0, 0, 0])
    }),
    ("dump its memory into a file", |_| {
        let more = libc::rlimit {
            rlim_cur: libc::RLIM_INFINITY,
            rlim_max: libc::RLIM_INFINITY,
        };
        // SAFETY: a structure that outlives the call.
        reply(unsafe { libc::setrlimit(libc::RLIMIT_CORE, &more) })
    }),
    ("clear no-new-privileges", |_| {
        // SAFETY: numbers.
        reply(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0) })
    }),
    ("load a module", |_| {
        call(libc::SYS_init_module, [0, 0, c"".as_ptr() as _, 0, 0, 0])
    }),
    ("load a kernel", |_| call(libc::SYS_kexec_load, [0; 6])),
    ("restart the host", |_| {
        call(libc::SYS_reboot, [0xfee1_dead, 672_274_793, 0, 0, 0, 0])
    }),
    ("use ports of devices", |_| {
        call(libc::SYS_iopl, [3, 0, 0, 0, 0, 0])
    }),
    ("read another's memory", |aims| {
        let mut found = 0_u64;
        let vector = |base: *mut libc::c_void| libc::iovec {
            iov_base: base,
            iov_len: 8,
        };
        let ours = vector((&raw mut found).cast());
        let theirs = vector(aims.address as _);
        // SAFETY: `found` has eight bytes.
        got(unsafe { libc::process_vm_readv(aims.victim, &ours, 1, &theirs, 1, 0) } as _)?;
        assert_eq!(found, SECRET);
        Ok(())
    }),
];

/// Refused by the system call filter.
const CALLS: &[Attempt] = &[
    ("signal another process", |aims| {
        // SAFETY: numbers.
        reply(unsafe { libc::kill(aims.victim, libc::SIGTERM) })
    }),
    ("limit another process", |aims| {
        let none = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: a structure that outlives the call.
        reply(unsafe { libc::prlimit(aims.victim, libc::RLIMIT_NOFILE, &none, ptr::null_mut()) })
    }),
    ("slow another process down", |aims| {
        // SAFETY: numbers.
        reply(unsafe { libc::setpriority(libc::PRIO_PROCESS, aims.victim as _, 19) })
    }),
    ("call the API", |aims| {
        UnixStream::connect(aims.other.join("api.sock")).map(drop)
    }),
    ("listen on TCP", |_| {
        TcpListener::bind("127.0.0.1:0").map(drop)
    }),
    ("open a vsock socket", |_| socket(libc::AF_VSOCK)),
    ("open a packet socket", |_| socket(libc::AF_PACKET)),
    ("execute itself", |_| {
        let empty = c"".as_ptr() as c_long;
        let flags = c_long::from(libc::AT_EMPTY_PATH);
        call(libc::SYS_execveat, [1, empty, 0, 0, flags, 0])
    }),
    ("make memory executable", |_| {
        let rwx = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new memory.
        let mapped = unsafe { libc::mmap(ptr::null_mut(), 4096, rwx, flags, -1, 0) };
        match mapped == libc::MAP_FAILED {
            true => Err(io::Error::last_os_error()),
            false => Ok(()),
        }
    }),
    ("type at a terminal", |_| {
        // SAFETY: a byte.
        reply(unsafe { libc::ioctl(0, libc::TIOCSTI, c"x".as_ptr()) })
    }),
    ("create a userfaultfd", |_| {
        call(libc::SYS_userfaultfd, [0; 6])
    }),
    ("load a BPF program", |_| call(libc::SYS_bpf, [0; 6])),
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
];

/// Refused to those that need no processes.
const PROCESSES: &[Attempt] = &[
    ("make a process", |_| {
        // SAFETY: the child ends at once.
        match unsafe { libc::fork() } {
            0 => unsafe { libc::_exit(0) },
            pid => got(pid.into()).map(drop),
        }
    }),
    ("open a pidfd of another process", |aims| {
        call(libc::SYS_pidfd_open, [aims.victim.into(), 0, 0, 0, 0, 0])
    }),
];

/// Networks, refused by the system call filter.
const NETWORKS: &[Attempt] = &[
    ("connect over TCP", |aims| {
        TcpStream::connect(("127.0.0.1", aims.tcp)).map(drop)
    }),
    ("open a datagram socket", |_| {
        UdpSocket::bind("127.0.0.1:0").map(drop)
    }),
    ("talk to the kernel by netlink", |_| {
        socket(libc::AF_NETLINK)
    }),
];

/// What only a process that has all its files open already must not do.
const ALONE: &[Attempt] = &[
    ("read its own file by name", |aims| {
        fs::read(aims.own.join("file")).map(drop)
    }),
    ("learn that a file exists", |aims| {
        fs::metadata(aims.other.join("public")).map(drop)
    }),
    ("learn its working directory", |_| {
        std::env::current_dir().map(drop)
    }),
    ("signal another process by a file", |aims| {
        // SAFETY: numbers.
        reply(unsafe { libc::fcntl(1, libc::F_SETOWN, aims.victim) })
    }),
    ("choose the signal of a file", |_| {
        // F_SETSIG of linux/fcntl.h.
        // SAFETY: numbers.
        reply(unsafe { libc::fcntl(1, 10, libc::SIGKILL) })
    }),
    ("duplicate a descriptor", |_| {
        // SAFETY: numbers.
        reply(unsafe { libc::fcntl(1, libc::F_DUPFD, 0) })
    }),
    ("open a file in memory", |_| {
        call(libc::SYS_memfd_create, [c"x".as_ptr() as _, 0, 0, 0, 0, 0])
    }),
    ("change the mode of an open file", |_| {
        // SAFETY: numbers.
        reply(unsafe { libc::fchmod(1, 0o666) })
    }),
    ("make a pair of sockets", |_| UnixStream::pair().map(drop)),
    ("outlive the process that started it", |_| {
        // SAFETY: numbers.
        reply(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, 0, 0, 0, 0) })
    }),
    ("have more descriptors", |_| {
        let more = libc::rlimit {
            rlim_cur: 64,
            rlim_max: 64,
        };
        // SAFETY: a structure that outlives the call.
        reply(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &more) })
    }),
    ("use all of the host's memory", |_| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: new memory.
        let mapped = unsafe { libc::mmap(ptr::null_mut(), 5 << 30, access, flags, -1, 0) };
        match mapped == libc::MAP_FAILED {
            true => Err(io::Error::last_os_error()),
            false => Ok(()),
        }
    }),
];

fn socket(family: c_int) -> Outcome {
    // SAFETY: numbers.
    reply(unsafe { libc::socket(family, libc::SOCK_STREAM, 0) })
}

pub fn c_path(path: &std::path::Path) -> CString {
    CString::new(path.to_str().unwrap()).unwrap()
}
