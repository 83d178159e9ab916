//! The stream of events.

use crate::daemon::{Daemon, bad_vm, command, named, shell, tar_of, vm};
use jiffy_wire::agent::ExitStatus;
use jiffy_wire::api::{
    Action, CreateVm, ErrorKind, Event, Hibernated, Limits, MakeSnapshot, MakeVolume, SnapshotMade,
    Subject, Vm, VmState, VolumeUse,
};
use jiffy_wire::vmm::DiskLimit;
use std::io::{BufRead, BufReader, Write};
use std::num::NonZeroU64;
use std::os::unix::net::UnixStream;

/// A client that follows events.
struct Follower(std::io::Lines<BufReader<UnixStream>>);

/// Follows events from now on.
fn follow(daemon: &Daemon, query: &str) -> Follower {
    let mut stream = crate::client::connect(&daemon.socket()).unwrap();
    let request =
        format!("GET /v1/events{query} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut lines = BufReader::new(stream).lines();
    // The subscription exists once the answer has begun.
    assert_eq!(lines.next().unwrap().unwrap(), "HTTP/1.1 200 OK");
    Follower(lines)
}

impl Iterator for Follower {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        let line = self
            .0
            .find(|line| line.as_ref().unwrap().starts_with('{'))?;
        Some(serde_json::from_str(&line.unwrap()).unwrap())
    }
}

impl Follower {
    fn next_is(&mut self, subject: Subject, action: Action, name: &str) -> Event {
        let event = self.next().expect("an event");
        let seen = (event.subject, event.action, event.name.as_str());
        assert_eq!(seen, (subject, action, name));
        event
    }
}

fn post<T: serde::Serialize>(daemon: &Daemon, path: &str, body: &T) -> crate::client::Answer {
    daemon.post(path, &serde_json::to_vec(body).unwrap())
}

#[test]
fn the_life_of_a_vm_is_told_as_it_happens() {
    let daemon = Daemon::start();
    let mut events = follow(&daemon, "");
    let run = named("web", vm(shell("sleep 60; exit 3")));
    let web: Vm = daemon.run_detached(run).json();
    let created = events.next_is(Subject::Vm, Action::Created, "web");
    assert_eq!(created.id.as_ref(), Some(&web.id));
    assert!(created.time_ms / 1000 >= web.created);
    events.next_is(Subject::Vm, Action::Starting, "web");
    events.next_is(Subject::Vm, Action::Running, "web");
    daemon.post("/v1/vms/web/pause", b"").json::<Vm>();
    events.next_is(Subject::Vm, Action::Paused, "web");
    daemon.post("/v1/vms/web/resume", b"").json::<Vm>();
    events.next_is(Subject::Vm, Action::Running, "web");
    daemon
        .post("/v1/vms/web/hibernate", b"")
        .json::<Hibernated>();
    events
        .find(|event| event.action == Action::Hibernated)
        .expect("it hibernates");
    daemon.post("/v1/vms/web/wake", b"").json::<Vm>();
    events.next_is(Subject::Vm, Action::Starting, "web");
    events.next_is(Subject::Vm, Action::Running, "web");
    daemon.post("/v1/vms/web/kill", b"").json::<Vm>();
    let exited = events
        .find(|event| event.action == Action::Exited)
        .expect("it exits");
    assert_eq!(exited.exit, Some(ExitStatus::Signal(9)));
    assert_eq!(daemon.delete("/v1/vms/web").status, 204);
    events.next_is(Subject::Vm, Action::Removed, "web");
}

#[test]
fn images_snapshots_volumes_and_limits_are_told() {
    let daemon = Daemon::start();
    let mut events = follow(&daemon, "");
    let volume = MakeVolume {
        size_mib: 8,
        raw: true,
    };
    assert_eq!(post(&daemon, "/v1/volumes/data", &volume).status, 200);
    events.next_is(Subject::Volume, Action::Created, "data");
    assert_eq!(daemon.delete("/v1/volumes/data").status, 204);
    events.next_is(Subject::Volume, Action::Removed, "data");
    let tar = tar_of(&[("etc/hostname", b"web")]);
    assert_eq!(daemon.post("/v1/images/mine?kind=root", &tar).status, 200);
    events.next_is(Subject::Image, Action::Created, "mine");
    assert_eq!(daemon.delete("/v1/images/mine").status, 204);
    events.next_is(Subject::Image, Action::Removed, "mine");
    // What failed is not told.
    daemon.delete("/v1/images/mine").error(ErrorKind::NotFound);

    let run = CreateVm {
        disks: vec![VolumeUse {
            name: "scratch".into(),
            size_mib: Some(8),
            ..VolumeUse::default()
        }],
        ..named("box", vm(command(&["true"])))
    };
    daemon.run(run).finish();
    events
        .find(|event| event.subject == Subject::Volume)
        .filter(|event| (event.action, event.name.as_str()) == (Action::Created, "scratch"))
        .expect("the volume that was missing is told");
    let run = named("web", vm(shell("sleep 60")));
    daemon.run_detached(run).json::<Vm>();
    events
        .find(|event| (event.action, event.name.as_str()) == (Action::Running, "web"))
        .expect("it runs");
    let make = MakeSnapshot {
        name: "warm".into(),
        stop: false,
    };
    post(&daemon, "/v1/vms/web/snapshots", &make).json::<SnapshotMade>();
    events
        .find(|event| event.subject == Subject::Snapshot)
        .filter(|event| (event.action, event.name.as_str()) == (Action::Created, "warm"))
        .expect("the snapshot is told");
    assert_eq!(daemon.delete("/v1/snapshots/warm").status, 204);
    events.next_is(Subject::Snapshot, Action::Removed, "warm");
    let limits = Limits {
        root: Some(DiskLimit {
            bytes_per_second: NonZeroU64::new(1 << 20),
            ..DiskLimit::default()
        }),
        ..Limits::default()
    };
    post(&daemon, "/v1/vms/web/limits", &limits).json::<Vm>();
    events.next_is(Subject::Vm, Action::Updated, "web");
}

#[test]
fn a_snapshot_of_a_vm_that_ends_meanwhile_is_made_and_told() {
    let daemon = Daemon::start();
    // It ends while its memory is being written.
    let ends = bad_vm("ends-captured fake=filled", Some(shell("sleep 60")));
    daemon.run_detached(named("web", ends)).json::<Vm>();
    let mut events = follow(&daemon, "");
    let make = MakeSnapshot {
        name: "last".into(),
        stop: true,
    };
    post(&daemon, "/v1/vms/web/snapshots", &make).json::<SnapshotMade>();
    let mut wanted = vec![
        (Subject::Snapshot, Action::Created, "last".to_owned()),
        (Subject::Vm, Action::Exited, "web".to_owned()),
    ];
    while !wanted.is_empty() {
        let event = events.next().expect("both are told");
        let seen = (event.subject, event.action, event.name);
        wanted.retain(|wanted| *wanted != seen);
    }
    assert_eq!(daemon.vm("web").state, VmState::Exited);
}

#[test]
fn events_of_one_vm_end_with_its_removal() {
    let daemon = Daemon::start();
    let other = named("other", CreateVm::default());
    daemon.run_detached(other).json::<Vm>();
    let web: Vm = daemon.create(&named("web", CreateVm::default())).json();
    let mut events = follow(&daemon, &format!("?vm={}", &web.id[..6]));
    daemon.post("/v1/vms/other/kill", b"").json::<Vm>();
    daemon.when("other", VmState::Exited);
    assert_eq!(daemon.delete("/v1/vms/web").status, 204);
    events.next_is(Subject::Vm, Action::Removed, "web");
    assert_eq!(events.next(), None);
    // Who does not read, or is gone, holds up nothing.
    let silent = follow(&daemon, "");
    drop(follow(&daemon, ""));
    daemon.post("/v1/vms/other/start", b"").json::<Vm>();
    drop(silent);
    daemon.get("/v1/events?vm=web").error(ErrorKind::NotFound);
    daemon.get("/v1/events?of=web").error(ErrorKind::Invalid);
}
