//! Ports that VMs in the machine publish, against a fake machine: a node on TCP, QEMU's control
//! socket with a list of forwarded ports, and a locked pid file.

mod support;

use rustix::fs::{FlockOperation, fcntl_lock};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use support::{FakeNode, Peer, Request, eventually, is_session, stderr, vm};

/// Time for a port that must be forwarded: a failing test need not wait for longer.
const SOON: Duration = Duration::from_secs(30);

/// The ports that the fake QEMU forwards, as `tcp:127.0.0.1:8080`.
type Ports = Arc<Mutex<BTreeSet<String>>>;

struct FakeMachine {
    node: FakeNode,
    ports: Ports,
    _pid_file: File,
}

impl FakeMachine {
    /// A machine whose node answers in this way.
    fn new(answer: impl Fn(&Request, &mut Peer, &Ports) + Send + Sync + 'static) -> FakeMachine {
        let ports = Ports::default();
        let seen = ports.clone();
        let node = FakeNode::new(move |request, peer| answer(request, peer, &seen));
        let folder = node.folder.path();
        let run = folder.join("run/machine");
        for private in [&run, &folder.join("data/machine")] {
            fs::create_dir_all(private).unwrap();
            fs::set_permissions(private, fs::Permissions::from_mode(0o700)).unwrap();
        }
        let pid_file = File::create(run.join("pid")).unwrap();
        fcntl_lock(&pid_file, FlockOperation::NonBlockingLockExclusive).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = tcp.local_addr().unwrap();
        let running = json!({
            "format": 1, "pid": std::process::id(), "api": address, "agent": address,
            "token": "secret", "started": 1,
        });
        fs::write(run.join("running.json"), running.to_string()).unwrap();
        let socket = folder.join("run/jiffyd.sock");
        std::thread::spawn(move || {
            for client in tcp.incoming() {
                let (client, node) = (client.unwrap(), UnixStream::connect(&socket).unwrap());
                let (mut from, mut to) = (client.try_clone().unwrap(), node.try_clone().unwrap());
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
                let (mut from, mut to) = (node, client);
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        });
        let control = UnixListener::bind(run.join("qmp.sock")).unwrap();
        let known = ports.clone();
        std::thread::spawn(move || {
            for client in control.incoming() {
                serve_control(client.unwrap(), &known);
            }
        });
        FakeMachine {
            node,
            ports,
            _pid_file: pid_file,
        }
    }

    fn jiffy(&self, arguments: &[&str]) -> Command {
        let mut jiffy = self.node.jiffy();
        jiffy.env("JIFFY_MACHINE", "always").args(arguments);
        jiffy
    }

    fn ok(&self, arguments: &[&str]) {
        let output = self.jiffy(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        assert_eq!(stderr(&output), "", "{arguments:?}");
    }

    fn ports(&self) -> Vec<String> {
        self.ports.lock().unwrap().iter().cloned().collect()
    }
}

/// One client of QEMU's control socket: `info usernet`, `hostfwd_add` and `hostfwd_remove`.
fn serve_control(stream: UnixStream, ports: &Ports) {
    let mut answers = &stream;
    let mut say = |value: Value| {
        let _ = answers.write_all(format!("{value}\n").as_bytes());
    };
    say(json!({ "QMP": { "version": {}, "capabilities": [] } }));
    for line in BufReader::new(&stream).lines() {
        let request: Value = serde_json::from_str(&line.unwrap()).unwrap();
        let Some(order) = request["arguments"]["command-line"].as_str() else {
            say(json!({ "return": {} }));
            continue;
        };
        let mut ports = ports.lock().unwrap();
        let answer = match order.split_whitespace().collect::<Vec<_>>()[..] {
            ["info", "usernet"] => ports.iter().map(|port| row(port)).collect(),
            ["hostfwd_add", "net", rule] => {
                ports.insert(rule.split_once('-').unwrap().0.to_owned());
                String::new()
            }
            ["hostfwd_remove", "net", port] => {
                assert!(ports.remove(port), "{port} is not forwarded");
                String::new()
            }
            _ => panic!("{order}"),
        };
        say(json!({ "return": answer }));
    }
}

/// A line of `info usernet`.
fn row(port: &str) -> String {
    let [protocol, address, number] = port.split(':').collect::<Vec<_>>()[..] else {
        panic!("{port}");
    };
    let protocol = protocol.to_uppercase();
    format!("  {protocol}[HOST_FORWARD]  13  {address} {number}  10.0.2.15  {number}  0  0\r\n")
}

/// A VM in this state with this published port.
fn publishing(name: &str, state: &str, port: u16) -> Value {
    let mut shown = serde_json::to_value(vm()).unwrap();
    shown["name"] = name.into();
    shown["state"] = state.into();
    shown["network"] = json!({
        "name": "default", "addresses": ["10.118.0.2"],
        "ports": [format!("127.0.0.1:{port}:80/tcp")],
    });
    shown
}

fn is_list(request: &Request) -> bool {
    request.line == "GET /v1/vms?all=true"
}

/// The exit status of a session that ends once this port is forwarded: 0, or 9 if it never is.
fn once_forwarded(ports: &Ports, port: &str) -> i32 {
    let until = Instant::now() + SOON;
    while !ports.lock().unwrap().contains(port) {
        if Instant::now() > until {
            return 9;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    0
}

fn play(peer: &mut Peer, code: i32) {
    peer.send(&jiffy_wire::agent::ExecOutput::Started { pid: 7 });
    peer.exit(code);
}

#[test]
fn ports_of_a_foreground_run_are_forwarded_while_it_runs() {
    // -P: the node chooses the port. -p: another command has closed the port meanwhile.
    for option in [&["-P"][..], &["-p", "8080:80"]] {
        let machine = FakeMachine::new(|request, peer, ports| {
            let ran = "tcp:127.0.0.1:8080";
            if is_session(request) {
                ports.lock().unwrap().clear();
                peer.upgrade();
                let code = once_forwarded(ports, ran);
                play(peer, code);
            } else if is_list(request) {
                peer.json(200, &[publishing("web", "running", 8080)]);
            } else {
                peer.json(200, &vm());
            }
        });
        let run = [&["run"], option, &["--", "server"]].concat();
        machine.ok(&run);
    }
}

#[test]
fn ports_of_an_attached_start_are_forwarded_while_it_runs() {
    let machine = FakeMachine::new(|request, peer, ports| {
        if is_session(request) {
            peer.upgrade();
            let code = once_forwarded(ports, "tcp:127.0.0.1:8081");
            play(peer, code);
        } else if is_list(request) {
            peer.json(200, &[publishing("web", "running", 8081)]);
        } else {
            peer.json(200, &vm());
        }
    });
    machine.ok(&["start", "--attach", "web"]);
}

#[test]
fn ports_of_a_hibernated_vm_are_forwarded_when_it_wakes() {
    let machine = FakeMachine::new(|request, peer, _| match is_list(request) {
        true => peer.json(200, &[publishing("web", "hibernated", 8082)]),
        false => peer.json(200, &vm()),
    });
    machine.ok(&["wake", "web"]);
    assert_eq!(machine.ports(), ["tcp:127.0.0.1:8082"]);
}

#[test]
fn a_slow_command_does_not_close_the_port_of_a_vm_that_has_started_meanwhile() {
    let lists = Arc::new(Mutex::new(0));
    let started = lists.clone();
    let machine = FakeMachine::new(move |request, peer, _| {
        if !is_list(request) {
            return peer.json(200, &vm());
        }
        let first = {
            let mut lists = lists.lock().unwrap();
            *lists += 1;
            *lists == 1
        };
        let mut vms = vec![publishing("one", "running", 8083)];
        match first {
            // The other command has time to list and to forward.
            true => std::thread::sleep(Duration::from_secs(2)),
            false => vms.push(publishing("two", "running", 8084)),
        }
        peer.json(200, &vms);
    });
    let mut slow = machine.jiffy(&["start", "one"]).spawn().unwrap();
    eventually("the first list is requested", || {
        *started.lock().unwrap() > 0
    });
    machine.ok(&["start", "two"]);
    assert!(slow.wait().unwrap().success());
    assert_eq!(
        machine.ports(),
        ["tcp:127.0.0.1:8083", "tcp:127.0.0.1:8084"]
    );
}
