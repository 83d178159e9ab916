//! Compromised `jiffy-pager`, `jiffy-origins`, `jiffy-disk`, `jiffy-files` and `jiffy-import` processes:
//! each tries to break out of its confinement and must not succeed.
//!
//! This test starts itself as the pager, as the process that reads from registries, as a disk's
//! server, as the process that serves a monitor, as the server of a folder and as one that makes an
//! image, each confined like the real program. They run as the user who started the test, so that only
//! the confinement restricts them; the server of a folder also as another user, if that was root.

mod attempts;
#[path = "../common/calls.rs"]
mod calls;
mod folder;

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Stdio};

/// A value at a known address of the victim.
const SECRET: u64 = 0x5ec2_e75e_c2e7_5ec2;
static TREASURE: u64 = SECRET;

/// The compromised program, and the number of its attempts.
const COMPROMISED: [(&str, usize); 8] = [
    ("pager", 40),
    ("origins", 35),
    ("disk", 35),
    ("monitor", 40),
    ("files", 55),
    ("files-read-only", 60),
    ("files-squashed", 55),
    ("import", 60),
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["victim"] => {
            println!("{:p}", &raw const TREASURE);
            loop {
                std::thread::park();
            }
        }
        ["attacker", who, aims @ ..] => attempts::run(who, aims),
        // Arguments that a test harness is started with.
        ["--list", ..] => println!("a_compromised_process_stays_confined: test"),
        _ => run(),
    }
}

struct Victim(Child);

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run() {
    let this = std::env::current_exe().unwrap();
    let base = tempfile::tempdir().unwrap();
    fs::set_permissions(base.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let other = base.path().join("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("public"), "public").unwrap();
    fs::set_permissions(other.join("public"), fs::Permissions::from_mode(0o666)).unwrap();
    let before = fs::metadata(other.join("public")).unwrap();
    let _api = UnixListener::bind(other.join("api.sock")).unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut child = Command::new(&this);
    let child = child.arg("victim").stdout(Stdio::piped()).spawn().unwrap();
    let mut victim = Victim(child);
    let mut treasure = String::new();
    let said = victim.0.stdout.take().unwrap();
    BufReader::new(said).read_line(&mut treasure).unwrap();

    for (who, least) in COMPROMISED {
        let own = base.path().join(who);
        fs::create_dir(&own).unwrap();
        fs::set_permissions(&own, fs::Permissions::from_mode(0o777)).unwrap();
        let attacker = Command::new(&this)
            .args(["attacker", who])
            .args([&own, &other])
            .arg(victim.0.id().to_string())
            .arg(treasure.trim())
            .arg(tcp.local_addr().unwrap().port().to_string())
            .stderr(Stdio::inherit())
            .output()
            .unwrap();
        let said = String::from_utf8(attacker.stdout).unwrap();
        print!("{said}");
        assert!(attacker.status.success(), "{who}: {:?}", attacker.status);
        let of = |kind: &'static str| said.lines().filter(move |line| line.starts_with(kind));
        let escaped: Vec<&str> = of("ESCAPED").collect();
        assert!(escaped.is_empty(), "{who}: {escaped:#?}");
        let held = of("held: ").count();
        assert!(held >= least, "{who}: only {held} attempts");
        assert!(said.lines().any(|line| line == "done"), "{who}");
        assert_eq!(fs::read(other.join("public")).unwrap(), b"public");
        let now = fs::metadata(other.join("public")).unwrap();
        let facts = |of: &fs::Metadata| (of.mode(), of.uid(), of.mtime(), of.nlink());
        assert_eq!(facts(&now), facts(&before), "{who}");
        assert!(victim.0.try_wait().unwrap().is_none(), "the victim lives");
    }
    println!(
        "test result: ok. 1 passed; 0 failed; 0 ignored; a_compromised_process_stays_confined"
    );
}
