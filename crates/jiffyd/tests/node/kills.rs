//! A daemon that is killed wherever it changes a file or a process, in what it does most:
//! run, stop, remove, exec, pull, adopt. Captures are in `crashes`.

use crate::client::{Answer, connect};
use crate::crashes::{Doom, MOST, ask};
use crate::daemon::{Daemon, eventually, named, pagers, shell, vm, vmms};
use crate::images::{by_name, encoded};
use crate::pulls::kept;
use crate::registry::Registry;
use jiffy_wire::api::{CreateVm, Image, RunVm, Vm, VmState};
use serde_json::json;
use std::io::{self, Read, Write};
use std::time::Duration;

/// System calls after which a file, a name, a folder or a process is another.
const CALLS: &str = "rename,renameat,renameat2,link,linkat,unlink,unlinkat,mkdir,mkdirat,rmdir,\
                     fsync,fdatasync,ftruncate,copy_file_range,bind,chmod,fchmodat,\
                     clone,clone3,vfork,execve,kill,pidfd_send_signal";
/// Those by which an exec reaches its guest and its client.
const STREAM_CALLS: &str = "socket,connect,write,writev,sendto,sendmsg";
const OPTIONS: [&str; 4] = ["--standby", "0", "--spare", "0"];

/// Has it done, is killed meanwhile at one call after the other until it is done before,
/// and asks the next daemon each time what holds. An answer with an error is as good as
/// none: the daemon may be on its way out.
fn killed_at_calls(
    daemon: &mut Daemon,
    calls: &str,
    does: impl Fn(&Daemon) -> io::Result<bool>,
    holds: impl Fn(&Daemon, bool),
) {
    let mut kills = 0;
    for nth in 1..MOST {
        let doom = Doom::at(daemon, nth, calls);
        let done = does(daemon).unwrap_or(false);
        drop(doom);
        // It may die behind its answer, too.
        let lives = ask(daemon, "GET", "/v1/info", b"").is_ok();
        if !lives {
            eventually("the daemon is dead", || !daemon.is_up());
            daemon.killed();
            daemon.up();
            kills += 1;
        }
        holds(daemon, done);
        if done && lives {
            eprintln!("killed {kills} times");
            assert!(kills > 0, "it was done before it was killed");
            return;
        }
    }
    panic!("it makes more calls than {MOST}");
}

fn good(answer: &Answer) -> bool {
    matches!(answer.status, 200 | 204)
}

fn counter() -> CreateVm {
    CreateVm {
        cold: true,
        ..vm(shell("while true; do echo on; sleep 0.02; done"))
    }
}

/// The VM of this name, once it is neither on its way up nor down.
fn settled(daemon: &Daemon, name: &str) -> Option<Vm> {
    let path = format!("/v1/vms/{name}");
    eventually("it is up or down", || {
        let answer = daemon.get(&path);
        answer.status == 404
            || !matches!(
                answer.json::<Vm>().state,
                VmState::Starting | VmState::Stopping
            )
    });
    let answer = daemon.get(&path);
    (answer.status != 404).then(|| answer.json())
}

#[test]
fn a_run_is_whole_or_absent() {
    let mut daemon = Daemon::with(&OPTIONS);
    // The image is made at the first run.
    daemon.get("/v1/images").json::<Vec<Image>>();
    let wanted = RunVm {
        vm: named("box", counter()),
        detach: true,
    };
    let body = serde_json::to_vec(&wanted).unwrap();
    killed_at_calls(
        &mut daemon,
        CALLS,
        |daemon| Ok(good(&ask(daemon, "POST", "/v1/run", &body)?)),
        |daemon, done| {
            let made = settled(daemon, "box");
            assert!(made.is_some() || !done);
            if let Some(vm) = made {
                assert!(vm.state == VmState::Running || vm.error.is_some(), "{vm:?}");
                assert_eq!(daemon.delete("/v1/vms/box?force=true").status, 204);
            }
            daemon.nothing_left();
        },
    );
}

#[test]
fn a_stop_leaves_a_vm_up_or_down() {
    let mut daemon = Daemon::with(&OPTIONS);
    daemon.run_detached(named("box", counter())).json::<Vm>();
    killed_at_calls(
        &mut daemon,
        CALLS,
        |daemon| {
            let path = "/v1/vms/box/stop?grace_ms=100";
            Ok(good(&ask(daemon, "POST", path, b"")?))
        },
        |daemon, done| {
            let vm = settled(daemon, "box").unwrap();
            match vm.state {
                VmState::Running => assert!(!done),
                VmState::Exited => {
                    assert!(vmms(&daemon.data).is_empty());
                    daemon.post("/v1/vms/box/start", b"").json::<Vm>();
                }
                other => panic!("{other:?}"),
            }
        },
    );
}

#[test]
fn a_vm_is_removed_whole_or_there() {
    let mut daemon = Daemon::with(&OPTIONS);
    daemon.run_detached(named("box", counter())).json::<Vm>();
    killed_at_calls(
        &mut daemon,
        CALLS,
        |daemon| Ok(good(&ask(daemon, "DELETE", "/v1/vms/box?force=true", b"")?)),
        |daemon, done| {
            if settled(daemon, "box").is_some() {
                assert!(!done);
                assert_eq!(daemon.delete("/v1/vms/box?force=true").status, 204);
            }
            daemon.nothing_left();
            daemon.run_detached(named("box", counter())).json::<Vm>();
        },
    );
}

#[test]
fn an_exec_leaves_the_vm_as_it_was() {
    let mut daemon = Daemon::with(&OPTIONS);
    daemon.run_detached(named("box", counter())).json::<Vm>();
    let pid = daemon.vm("box").pid;
    let body = serde_json::to_vec(&shell("echo well")).unwrap();
    let exec = |daemon: &Daemon| {
        let mut stream = connect(&daemon.socket())?;
        let length = body.len();
        write!(
            stream,
            "POST /v1/vms/box/exec HTTP/1.1\r\nHost: node\r\nConnection: upgrade\r\nUpgrade: jiffy-frames\r\nContent-Length: {length}\r\n\r\n"
        )?;
        stream.write_all(&body)?;
        let mut said = Vec::new();
        stream.read_to_end(&mut said)?;
        Ok(said.windows(4).any(|bytes| bytes == b"well"))
    };
    killed_at_calls(&mut daemon, STREAM_CALLS, exec, |daemon, _| {
        let vm = daemon.vm("box");
        assert_eq!((vm.state, vm.pid), (VmState::Running, pid));
        let again = daemon.exec("box", &shell("echo well")).unwrap().finish();
        assert_eq!(again.text(), "well\n");
    });
}

#[test]
fn a_pull_is_whole_or_can_go_on() {
    let registry = Registry::start();
    registry.put("web:1", &[("file", &[7; 50_000])], json!({}));
    let name = registry.name("web:1");
    let body = serde_json::to_vec(&by_name(&name)).unwrap();
    let mut daemon = Daemon::with(&OPTIONS);
    let before = kept(&daemon);
    let there = |daemon: &Daemon| {
        let all: Vec<Image> = daemon.get("/v1/images").json();
        all.into_iter().any(|image| image.name == name)
    };
    let pull = |daemon: &Daemon| {
        let answer = ask(daemon, "POST", "/v1/pulls", &body)?;
        Ok(good(&answer) && String::from_utf8_lossy(&answer.body).contains("pulled"))
    };
    killed_at_calls(&mut daemon, CALLS, pull, |daemon, done| {
        assert!(there(daemon) || !done);
        assert!(pull(daemon).unwrap() && there(daemon));
        let path = format!("/v1/images/{}", encoded(&name));
        assert_eq!(daemon.delete(&path).status, 204);
        assert_eq!(kept(daemon), before);
    });
}

#[test]
fn a_daemon_may_be_killed_while_it_adopts() {
    let mut daemon = Daemon::with(&OPTIONS);
    daemon.run_detached(named("box", counter())).json::<Vm>();
    daemon.run_detached(named("rest", counter())).json::<Vm>();
    daemon
        .post("/v1/vms/rest/hibernate", b"")
        .json::<serde_json::Value>();
    let pid = daemon.vm("box").pid;
    let mut kills = 0;
    for nth in 1..MOST {
        daemon.killed();
        daemon.begin(Doom::of(&daemon.command(), nth, CALLS));
        let mut answers = false;
        while !answers && alive(&daemon) {
            answers = ask(&daemon, "GET", "/v1/info", b"").is_ok();
            std::thread::sleep(Duration::from_millis(2));
        }
        let lasts = alive(&daemon);
        kills += u32::from(!lasts);
        daemon.killed();
        daemon.up();
        let vm = daemon.vm("box");
        assert_eq!((vm.state, vm.pid), (VmState::Running, pid), "call {nth}");
        assert_eq!(daemon.vm("rest").state, VmState::Hibernated, "call {nth}");
        let well = daemon.exec("box", &shell("echo well")).unwrap().finish();
        assert_eq!(well.text(), "well\n", "call {nth}");
        if answers && lasts {
            eprintln!("killed {kills} times");
            break;
        }
    }
    assert!(kills > 0, "it was up before it was killed");
    for name in ["box", "rest"] {
        let path = format!("/v1/vms/{name}?force=true");
        assert_eq!(daemon.delete(&path).status, 204);
    }
    daemon.nothing_left();
    assert!(pagers(daemon.folder.path()).len() <= 1);
}

fn alive(daemon: &Daemon) -> bool {
    crate::daemon::is_alive(daemon.pid())
}
