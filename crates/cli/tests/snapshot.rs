//! Snapshots, forks and hibernated VMs against a fake node.

mod support;

use jiffy_wire::agent::{ExecOutput, Stream};
use jiffy_wire::api::{
    ChunkKind, ChunkRange, ErrorKind, ForkVm, Forked, MakeSnapshot, MemoryReport, RunVm,
    SnapshotMade, Vm,
};
use jiffy_wire::timeline::{Span, Timeline, Track, names};
use support::{FakeNode, is_session, snapshot, stderr, stdout, vm};

fn timeline() -> Timeline {
    let clock = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let mut timeline = Timeline::new(clock.trim());
    let span = Span::new(Track::Node, names::QUIESCE, 1_000_000, 3_000_000);
    timeline.spans.push(span);
    timeline
}

fn named(name: &str) -> Vm {
    Vm {
        name: name.into(),
        ..vm()
    }
}

/// A node with one snapshot, in which this command runs, if any.
fn node(command: Option<&'static [&'static str]>) -> FakeNode {
    FakeNode::new(move |request, peer| {
        let path = request.line.split(' ').nth(1).unwrap();
        if is_session(request) {
            peer.upgrade();
            peer.send(&ExecOutput::Started { pid: 7 });
            peer.output(Stream::Stdout, b"hello\n");
            peer.exit(3);
        } else if path.ends_with("/snapshots") {
            peer.json(
                200,
                &SnapshotMade {
                    snapshot: snapshot(command),
                    pause_ns: 1000,
                    timeline: timeline(),
                },
            );
        } else if path.starts_with("/v1/snapshots?") {
            peer.json(200, &[snapshot(command)]);
        } else if path.contains("/memory") {
            peer.json(
                200,
                &MemoryReport {
                    size: 128 << 20,
                    chunk_bytes: 8192,
                    file_bytes: 4 << 20,
                    kinds: vec![ChunkKind {
                        kind: "zstd".into(),
                        chunks: 12,
                        bytes: 98304,
                        stored_bytes: 49152,
                    }],
                    ranges: vec![ChunkRange {
                        offset: 4096,
                        length: 8192,
                        kind: "zstd".into(),
                        stored_bytes: 700,
                    }],
                    ..MemoryReport::default()
                },
            );
        } else if path.ends_with("/fork") {
            peer.json(
                200,
                &Forked {
                    vms: vec![named("child-1"), named("child-2")],
                    pause_ns: 1000,
                    timeline: timeline(),
                },
            );
        } else if path.starts_with("/v1/snapshots/one") {
            peer.json(200, &snapshot(command));
        } else {
            peer.json(200, &vm());
        }
    })
}

#[test]
fn snapshot_create_sends_the_request_and_prints_the_name() {
    let node = node(None);
    let output = node
        .jiffy()
        .args([
            "snapshot",
            "create",
            "--stop",
            "--timeline=json",
            "box",
            "one",
        ])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stdout(&output), "one\n");
    assert!(stderr(&output).contains(names::QUIESCE));
    let request = &node.requests()[0];
    assert_eq!(request.line, "POST /v1/vms/box/snapshots");
    let asked: MakeSnapshot = request.json();
    assert_eq!((asked.name.as_str(), asked.stop), ("one", true));
}

#[test]
fn snapshots_are_listed_and_inspected() {
    let node = node(Some(&["sleep", "100"]));
    let run = |args: &[&str]| {
        let output = node.jiffy().args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        stdout(&output).to_owned()
    };
    let list = run(&["snapshot", "ls", "-a"]);
    assert!(
        list.contains("sleep 100") && list.contains("5.0 MiB"),
        "{list}"
    );
    let inspected = run(&["snapshot", "inspect", "one"]);
    assert!(inspected.contains("base (0123456789ab)"), "{inspected}");
    assert!(
        inspected.contains("zstd   12       96.0 KiB   48.0 KiB   2.0:1"),
        "{inspected}"
    );
    assert!(inspected.contains("32.0:1"), "{inspected}");
    let map = run(&["snapshot", "inspect", "--map", "one"]);
    assert!(map.contains("0x0000001000   0x0000003000"), "{map}");
    let json = run(&["snapshot", "inspect", "--format", "json", "one"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["snapshot"]["name"], "one");
    assert_eq!(json["memory"]["kinds"][0]["chunks"], 12);
    assert!(
        node.lines()
            .contains(&"GET /v1/snapshots?all=true".to_owned())
    );
}

#[test]
fn a_run_from_a_snapshot_attaches_to_its_command() {
    let running = node(Some(&["sleep", "100"]));
    let output = running
        .jiffy()
        .env("JIFFY_COLD", "1")
        .args(["run", "--from", "one", "--rm"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(stdout(&output), "hello\n");
    let request = running.requests().pop().unwrap();
    let asked: RunVm = request.json();
    assert_eq!(asked.vm.from.as_deref(), Some("one"));
    assert!(asked.vm.command.is_none() && asked.vm.remove && !asked.vm.cold);
    // With a command of its own.
    let output = running
        .jiffy()
        .args(["run", "--from", "one", "--", "date"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(3));
    let asked: RunVm = running.requests().pop().unwrap().json();
    assert_eq!(asked.vm.command.unwrap().argv, ["date"]);
    // No command runs there, and none was given.
    let idle = node(None);
    let output = idle
        .jiffy()
        .args(["run", "--from", "one"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr(&output).contains("no command was running"));
    assert!(stderr(&output).contains("hint: "));
}

#[test]
fn a_cold_run_is_chosen_by_option_or_environment() {
    let node = node(None);
    let cold = |variable: &str, option: bool| {
        let mut jiffy = node.jiffy();
        jiffy.env("JIFFY_COLD", variable).arg("run");
        if option {
            jiffy.arg("--cold");
        }
        jiffy.args(["--", "true"]).output().unwrap();
        node.requests().pop().unwrap().json::<RunVm>().vm.cold
    };
    assert!(cold("", true));
    assert!(cold("1", false));
    assert!(!cold("0", false));
    assert!(!cold("", false));
}

#[test]
fn fork_prints_the_names_of_the_children() {
    let node = node(None);
    let output = node
        .jiffy()
        .args(["fork", "box", "-n", "2", "--name", "child"])
        .output()
        .unwrap();
    assert_eq!(stdout(&output), "child-1\nchild-2\n");
    let asked: ForkVm = node.requests()[0].json();
    assert_eq!(
        (asked.count, asked.name.as_deref()),
        (Some(2), Some("child"))
    );
}

#[test]
fn state_verbs_go_to_each_vm_and_report_refusals() {
    let node = FakeNode::new(|request, peer| {
        if request.line.contains("/v1/vms/bad/") {
            peer.error(ErrorKind::WrongState, "The VM bad is hibernated.", None);
        } else {
            peer.json(200, &vm());
        }
    });
    for verb in ["pause", "resume", "wake"] {
        let output = node.jiffy().args([verb, "bad", "good"]).output().unwrap();
        assert_eq!(stdout(&output), "good\n");
        assert!(stderr(&output).contains("VM bad is hibernated"));
        assert_ne!(output.status.code(), Some(0));
        assert!(node.lines().contains(&format!("POST /v1/vms/good/{verb}")));
    }
}

#[test]
fn the_timelines_of_several_vms_do_not_overwrite_each_other() {
    let node = FakeNode::new(|_, peer| peer.json(200, &vm()));
    let file = node.folder.path().join("timeline");
    let option = format!("--timeline=json:{}", file.display());
    let output = node
        .jiffy()
        .args(["hibernate", &option, "one", "two"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr(&output).contains("several VMs"));
    assert_eq!(node.lines(), [""; 0]);
    assert!(!file.exists());
}
