//! Debian's registry in the machine, with images made by Debian's tools.

use crate::support::Jiffy;
use jiffy_registry::testing::{LocalRegistry, RegistryOptions, missing};
use jiffy_testkit::MOST_SHARED;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Once, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

/// Address of the registry in the machine.
pub const HOST: &str = "127.0.0.1:5000";
/// Bytes of an image that no shell command reads.
pub const BALLAST: usize = 24 << 20;

/// The program, its loader and its library; the machine has no libc.
const FILES: [(&str, &str); 3] = [
    ("/usr/bin/docker-registry", "/usr/bin/docker-registry"),
    ("/lib64/ld-linux-x86-64.so.2", "/lib64/ld-linux-x86-64.so.2"),
    (
        "/lib/x86_64-linux-gnu/libc.so.6",
        "/lib/x86_64-linux-gnu/libc.so.6",
    ),
];

const CONFIG: &str = "\
version: 0.1
log: { level: info }
storage:
  filesystem: { rootdirectory: /var/lib/jiffy/registry }
  delete: { enabled: true }
http:
  addr: 127.0.0.1:5000
";

/// A registry in the machine that has `HOST/tests/layers:1`.
pub struct Registry<'a> {
    jiffy: &'a Jiffy,
}

impl Registry<'_> {
    /// Starts the registry with the tests' image only.
    pub fn start(jiffy: &Jiffy) -> Registry<'_> {
        static PUSHED: [Once; MOST_SHARED] = [const { Once::new() }; MOST_SHARED];
        PUSHED[jiffy.machine()].call_once(|| {
            for (host, guest) in FILES {
                let pushed = jiffy.lab.push(Path::new(host), guest);
                pushed.unwrap_or_else(|error| panic!("{error:#}; scripts/setup installs it"));
            }
        });
        static STORAGE: OnceLock<Vec<u8>> = OnceLock::new();
        let storage = STORAGE.get_or_init(storage);
        let write = |path: &str, contents: &[u8]| {
            jiffy
                .lab
                .write(path, 0o644, contents.to_vec())
                .expect("written");
        };
        write("/tests/registry/config.yml", CONFIG.as_bytes());
        write("/tests/registry/storage.tar", storage);
        jiffy.sh(
            "mkdir -p /var/lib/jiffy/registry && cd /var/lib/jiffy/registry && \
             tar xf /tests/registry/storage.tar && cd / && \
             (setsid docker-registry serve /tests/registry/config.yml \
               </dev/null >/tests/registry/log 2>&1 & echo $! > /tests/registry/pid) && \
             until grep -q 'listening on' /tests/registry/log; do sleep 0.1; done",
        );
        Registry { jiffy }
    }

    /// Bytes that the registry has sent since its start or the last call.
    pub fn sent(&self) -> u64 {
        let log = self
            .jiffy
            .sh("cat /tests/registry/log; : > /tests/registry/log");
        log.lines()
            .filter_map(|line| {
                let (_, rest) = line.split_once("http.response.written=")?;
                let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
                digits.parse::<u64>().ok()
            })
            .sum()
    }

    /// Stops the registry.
    pub fn stop(&self) {
        self.jiffy
            .sh("kill $(cat /tests/registry/pid) 2>/dev/null; true");
    }
}

impl Drop for Registry<'_> {
    fn drop(&mut self) {
        self.stop();
        self.jiffy
            .sh("rm -rf /var/lib/jiffy/registry /tests/registry");
    }
}

/// The storage folder of a registry with the tests' image, as a tar.
fn storage() -> Vec<u8> {
    let work = tempfile::tempdir().expect("a folder");
    let layout = layout(work.path());
    let registry = LocalRegistry::start(&RegistryOptions::default()).expect("it starts");
    run(Command::new("skopeo")
        .args(["copy", "--quiet", "--dest-tls-verify=false"])
        .args([
            format!("oci:{}:1", layout.display()),
            format!("docker://{}/tests/layers:1", registry.host()),
        ]));
    run(Command::new("tar")
        .arg("-C")
        .arg(registry.storage())
        .args(["-cf", "-", "."]))
}

/// An OCI layout with an image of two layers, made by umoci: busybox and ballast, then changes with
/// whiteouts.
fn layout(work: &Path) -> PathBuf {
    let layout = work.join("layout");
    let image = format!("{}:1", layout.display());
    let umoci = |arguments: &[&str]| run(Command::new("umoci").args(arguments));
    umoci(&["init", "--layout", &layout.display().to_string()]);
    umoci(&["new", "--image", &image]);
    for (name, make) in [("one", first_layer as fn(&Path)), ("two", second_layer)] {
        let folder = work.join(name);
        fs::create_dir(&folder).expect("a folder");
        make(&folder);
        let tar = work.join(format!("{name}.tar"));
        run(Command::new("tar")
            .arg("-C")
            .arg(&folder)
            .args(["--owner=0", "--group=0", "--sort=name", "-cf"])
            .args([&tar, Path::new(".")]));
        umoci(&[
            "raw",
            "add-layer",
            "--image",
            &image,
            &tar.display().to_string(),
        ]);
    }
    umoci(&[
        "config",
        "--image",
        &image,
        "--config.entrypoint",
        "/bin/greet",
        "--config.cmd",
        "world",
        "--config.env",
        "GREETING=hello",
        "--config.workingdir",
        "/srv",
        "--config.user",
        "1000:1000",
        "--config.exposedports",
        "8080/tcp",
    ]);
    layout
}

fn first_layer(root: &Path) {
    for folder in [
        "bin",
        "etc",
        "srv",
        "usr/share",
        "old",
        "tmp",
        "proc",
        "sys",
        "dev",
    ] {
        fs::create_dir_all(root.join(folder)).expect("a folder");
    }
    fs::copy("/bin/busybox", root.join("bin/busybox")).expect("busybox-static is installed");
    for applet in [
        "sh", "cat", "echo", "ls", "id", "pwd", "env", "true", "md5sum", "dd", "rm",
    ] {
        std::os::unix::fs::symlink("busybox", root.join("bin").join(applet)).expect("a link");
    }
    let greet = "#!/bin/sh\necho \"$GREETING $* $(pwd) $(id -u)\"\n";
    fs::write(root.join("bin/greet"), greet).expect("written");
    run(Command::new("chmod").arg("755").arg(root.join("bin/greet")));
    fs::write(root.join("etc/passwd"), "root:x:0:0::/:/bin/sh\n").expect("written");
    fs::write(root.join("old/gone"), "of the first layer").expect("written");
    fs::write(root.join("etc/changed"), "first").expect("written");
    // Incompressible data, different in each run, so that no cache helps.
    let mut state = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(1, |now| now.as_nanos() as u64)
        | 1;
    let ballast: Vec<u8> = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    })
    .take(BALLAST / 8)
    .flatten()
    .collect();
    for (number, part) in ballast.chunks(4 << 20).enumerate() {
        let path = root.join(format!("usr/share/ballast-{number}"));
        fs::write(path, part).expect("written");
    }
}

fn second_layer(root: &Path) {
    fs::create_dir_all(root.join("etc")).expect("a folder");
    fs::create_dir_all(root.join("old")).expect("a folder");
    fs::write(root.join("etc/changed"), "second").expect("written");
    fs::write(root.join("old/.wh.gone"), "").expect("written");
    fs::write(root.join("old/new"), "of the second layer").expect("written");
}

/// Runs a program of the host, which must succeed; returns its stdout.
fn run(command: &mut Command) -> Vec<u8> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{}", missing(&name, &error)));
    assert!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    output.stdout
}
