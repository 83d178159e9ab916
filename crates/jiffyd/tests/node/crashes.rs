//! A daemon that is killed wherever it changes a file.

use crate::client::{Answer, PATIENCE, connect, request};
use crate::daemon::{Daemon, eventually, named, shell, tar_of, vm};
use crate::pulls::kept;
use jiffy_wire::api::{CreateVm, Image, Snapshot, Vm, VmState};
use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// System calls after which a file, a name or a folder is another.
const CALLS: &str = "rename,renameat,renameat2,link,linkat,unlink,unlinkat,mkdir,mkdirat,rmdir,\
                     fsync,fdatasync,ftruncate,copy_file_range";
/// More than any operation's thread makes of them.
pub const MOST: u32 = 60;
/// What strace has to find all threads: it looks once, and does not see one that
/// a thread makes just before it is found itself.
const ATTACHING: Duration = Duration::from_secs(10);

/// Somebody who waits for the daemon to make its so-manieth call; who is made
/// by it is followed, too.
pub struct Doom(Child);

impl Doom {
    pub fn at(daemon: &mut Daemon, nth: u32, calls: &str) -> Doom {
        let until = Instant::now() + PATIENCE;
        loop {
            let doom = Doom::begin(daemon.pid(), nth, calls);
            if doom.watches_all(daemon) {
                return doom;
            }
            assert!(Instant::now() < until, "never: all threads are watched");
            drop(doom);
            // What it does by itself after its start makes such calls, too.
            if !daemon.is_up() {
                daemon.killed();
                daemon.up();
            }
        }
    }

    /// A daemon that has this befall it from its first call on.
    pub fn of(daemon: &Command, nth: u32, calls: &str) -> Command {
        let mut strace = Doom::strace(nth, calls);
        // As a grandchild: the daemon itself is what is started.
        strace.arg("-D").arg(daemon.get_program());
        strace.args(daemon.get_args());
        for (name, value) in daemon.get_envs() {
            strace.env(name, value.unwrap_or_default());
        }
        strace
    }

    fn strace(nth: u32, calls: &str) -> Command {
        let mut strace = Command::new("strace");
        strace
            .args(["-f", "-qq", "-o", "/dev/null", "-e"])
            .arg(format!("trace={calls}"))
            .arg("-e")
            .arg(format!("inject={calls}:signal=KILL:when={nth}"))
            .stdin(Stdio::null());
        strace
    }

    fn begin(pid: u32, nth: u32, calls: &str) -> Doom {
        let strace = Doom::strace(nth, calls)
            .arg("-p")
            .arg(pid.to_string())
            .stderr(Stdio::null())
            .spawn()
            .expect("strace is installed");
        Doom(strace)
    }

    /// False if some thread is overlooked, or the daemon is dead already.
    fn watches_all(&self, daemon: &mut Daemon) -> bool {
        let until = Instant::now() + ATTACHING;
        let tasks = format!("/proc/{}/task", daemon.pid());
        while daemon.is_up() && Instant::now() < until {
            let all = fs::read_dir(&tasks).unwrap().all(|task| {
                let status = task.unwrap().path().join("status");
                // It may just have ended.
                let text = fs::read_to_string(status).unwrap_or_default();
                !text.contains("TracerPid:\t0\n")
            });
            if all {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }
}

impl Drop for Doom {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn counter() -> CreateVm {
    vm(shell(
        "n=0; while true; do n=$((n+1)); echo $n; sleep 0.02; done",
    ))
}

/// Asks a daemon that may be killed meanwhile.
pub fn ask(daemon: &Daemon, method: &str, path: &str, body: &[u8]) -> std::io::Result<Answer> {
    let stream = connect(&daemon.socket())?;
    request(stream, &format!("{method} {path} HTTP/1.1"), body)
}

/// Has it done at its first, second, third … call, until it is done before.
/// What holds however far it came is asked each time of a new daemon.
fn killed_at_every_call(
    daemon: &mut Daemon,
    (path, body): (&str, &[u8]),
    holds: impl Fn(&Daemon, bool),
) {
    for nth in 1..MOST {
        let doom = Doom::at(daemon, nth, CALLS);
        let answer = ask(daemon, "POST", path, body);
        drop(doom);
        // It may die behind its answer, too, and what dies may be there for a moment yet.
        if answer.is_err() || ask(daemon, "GET", "/v1/info", b"").is_err() {
            eventually("the daemon is dead", || !daemon.is_up());
        }
        let is_done = answer.is_ok_and(|answer| answer.status == 200);
        if !daemon.is_up() {
            daemon.killed();
            daemon.up();
        }
        holds(daemon, is_done);
        if is_done {
            assert!(nth > 1, "{path} was done before it was killed");
            return;
        }
    }
    panic!("{path} makes more calls than {MOST}");
}

/// Nothing that was begun is left among what is kept.
fn nothing_half_made(daemon: &Daemon) {
    let vm = daemon.vm("box");
    for folder in [daemon.data.join("snapshots"), daemon.vm_folder(&vm.id)] {
        eventually("nothing half made is left", || {
            let names = fs::read_dir(&folder).into_iter().flatten().flatten();
            let mut names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
            !names.any(|name| name.starts_with('.'))
        });
    }
}

#[test]
fn a_snapshot_is_there_whole_or_not_at_all() {
    let mut daemon = Daemon::start();
    daemon.run_detached(named("box", counter())).json::<Vm>();
    let pid = daemon.vm("box").pid;
    let request = ("/v1/vms/box/snapshots", &b"{\"name\":\"one\"}"[..]);
    killed_at_every_call(&mut daemon, request, |daemon, done| {
        let vm = daemon.vm("box");
        assert_eq!((vm.state, vm.pid), (VmState::Running, pid));
        nothing_half_made(daemon);
        let made: Vec<Snapshot> = daemon.get("/v1/snapshots").json();
        assert!(made.len() == 1 || !done, "{made:?}");
        if !made.is_empty() {
            let child = CreateVm {
                from: Some("one".into()),
                ..named("child", CreateVm::default())
            };
            daemon.run_detached(child).json::<Vm>();
            assert_eq!(daemon.delete("/v1/vms/child?force=true").status, 204);
            assert_eq!(daemon.delete("/v1/snapshots/one").status, 204);
        }
    });
}

#[test]
fn an_image_is_there_whole_or_not_at_all() {
    let mut daemon = Daemon::start();
    let tar = tar_of(&[("one", &[1; 100_000]), ("two", &[2; 100_000])]);
    let good: Image = daemon.post("/v1/images/mine?kind=root", &tar).json();
    assert_eq!(daemon.delete("/v1/images/mine").status, 204);
    let nothing = kept(&daemon);
    let request = ("/v1/images/mine?kind=root", &tar[..]);
    killed_at_every_call(&mut daemon, request, |daemon, done| {
        let all: Vec<Image> = daemon.get("/v1/images").json();
        let made = all.iter().find(|image| image.name == "mine");
        assert!(made.is_some() || !done);
        if let Some(made) = made {
            assert_eq!((&made.digest, made.size), (&good.digest, good.size));
            assert_eq!(daemon.delete("/v1/images/mine").status, 204);
        }
        assert_eq!(kept(daemon), nothing);
    });
}

#[test]
fn a_commit_makes_a_whole_image_or_none() {
    let mut daemon = Daemon::start();
    let tar = tar_of(&[("one", &[1; 100_000])]);
    daemon
        .post("/v1/images/mine?kind=root", &tar)
        .json::<Image>();
    // Cold: it leaves nothing of a boot with the image, at whatever moment.
    let of_mine = CreateVm {
        image: Some("mine".into()),
        cold: true,
        ..counter()
    };
    daemon.run_detached(named("box", of_mine)).json::<Vm>();
    let pid = daemon.vm("box").pid;
    let before = kept(&daemon);
    let request = ("/v1/vms/box/commit", &b"{\"image\":\"next\"}"[..]);
    killed_at_every_call(&mut daemon, request, |daemon, done| {
        let vm = daemon.vm("box");
        assert_eq!((vm.state, vm.pid), (VmState::Running, pid));
        let all: Vec<Image> = daemon.get("/v1/images").json();
        let is_made = all.iter().any(|image| image.name == "next");
        assert!(is_made || !done);
        if is_made {
            let child = CreateVm {
                image: Some("next".into()),
                ..named("child", counter())
            };
            daemon.run_detached(child).json::<Vm>();
            assert_eq!(daemon.delete("/v1/vms/child?force=true").status, 204);
            assert_eq!(daemon.delete("/v1/images/next").status, 204);
        }
        assert_eq!(kept(daemon), before);
    });
}

#[test]
fn a_vm_is_awake_or_asleep() {
    let mut daemon = Daemon::start();
    daemon.run_detached(named("box", counter())).json::<Vm>();
    let awake = |daemon: &Daemon| {
        nothing_half_made(daemon);
        if daemon.vm("box").state != VmState::Running {
            daemon.post("/v1/vms/box/wake", b"").json::<Vm>();
        }
        let seen = daemon.logs("box", "").0.len();
        eventually("it goes on", || daemon.logs("box", "").0.len() > seen);
    };
    let request = ("/v1/vms/box/hibernate", &b""[..]);
    killed_at_every_call(&mut daemon, request, |daemon, _| awake(daemon));
    daemon.post("/v1/vms/box/hibernate", b"");
    let request = ("/v1/vms/box/wake", &b""[..]);
    killed_at_every_call(&mut daemon, request, |daemon, done| {
        awake(daemon);
        if !done {
            assert_eq!(daemon.post("/v1/vms/box/hibernate", b"").status, 200);
        }
    });
}

#[test]
fn a_forks_parent_goes_on() {
    let mut daemon = Daemon::start();
    daemon.run_detached(named("box", counter())).json::<Vm>();
    let pid = daemon.vm("box").pid;
    let request = ("/v1/vms/box/fork", &b"{\"name\":\"child\"}"[..]);
    killed_at_every_call(&mut daemon, request, |daemon, _| {
        let vm = daemon.vm("box");
        assert_eq!((vm.state, vm.pid), (VmState::Running, pid));
        nothing_half_made(daemon);
        let all: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
        for child in all.iter().filter(|vm| vm.name != "box") {
            let path = format!("/v1/vms/{}?force=true", child.id);
            assert_eq!(daemon.delete(&path).status, 204);
        }
    });
    assert_eq!(daemon.delete("/v1/vms/box?force=true").status, 204);
    daemon.nothing_left();
}
