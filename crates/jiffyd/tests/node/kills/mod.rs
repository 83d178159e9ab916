//! Kills a daemon at every system call by which it changes a file or another process. The next
//! daemon must start at once; the interrupted operation must be complete or undone; acknowledged
//! results must be there, and nothing may be left behind.
//!
//! An operation runs once to record its calls in all threads; then it runs again for each of them.
//! `JIFFY_KILL=TEXT` runs only the calls whose description contains TEXT.

mod captures;
mod images;
mod isolated;
mod lives;
mod thousand;
mod tracer;

use crate::client::{Answer, connect, request};
use crate::daemon::{Daemon, eventually, named, pagers, shell, vm, vmms};
use jiffy_wire::api::{CreateVm, Vm, VmState};
use jiffy_wire::lines;
use jiffy_wire::vmm::{ControlRequest, ControlResponse};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};
use tracer::{Killer, Point, up};

/// Disables all background work during a test.
const OPTIONS: [&str; 4] = ["--standby", "0", "--spare", "0"];
/// Time limit for a daemon to start after a kill.
const UP: Duration = Duration::from_secs(2);
/// How often a slow daemon is started again: the host may be slow for a while.
const TRIES: usize = 10;
/// How long a daemon may still make calls after its answer: it writes records, removes links.
const BEHIND: Duration = Duration::from_millis(400);
/// How long all of that may take on a host whose disk or processors stall.
const SETTLED: Duration = Duration::from_secs(60);
/// Most calls of one kind that are tested separately: more are pieces of one file.
const MOST: usize = 20;
/// Time after which an idle daemon makes no such calls any more.
const QUIET: Duration = Duration::from_millis(20);

/// A kill comes before or after a call; a created process exists only after the call.
const WHENS: [&str; 2] = ["before", "after"];

/// Runs the operation, kills the daemon at each of its calls, and checks the state each time.
fn killed_at_every_call(
    daemon: &mut Daemon,
    does: impl Fn(&Daemon) -> io::Result<bool>,
    holds: impl Fn(&Daemon, bool),
) {
    killed_wherever(daemon, Began::Before, does, holds);
}

/// When the daemon to be killed was started.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Began {
    Before,
    /// The operation is the daemon's start.
    Then,
}

fn killed_wherever(
    daemon: &mut Daemon,
    began: Began,
    does: impl Fn(&Daemon) -> io::Result<bool>,
    holds: impl Fn(&Daemon, bool),
) {
    let follow = |daemon: &mut Daemon, point: Option<&Point>| match began {
        Began::Before => {
            std::thread::sleep(QUIET);
            Killer::of(daemon.pid(), point)
        }
        Began::Then => {
            daemon.killed();
            Killer::of_next(daemon, point)
        }
    };
    let killer = follow(daemon, None);
    assert!(does(daemon).unwrap(), "the operation fails without a kill");
    std::thread::sleep(BEHIND);
    let points = points(&killer.calls());
    holds(daemon, true);
    let nothing_more = Left::settled(daemon);
    let mut missed = Vec::new();
    for point in &points {
        let mut killer = follow(daemon, Some(point));
        let done = does(daemon).unwrap_or(false);
        if killer.kills_within(BEHIND, daemon) {
            daemon.killed();
            // The tracer may still hold a process that the daemon has just created.
            up_in_time(daemon, point);
        } else {
            assert!(done, "{point}: it failed without a kill");
            missed.push(point.to_string());
        }
        drop(killer);
        let tried = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            assert_matches_vms(daemon);
            holds(daemon, done);
            assert_matches_vms(daemon);
            nothing_more.assert_unchanged(daemon);
        }));
        if let Err(why) = tried {
            eprintln!("---- the daemon was killed {point}");
            std::panic::resume_unwind(why);
        }
    }
    let (all, kills) = (points.len(), points.len() - missed.len());
    eprintln!("killed {kills} times, missed {missed:?}");
    // An operation may not make the same calls each time: some are made once per daemon.
    assert!(kills * 4 >= all * 3, "only {kills} of {all} were reached");
}

fn points(calls: &[String]) -> Vec<Point> {
    let mut counts = BTreeMap::<&str, usize>::new();
    for call in calls {
        *counts.entry(call).or_default() += 1;
    }
    eprintln!("{counts:?}");
    let whens = counts
        .iter()
        .flat_map(|call| WHENS.map(|when| (when, call)));
    let each = whens.flat_map(|(when, (call, count))| {
        let nths = 1..=(*count).min(MOST);
        nths.map(move |nth| Point {
            when,
            call: call.to_string(),
            nth,
        })
    });
    let only = std::env::var("JIFFY_KILL").unwrap_or_default();
    each.filter(|point| (point.when, &*point.call) != ("before", "spawn"))
        .filter(|point| point.to_string().contains(&only))
        .collect()
}

fn up_in_time(daemon: &mut Daemon, point: &Point) {
    let mut took = up(daemon);
    for _ in 1..TRIES {
        if took <= UP {
            return;
        }
        daemon.killed();
        took = up(daemon);
    }
    assert!(
        took <= UP,
        "killed {point}, the daemon was up after {took:?}"
    );
}

/// Checks that each VM has the VMM that it is shown with, and every VMM has a VM.
fn assert_matches_vms(daemon: &Daemon) {
    eventually("each VM has one VMM, and each VMM its VM", || {
        let all: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
        let shown: BTreeSet<u32> = all.iter().filter_map(|vm| vm.pid).collect();
        let there: BTreeSet<u32> = vmms(&daemon.data).into_iter().collect();
        shown == there
    });
    eventually("there is one pager at most", || {
        pagers(daemon.folder.path()).len() <= 1
    });
    if daemon.isolates {
        isolated::assert_matches_vms(daemon);
    }
}

/// Names of all files in a node's folders, with `ID` in place of VMs' ids.
#[derive(Debug, PartialEq, Eq)]
struct Left(Vec<String>);

impl Left {
    fn behind(daemon: &Daemon) -> Left {
        fn walk(folder: &Path, name: &str, found: &mut Vec<String>) {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                let own = entry.file_name().into_string().unwrap();
                let own = without_ids(&own);
                let path = format!("{name}/{own}");
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    walk(&entry.path(), &path, found);
                }
                found.push(path);
            }
        }
        let mut found = Vec::new();
        for folder in ["data", "run"] {
            walk(&daemon.folder.path().join(folder), folder, &mut found);
        }
        // Written at any time, or removed when a start begins; and a pager runs only while it is
        // needed.
        let at_times = [
            "/timeline.json",
            "/exit.json",
            "run/pager.sock",
            "run/jiffy-pager.log",
        ];
        found.retain(|path| !at_times.iter().any(|name| path.ends_with(name)));
        found.sort();
        Left(found)
    }

    /// The names when they do not change any more.
    fn settled(daemon: &Daemon) -> Left {
        let mut last = Left::behind(daemon);
        eventually("nothing changes any more", || {
            std::thread::sleep(BEHIND);
            let now = Left::behind(daemon);
            let stays = now == last;
            last = now;
            stays
        });
        last
    }

    fn assert_unchanged(&self, daemon: &Daemon) {
        let until = Instant::now() + SETTLED;
        let mut now = Left::behind(daemon);
        while now != *self && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
            now = Left::behind(daemon);
        }
        if now == *self {
            return;
        }
        let [before, now] = [self, &now].map(|left| left.0.iter().collect::<BTreeSet<_>>());
        let left: Vec<_> = now.difference(&before).collect();
        let gone: Vec<_> = before.difference(&now).collect();
        panic!("left behind: {left:?}, gone: {gone:?}");
    }
}

/// A VM's id is a run of twelve hexadecimal digits.
fn without_ids(name: &str) -> String {
    const LENGTH: usize = 12;
    let is_digit = |letter: char| letter.is_ascii_digit() || ('a'..='f').contains(&letter);
    let parts = name.split_inclusive(|letter: char| !is_digit(letter));
    let parts = parts.map(|part| {
        let digits = part.trim_end_matches(|letter: char| !is_digit(letter));
        match digits.len() {
            LENGTH => format!("ID{}", &part[LENGTH..]),
            _ => part.to_owned(),
        }
    });
    parts.collect()
}

/// Sends a request to a daemon that may be killed meanwhile.
fn ask(daemon: &Daemon, method: &str, path: &str, body: &[u8]) -> io::Result<Answer> {
    let stream = connect(&daemon.socket())?;
    request(stream, &format!("{method} {path} HTTP/1.1"), body)
}

/// As [`ask`], for callers that only need to know whether it succeeded.
fn is_done(daemon: &Daemon, method: &str, path: &str, body: &[u8]) -> io::Result<bool> {
    let answer = ask(daemon, method, path, body)?;
    Ok(matches!(answer.status, 200 | 204))
}

/// A VM that writes nothing, so that its daemon makes no calls for it, and whose program ends with
/// its VMM.
fn quiet() -> CreateVm {
    CreateVm {
        cold: true,
        ..vm(shell("while kill -0 $PPID; do sleep 0.1; done"))
    }
}

/// Creates and starts such a VM.
fn begin(daemon: &Daemon, name: &str) -> Vm {
    daemon.run_detached(named(name, quiet())).json()
}

fn remove(daemon: &Daemon, name: &str) {
    let path = format!("/v1/vms/{name}?force=true");
    assert_eq!(daemon.delete(&path).status, 204);
}

/// The VM of this name, once it is neither starting nor ending.
fn settled(daemon: &Daemon, name: &str) -> Option<Vm> {
    let path = format!("/v1/vms/{name}");
    eventually("the VM runs or has ended", || {
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

/// Checks that it runs, is not paused, has all of its memory, and its agent answers.
fn assert_runs(daemon: &Daemon, name: &str) {
    let vm = daemon.when(name, VmState::Running);
    let socket = daemon.run_folder(&vm.id).join("control.sock");
    let order = |request: ControlRequest| -> ControlResponse {
        let mut stream = UnixStream::connect(&socket).unwrap();
        let line = lines::encode(&request).unwrap();
        stream.write_all(&line).unwrap();
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).unwrap();
        serde_json::from_str(&answer).unwrap()
    };
    eventually("it is not paused, and has its memory", || {
        let runs = order(ControlRequest::Status);
        let memory = order(ControlRequest::Balloon);
        matches!(runs, ControlResponse::Status { paused: false, .. })
            && matches!(memory, ControlResponse::Balloon(status) if status.target_mib == 0)
    });
    let well = daemon.exec(name, &shell("echo well")).unwrap().finish();
    assert_eq!(well.text(), "well\n");
}
