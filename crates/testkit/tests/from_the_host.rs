//! The user's way: `jiffy` on a host without a real KVM, its node in the
//! machine, in folders of the test's own.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Two machines at once would only slow one another down.
static TURN: Mutex<()> = Mutex::new(());

/// An installation's folders, and its machine's end when the test ends.
struct Host {
    folder: tempfile::TempDir,
    jiffy: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

fn host() -> Host {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let dist = std::env::var_os("JIFFY_DIST").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist"),
        PathBuf::from,
    );
    let jiffy = dist.join("bin/jiffy");
    assert!(jiffy.exists(), "{} is missing: make build", jiffy.display());
    Host {
        folder: tempfile::Builder::new()
            .prefix("jiffy-host-")
            .tempdir()
            .expect("a folder"),
        jiffy,
        _turn: turn,
    }
}

impl Host {
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.jiffy);
        command
            .args(arguments)
            .env("JIFFY_MACHINE", "always")
            .env("JIFFY_DATA", self.folder.path().join("data"))
            .env("JIFFY_RUN", self.folder.path().join("run"))
            .stdin(Stdio::null());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("jiffy runs")
    }

    fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(
            output.status.success(),
            "jiffy {}: {output:?}",
            arguments.join(" ")
        );
        text(&output.stdout)
    }

    /// The process of the machine's QEMU, if it runs.
    fn pid(&self) -> Option<i64> {
        let output = self.run(&["machine", "status", "--format", "json"]);
        let status: Value = serde_json::from_slice(&output.stdout).expect("a status");
        status["pid"].as_i64()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.command(&["machine", "rm", "--force"]).output();
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end().into()
}

/// One sentence and perhaps a hint.
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
    println!("from nothing to the answer: {:?}", begin.elapsed());
    assert_eq!(text(&first.stderr).lines().count(), 1, "{first:?}");
    assert!(text(&first.stdout).contains("UTC"), "{first:?}");

    let second = host.run(&["run", "--rm", "--", "echo", "again"]);
    assert_eq!(text(&second.stdout), "again");
    assert_eq!(text(&second.stderr), "", "said once");

    // Exit statuses and stdin come through as they do locally.
    let status = host
        .run(&["run", "--rm", "--", "sh", "-c", "exit 7"])
        .status
        .code();
    assert_eq!(status, Some(7));

    // What is stored outlives the machine; what ran in it does not.
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
fn a_machine_that_dies_is_explained_and_started_again() {
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
    // Sockets, pid and token of the dead one are still there.
    assert_eq!(host.ok(&["run", "--rm", "--", "echo", "back"]), "back");
}

#[test]
fn what_is_missing_or_wrong_is_one_sentence() {
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

/// Runs in a mount namespace of its own, where the data folder is a small
/// disk that grows later.
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
fn a_full_disk_of_the_host_is_explained_and_nothing_is_lost() {
    let host = host();
    let output = Command::new("unshare")
        .args([
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            FULL_DISK,
        ])
        .env("JIFFY", &host.jiffy)
        .env("JIFFY_MACHINE", "always")
        .env("JIFFY_DATA", host.folder.path().join("data"))
        .env("JIFFY_RUN", host.folder.path().join("run"))
        .stdin(Stdio::null())
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
