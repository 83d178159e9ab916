//! Daily work in VMs, with ordinary programs: Debian's servers, Docker and package managers in VMs
//! of the machine, and ordinary clients on this host.

#[path = "clients/docker.rs"]
mod docker;
#[path = "from_the_host/installation.rs"]
mod installation;
#[path = "clients/names.rs"]
mod names;
#[path = "clients/packages.rs"]
mod packages;
#[path = "clients/servers.rs"]
mod servers;

use installation::{Host, text};
use jiffy_registry::testing::{LocalRegistry, RegistryOptions, missing};
use jiffy_sys::mutex::lock;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// Time limit of anything that is waited for. It says nothing about the expected speed.
const TIMEOUT: Duration = Duration::from_secs(900);
/// This host's loopback, as VMs in the machine reach it.
const LOOPBACK: &str = "10.0.2.2";

/// A machine, and a registry on this host with the image of `scripts/clients-image`.
struct Debian {
    host: Host,
    registry: LocalRegistry,
}

/// The machine of all tests that run at the same time.
fn debian() -> Arc<Debian> {
    static SHARED: Mutex<Weak<Debian>> = Mutex::new(Weak::new());
    let mut shared = lock(&SHARED);
    shared.upgrade().unwrap_or_else(|| {
        let new = Arc::new(Debian::start());
        *shared = Arc::downgrade(&new);
        new
    })
}

impl Debian {
    fn start() -> Debian {
        let host = Host::new();
        let registry = LocalRegistry::start(&RegistryOptions::default()).expect("a registry");
        let debian = Debian { host, registry };
        debian.push();
        debian.host.ok(&["machine", "start"]);
        debian.host.ok(&["image", "pull", &debian.image()]);
        debian
    }

    /// The reference of the image. VMs fetch what they read of it.
    fn image(&self) -> String {
        format!("{}/tests/clients:1", self.registry.host())
    }

    /// Imports the image into a node on this host, which is ten times as fast as in the machine,
    /// and pushes it.
    fn push(&self) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/clients-image");
        let tar = run(&mut Command::new(script));
        let folder = tempfile::tempdir().expect("a folder");
        let of_node = |program: &Path| {
            let mut command = Command::new(program);
            command
                .env("JIFFY_MACHINE", "never")
                .env("JIFFY_VM_NETWORK", "off")
                .env("JIFFY_DATA", folder.path().join("data"))
                .env("JIFFY_RUN", folder.path().join("run"))
                .stdin(Stdio::null());
            command
        };
        // A daemon that `jiffy` started would keep running.
        let jiffyd = self.host.jiffy.with_file_name("../lib/jiffy/jiffyd");
        let daemon = of_node(&jiffyd).stderr(Stdio::null()).spawn();
        let _daemon = Running(daemon.expect("jiffyd starts"));
        let socket = folder.path().join("run/jiffyd.sock");
        eventually("the node", || UnixStream::connect(&socket).is_ok());
        let node = |words: &[&str]| run(of_node(&self.host.jiffy).args(words));
        node(&["image", "import", "clients", &tar]);
        node(&["push", "clients", &self.image()]);
    }

    /// Starts a VM of the image.
    fn start_vm(&self, name: &str, options: &[&str], argv: &[&str]) -> Vm<'_> {
        let image = self.image();
        let begin = ["run", "-d", "--name", name];
        self.host
            .ok(&[&begin, options, &[&image, "--"], argv].concat());
        Vm {
            host: &self.host,
            name: name.into(),
        }
    }
}

/// A VM, which is removed when this is dropped.
struct Vm<'a> {
    host: &'a Host,
    name: String,
}

impl Vm<'_> {
    /// Runs a shell script in the VM, which must succeed; returns its stdout.
    fn sh(&self, script: &str) -> String {
        self.host.ok(&["exec", &self.name, "sh", "-ec", script])
    }

    /// Copies a file or a folder of this host.
    fn copy(&self, from: &Path, to: &str) {
        let from = from.to_str().expect("UTF-8");
        let to = format!("{}:{to}", self.name);
        self.host.ok(&["cp", from, &to]);
    }
}

impl Drop for Vm<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let logs = self.host.run(&["logs", &self.name]);
            println!(
                "{}: {}{}",
                self.name,
                text(&logs.stdout),
                text(&logs.stderr)
            );
        }
        self.host.run(&["rm", "--force", &self.name]);
    }
}

/// A process that is killed when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a program of this host, which must succeed; returns its stdout.
fn run(command: &mut Command) -> String {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{}", missing(&name, &error)));
    assert!(output.status.success(), "{command:?}: {output:?}");
    text(&output.stdout)
}

/// Runs a client of this host until it succeeds; returns its stdout. QEMU accepts a connection
/// before it knows whether the server in the VM listens.
fn ask(client: &[&str]) -> String {
    let mut said = String::new();
    eventually(&client.join(" "), || {
        let output = Command::new(client[0]).args(&client[1..]).output();
        let output = output.unwrap_or_else(|error| panic!("{}", missing(client[0], &error)));
        said = text(&output.stdout);
        output.status.success()
    });
    said
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < until, "{what}: not within {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(200));
    }
}
