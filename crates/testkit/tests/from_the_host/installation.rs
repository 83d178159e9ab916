//! An installation of Jiffy whose node is in the machine, in folders of a test.

use jiffy_testkit::dist;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// An installation's folders. Dropping it ends its machine.
pub struct Host {
    pub folder: tempfile::TempDir,
    pub jiffy: PathBuf,
}

/// Time limit of a command, seconds: a hundred times what one takes on a slow machine.
const LIMIT: &str = "900";
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
        let mut command = Command::new("/usr/bin/timeout");
        command
            .arg(LIMIT)
            .arg(&self.jiffy)
            .args(arguments)
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

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let console = self.folder.path().join("data/machine/console.log");
            let console = std::fs::read(console).unwrap_or_default();
            let console = String::from_utf8_lossy(&console);
            let lines: Vec<_> = console.lines().collect();
            let last = &lines[lines.len().saturating_sub(SHOWN)..];
            println!("the machine's console ends with:\n{}", last.join("\n"));
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
