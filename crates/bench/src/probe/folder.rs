//! Measures a guest's work in a shared folder.

use super::many::idle_ns;
use super::marks::Marks;
use super::{Running, command, cpu_ns, kvm_counters, now_ns, since};
use crate::folder::{FOLDER, LISTEN_DESCRIPTOR, SERVER_DESCRIPTOR, SOCKET};
use crate::plan::{FolderServer, Sample};
use crate::work::{DATA, FILES, MEASURED, PIECE, Part, WARM_UP, Work};
use anyhow::{Context, Result, ensure};
use jiffy_sys::durable;
use jiffy_sys::spawn::{Detached, Environment, spawn_detached};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::mount::{MountFlags, mount};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;

const JIFFY_FILES: &str = "/lib/jiffy/jiffy-files";

/// Measures from the guest's first mark to its second. The sample's time is that in which the
/// machine's processor was busy, for each unit of the work.
///
/// # Errors
///
/// If the folder can't be filled, its server can't be started, or the VMM ends before its second
/// mark.
pub fn measure(run: u32, argv: &[String], server: &FolderServer, work: Work) -> Result<Sample> {
    prepare(run, work)?;
    let server = Server::start(server)?;
    let (mut child, mut marks) = Marks::start(argv)?;
    let pid = child.0.id();
    marks.next(&mut child)?;
    // The guest waits meanwhile.
    let before = (kvm_counters(pid), cpu_ns(pid)?, server.cpu_ns()?);
    let (idle, start) = (idle_ns()?, now_ns());
    marks.next(&mut child)?;
    let (end, idle) = (now_ns(), idle_ns()? - idle);
    let mut counters = since(kvm_counters(pid), &before.0);
    counters.insert("cpu_ns".into(), cpu_ns(pid)? - before.1);
    counters.insert("server_cpu_ns".into(), server.cpu_ns()? - before.2);
    Ok(Sample {
        nanoseconds: (end - start).saturating_sub(idle) / work.units(),
        counters,
        ..Sample::default()
    })
}

/// Makes what the guest finds in the folder.
fn prepare(run: u32, work: Work) -> Result<()> {
    let folder = Path::new(FOLDER);
    fs::create_dir_all(folder)?;
    if run == 0 && !fs::read_to_string("/proc/mounts")?.contains(&format!(" {FOLDER} ")) {
        mount("tmpfs", FOLDER, "tmpfs", MountFlags::empty(), c"")?;
    }
    for part in [WARM_UP, MEASURED] {
        let place = folder.join(part.name);
        durable::remove_any(&place)?;
        fs::create_dir(&place)?;
        fill(&place, part, work)?;
    }
    Ok(())
}

fn fill(place: &Path, part: Part, work: Work) -> Result<()> {
    let files = place.join(FILES);
    fs::create_dir(&files)?;
    match work {
        Work::Write | Work::Create => {}
        Work::Read => {
            let mut file = File::create_new(place.join(DATA))?;
            let piece = vec![1; PIECE];
            for _ in 0..part.bytes / PIECE as u64 {
                file.write_all(&piece)?;
            }
        }
        Work::Stat | Work::List | Work::Remove => {
            for number in 0..part.files {
                File::create_new(files.join(number.to_string()))?;
            }
        }
    }
    Ok(())
}

/// The folder's server.
enum Server {
    /// Of Jiffy; the VMM inherits the socket, without close-on-exec.
    Jiffy { pid: Pid, _vmms: OwnedFd },
    /// Of QEMU, with its own processes.
    Virtiofsd(Running),
}

impl Server {
    fn start(which: &FolderServer) -> Result<Server> {
        let FolderServer::Virtiofsd(argv) = which else {
            return Server::start_jiffys();
        };
        durable::remove(Path::new(SOCKET))?;
        fs::create_dir_all("/var/run")?;
        let listener = UnixListener::bind(SOCKET).context(SOCKET)?;
        let _inherited = inherited(listener.as_fd(), LISTEN_DESCRIPTOR)?;
        let mut command = command(argv)?;
        let child = command.spawn().with_context(|| argv.join(" "))?;
        Ok(Server::Virtiofsd(Running(child)))
    }

    fn start_jiffys() -> Result<Server> {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (vmms, servers) = socketpair(AddressFamily::UNIX, kind, flags, None)?;
        let folder = File::open(FOLDER)?;
        let arguments: Vec<&OsStr> = jiffy_wire::files::arguments(false, false)
            .map(OsStr::new)
            .collect();
        let pid = spawn_detached(&Detached {
            program: Path::new(JIFFY_FILES),
            arguments: &arguments,
            directory: Path::new("/"),
            output: std::io::stderr().as_fd(),
            descriptors: &[servers.as_fd(), folder.as_fd()],
            environment: Environment::Empty,
        })
        .context(JIFFY_FILES)?;
        let pid = Pid::from_raw(pid as i32).context("a process id")?;
        let _vmms = inherited(vmms.as_fd(), SERVER_DESCRIPTOR)?;
        Ok(Server::Jiffy { pid, _vmms })
    }

    /// CPU time of its processes, nanoseconds: virtiofsd's work is done by a child.
    fn cpu_ns(&self) -> Result<u64> {
        let pid = match self {
            Server::Jiffy { pid, .. } => pid.as_raw_pid() as u32,
            Server::Virtiofsd(child) => child.0.id(),
        };
        let children = format!("/proc/{pid}/task/{pid}/children");
        let children = fs::read_to_string(&children).context(children)?;
        let children = children.split_whitespace().map(str::parse::<u32>);
        std::iter::once(Ok(pid))
            .chain(children)
            .map(|pid| cpu_ns(pid?))
            .sum()
    }
}

impl Drop for Server {
    /// It would end with its VMM, which may still be running after a failure.
    fn drop(&mut self) {
        if let Server::Jiffy { pid, .. } = self {
            let _ = kill_process(*pid, Signal::KILL);
            let _ = rustix::io::retry_on_intr(|| waitpid(Some(*pid), WaitOptions::empty()));
        }
    }
}

/// The same file with this number, which children inherit.
fn inherited(file: impl AsFd, number: i32) -> Result<OwnedFd> {
    // The first free number from this one on.
    let same = fcntl_dupfd_cloexec(file, number)?;
    ensure!(same.as_raw_fd() == number, "descriptor {number} is in use");
    fcntl_setfd(&same, FdFlags::empty())?;
    Ok(same)
}
