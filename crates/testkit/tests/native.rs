//! A node on the host where this program runs, which has hardware-backed or emulated KVM: features
//! that must work on every processor and every host kernel. `jiffy-lab run-tests` runs it on an
//! emulated Intel processor and on other kernels. On a host with KVM it runs with `--ignored`.

use jiffy_testkit::dist;
use jiffy_wire::cpu::Profile;
use serde_json::Value;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Time limit after which an operation counts as hanging; emulated processors are slow.
const TIMEOUT: Duration = Duration::from_secs(300);

/// A daemon with its own folders. It and its VMs end when this is dropped.
struct Node {
    folder: tempfile::TempDir,
    root: PathBuf,
    daemon: Child,
}

impl Node {
    fn start() -> Node {
        // In the laboratory's machine Jiffy is installed at the root.
        let root = match std::env::var_os("JIFFY_IN_LAB") {
            Some(_) => PathBuf::from("/"),
            None => dist(),
        };
        let folder = tempfile::tempdir().expect("a folder");
        let log = std::fs::File::create(folder.path().join("log")).expect("a log");
        let daemon = Command::new(root.join("lib/jiffy/jiffyd"))
            .arg("--data")
            .arg(folder.path().join("data"))
            .arg("--run")
            .arg(folder.path().join("run"))
            .args(["--start-timeout", "250"])
            .env("JIFFY_PAGER_PATIENCE_MS", "60000")
            .env("JIFFY_VM_NETWORK", "off")
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("jiffyd");
        let mut node = Node {
            folder,
            root,
            daemon,
        };
        let socket = node.folder.path().join("run/jiffyd.sock");
        let deadline = Instant::now() + TIMEOUT;
        while UnixStream::connect(&socket).is_err() {
            let ended = node.daemon.try_wait().expect("a child");
            assert!(ended.is_none(), "jiffyd ended: {ended:?} {}", node.log());
            assert!(Instant::now() < deadline, "jiffyd does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        node
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let begin = Instant::now();
        let output = Command::new(self.root.join("bin/jiffy"))
            .args(arguments)
            .env("JIFFY_MACHINE", "never")
            .env("JIFFY_DATA", self.folder.path().join("data"))
            .env("JIFFY_RUN", self.folder.path().join("run"))
            .stdin(Stdio::null())
            .output()
            .expect("jiffy runs");
        println!(
            "{:6.2} s  {}",
            begin.elapsed().as_secs_f64(),
            arguments.join(" ")
        );
        output
    }

    /// Runs `jiffy`, which must succeed; returns its stdout.
    fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(
            output.status.success(),
            "jiffy {}: {}\n{}\n{}\nthe daemon's log:\n{}",
            arguments.join(" "),
            output.status,
            text(&output.stdout),
            text(&output.stderr),
            self.log()
        );
        text(&output.stdout)
    }

    /// Runs a shell script in a VM.
    fn sh(&self, vm: &str, script: &str) -> String {
        self.ok(&["exec", vm, "sh", "-c", script])
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Ok(names) = String::from_utf8(self.run(&["ps", "-aq"]).stdout) {
            for name in names.split_whitespace() {
                self.run(&["rm", "-f", name]);
            }
        }
        let pid = rustix::process::Pid::from_child(&self.daemon);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.daemon.wait();
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end().into()
}

/// The value of a line in /proc/cpuinfo.
fn processor(cpuinfo: &str, name: &str) -> String {
    let line = cpuinfo.lines().find(|line| line.starts_with(name));
    let value = line.and_then(|line| line.split_once(": "));
    value.map_or_else(String::new, |(_, value)| value.into())
}

#[test]
#[ignore = "needs a real KVM here"]
fn a_guest_is_run_captured_restored_forked_and_hibernated() {
    let node = Node::start();
    let doctor = node.run(&["doctor", "--format", "json"]);
    let report: Value = serde_json::from_slice(&doctor.stdout).expect("JSON");
    assert_eq!(report["verdict"], "native", "{report}");

    let cold = node.run(&[
        "run",
        "--rm",
        "--cold",
        "--",
        "sh",
        "-c",
        "uname -s; exit 7",
    ]);
    assert_eq!(cold.status.code(), Some(7), "{cold:?}\n{}", node.log());
    assert_eq!(text(&cold.stdout), "Linux");

    node.ok(&[
        "run", "--cold", "-d", "--cpus", "2", "--name", "parent", "--", "sleep", "1000000",
    ]);
    // Data that only an exact copy has, and a random number that no two VMs may draw.
    node.sh(
        "parent",
        "head -c 4194304 /dev/urandom > /tmp/bytes; nproc > /tmp/nproc",
    );
    let sum = node.sh("parent", "cat /tmp/nproc; md5sum < /tmp/bytes");
    assert!(sum.starts_with("2\n"), "{sum}");
    let guests = node.sh("parent", "cat /proc/cpuinfo");
    let ours = std::fs::read_to_string("/proc/cpuinfo").expect("cpuinfo");
    assert_eq!(
        processor(&guests, "vendor_id"),
        processor(&ours, "vendor_id")
    );

    node.ok(&["snapshot", "create", "parent", "kept"]);
    node.ok(&["run", "-d", "--from", "kept", "--name", "restored"]);
    node.ok(&["fork", "parent", "--name", "child"]);
    let mut numbers = Vec::new();
    for vm in ["parent", "restored", "child"] {
        assert_eq!(
            node.sh(vm, "cat /tmp/nproc; md5sum < /tmp/bytes"),
            sum,
            "{vm}"
        );
        // On each vCPU.
        let both = node.sh(
            vm,
            "for cpu in 0 1; do taskset -c $cpu cat /proc/sys/kernel/random/uuid; done",
        );
        assert_eq!(both.lines().count(), 2, "{vm}: {both}");
        numbers.extend(both.lines().map(String::from));
    }
    numbers.sort();
    numbers.dedup();
    assert_eq!(numbers.len(), 6, "{numbers:?}");

    node.ok(&["hibernate", "parent"]);
    node.ok(&["wake", "parent"]);
    assert_eq!(
        node.sh("parent", "cat /tmp/nproc; md5sum < /tmp/bytes"),
        sum
    );
    for vm in ["parent", "restored", "child"] {
        node.ok(&["rm", "-f", vm]);
    }
    assert_eq!(node.ok(&["ps", "-aq"]), "");
}

#[test]
#[ignore = "needs a real KVM here"]
fn a_guest_has_the_requested_cpu_profile() {
    let node = Node::start();
    let host = node.ok(&["doctor", "--cpu", "--format", "json"]);
    let profile: Profile = serde_json::from_str(&host).expect("a profile");
    let file = |name: &str, text: &str| {
        let path = node.folder.path().join(name);
        std::fs::write(&path, text).expect("written");
        path.to_str().expect("a path in UTF-8").to_owned()
    };
    let flags_with = |options: &[&str]| {
        let mut arguments = vec!["run", "--rm"];
        arguments.extend(options);
        arguments.extend(["--", "cat", "/proc/cpuinfo"]);
        let flags = processor(&node.ok(&arguments), "flags");
        let flags: Vec<String> = flags.split(' ').map(String::from).collect();
        assert!(flags.len() > 20, "{flags:?}");
        flags
    };
    let has = |flags: &[String], name: &str| flags.iter().any(|flag| flag == name);

    // The host's own profile changes nothing.
    let plain = flags_with(&["--cold"]);
    assert!(has(&plain, "sse4_2"), "{plain:?}");
    let own = file("own.json", &host);
    assert_eq!(flags_with(&["--cpu-profile", &own]), plain);

    let level = flags_with(&["--cpu-profile", "x86-64-v2"]);
    assert!(
        has(&level, "sse4_2") && has(&level, "popcnt") && !has(&level, "avx"),
        "{level:?}"
    );
    assert!(level.len() < plain.len(), "{level:?}");

    // What several hosts have in common: here AVX is taken away from one.
    let mut other = profile.clone();
    let leaf = |profile: &mut Profile, number: u32| {
        let mut leaves = profile.cpuid.iter_mut();
        let at = leaves.position(|leaf| (leaf.leaf, leaf.index) == (number, 0));
        at.expect("a leaf")
    };
    let first = leaf(&mut other, 1);
    other.cpuid[first].registers[2] &= !(1 << 28);
    let json = |profile: &Profile| serde_json::to_string_pretty(profile).expect("JSON");
    let fleet = file("fleet.json", &(host + "\n" + &json(&other)));
    let common = flags_with(&["--cpu-profile", &fleet]);
    assert!(has(&common, "sse4_2") && !has(&common, "avx"), "{common:?}");

    // A profile with more features than the host has, and an unknown name.
    let mut more = profile;
    let seventh = leaf(&mut more, 7);
    more.cpuid[seventh].registers[2] |= 1 << 13;
    let more = file("more.json", &json(&more));
    for (choice, why) in [(&*more, "it lacks tme"), ("x86-64-v9", "x86-64-v9")] {
        let refused = node.run(&["run", "--rm", "--cpu-profile", choice, "--", "true"]);
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(125), "{said}");
        assert!(said.starts_with("jiffy: ") && said.contains(why), "{said}");
    }
    // `run --rm` does not wait until the VM's files are removed.
    let deadline = Instant::now() + TIMEOUT;
    while !node.ok(&["ps", "-aq"]).is_empty() {
        assert!(Instant::now() < deadline, "a VM is left");
        std::thread::sleep(Duration::from_millis(50));
    }
}
