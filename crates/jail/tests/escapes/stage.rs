//! Two jails, and targets outside of them that must not be reached.
#![allow(unsafe_code)] // Shared memory of System V, and the victim's secret.

use jiffy_jail::{Cgroup, Cgroups, Identities, Jail, Level, Limits, Program, Share};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Limit of descriptors of a jailed program in this test.
pub const FILES: u64 = 64;
/// Limit of threads and processes.
pub const PROCESSES: u64 = 16;
/// Limit of memory in bytes, if there are control groups.
pub const MEMORY: u64 = 64 << 20;
/// Limit of a file's size in bytes.
pub const FILE_SIZE: u64 = 1 << 20;
/// A value at a known address of the victim.
pub const SECRET: u64 = 0x5ec2_e75e_c2e7_5ec2;
/// A System V shared memory segment of the host.
pub const SHM_KEY: i32 = 0x6a69_6666;

static TREASURE: u64 = SECRET;

/// Uses four times its memory limit.
pub fn be_memory_bomb() {
    let mut all = vec![0_u8; 4 * MEMORY as usize];
    for page in all.chunks_mut(4096) {
        page[0] = 1;
    }
    std::hint::black_box(&all);
}

/// Holds the secret in memory until it is killed.
pub fn be_victim() {
    println!("{:p}", &raw const TREASURE);
    loop {
        std::thread::park();
    }
}

struct Jailed(u32);

impl Jailed {
    fn wait(self) -> Option<rustix::process::WaitStatus> {
        let pid = rustix::process::Pid::from_raw(self.0 as i32);
        std::mem::forget(self);
        let waited = rustix::process::waitpid(pid, rustix::process::WaitOptions::empty());
        waited.unwrap().map(|(_, status)| status)
    }
}

impl Drop for Jailed {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_raw(self.0 as i32).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
    }
}

fn start(jail: &Jail<'_>, arguments: &[&str], handed: &[BorrowedFd<'_>]) -> (Jailed, OwnedFd) {
    let (ours, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let this = File::open("/proc/self/exe").unwrap();
    let mut all = vec![OsStr::new("escapes")];
    all.extend(arguments.iter().map(OsStr::new));
    let pid = jail.launch(&Program {
        file: this.as_fd(),
        arguments: &all,
        environment: &[],
        output: theirs.as_fd(),
        descriptors: handed,
        own_proc: true,
    });
    let pid = pid.unwrap_or_else(|error| panic!("{error}: {}", error.io()));
    (Jailed(pid), ours)
}

/// A socket that only this group may connect to; with `None`, only its owner.
fn listen(path: &Path, group: Option<u32>) -> UnixListener {
    let listener = UnixListener::bind(path).unwrap();
    let mode = if group.is_some() { 0o660 } else { 0o600 };
    std::os::unix::fs::chown(path, None, group).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    listener
}

fn folder(path: &Path, group: u32) {
    fs::create_dir(path).unwrap();
    std::os::unix::fs::chown(path, None, Some(group)).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o710)).unwrap();
}

struct World<'a> {
    level: Level,
    group: u32,
    run: &'a Path,
}

/// The jail of the VM with this run folder.
fn jail_of<'a>(
    world: &World<'a>,
    folder: &'a Path,
    user: u32,
    cgroup: Option<&'a Cgroup>,
) -> Jail<'a> {
    Jail {
        level: world.level,
        user,
        group: world.group,
        folder,
        run: world.run,
        limits: Limits {
            files: FILES,
            processes: PROCESSES,
            file_size: Some(FILE_SIZE),
        },
        cgroup: cgroup.map(AsFd::as_fd),
    }
}

/// As [`run`], by a user without privileges, if this is root.
pub fn run_unprivileged() {
    const NOBODY: u32 = 65534;
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let copy = folder.path().join("escapes");
    fs::copy("/proc/self/exe", &copy).unwrap();
    let mut again = Command::new(&copy);
    let ended = again
        .arg("unprivileged")
        .current_dir("/")
        .uid(NOBODY)
        .gid(NOBODY);
    assert!(ended.status().unwrap().success());
}

/// Sets everything up, and starts the attacker.
pub fn run() {
    let base = tempfile::tempdir().unwrap();
    let path = |name: &str| base.path().join(name);
    let ids = Identities::new(jiffy_jail::identity::FIRST, 16);
    let is_root = rustix::process::geteuid().is_root();
    let group = |id: u32| match is_root {
        true => id,
        false => rustix::process::getegid().as_raw(),
    };
    folder(&path("run"), group(ids.shared_group()));
    let run = path("run");
    Jail::prepare(&run).unwrap();
    let (level, refused) = Jail::strongest_level(&run, ids.shared_group());
    for error in refused {
        println!("not here: {error}: {}", error.io());
    }
    println!("jail: {level}");
    let expected = match is_root {
        true => Level::OwnUser,
        false => Level::UserNamespace,
    };
    assert_eq!(level, expected);

    let (victims, attackers) = (ids.take().unwrap(), ids.take().unwrap());
    folder(&run.join("vms"), group(ids.shared_group()));
    folder(&run.join("vms/victim"), group(victims.id()));
    folder(&run.join("vms/own"), group(attackers.id()));
    let _sockets = [
        listen(&run.join("jiffyd.sock"), None),
        listen(&run.join("pager.sock"), None),
        listen(&run.join("vms/victim/control.sock"), None),
        listen(
            &run.join("vms/victim/vsock.sock_1024"),
            Some(group(victims.id())),
        ),
        listen(&run.join("vms/own/control.sock"), None),
    ];
    let own = listen(
        &run.join("vms/own/vsock.sock_1024"),
        Some(group(attackers.id())),
    );
    fs::write(path("public"), "public").unwrap();
    fs::set_permissions(base.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(path("public"), fs::Permissions::from_mode(0o666)).unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    udp.set_nonblocking(true).unwrap();
    let name = format!("jiffy-jail-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let _abstract = UnixListener::bind_addr(&address).unwrap();
    // SAFETY: makes, and at the end removes, a segment of the host's.
    let shm = unsafe { libc::shmget(SHM_KEY, 4096, libc::IPC_CREAT | 0o666) };
    assert!(shm >= 0, "{}", std::io::Error::last_os_error());

    let cgroups = Cgroups::of_host("jiffy-escapes")
        .inspect_err(|error| println!("not here: {error}"))
        .ok();
    let group_of_its_own = || {
        let cgroup = cgroups.as_ref()?.make(PROCESSES).unwrap();
        let share = Share {
            memory: MEMORY,
            processors: 1,
            is_last: false,
        };
        cgroup.set_limits(&share).unwrap();
        Some(cgroup)
    };
    let world = World {
        level,
        group: ids.shared_group(),
        run: &run,
    };
    let here = run.join("vms/own");
    let (victim, says) = start(
        &jail_of(&world, &run.join("vms/victim"), victims.id(), None),
        &["victim"],
        &[],
    );
    let mut treasure = String::new();
    BufReader::new(File::from(says))
        .read_line(&mut treasure)
        .unwrap();

    let public = path("public");
    for filter in ["jail", "filter"] {
        let kept = tempfile::tempfile().unwrap();
        let aims = [
            "attacker",
            filter,
            &victim.0.to_string(),
            treasure.trim(),
            &std::process::id().to_string(),
            public.to_str().unwrap(),
            &tcp.local_addr().unwrap().port().to_string(),
            &udp.local_addr().unwrap().port().to_string(),
            &name,
        ];
        let cgroup = group_of_its_own();
        let jail = jail_of(&world, &here, attackers.id(), cgroup.as_ref());
        let (attacker, says) = start(&jail, &aims, &[kept.as_fd()]);
        let mut said = String::new();
        File::from(says).read_to_string(&mut said).unwrap();
        let status = attacker.wait().unwrap();
        print!("{said}");
        assert!(status.exit_status() == Some(0), "{status:?}");
        let failed = said
            .lines()
            .filter(|line| line.starts_with("held: "))
            .count();
        let escaped: Vec<&str> = said
            .lines()
            .filter(|line| line.starts_with("ESCAPED"))
            .collect();
        assert!(escaped.is_empty(), "with {filter}: {escaped:#?}");
        assert!(failed >= 60, "only {failed} were tried");
        assert!(said.lines().any(|line| line == "done"));
        assert!(kept.metadata().unwrap().len() <= FILE_SIZE);
        own.set_nonblocking(true).unwrap();
        own.accept().expect("its own socket was to be reached");
        let mut datagram = [0];
        assert!(udp.recv(&mut datagram).is_err(), "a datagram came");
    }
    if let Some(cgroup) = group_of_its_own() {
        let jail = jail_of(&world, &here, attackers.id(), Some(&cgroup));
        let (attacker, _) = start(&jail, &["memory bomb"], &[]);
        let status = attacker.wait().unwrap();
        assert_eq!(status.terminating_signal(), Some(libc::SIGKILL));
        assert!(cgroup.was_oom_killed(), "it was the kernel");
        println!("held: use memory without end");
        let folder = cgroup.folder().to_owned();
        drop(cgroup);
        assert!(!folder.exists(), "its group is gone");
    }
    if let Some(cgroups) = &cgroups {
        // An unknown group, like that of a monitor which the daemon forgot.
        let lost = cgroups.make(PROCESSES).unwrap();
        // Its output stays open: it would end at the first line that nobody can read.
        let (stray, _says) = start(
            &jail_of(&world, &here, attackers.id(), Some(&lost)),
            &["victim"],
            &[],
        );
        let found = cgroups.of_process(stray.0).unwrap();
        assert_eq!(found.folder(), lost.folder());
        let high = || fs::read_to_string(found.folder().join("memory.high")).unwrap();
        let has = |name| fs::read_to_string(found.folder().join(name)).unwrap();
        let last = Share {
            memory: MEMORY,
            processors: 1,
            is_last: true,
        };
        found.set_limits(&last).unwrap();
        let io = found.folder().join("io.weight").exists();
        if io {
            assert_eq!(has("io.weight").trim(), "default 1");
        }
        found.set_processors(3).unwrap();
        assert_eq!(has("cpu.max").trim(), "400000 100000");
        assert_eq!(has("cpu.weight").trim(), "300");
        if io {
            assert_eq!(has("io.weight").trim(), "default 300");
        }
        found.set_processors(1).unwrap();
        assert_eq!(has("cpu.weight").trim(), "100");
        cgroups.limit_growth(stray.0, Some(1 << 20)).unwrap();
        let limited: u64 = high().trim().parse().unwrap();
        assert!(limited >= 1 << 20, "{limited}");
        cgroups.limit_growth(stray.0, None).unwrap();
        assert_eq!(high(), "max\n");
        drop((found, lost));
        cgroups.kill_unknown();
        assert_eq!(
            stray.wait().unwrap().terminating_signal(),
            Some(libc::SIGKILL)
        );
        cgroups.kill_unknown();
        cgroups.remove();
        assert!(!cgroups.folder().exists(), "nothing is left");
    }
    // SAFETY: as above.
    unsafe { libc::shmctl(shm, libc::IPC_RMID, std::ptr::null_mut()) };
    assert_eq!(fs::read(path("public")).unwrap(), b"public");
    let alive = rustix::process::test_kill_process(
        rustix::process::Pid::from_raw(victim.0 as i32).unwrap(),
    );
    assert!(alive.is_ok(), "the victim lives");
    println!(
        "test result: ok. 1 passed; 0 failed; 0 ignored; a_compromised_program_reaches_nothing"
    );
}
