//! `make install` and `make uninstall`, with stand-ins for Jiffy's programs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

struct Installation {
    folder: tempfile::TempDir,
    prefix: PathBuf,
}

impl Installation {
    /// An installation whose daemon writes its arguments to `called`.
    fn new() -> Installation {
        let folder = tempfile::tempdir().expect("a folder");
        let prefix = folder.path().join("usr");
        let dist = folder.path().join("dist");
        let daemon = format!(
            "#!/bin/sh\necho \"$@\" > {}\n",
            folder.path().join("called").display()
        );
        for (file, content) in [
            ("bin/jiffy", "#!/bin/sh\n"),
            ("lib/jiffy/jiffyd", &daemon),
            ("share/jiffy/kernels/base/vmlinux", "kernel"),
        ] {
            let file = dist.join(file);
            fs::create_dir_all(file.parent().expect("a folder")).expect("made");
            fs::write(&file, content).expect("written");
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("executable");
        }
        // A program of the prefix that is not Jiffy's.
        fs::create_dir_all(prefix.join("bin")).expect("made");
        fs::write(prefix.join("bin/other"), "other").expect("written");
        let installation = Installation { folder, prefix };
        let output = installation.script("install", "");
        assert!(output.status.success(), "{output:?}");
        assert!(installation.prefix.join("lib/jiffy/jiffyd").exists());
        installation
    }

    fn script(&self, name: &str, destdir: &str) -> Output {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        Command::new(root.join("scripts").join(name))
            .arg(&self.prefix)
            .env("DIST", self.folder.path().join("dist"))
            .env("DESTDIR", destdir)
            .output()
            .expect("it runs")
    }

    fn files(&self) -> Vec<String> {
        let found = Command::new("find")
            .args([".", "-type", "f"])
            .current_dir(&self.prefix)
            .output();
        let text = String::from_utf8(found.expect("find").stdout).expect("names");
        text.lines().map(str::to_owned).collect()
    }
}

#[test]
fn uninstall_removes_what_install_has_copied_and_the_network() {
    let installation = Installation::new();
    let output = installation.script("uninstall", "");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(installation.files(), ["./bin/other"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("/var/lib/jiffy"), "{said}");
    let called = fs::read_to_string(installation.folder.path().join("called"));
    if rustix::process::geteuid().is_root() {
        assert_eq!(called.expect("the daemon was called"), "--remove-network\n");
    }
    let again = installation.script("uninstall", "");
    assert!(!again.status.success(), "{again:?}");
}

#[test]
fn a_staged_installation_is_removed_without_touching_the_network() {
    let installation = Installation::new();
    let output = installation.script("uninstall", "/staging");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(installation.files(), ["./bin/other"]);
    assert!(!installation.folder.path().join("called").exists());
}

#[test]
fn nothing_is_removed_while_a_program_runs() {
    let installation = Installation::new();
    let monitor = installation.prefix.join("lib/jiffy/jiffy-vmm");
    let copied = Command::new("cp").arg("/bin/sleep").arg(&monitor).status();
    assert!(copied.expect("cp").success());
    let mut running = Command::new(&monitor)
        .arg("1000")
        .stdin(Stdio::null())
        .spawn()
        .expect("it runs");
    let output = installation.script("uninstall", "");
    running.kill().expect("it ran");
    running.wait().expect("it ends");
    assert!(!output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains(&format!("process {}", running.id())),
        "{said}"
    );
    assert_eq!(installation.files().len(), 5);
}
