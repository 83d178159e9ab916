//! An installation of Jiffy whose node is in the machine, in folders of a test.

use jiffy_testkit::dist;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// An installation's folders. Dropping it ends its machine.
pub struct Host {
    pub folder: tempfile::TempDir,
    pub jiffy: PathBuf,
}

/// Time limit of a command, seconds: many times what one takes on a slow machine, and a quarter of
/// what all tests may take, so that a command that hangs fails its test and is explained.
pub const LIMIT: u32 = 450;
/// Time limit of a command that explains a failure, seconds.
const BRIEF: u32 = 60;
/// Lines of the machine's console that are shown if a test fails.
const SHOWN: usize = 100;

impl Host {
    pub fn new() -> Host {
        let jiffy = dist().join("bin/jiffy");
        assert!(jiffy.exists(), "{} is missing: make build", jiffy.display());
        Host {
            folder: tempfile::Builder::new()
                .prefix("jiffy-host-")
                .tempdir()
                .expect("a folder"),
            jiffy,
        }
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.limited(LIMIT, &self.jiffy);
        command.args(arguments);
        command
    }

    /// A program that runs `jiffy`, with a time limit.
    pub fn limited(&self, seconds: u32, program: &Path) -> Command {
        let mut command = Command::new("/usr/bin/timeout");
        command
            .arg(seconds.to_string())
            .arg(program)
            .env("JIFFY_MACHINE", "always")
            .env("JIFFY_DATA", self.folder.path().join("data"))
            .env("JIFFY_RUN", self.folder.path().join("run"))
            .stdin(Stdio::null());
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("jiffy runs")
    }

    pub fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(
            output.status.success(),
            "jiffy {}: {output:?}",
            arguments.join(" ")
        );
        text(&output.stdout)
    }
}

impl Host {
    /// Prints what shows why a test failed: the VMs, the machine's threads and its console.
    fn explain(&self) {
        let threads = "uptime; ps; echo w >/proc/sysrq-trigger";
        for words in [
            &["machine", "status"] as &[_],
            &["ps", "--all"],
            &["machine", "shell", "sh", "-c", threads],
        ] {
            let Ok(output) = self.limited(BRIEF, &self.jiffy).args(words).output() else {
                continue;
            };
            let (said, complaint) = (text(&output.stdout), text(&output.stderr));
            println!("$ jiffy {}\n{said}\n{complaint}", words.join(" "));
            // The other commands would start a machine.
            if !output.status.success() {
                break;
            }
        }
        let console = self.folder.path().join("data/machine/console.log");
        let console = std::fs::read(console).unwrap_or_default();
        let console = String::from_utf8_lossy(&console);
        let lines: Vec<_> = console.lines().collect();
        let last = &lines[lines.len().saturating_sub(SHOWN)..];
        println!("the machine's console ends with:\n{}", last.join("\n"));
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.explain();
        }
        let _ = self.command(&["machine", "rm", "--force"]).output();
    }
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end().into()
}

pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}
