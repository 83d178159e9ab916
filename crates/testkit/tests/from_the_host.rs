//! `jiffy` on a host without hardware KVM, with its node in the machine, in folders of the test.

#[path = "from_the_host/folders.rs"]
mod folders;
#[path = "from_the_host/installation.rs"]
mod installation;

use installation::{Host, LIMIT, free_port, text};
use jiffy_machine::protocol::{AGENT_PORT, API_PORT, GUEST};
use jiffy_sys::mutex::lock;
use serde_json::Value;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// One machine at a time: two would only slow each other down.
static TURN: Mutex<()> = Mutex::new(());

/// An installation that no other test uses at the same time.
struct Alone {
    host: Host,
    _turn: MutexGuard<'static, ()>,
}

impl std::ops::Deref for Alone {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.host
    }
}

fn host() -> Alone {
    let turn = lock(&TURN);
    Alone {
        host: Host::new(),
        _turn: turn,
    }
}

impl Host {
    /// The process id of the machine's QEMU, if it runs.
    fn pid(&self) -> Option<i64> {
        let output = self.run(&["machine", "status", "--format", "json"]);
        let status: Value = serde_json::from_slice(&output.stdout).expect("a status");
        status["pid"].as_i64()
    }
}

/// Asserts that a failure prints one sentence, with or without a hint; returns the text.
fn assert_one_sentence(output: &Output) -> String {
    let said = text(&output.stderr);
    assert!(!output.status.success(), "it must fail: {output:?}");
    let sentences = said
        .lines()
        .filter(|line| line.starts_with("jiffy: "))
        .count();
    assert_eq!(sentences, 1, "{said}");
    assert!(
        said.lines()
            .all(|line| line.starts_with("jiffy: ") || line.starts_with("  hint: ")),
        "{said}"
    );
    said
}

#[test]
fn the_first_command_starts_the_machine_and_says_so_once() {
    let host = host();
    let begin = Instant::now();
    let first = host.run(&["run", "--rm", "--", "/usr/bin/date"]);
    assert!(first.status.success(), "{first:?}");
    println!(
        "the first command, which starts the machine: {:?}",
        begin.elapsed()
    );
    assert_eq!(text(&first.stderr).lines().count(), 1, "{first:?}");
    assert!(text(&first.stdout).contains("UTC"), "{first:?}");

    let second = host.run(&["run", "--rm", "--", "echo", "again"]);
    assert_eq!(text(&second.stdout), "again");
    assert_eq!(text(&second.stderr), "", "printed once");

    // Exit statuses and stdin are passed through as for a local command.
    let status = host
        .run(&["run", "--rm", "--", "sh", "-c", "exit 7"])
        .status
        .code();
    assert_eq!(status, Some(7));

    // Volumes survive the machine; its VMs do not.
    host.ok(&[
        "run",
        "--rm",
        "--disk",
        "kept:16M",
        "--",
        "sh",
        "-c",
        "echo lasting > /dev/vdb; sync",
    ]);
    host.ok(&["run", "-d", "--name", "resident"]);
    assert!(text(&host.run(&["machine", "shell", "uname", "-r"]).stdout).contains("cloud-amd64"));
    host.ok(&["machine", "stop"]);
    assert_eq!(host.pid(), None);
    assert_eq!(host.run(&["machine", "status"]).status.code(), Some(3));
    assert_eq!(
        host.ok(&[
            "run", "--rm", "--disk", "kept:ro", "--", "head", "-n1", "/dev/vdb"
        ]),
        "lasting"
    );
    assert!(
        host.ok(&["ps", "-a"]).contains("resident"),
        "its record is kept"
    );
    host.ok(&["rm", "-f", "resident"]);
}

#[test]
fn two_commands_at_once_start_one_machine() {
    let host = host();
    let children: Vec<_> = ["one", "two", "three"]
        .iter()
        .map(|word| {
            host.command(&["run", "--rm", "--", "echo", word])
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .expect("it starts")
        })
        .collect();
    let mut answers: Vec<String> = children
        .into_iter()
        .map(|child| {
            let output = child.wait_with_output().expect("it ends");
            assert!(output.status.success(), "{output:?}");
            text(&output.stdout)
        })
        .collect();
    answers.sort();
    assert_eq!(answers, ["one", "three", "two"]);
    let data = host.folder.path().join("data");
    let machines = std::fs::read_dir("/proc")
        .expect("processes")
        .flatten()
        .filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok())
        .filter(|line| {
            let line = String::from_utf8_lossy(line);
            line.contains("qemu-system") && line.contains(&*data.to_string_lossy())
        })
        .count();
    assert_eq!(machines, 1);
}

#[test]
fn a_dead_machine_is_reported_and_restarted() {
    let host = host();
    host.ok(&["machine", "start"]);
    let mut waiting = host
        .command(&["run", "--", "sh", "-c", "echo ready; sleep 1000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    use std::io::Read;
    let mut ready = [0; 6];
    waiting
        .stdout
        .as_mut()
        .expect("piped")
        .read_exact(&mut ready)
        .expect("it answers");
    let pid = host.pid().expect("it runs");
    let killed = Command::new("kill").args(["-9", &pid.to_string()]).status();
    assert!(killed.expect("kill runs").success());
    let output = waiting.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert_one_sentence(&output);
    // Sockets, pid and token of the killed machine still exist.
    assert_eq!(host.ok(&["run", "--rm", "--", "echo", "back"]), "back");
}

#[test]
fn missing_or_invalid_files_are_reported_in_one_sentence() {
    let host = host();
    let empty = tempfile::tempdir().expect("a folder");
    let without_qemu = host
        .command(&["machine", "start"])
        .env("PATH", empty.path())
        .output()
        .expect("jiffy runs");
    let said = assert_one_sentence(&without_qemu);
    assert!(said.contains("QEMU") || said.contains("mkfs.xfs"), "{said}");

    let without_image = host
        .command(&["machine", "start"])
        .env("JIFFY_SHARE", empty.path())
        .output()
        .expect("jiffy runs");
    assert_one_sentence(&without_image);

    let long = host.folder.path().join("long".repeat(30));
    let long_path = host
        .command(&["machine", "start"])
        .env("JIFFY_RUN", long)
        .output();
    let said = assert_one_sentence(&long_path.expect("jiffy runs"));
    assert!(said.contains("107"), "{said}");

    std::fs::create_dir_all(host.folder.path().join("data/machine")).expect("made");
    std::fs::write(
        host.folder.path().join("data/machine/machine.json"),
        "nonsense",
    )
    .expect("written");
    let said = assert_one_sentence(&host.run(&["machine", "start"]));
    assert!(said.contains("machine.json"), "{said}");
    std::fs::remove_file(host.folder.path().join("data/machine/machine.json")).expect("removed");

    let said = assert_one_sentence(&host.run(&["machine", "start", "--memory", "1"]));
    assert!(said.contains("512 MiB"), "{said}");
}

/// Runs in a separate mount namespace, in which the data folder is a small disk that grows later.
const FULL_DISK: &str = r#"
set -e
mkdir -p "$JIFFY_DATA"
mount -t tmpfs -o size=300m none "$JIFFY_DATA"
trap '"$JIFFY" machine rm --force >/dev/null 2>&1' EXIT
"$JIFFY" machine start 2>/dev/null
"$JIFFY" run --rm --disk big:600M -- dd if=/dev/zero of=/dev/vdb bs=1M count=500 conv=fsync 2>/dev/null &
writer=$!
tries=0
until "$JIFFY" machine status --format json | grep -q host_disk_full; do
    tries=$((tries + 1))
    [ $tries -lt 3000 ] || { echo "never full"; exit 1; }
    sleep 0.3
done
"$JIFFY" ps >/dev/null 2>"$JIFFY_DATA.said" && { echo "ps must not succeed"; exit 1; }
cat "$JIFFY_DATA.said"
mount -o remount,size=2g "$JIFFY_DATA"
"$JIFFY" machine start
wait $writer
echo "the writer ended with $?"
"#;

#[test]
fn a_full_host_disk_is_reported_and_no_data_is_lost() {
    let host = host();
    let output = host
        .limited(LIMIT, Path::new("unshare"))
        .args([
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            FULL_DISK,
        ])
        .env("JIFFY", &host.jiffy)
        .output()
        .expect("unshare runs");
    assert!(output.status.success(), "{output:?}");
    let said = text(&output.stdout);
    let first = said.lines().next().unwrap_or_default();
    assert!(
        first.starts_with("jiffy: ") && first.contains("full"),
        "{said}"
    );
    assert!(said.ends_with("the writer ended with 0"), "{said}");
}

/// A web server that answers with its host name. Its backlog holds ten clients: QEMU does not
/// resend what a guest drops because the backlog is full (that of `nc` holds two).
const SERVE: &str = r"mkdir -p /tmp/www/cgi-bin; cd /tmp/www
    printf '#!/bin/sh\necho; hostname\n' >cgi-bin/name; chmod +x cgi-bin/name
    echo ready; exec httpd -f -p 8080";
const NAME: &str = "/cgi-bin/name";

impl Host {
    /// Starts a VM that answers with its host name at port 8080, and waits until it does.
    fn server(&self, name: &str, options: &[&str]) {
        let mut arguments = vec!["run", "-d", "--name", name];
        arguments.extend(options);
        arguments.extend(["--", "sh", "-c", SERVE]);
        self.ok(&arguments);
        let until = Instant::now() + Duration::from_secs(60);
        while !self.ok(&["logs", name]).contains("ready") {
            assert!(Instant::now() < until, "{name} does not serve");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Runs a script in a VM; returns its output and whether it succeeded.
    fn run_in_vm(&self, vm: &str, script: &str) -> (String, bool) {
        let output = self.run(&["exec", vm, "sh", "-c", script]);
        (text(&output.stdout), output.status.success())
    }

    fn address(&self, vm: &str) -> String {
        let shown: Value = serde_json::from_str(&self.ok(&["inspect", vm])).expect("JSON");
        let address = &shown[0]["network"]["addresses"][0];
        address.as_str().expect("an address").to_owned()
    }
}

/// The answer of a server to this host. Retries while the server does not listen yet.
fn fetch(port: u16) -> std::io::Result<String> {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let answer = fetch_once(port);
        let listens = match &answer {
            Ok(said) => !said.is_empty(),
            Err(error) => error.kind() != std::io::ErrorKind::ConnectionReset,
        };
        if listens || Instant::now() >= until {
            return answer;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn fetch_once(port: u16) -> std::io::Result<String> {
    use std::io::{Read, Write};
    let mut stream =
        TcpStream::connect_timeout(&([127, 0, 0, 1], port).into(), Duration::from_secs(30))?;
    stream.set_read_timeout(Some(Duration::from_secs(120)))?;
    stream.write_all(format!("GET {NAME} HTTP/1.0\r\n\r\n").as_bytes())?;
    let mut said = String::new();
    stream.read_to_string(&mut said)?;
    Ok(said.lines().last().unwrap_or_default().to_owned())
}

impl Host {
    /// The node and the agent listen on the machine's address: no rule opens their ports to a VM.
    fn assert_machine_is_unreachable_from(&self, vm: &str) {
        const BESIDE: u16 = AGENT_PORT + 1;
        let serve = format!("nc -ll -p {BESIDE} -e echo machine </dev/null >/dev/null 2>&1 &");
        self.ok(&["machine", "shell", "sh", "-c", &serve]);
        let allow = format!("host:{API_PORT}-{BESIDE}");
        self.ok(&["network", "policy", vm, "--allow", &allow, "--allow", GUEST]);
        let connects = |port| {
            let ask = format!("nc -w 20 {GUEST} {port} </dev/null");
            self.run_in_vm(vm, &ask)
        };
        let until = Instant::now() + Duration::from_secs(60);
        while connects(BESIDE) != ("machine".to_owned(), true) {
            assert!(Instant::now() < until, "the rule opens nothing");
            std::thread::sleep(Duration::from_millis(50));
        }
        for port in [API_PORT, AGENT_PORT] {
            // From the machine itself there is an answer.
            let ask = format!("nc -w 20 {GUEST} {port} </dev/null");
            self.ok(&["machine", "shell", "sh", "-c", &ask]);
            assert_eq!(connects(port), (String::new(), false), "{port}");
        }
        self.ok(&["network", "policy", vm, "--clear"]);
    }
}

#[test]
fn vms_have_a_network_and_published_ports() {
    let host = host();
    // A client of this host's port reaches the server in the VM through the machine.
    let port = free_port();
    let publish = format!("{port}:8080");
    host.server("web", &["--network", "default", "-p", &publish]);
    assert_eq!(fetch(port).expect("an answer"), "web");
    assert_eq!(
        host.ok(&["port", "web"]),
        format!("8080/tcp -> 127.0.0.1:{port}")
    );
    // The port is in use, on the machine and on the host.
    let refused = assert_one_sentence(&host.run(&[
        "run", "-d", "--name", "other", "-p", &publish, "--", "sleep", "1000",
    ]));
    assert!(refused.contains(&port.to_string()), "{refused}");
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let publish = format!("{}:8080", taken.local_addr().expect("an address").port());
    assert_one_sentence(&host.run(&["run", "--rm", "-p", &publish, "--", "true"]));
    assert!(!host.ok(&["ps", "-a"]).contains("other"));

    // Its rate may be limited meanwhile.
    host.ok(&["update", "--network-limit", "bps=1M,pps=500", "web"]);
    assert_eq!(fetch(port).expect("an answer"), "web");

    // A hibernated VM keeps its address, and answers again once woken.
    let address = host.address("web");
    host.ok(&["hibernate", "web"]);
    host.ok(&["wake", "web"]);
    assert_eq!(host.address("web"), address);
    assert_eq!(fetch(port).expect("an answer"), "web");
    let timeline = host.ok(&["timeline", "web"]);
    for span in ["address taken", "rules made"] {
        assert!(timeline.contains(span), "{timeline}");
    }

    // A server on this host has a private address: VMs reach it only if it is allowed.
    let server = TcpListener::bind("127.0.0.1:0").expect("a port");
    let local = server.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        use std::io::Write;
        for stream in server.incoming().flatten() {
            let _ = (&stream).write_all(b"hello from the host\n");
        }
    });
    let ask = format!("nc -w 20 10.0.2.2 {local} </dev/null");
    let (said, _) = host.run_in_vm("web", &ask);
    assert_eq!(said, "");
    let rule = format!("10.0.2.2:{local}");
    host.ok(&["network", "policy", "web", "--allow", &rule]);
    let (said, _) = host.run_in_vm("web", &ask);
    assert_eq!(said, "hello from the host");
    assert_eq!(
        host.ok(&["network", "policy", "web"]),
        format!("allow {rule}")
    );
    host.ok(&["network", "policy", "web", "--clear"]);
    assert_eq!(host.run_in_vm("web", &ask).0, "");
    host.assert_machine_is_unreachable_from("web");
    let shown: Value = serde_json::from_str(&host.ok(&["inspect", "web"])).expect("JSON");
    let counters = &shown[0]["network"]["counters"];
    assert!(counters["refused"].as_u64() >= Some(2), "{counters}");
    assert_eq!(counters["spoofed"], 0, "{counters}");

    // The port is closed with the VM, on this host as well.
    let id = shown[0]["id"].as_str().expect("an id");
    host.ok(&["rm", "--force", "web"]);
    assert!(fetch_once(port).is_err());
    let links = host.ok(&["machine", "shell", "ls", "/sys/class/net"]);
    assert!(links.contains("jf-host") && !links.contains(id), "{links}");
}

#[test]
fn vms_of_a_network_reach_each_other_and_forked_children_by_name() {
    let host = host();
    host.ok(&["network", "create", "lab"]);
    host.server("parent", &["--network", "lab"]);
    host.ok(&["fork", "parent", "-n", "3", "--name", "child"]);
    host.ok(&[
        "run",
        "-d",
        "--name",
        "asker",
        "--network",
        "lab",
        "--",
        "sleep",
        "1000",
    ]);
    host.ok(&["run", "-d", "--name", "stranger", "--", "sleep", "1000"]);
    // Each VM is reached by its address and by its name; the name resolves to one VM only.
    for name in ["parent", "child-1", "child-2", "child-3"] {
        let address = host.address(name);
        for at in [address.as_str(), name] {
            let (said, _) =
                host.run_in_vm("asker", &format!("timeout 20 wget -qO- {at}:8080{NAME}"));
            assert_eq!(said, name, "{at}");
        }
        // A VM in another network neither reaches it nor resolves its name.
        let (said, _) = host.run_in_vm(
            "stranger",
            &format!("timeout 5 wget -qO- {address}:8080{NAME}"),
        );
        assert_eq!(said, "");
        assert!(!host.run_in_vm("stranger", &format!("nslookup {name}")).1);
    }
    assert!(host.run_in_vm("stranger", "nslookup host.jiffy.internal").1);
    let used = assert_one_sentence(&host.run(&["network", "rm", "lab"]));
    assert!(used.contains("parent"), "{used}");
    // A run from a golden snapshot, and a run without a network.
    let resolv = host.ok(&["run", "--rm", "--", "cat", "/etc/resolv.conf", "/etc/hosts"]);
    assert!(resolv.contains("search jiffy.internal"), "{resolv}");
    let links = host.ok(&[
        "run",
        "--rm",
        "--network",
        "none",
        "--",
        "ls",
        "/sys/class/net",
    ]);
    assert!(!links.contains("eth0"), "{links}");
    let doctor = text(&host.run(&["doctor"]).stdout);
    assert!(doctor.contains("VMs have addresses of 10."), "{doctor}");
    let contained = "each VMM has a user, namespaces, a control group of its own";
    assert!(doctor.contains(contained), "{doctor}");
}

#[test]
fn twenty_forked_servers_answer_at_their_own_addresses_at_once() {
    const CHILDREN: usize = 20;
    let host = host();
    host.ok(&["run", "-d", "--name", "parent", "--", "sleep", "1000"]);
    // Counts its clients, and sends each of them its current address and host name.
    let answer = "echo >> /tmp/clients; ip -4 -o addr show eth0; hostname";
    let serve = format!("echo '{answer}' > /tmp/answer; nc -ll -p 8080 -e sh /tmp/answer");
    let serve = format!("({serve}) </dev/null >/dev/null 2>&1 &");
    assert!(host.run_in_vm("parent", &serve).1);
    let count = CHILDREN.to_string();
    host.ok(&["fork", "parent", "-n", &count, "--name", "child"]);
    // Once the fork is answered, the first packet reaches each child, without retries.
    let children: Vec<(String, String)> = (1..=CHILDREN)
        .map(|number| format!("child-{number}"))
        .map(|name| (host.address(&name), name))
        .collect();
    let ask = children
        .iter()
        .map(|(address, _)| format!("nc -w 20 {address} 8080 </dev/null || exit 1;"));
    let ask: String = ask.collect();
    let answers = host.ok(&["machine", "shell", "sh", "-c", &ask]);
    let lines: Vec<&str> = answers.lines().collect();
    assert_eq!(lines.len(), 2 * CHILDREN, "{answers}");
    for ((address, name), said) in children.iter().zip(lines.chunks(2)) {
        assert!(said[0].contains(&format!(" {address}/32 ")), "{said:?}");
        assert_eq!(said[1], name);
        // It got no other VM's client, and no packet for another address.
        let (seen, _) = host.run_in_vm(
            name,
            "wc -l < /tmp/clients; awk '/^Ip: [0-9]/ { print $6 }' /proc/net/snmp",
        );
        assert_eq!(seen, "1\n0", "{name}");
    }
    assert!(
        !host.run_in_vm("parent", "cat /tmp/clients").1,
        "no client of a child connected to the parent"
    );
}

#[test]
fn ssh_reaches_vms_whose_image_has_no_server() {
    let host = host();
    host.ok(&["run", "-d", "--name", "web"]);
    let ssh = |words: &[&str]| host.run(&[&["ssh"], words].concat());
    let output = ssh(&["web", "echo out; echo err >&2; exit 7"]);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert_eq!(text(&output.stdout), "out");
    assert_eq!(text(&output.stderr), "err");
    // Copies files both ways with the SFTP server of `jiffy-ssh-guest`.
    let path = |name: &str| host.folder.path().join(name);
    std::fs::write(path("config"), host.ok(&["ssh-config"]) + "\n").expect("it is written");
    let sent: Vec<u8> = (0..3_000_000u32).map(|i| (i % 251) as u8).collect();
    std::fs::write(path("sent"), &sent).expect("it is written");
    let scp = |from: &str, to: &str| {
        let mut scp = host.limited(LIMIT, Path::new("scp"));
        scp.arg("-qF").arg(path("config")).args([from, to]);
        scp.current_dir(host.folder.path());
        let output = scp.output().expect("scp runs");
        assert!(output.status.success(), "{output:?}");
    };
    scp("sent", "web.jiffy:/root/");
    scp("web.jiffy:sent", "back");
    assert_eq!(std::fs::read(path("back")).expect("the copy is read"), sent);
    // A clone has another host key; a VM keeps its own key when it hibernates.
    let key = |vm: &str| {
        let line = host.ok(&["ssh-proxy", "--known-hosts", "host", vm]);
        line.split_once(' ').expect("two words").1.to_owned()
    };
    let web = key("web");
    host.ok(&["fork", "web", "--name", "clone"]);
    assert_ne!(key("clone"), web);
    assert_eq!(text(&ssh(&["clone", "cat sent | wc -c"]).stdout), "3000000");
    host.ok(&["hibernate", "web"]);
    assert_eq!(text(&ssh(&["web", "echo awake"]).stdout), "awake");
    assert_eq!(key("web"), web);
    assert!(assert_one_sentence(&ssh(&["nobody"])).contains("nobody"));
}

#[test]
fn connections_to_a_hibernated_vm_wake_it_once() {
    let host = host();
    let port = free_port();
    let publish = format!("{port}:8080");
    host.server(
        "dev",
        &["--network", "default", "--idle", "2s", "-p", &publish],
    );
    let state = || -> String {
        let shown: Value = serde_json::from_str(&host.ok(&["inspect", "dev"])).expect("JSON");
        shown[0]["state"].as_str().expect("a state").to_owned()
    };
    let until_it_sleeps = || {
        let until = Instant::now() + Duration::from_secs(120);
        while state() != "hibernated" {
            assert!(Instant::now() < until, "dev is not idle");
            std::thread::sleep(Duration::from_millis(200));
        }
    };
    until_it_sleeps();
    let address = host.address("dev");
    // Clients that connect while the VM is hibernated are held and then answered.
    let answers: Vec<String> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..10).map(|_| scope.spawn(|| fetch_once(port))).collect();
        let answers = clients.into_iter().map(|one| one.join().expect("no panic"));
        answers.map(|one| one.expect("an answer")).collect()
    });
    assert_eq!(answers, ["dev"; 10]);
    assert_eq!(
        (state().as_str(), host.address("dev")),
        ("running", address)
    );
    // The kernel forwards clients to it until it hibernates again.
    assert_eq!(fetch_once(port).expect("an answer"), "dev");
    until_it_sleeps();
    assert_eq!(fetch_once(port).expect("an answer"), "dev");
    // Whatever command starts the machine again makes the new QEMU forward the port.
    until_it_sleeps();
    host.ok(&["machine", "stop"]);
    host.ok(&["ps"]);
    assert_eq!(fetch_once(port).expect("an answer"), "dev");
    host.ok(&["rm", "--force", "dev"]);
    assert!(fetch_once(port).is_err());
}

#[test]
fn vms_that_need_twice_the_memory_all_finish_and_none_is_killed() {
    const VMS: usize = 16;
    const BYTES: &str = "60000000";
    let host = host();
    host.ok(&["machine", "start", "--memory", "1G"]);
    let names: Vec<String> = (0..VMS).map(|number| format!("vm{number}")).collect();
    for name in &names {
        host.ok(&[
            "run", "-d", "--name", name, "-m", "128M", "--idle", "1h", "--", "sleep", "100000",
        ]);
    }
    let fill = format!(
        "mount -o remount,size=100% /dev/shm && head -c {BYTES} /dev/zero >/dev/shm/all && echo done"
    );
    // All grow at once. VMs that finish when little memory is left then hibernate and free it.
    std::thread::scope(|scope| {
        let all = names
            .iter()
            .map(|name| scope.spawn(|| host.run_in_vm(name, &fill)));
        let all: Vec<_> = all.collect();
        for (one, name) in all.into_iter().zip(&names) {
            let done = one.join().expect("no panic");
            assert_eq!(done, ("done".to_owned(), true), "{name}");
        }
    });
    // Every VM still has its data, hibernated or not.
    for name in &names {
        let (said, _) = host.run_in_vm(name, "wc -c </dev/shm/all");
        assert_eq!(said, BYTES, "{name}");
    }
    let kernel = host.ok(&["machine", "shell", "dmesg"]);
    assert!(!kernel.contains("Out of memory"), "{kernel}");
    assert!(!kernel.contains("oom-kill"), "{kernel}");
}
