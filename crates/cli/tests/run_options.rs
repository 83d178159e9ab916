//! Options of `jiffy run` that don't go together, or that it can't follow, against a fake node.

mod support;

use jiffy_wire::agent::{ExecInput, Stream};
use jiffy_wire::api::{ApiError, ErrorKind, RunVm};
use std::fs::OpenOptions;
use std::process::Output;
use support::{FakeNode, VM_ID, snapshot, stderr, vm};

/// Runs `jiffy run` with these arguments.
fn run(node: &FakeNode, arguments: &[&str]) -> Output {
    node.jiffy().arg("run").args(arguments).output().unwrap()
}

#[test]
fn a_missing_network_is_not_taken_for_a_missing_image() {
    let missing = |what: &'static str| {
        FakeNode::new(move |request, peer| {
            let asks_for_image = request.line.starts_with("GET /v1/images/");
            if asks_for_image && what != "image" {
                let web = serde_json::json!({
                    "name": "web", "digest": "00", "size": 1, "entries": 1, "created": 1
                });
                return peer.json(200, &web);
            }
            peer.error(
                ErrorKind::NotFound,
                &format!("There is no {what} lab."),
                Some("Create it first."),
            );
        })
    };
    let said = |what, arguments: &[&str]| stderr(&run(&missing(what), arguments));
    let network = "jiffy: There is no network lab\n  hint: Create it first\n";
    assert_eq!(said("network", &["--network", "lab", "web", "x"]), network);
    assert_eq!(said("network", &["-d", "--network=lab", "web"]), network);
    let image = said("image", &["lab", "x"]);
    assert!(image.ends_with("write `jiffy run -- lab …`\n"), "{image}");
}

#[test]
fn a_value_that_was_taken_for_the_image_is_named() {
    for (kind, option, value) in [
        (ErrorKind::NotFound, "--root-disk", "8G"),
        (ErrorKind::Invalid, "--init", "/sbin/init"),
    ] {
        let node = FakeNode::new(move |_, peer| peer.error(kind, "There is no such image.", None));
        let said = stderr(&run(&node, &[option, value, "debian", "date"]));
        let hint = format!("of the option before it, write `{option}={value}`\n");
        assert!(said.ends_with(&hint), "{said}");
    }
}

#[test]
fn an_empty_variable_counts_as_unset() {
    let node = FakeNode::playing(|peer| peer.exit(0));
    let mut command = node.jiffy();
    command.args(["run", "--", "true"]).env("JIFFY_NETWORK", "");
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let run: RunVm = node.session().json();
    assert_eq!(run.vm.network.name, None);
    let mut command = node.jiffy();
    command
        .args(["completions", "bash"])
        .env("JIFFY_MACHINE", "");
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[test]
fn a_detached_run_whose_command_can_not_be_started_ends_as_a_shell_does() {
    for code in [125, 126, 127] {
        let node = FakeNode::new(move |_, peer| {
            let error = ApiError {
                kind: ErrorKind::VmFailed,
                message: "nope: no such program".into(),
                hint: None,
                retry_after_s: None,
                exit_code: Some(code),
            };
            peer.json(error.status(), &error);
        });
        let output = run(&node, &["-d", "--", "nope"]);
        assert_eq!(output.status.code(), Some(code.into()));
        assert_eq!(stderr(&output), "jiffy: nope: no such program\n");
    }
}

#[test]
fn a_full_stdout_ends_the_vm_unless_leaving_keeps_it() {
    let node = FakeNode::playing(|peer| {
        peer.output(Stream::Stdout, b"more than fits\n");
        while peer.receive::<ExecInput>().is_some() {}
    });
    let said = |arguments: &[&str]| {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = node.jiffy().args(arguments).stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(125), "{arguments:?}");
        stderr(&output)
    };
    let failure = "jiffy: stdout can't be written: No space left on device\n";
    let ended = format!("{failure}  hint: the VM {VM_ID} was ended\n");
    assert_eq!(said(&["run", "--", "yes"]), ended);
    let kill = format!("POST /v1/vms/{VM_ID}/kill");
    assert_eq!(node.lines(), ["POST /v1/run", &kill]);
    let attached = said(&["attach", "web"]);
    assert!(
        attached.contains(&format!("`jiffy attach {VM_ID}`")),
        "{attached}"
    );
    assert_eq!(said(&["exec", "web", "yes"]), failure);
    assert_eq!(node.lines().iter().filter(|line| **line == kill).count(), 1);
    let node = FakeNode::new(|_, peer| peer.json(200, &vm()));
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let detached = node.jiffy().args(["run", "-d"]).stdout(full).output();
    let kept = format!("{failure}  hint: the VM {VM_ID} keeps running\n");
    assert_eq!(stderr(&detached.unwrap()), kept);
}

#[test]
fn a_detached_run_refuses_a_timeline_that_it_would_not_write() {
    let node = FakeNode::new(|_, peer| peer.json(200, &vm()));
    for option in ["json", "perfetto", "table:t.txt", "deep:t.json"] {
        let output = run(&node, &["-d", &format!("--timeline={option}"), "--", "x"]);
        assert_eq!(output.status.code(), Some(125), "{option}");
        let said = stderr(&output);
        assert!(said.contains("`jiffy timeline VM`"), "{option}: {said}");
    }
    assert!(node.lines().is_empty(), "nothing was started");
    for (option, deep) in [("--timeline", false), ("--timeline=deep", true)] {
        let output = run(&node, &["-d", option, "--", "x"]);
        assert_eq!(output.status.code(), Some(0), "{option}");
        let asked: RunVm = node.requests().last().unwrap().json();
        assert!(asked.vm.timeline && asked.vm.deep == deep, "{option}");
    }
}

#[test]
fn the_network_of_the_environment_is_not_for_a_vm_from_a_snapshot() {
    let node = FakeNode::playing(|peer| peer.exit(0));
    let network = |arguments: &[&str]| {
        let mut command = node.jiffy();
        command.arg("run").args(arguments);
        command.env("JIFFY_NETWORK", "none").output().unwrap();
        let asked: RunVm = node.requests().pop().unwrap().json();
        asked.vm.network.name
    };
    let named = |name: &str| Some(name.to_owned());
    assert_eq!(network(&["--", "x"]), named("none"));
    assert_eq!(network(&["--from", "one", "--", "x"]), None);
    let chosen = ["--network", "lab", "--from", "one", "--", "x"];
    assert_eq!(network(&chosen), named("lab"));
}

#[test]
fn options_of_a_command_need_a_command_beside_the_captured_one() {
    let node = FakeNode::new(|_, peer| peer.json(200, &snapshot(Some(&["sleep", "9"]))));
    let options: [&[&str]; 4] = [
        &["-e", "A=1"],
        &["-w", "/srv"],
        &["--user", "1"],
        &["-d", "-u", "1"],
    ];
    for given in options {
        let output = run(&node, &[&["--from", "ready"], given].concat());
        assert_eq!(output.status.code(), Some(125), "{given:?}");
        let said = stderr(&output);
        assert!(said.contains("hint: give a command"), "{given:?}: {said}");
    }
    assert!(node.lines().is_empty(), "nothing was asked");
    let output = run(&node, &["--from", "ready", "-t"]);
    assert_eq!(output.status.code(), Some(125));
    let said = stderr(&output);
    assert!(said.contains("without a terminal"), "{said}");
}
