//! The queue of requests that wait for memory and vCPUs.

use crate::client::Answer;
use crate::daemon::{Daemon, command, eventually, named, run_of, shell, vm};
use crate::room::{asked, patient, until};
use crate::snapshots::{counter, two_from_one};
use jiffy_wire::agent::ExitStatus;
use jiffy_wire::api::{
    CreateVm, ErrorKind, ForkVm, Hibernated, Priority, Purpose, Queued, RunVm, Vm, VmState,
};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;

/// A VM of this owner and priority.
fn of(owner: &str, priority: Priority, vm: CreateVm) -> CreateVm {
    CreateVm {
        owner: Some(owner.into()),
        priority,
        ..vm
    }
}

fn queue(daemon: &Daemon) -> Vec<Queued> {
    daemon.get("/v1/queue").json()
}

fn names(queue: &[Queued]) -> Vec<&str> {
    queue.iter().map(|one| one.name.as_str()).collect()
}

/// Sends a request; returns when it is in the queue.
fn queued(daemon: &Daemon, path: &str, body: &[u8]) -> UnixStream {
    let before = queue(daemon).len();
    let stream = asked(daemon, path, body);
    eventually("it is in the queue", || queue(daemon).len() == before + 1);
    stream
}

fn detached(vm: CreateVm) -> Vec<u8> {
    serde_json::to_vec(&run_of(vm, true)).unwrap()
}

/// A VM that appends its name to a file, and ends.
fn notes(name: &str, file: &Path) -> CreateVm {
    CreateVm {
        remove: true,
        ..named(
            name,
            vm(shell(&format!("echo {name} >> {}", file.display()))),
        )
    }
}

/// The status line and the header of an answer, in lower case.
fn head(stream: &mut UnixStream) -> String {
    let mut head = String::new();
    let mut reader = BufReader::new(stream);
    while !head.ends_with("\r\n\r\n") {
        assert!(reader.read_line(&mut head).unwrap() > 0, "{head}");
    }
    head.to_lowercase()
}

fn uid() -> String {
    format!("uid-{}", rustix::process::getuid().as_raw())
}

#[test]
fn owners_take_turns_and_higher_priorities_go_first() {
    use Priority::{High, Low, Normal};
    let daemon = patient("128M");
    let (go, file) = (
        daemon.folder.path().join("go"),
        daemon.folder.path().join("order"),
    );
    let first = daemon.run(named("first", until(&go)));
    let requests = [
        ("low", "d", Low),
        ("a1", "a", Normal),
        ("a2", "a", Normal),
        ("a3", "a", Normal),
        ("b1", "b", Normal),
        ("high", "a", High),
    ];
    let waiting: Vec<_> = requests
        .into_iter()
        .map(|(name, owner, priority)| {
            let vm = of(owner, priority, notes(name, &file));
            queued(&daemon, "/v1/run", &detached(vm))
        })
        .collect();
    let all = queue(&daemon);
    let order = ["high", "a1", "b1", "a2", "a3", "low"];
    assert_eq!(names(&all), order);
    let b1 = &all[2];
    assert_eq!((b1.place, &*b1.owner, b1.priority), (3, "b", Normal));
    assert_eq!(
        (b1.purpose, b1.vms, b1.memory_mib, b1.cpus),
        (Purpose::Start, 1, 128, 1)
    );
    assert_eq!(b1.until - b1.since, 86_400);
    let inspected = daemon.vm("b1");
    assert_eq!(
        (inspected.state, inspected.queued.as_ref()),
        (VmState::Created, Some(b1))
    );
    assert_eq!(
        (inspected.owner.as_deref(), inspected.priority),
        (Some("b"), Normal)
    );
    fs::write(&go, "").unwrap();
    assert_eq!(first.finish().status(), ExitStatus::Code(0));
    eventually("all were served", || {
        fs::read_to_string(&file).is_ok_and(|text| text.lines().count() == order.len())
    });
    let text = fs::read_to_string(&file).unwrap();
    assert_eq!(text.lines().collect::<Vec<_>>(), order);
    assert!(queue(&daemon).is_empty());
    drop(waiting);
    daemon.delete("/v1/vms/first");
    daemon.assert_nothing_left();
}

#[test]
fn a_request_waits_as_long_as_it_asks_up_to_a_day() {
    let daemon = patient("128M");
    daemon
        .run_detached(named("first", CreateVm::default()))
        .json::<Vm>();
    daemon
        .create(&named("second", CreateVm::default()))
        .json::<Vm>();
    let refused = |answer: Answer| answer.error(ErrorKind::NoRoom).message;
    let run = |wait_s| {
        let run = RunVm {
            wait_s: Some(wait_s),
            ..run_of(CreateVm::default(), true)
        };
        daemon.post("/v1/run", &serde_json::to_vec(&run).unwrap())
    };
    let fork = |wait_s| {
        let fork = ForkVm {
            wait_s: Some(wait_s),
            ..ForkVm::default()
        };
        daemon.post("/v1/vms/first/fork", &serde_json::to_vec(&fork).unwrap())
    };
    let start = |query: &str| daemon.post(&format!("/v1/vms/second/start?{query}"), b"");
    for answer in [run(0), fork(0), start("wait_s=0")] {
        assert!(!refused(answer).contains("waited"));
    }
    for answer in [run(1), fork(1), start("wait_s=1&priority=low")] {
        let refused = refused(answer);
        assert!(refused.contains("and waited 1 s for it"), "{refused}");
    }
    for answer in [run(86_401), fork(86_401), start("wait_s=86401")] {
        let message = answer.error(ErrorKind::Invalid).message;
        assert!(message.contains("0 to 86400 s"), "{message}");
    }
    start("priority=urgent").error(ErrorKind::Invalid);
    let wrong = of("no owner", Priority::Normal, CreateVm::default());
    daemon.create(&wrong).error(ErrorKind::Invalid);
    assert_eq!(daemon.vm("second").state, VmState::Created);
}

#[test]
fn a_full_queue_refuses_with_a_retry_time() {
    let options = [
        "--memory-limit",
        "128M",
        "--memory-wait",
        "600",
        "--queue-limit",
        "2",
    ];
    let daemon = Daemon::with(&options);
    daemon
        .run_detached(named("first", CreateVm::default()))
        .json::<Vm>();
    let run = |name| detached(named(name, CreateVm::default()));
    let one = queued(&daemon, "/v1/run", &run("one"));
    let _two = queued(&daemon, "/v1/run", &run("two"));
    let error = daemon.post("/v1/run", &run("three"));
    assert_eq!(error.status, 503);
    let error = error.error(ErrorKind::NoRoom);
    assert_eq!(
        error.message,
        "2 requests wait for memory or vCPUs; the queue accepts no more."
    );
    assert!(error.hint.unwrap().contains("--queue-limit"));
    assert_eq!(error.retry_after_s, Some(60));
    let head = head(&mut asked(&daemon, "/v1/run", &run("three")));
    assert!(head.starts_with("http/1.1 503 "), "{head}");
    assert!(head.contains("\r\nretry-after: 60\r\n"), "{head}");
    daemon.gone("three");
    // A request whose client leaves makes room for another.
    drop(one);
    daemon.gone("one");
    let _three = queued(&daemon, "/v1/run", &run("three"));
    assert_eq!(names(&queue(&daemon)), ["two", "three"]);
}

#[test]
fn vcpus_are_limited_to_a_share_of_the_hosts_processors() {
    // A limit of one vCPU, whatever the number of processors.
    let options = ["--cpu-share", "0.001", "--memory-wait", "0"];
    let mut daemon = Daemon::with(&options);
    daemon
        .run_detached(named("first", CreateVm::default()))
        .json::<Vm>();
    let one = "The VM wants 1 vCPU; VMs have 1 of the 1 vCPU that they may have in all.";
    let another = |daemon: &Daemon| {
        let error = daemon.run_detached(CreateVm::default());
        let error = error.error(ErrorKind::NoRoom);
        assert_eq!(error.message, one);
        assert!(error.hint.unwrap().contains("--cpu-share"));
    };
    another(&daemon);
    daemon
        .post("/v1/vms/first/fork", b"{}")
        .error(ErrorKind::NoRoom);
    // VMs of an earlier daemon count.
    daemon.killed();
    daemon.up();
    another(&daemon);
    // A hibernated VM has no vCPU, and waits for one when it is woken.
    assert_eq!(daemon.post("/v1/vms/first/hibernate", b"").status, 200);
    daemon
        .run_detached(named("second", CreateVm::default()))
        .json::<Vm>();
    let wakes = queued(&daemon, "/v1/vms/first/wake?wait_s=86400", b"");
    assert_eq!(daemon.post("/v1/vms/second/kill", b"").status, 200);
    daemon.when("first", VmState::Running);
    drop(wakes);
    let two = CreateVm {
        cpus: Some(2),
        ..CreateVm::default()
    };
    let error = daemon.run_detached(two).error(ErrorKind::NoRoom);
    assert!(
        error.message.starts_with("The VM wants 2 vCPUs;"),
        "{}",
        error.message
    );
}

#[test]
fn every_request_is_queued_with_its_vms_owner_and_priority() {
    use Priority::{High, Low, Normal};
    let daemon = patient("256M");
    let sleeper = of(
        "team-a",
        High,
        named("sleeper", vm(command(&["/bin/sleep", "1000"]))),
    );
    daemon.run_detached(sleeper).json::<Vm>();
    assert_eq!(daemon.post("/v1/vms/sleeper/hibernate", b"").status, 200);
    for name in ["one", "two"] {
        daemon
            .run_detached(named(name, CreateVm::default()))
            .json::<Vm>();
    }
    let seen = |path: &str, body: &[u8]| {
        let stream = queued(&daemon, path, body);
        let queued = queue(&daemon).remove(0);
        // It leaves the queue with its client.
        drop(stream);
        eventually("it has left", || queue(&daemon).is_empty());
        (queued.name, queued.purpose, queued.owner, queued.priority)
    };
    let text = str::to_owned;
    let exec = serde_json::to_vec(&command(&["true"])).unwrap();
    let upgraded =
        "/v1/vms/sleeper/exec HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: jiffy-frames\r\nX: ";
    assert_eq!(
        seen(upgraded, &exec),
        (text("sleeper"), Purpose::Wake, text("team-a"), High)
    );
    assert_eq!(
        seen("/v1/vms/sleeper/wake?priority=low", b""),
        (text("sleeper"), Purpose::Wake, text("team-a"), Low)
    );
    assert_eq!(
        seen("/v1/vms/one/fork", br#"{"count":2,"priority":"high"}"#),
        (text("one"), Purpose::Fork, uid(), High)
    );
    assert_eq!(
        seen("/v1/vms/one/fork", b"{}"),
        (text("one"), Purpose::Fork, uid(), Normal)
    );
    let made = daemon.vm("sleeper");
    assert_eq!(
        (made.owner.as_deref(), made.priority),
        (Some("team-a"), High)
    );
}

#[test]
fn a_second_request_for_a_waiting_vm_has_its_own_wait_time() {
    let daemon = Daemon::with(&["--memory-limit", "128M", "--memory-wait", "1"]);
    let sleeper = named("sleeper", vm(command(&["/bin/sleep", "1000"])));
    daemon.run_detached(sleeper).json::<Vm>();
    assert_eq!(daemon.post("/v1/vms/sleeper/hibernate", b"").status, 200);
    daemon
        .run_detached(named("first", CreateVm::default()))
        .json::<Vm>();
    let wakes = queued(&daemon, "/v1/vms/sleeper/wake?wait_s=86400", b"");
    let refused = |answer: Answer| {
        let error = answer.error(ErrorKind::NoRoom);
        assert_eq!(
            error.message,
            "Another request for the VM sleeper waits for memory or vCPUs."
        );
        assert!(error.hint.unwrap().contains("jiffy queue"));
    };
    for path in ["start?wait_s=0", "start?wait_s=1", "wake?wait_s=1"] {
        refused(daemon.post(&format!("/v1/vms/sleeper/{path}"), b""));
    }
    refused(daemon.exec("sleeper", &shell("true")).unwrap_err());
    assert_eq!(queue(&daemon).len(), 1);
    // A request with a longer wait takes its place, with the rest of its time.
    let starts = asked(&daemon, "/v1/vms/sleeper/start?wait_s=86000", b"");
    drop(wakes);
    eventually("the second waits", || {
        queue(&daemon)
            .first()
            .is_some_and(|it| it.until - it.since <= 86_000)
    });
    assert_eq!(daemon.post("/v1/vms/first/kill", b"").status, 200);
    daemon.when("sleeper", VmState::Running);
    drop(starts);
}

#[test]
fn a_hibernation_does_not_queue_behind_waiting_runs() {
    let daemon = patient("256M");
    // Only a VM from a snapshot has memory that its hibernation has to fill.
    two_from_one(&daemon, counter());
    let large = CreateVm {
        memory_mib: Some(256),
        ..named("large", CreateVm::default())
    };
    let _large = queued(&daemon, "/v1/run", &detached(large));
    assert_eq!(daemon.post("/v1/vms/two/hibernate", b"").status, 200);
    daemon.when("large", VmState::Running);
}

#[test]
fn a_requests_queue_place_can_be_followed_until_served() {
    let daemon = patient("128M");
    daemon
        .run_detached(named("first", CreateVm::default()))
        .json::<Vm>();
    let run = |name| detached(named(name, CreateVm::default()));
    let before = queued(&daemon, "/v1/run", &run("before"));
    let id = "0123456789abcdef".repeat(2);
    let header = format!("/v1/run HTTP/1.1\r\njiffy-request: {id}\r\nX: ");
    let _mine = queued(&daemon, &header, &run("mine"));
    let nobodys = format!("/v1/queue/{}", "0".repeat(32));
    assert_eq!(daemon.get(&nobodys).status, 404);
    let mut stream = crate::client::connect(&daemon.socket()).unwrap();
    let request = format!("GET /v1/queue/{id} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut lines = BufReader::new(stream).lines();
    let mut next_place = || {
        let line = lines.find(|line| line.as_ref().unwrap().starts_with('{'));
        line.map(|line| {
            let queued: Queued = serde_json::from_str(&line.unwrap()).unwrap();
            (queued.place, queued.name)
        })
    };
    assert_eq!(next_place(), Some((2, "mine".into())));
    drop(before);
    assert_eq!(next_place(), Some((1, "mine".into())));
    assert_eq!(daemon.post("/v1/vms/first/kill", b"").status, 200);
    assert_eq!(next_place(), None);
    daemon.when("mine", VmState::Running);
    // An invalid id is refused.
    let wrong = "/v1/run HTTP/1.1\r\njiffy-request: a b\r\nX: ";
    let mut answer = [0; 12];
    asked(&daemon, wrong, &run("wrong"))
        .read_exact(&mut answer)
        .unwrap();
    assert_eq!(&answer, b"HTTP/1.1 400");
}

#[test]
fn each_request_that_wakes_a_vm_waits_as_long_as_it_asks() {
    let daemon = Daemon::with(&["--memory-limit", "256M", "--memory-wait", "86400"]);
    let sleeper = || named("sleeper", counter());
    daemon.run_detached(sleeper()).json::<Vm>();
    daemon
        .post("/v1/vms/sleeper/hibernate", b"")
        .json::<Hibernated>();
    let other = |name| CreateVm {
        max_memory_mib: Some(256),
        ..named(name, counter())
    };
    for name in ["one", "two"] {
        daemon.run_detached(other(name)).json::<Vm>();
    }
    let echo = serde_json::to_vec(&shell("echo here")).unwrap();
    let ask = |order: &str, body: &[u8]| daemon.stream(&format!("/v1/vms/sleeper/{order}"), body);
    let refused = |order: &str, body: &[u8]| ask(order, body).unwrap_err().error(ErrorKind::NoRoom);
    refused("exec?wait_s=0", &echo);
    refused("attach?wait_s=0", b"");
    refused("copy-out?path=/etc/hostname&wait_s=0", b"");
    refused("copy-in?path=/tmp/x&wait_s=0", b"");
    let grow = daemon.post("/v1/vms/one/limits?wait_s=0", br#"{"memory_mib": 256}"#);
    grow.error(ErrorKind::NoRoom);
    let wrong = ask("exec?wait_s=86401", &echo).unwrap_err();
    wrong.error(ErrorKind::Invalid);
    thread::scope(|scope| {
        let short = scope.spawn(|| refused("exec?wait_s=20", &echo));
        eventually("it waits", || !queue(&daemon).is_empty());
        // One that waits for less time gives up earlier,
        let joined = refused("exec?wait_s=0", &echo).message;
        assert!(
            joined.starts_with("Another request for the VM sleeper"),
            "{joined}"
        );
        assert!(!short.is_finished());
        // and one that waits for longer is not refused with the first.
        let long = scope.spawn(|| ask("exec?wait_s=86400", &echo).unwrap().finish().text());
        short.join().unwrap();
        eventually("it waits", || !queue(&daemon).is_empty());
        assert!(!long.is_finished());
        assert_eq!(daemon.delete("/v1/vms/two?force=true").status, 204);
        assert_eq!(long.join().unwrap(), "here\n");
    });
}
