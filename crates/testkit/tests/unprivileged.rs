//! A node of an ordinary user, whose VMs have their network by passt. Needs KVM, root for the
//! preparations, and passt; `jiffy-lab run-tests` runs it in a machine.

use jiffy_testkit::dist;
use rustix::mount::{MountFlags, MountPropagationFlags};
use serde_json::Value;
use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(300);
/// How long a client waits for an answer before it tries again.
const PATIENCE: Duration = Duration::from_secs(30);
const USER: u32 = 1000;
/// A public address, which the host gets after the VM has started.
const OUTSIDE: &str = "198.51.100.7";

struct Node {
    folder: tempfile::TempDir,
    root: PathBuf,
    daemon: Child,
}

/// Lets the programs of this test replace their root folder, as they can everywhere but in an
/// initramfs.
fn leave_the_initramfs() {
    #[allow(deprecated, reason = "of this thread's own, mounts only")]
    rustix::thread::unshare(rustix::thread::UnshareFlags::NEWNS).expect("root");
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private).expect("private mounts");
    let root = tempfile::tempdir_in("/").expect("a folder").keep();
    rustix::mount::mount_bind_recursive("/", &root).expect("a second root");
    std::env::set_current_dir(&root).expect("a folder");
    rustix::mount::mount_move(".", "/").expect("the root is replaced");
    rustix::process::chroot(".").expect("a new root");
    std::env::set_current_dir("/").expect("a folder");
    // One of its own, for passt, whatever the host has there.
    let _ = fs::create_dir("/tmp");
    rustix::mount::mount("tmp", "/tmp", "tmpfs", MountFlags::empty(), None).expect("a tmpfs");
    fs::set_permissions("/tmp", Permissions::from_mode(0o1777)).expect("permissions");
}

impl Node {
    fn start() -> Node {
        let root = match std::env::var_os("JIFFY_IN_LAB") {
            Some(_) => PathBuf::from("/"),
            None => dist(),
        };
        let folder = tempfile::tempdir_in("/tmp").expect("a folder");
        chown(folder.path(), Some(USER), Some(USER)).expect("root");
        for device in ["/dev/kvm", "/dev/userfaultfd"] {
            fs::set_permissions(device, Permissions::from_mode(0o666)).expect(device);
        }
        let log = File::create(folder.path().join("log")).expect("a log");
        let daemon = Node::daemon(&root, &folder, log);
        let node = Node {
            folder,
            root,
            daemon,
        };
        node.answers();
        node
    }

    fn daemon(root: &std::path::Path, folder: &tempfile::TempDir, log: File) -> Child {
        Command::new(root.join("lib/jiffy/jiffyd"))
            .arg("--data")
            .arg(folder.path().join("data"))
            .arg("--run")
            .arg(folder.path().join("run"))
            .args(["--start-timeout", "250"])
            .env("JIFFY_PAGER_PATIENCE_MS", "60000")
            .uid(USER)
            .gid(USER)
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("jiffyd")
    }

    fn answers(&self) {
        let socket = self.folder.path().join("run/jiffyd.sock");
        eventually("jiffyd listens", || UnixStream::connect(&socket).is_ok());
    }

    /// Kills the daemon, and starts another.
    fn restart(&mut self) {
        self.daemon.kill().expect("a daemon");
        self.daemon.wait().expect("a child");
        let log = File::options().append(true).open(self.log_file()).unwrap();
        self.daemon = Node::daemon(&self.root, &self.folder, log);
        self.answers();
    }

    fn log_file(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.root.join("bin/jiffy"));
        command
            .args(arguments)
            .env("JIFFY_MACHINE", "never")
            .env("JIFFY_DATA", self.folder.path().join("data"))
            .env("JIFFY_RUN", self.folder.path().join("run"))
            .uid(USER)
            .gid(USER)
            .stdin(Stdio::null());
        command
    }

    /// Runs `jiffy`, which must succeed; returns its stdout.
    fn ok(&self, arguments: &[&str]) -> String {
        let begin = Instant::now();
        let output = self.command(arguments).output().expect("jiffy runs");
        let spent = begin.elapsed().as_secs_f64();
        println!("{spent:6.2} s  {}", arguments.join(" "));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
        assert!(
            output.status.success(),
            "{}\n{}\n{}",
            text(&output.stdout),
            text(&output.stderr),
            fs::read_to_string(self.log_file()).unwrap_or_default()
        );
        text(&output.stdout)
    }

    /// Whether the guest gets `hello` from a server.
    fn asks(&self, vm: &str, server: &str) -> bool {
        let (address, port) = server.split_once(':').expect("a port");
        let script = format!("sleep 1 | nc -w 10 {address} {port} || true");
        self.ok(&["exec", vm, "sh", "-c", &script]) == "hello"
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let listed = self.command(&["ps", "-aq"]).output();
        let names = listed.map(|it| String::from_utf8_lossy(&it.stdout).into_owned());
        for name in names.unwrap_or_default().split_whitespace() {
            let _ = self.command(&["rm", "-f", name]).output();
        }
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

#[track_caller]
fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !is() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// What the VM answers at its published port; empty until it listens.
fn answer() -> String {
    let mut text = String::new();
    if let Ok(mut stream) = TcpStream::connect("127.0.0.1:8080") {
        let _ = stream.set_read_timeout(Some(PATIENCE));
        // Debian 12's passt completes the guest's handshake with the first bytes only.
        let _ = stream.write_all(b"\n");
        let _ = BufReader::new(stream).read_line(&mut text);
    }
    println!("         the guest answers {text:?}");
    text.trim_end().to_owned()
}

fn serve(address: &str) -> String {
    let listener = TcpListener::bind((address, 0)).expect("an address");
    let at = listener.local_addr().expect("an address").to_string();
    thread::spawn(move || {
        while let Ok((mut client, _)) = listener.accept() {
            let _ = client.write_all(b"hello");
        }
    });
    at
}

/// Gives the host the public address, or takes it away.
fn change_outside(verb: &str) {
    let changed = Command::new("busybox")
        .args(["ip", "addr", verb, &format!("{OUTSIDE}/32"), "dev", "lo"])
        .status();
    assert!(changed.expect("busybox").success(), "{verb}");
}

/// The address of the host's first interface.
fn own_address() -> String {
    let output = Command::new("busybox")
        .args(["ip", "-4", "-o", "addr", "show", "scope", "global"])
        .output()
        .expect("busybox");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let address = text.split_once("inet ").and_then(|it| it.1.split_once('/'));
    address.expect("an address").0.to_owned()
}

#[test]
#[ignore = "needs a real KVM here"]
fn vms_of_an_ordinary_user_have_a_network_and_published_ports() {
    leave_the_initramfs();
    let mut node = Node::start();
    let networks: Value =
        serde_json::from_str(&node.ok(&["network", "ls", "--format", "json"])).expect("JSON");
    let note = networks[0]["note"].as_str().expect("a note").to_owned();
    assert!(note.contains("passt"), "{note}");
    let refused = node
        .command(&["sched", "trace"])
        .output()
        .expect("jiffy runs");
    let refused = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.contains("needs root"), "{refused}");
    let serving = "echo echo from the guest > /tmp/answer; nc -ll -p 80 -e sh /tmp/answer";
    node.ok(&[
        "run", "-d", "--name", "web", "-p", "8080:80", "--", "sh", "-c", serving,
    ]);
    eventually("the guest is reached", || answer() == "from the guest");
    let own = serve(&own_address());
    change_outside("add");
    let outside = serve(OUTSIDE);
    assert!(node.asks("web", &outside), "the guest reaches it");
    assert!(!node.asks("web", &own), "the host is closed to the guest");
    // Without a daemon, and with the next.
    node.restart();
    eventually("the guest is still reached", || {
        answer() == "from the guest"
    });
    assert!(node.asks("web", &outside));
    // Others have a network of their own. What is the host's when they start is closed to them.
    change_outside("del");
    node.ok(&["fork", "web", "--name", "child"]);
    node.ok(&["snapshot", "create", "web", "kept"]);
    node.ok(&["run", "-d", "--name", "restored", "--from", "kept"]);
    change_outside("add");
    assert!(node.asks("child", &outside));
    assert!(node.asks("restored", &outside));
    // A connection wakes it.
    change_outside("del");
    node.ok(&["hibernate", "web"]);
    eventually("it is woken and reached", || answer() == "from the guest");
    change_outside("add");
    assert!(node.asks("web", &outside));
    node.ok(&["rm", "-f", "web"]);
    eventually("its port is free", || {
        TcpListener::bind("127.0.0.1:8080").is_ok()
    });
}
