//! Requests that wait for memory and vCPUs, against a fake node.

mod support;

use jiffy_wire::api::{CreateVm, ErrorKind, ForkVm, Priority, Queued, RunVm};
use support::{FakeNode, VM_ID, queued, stderr, stdout, vm};

#[test]
fn queue_lists_waiting_requests() {
    let node = FakeNode::new(|_, peer| {
        let mut second = queued(2);
        second.name = "bad\x1b[2Jname".into();
        peer.json(200, &[queued(1), second]);
    });
    let output = node.jiffy().arg("queue").output().unwrap();
    let table = stdout(&output);
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 3, "{table}");
    let words = |line: &str| {
        line.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        words(lines[0]),
        [
            "PLACE", "ID", "NAME", "FOR", "OWNER", "PRIORITY", "VMS", "MEMORY", "VCPUS", "WAITED",
            "LEFT"
        ]
    );
    assert_eq!(
        words(lines[1])[..10],
        [
            "1", VM_ID, "web", "start", "team-a", "high", "1", "256.0", "MiB", "2"
        ]
    );
    assert!(
        lines[1].trim_end().ends_with(" 0 s"),
        "it is overdue: {table}"
    );
    assert!(lines[2].contains("bad\u{fffd}[2Jname"), "{table}");
    let json = node
        .jiffy()
        .args(["queue", "--format", "json"])
        .output()
        .unwrap();
    let shown: Vec<Queued> = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(shown[0], queued(1));
    assert_eq!(node.lines(), ["GET /v1/queue", "GET /v1/queue"]);
}

#[test]
fn requests_carry_the_queue_options() {
    let node = FakeNode::new(|_, peer| peer.json(200, &vm()));
    let sent = |arguments: &[&str]| {
        node.jiffy().args(arguments).output().unwrap();
        node.requests().pop().unwrap()
    };
    let options = ["--owner", "team-a", "--priority", "high"];
    let run = sent(&[&["run", "-d", "--wait", "30s"], &options[..], &["true"]].concat());
    let body: RunVm = run.json();
    assert_eq!((body.wait_s, body.vm.priority), (Some(30), Priority::High));
    assert_eq!(body.vm.owner.as_deref(), Some("team-a"));
    // A node of an earlier release refuses fields that it does not know.
    let plain = String::from_utf8(sent(&["run", "-d", "true"]).body).unwrap();
    for field in ["wait_s", "priority", "owner"] {
        assert!(!plain.contains(field), "{plain}");
    }
    let create: CreateVm = sent(&[&["create"], &options[..], &["base"]].concat()).json();
    assert_eq!(
        (create.owner.as_deref(), create.priority),
        (Some("team-a"), Priority::High)
    );
    let line = |arguments: &[&str]| sent(arguments).line;
    assert_eq!(line(&["start", "web"]), "POST /v1/vms/web/start");
    assert_eq!(
        line(&["start", "--priority", "low", "--wait", "0", "web"]),
        "POST /v1/vms/web/start?priority=low&wait_s=0"
    );
    assert_eq!(
        line(&["wake", "--wait", "1m", "web"]),
        "POST /v1/vms/web/wake?wait_s=60"
    );
    let fork: ForkVm = sent(&["fork", "--priority", "high", "--wait", "5", "web"]).json();
    assert_eq!(
        (fork.priority, fork.wait_s),
        (Some(Priority::High), Some(5))
    );
    let plain = String::from_utf8(sent(&["fork", "web"]).body).unwrap();
    assert!(
        !plain.contains("wait_s") && !plain.contains("priority"),
        "{plain}"
    );
}

#[test]
fn a_full_queue_is_reported_with_a_hint() {
    let node = FakeNode::new(|_, peer| {
        let message = "2 requests wait for memory or vCPUs; the queue accepts no more.";
        peer.error(ErrorKind::NoRoom, message, Some("Try again later."));
    });
    let output = node.jiffy().args(["start", "web"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert_eq!(
        stderr(&output),
        "jiffy: 2 requests wait for memory or vCPUs; the queue accepts no more\n  hint: Try again later\n"
    );
}
