//! Limits of the API: tokens, malformed requests, names.

use crate::client::{Answer, connect, request};
use crate::daemon::{Daemon, eventually, tar_of};
use jiffy_wire::api::{CreateVm, ErrorKind, Image, KernelInfo, REQUEST_HEADER, RequestState, Vm};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;

#[test]
fn a_hangup_without_a_certificate_is_ignored() {
    let mut daemon = Daemon::start();
    let pid = Pid::from_raw(daemon.pid() as i32).unwrap();
    kill_process(pid, Signal::HUP).unwrap();
    eventually("it is logged", || {
        let log = fs::read_to_string(daemon.folder.path().join("jiffyd.log")).unwrap();
        log.contains("SIGHUP is ignored")
    });
    assert!(daemon.is_up());
    assert_eq!(daemon.get("/v1/info").status, 200);
}

#[test]
fn tcp_needs_the_token() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    fs::write(&file, "s3cret\n").unwrap();
    let token_file = file.to_str().unwrap();
    let daemon = Daemon::with(&["--listen", "tcp:127.0.0.1:0", "--token-file", token_file]);
    let log = fs::read_to_string(daemon.folder.path().join("jiffyd.log")).unwrap();
    let port = log.split("127.0.0.1:").nth(1).unwrap();
    let port = port.split(|end: char| !end.is_ascii_digit()).next();
    let port: u16 = port.unwrap().parse().unwrap();
    let ask = |header: &str| -> Answer {
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream
            .set_read_timeout(Some(crate::client::TIMEOUT))
            .unwrap();
        request(stream, &format!("GET /v1/info HTTP/1.1{header}"), b"").unwrap()
    };
    for wrong in [
        "",
        "\r\nAuthorization: Bearer wrong",
        "\r\nAuthorization: Bearer s3cre",
        "\r\nAuthorization: Basic s3cret",
    ] {
        ask(wrong).error(ErrorKind::Unauthorized);
    }
    assert_eq!(ask("\r\nAuthorization: Bearer s3cret").status, 200);
    assert_eq!(
        daemon.get("/v1/info").status,
        200,
        "the Unix socket needs none"
    );
}

#[test]
fn tcp_without_a_token_file_is_refused() {
    let empty = tempfile::NamedTempFile::new().unwrap();
    for options in [
        &["--listen", "tcp:127.0.0.1:1"][..],
        &[
            "--listen",
            "tcp:127.0.0.1:1",
            "--token-file",
            empty.path().to_str().unwrap(),
        ],
        &["--listen", "127.0.0.1:1"],
    ] {
        let daemon = Daemon::prepared(options);
        let output = daemon.command().output().unwrap();
        assert!(!output.status.success());
        assert!(!output.stderr.is_empty());
        assert!(!daemon.socket().exists());
    }
}

#[test]
fn an_empty_variable_counts_as_unset() {
    let daemon = Daemon::prepared(&["--listen", "tcp:127.0.0.1:1"]);
    let mut command = daemon.command();
    for name in [
        "JIFFY_CACHE",
        "JIFFY_CONNECTIONS",
        "JIFFY_PROXY",
        "JIFFY_PROXY_CERT",
        "JIFFY_STANDBY",
        "JIFFY_START_TIMEOUT",
        "JIFFY_VM_NETWORK",
    ] {
        command.env(name, "");
    }
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("needs a token"), "{said}");
}

#[test]
fn a_run_folder_too_long_for_a_socket_is_refused() {
    let mut command = Daemon::prepared(&[]).command();
    let long = format!("/tmp/{}", "x".repeat(80));
    command.env("JIFFY_RUN", &long);
    let output = std::process::Command::new(command.get_program())
        .args(["--data", "/tmp/node-unused", "--run", &long])
        .output()
        .unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("too long") && said.contains("107"), "{said}");
    assert!(!std::path::Path::new(&long).exists());
}

#[test]
fn the_socket_is_closed_to_others() {
    use std::os::unix::fs::PermissionsExt;
    let daemon = Daemon::start();
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&daemon.socket()), 0o600);
    assert_eq!(mode(daemon.socket().parent().unwrap()), 0o700);
    assert_eq!(mode(&daemon.data), 0o700);
}

#[test]
fn malformed_requests_are_refused_with_a_sentence() {
    let daemon = Daemon::start();
    let create = |body: &str| {
        daemon
            .post("/v1/vms", body.as_bytes())
            .error(ErrorKind::Invalid)
            .message
    };
    assert!(create("{").contains("body"));
    assert!(create("[]").contains("body"));
    assert!(create("{\"nmae\": \"x\"}").contains("nmae"));
    assert!(create("{\"cpus\": 300}").contains("body"));
    assert!(create("{\"cpus\": 33}").contains("33"));
    assert!(create("{\"memory_mib\": 1}").contains("1 MiB"));
    assert!(create(&format!("{{\"name\": \"{}\"}}", "x".repeat(2_000_000))).contains("body"));
    daemon
        .post("/v1/vms", b"{\"image\":\"nope\"}")
        .error(ErrorKind::NotFound);
    daemon
        .post("/v1/vms", b"{\"kernel\":\"nope\"}")
        .error(ErrorKind::NotFound);
    daemon.get("/v1/nothing").error(ErrorKind::NotFound);
    daemon
        .ask("PATCH", "/v1/vms", b"")
        .error(ErrorKind::NotFound);
    daemon.get("/v1/vms?al=true").error(ErrorKind::Invalid);
    for query in ["", "?seconds=0", "?seconds=61", "?seconds=1&more=1"] {
        let path = format!("/v1/sched/trace{query}");
        daemon.post(&path, b"").error(ErrorKind::Invalid);
    }
    daemon
        .post("/v1/run", b"{\"vm\":{\"command\":{\"argv\":[\"true\"]}}}")
        .error(ErrorKind::Invalid);
    let no_command = daemon.stream("/v1/run", b"{\"vm\":{}}").unwrap_err();
    no_command.error(ErrorKind::Invalid);
    let empty = daemon
        .stream("/v1/run", b"{\"vm\":{\"command\":{\"argv\":[]}}}")
        .unwrap_err();
    empty.error(ErrorKind::Invalid);
    daemon.assert_nothing_left();
}

#[test]
fn unknown_things_come_with_a_hint() {
    let daemon = Daemon::start();
    let hint = |answer: Answer| answer.error(ErrorKind::NotFound).hint.unwrap();
    assert!(hint(daemon.get("/v1/vms/none")).contains("jiffy ps"));
    assert!(hint(daemon.post("/v1/vms", b"{\"image\":\"nope\"}")).contains("jiffy image ls"));
    assert!(hint(daemon.post("/v1/vms", b"{\"kernel\":\"nope\"}")).contains("jiffy kernel list"));
    assert!(hint(daemon.post("/v1/vms", b"{\"disks\":[{\"name\":\"nope\"}]}")).contains("--disk"));
}

#[test]
fn images_can_be_imported_listed_and_removed() {
    let daemon = Daemon::start();
    let listed = || -> Vec<String> {
        let images: Vec<Image> = daemon.get("/v1/images").json();
        images.into_iter().map(|image| image.name).collect()
    };
    assert_eq!(listed(), ["base"]);
    let tar = tar_of(&[("a", b"1"), ("b", b"2")]);
    let first: Image = daemon.post("/v1/images/mine", &tar).json();
    assert_eq!(first.digest.len(), 64);
    assert_eq!(listed(), ["base", "mine"]);
    let other: Image = daemon
        .post("/v1/images/mine", &tar_of(&[("c", b"3")]))
        .json();
    assert_ne!(first.digest, other.digest, "an unused image is replaced");
    daemon.create(&CreateVm {
        name: Some("user".into()),
        image: Some("mine".into()),
        ..CreateVm::default()
    });
    let refused = daemon.delete("/v1/images/mine").error(ErrorKind::Conflict);
    assert!(refused.message.contains("user"));
    daemon
        .post("/v1/images/mine", &tar)
        .error(ErrorKind::Conflict);
    daemon.delete("/v1/vms/user");
    assert_eq!(daemon.delete("/v1/images/mine").status, 204);
    daemon.delete("/v1/images/mine").error(ErrorKind::NotFound);
    daemon
        .post("/v1/images/b%20ad", &tar)
        .error(ErrorKind::Invalid);
    daemon
        .post("/v1/images/..%2Fup", &tar)
        .error(ErrorKind::Invalid);
    daemon
        .post("/v1/images/mine", b"this is no tar, not at all")
        .error(ErrorKind::Invalid);
    daemon
        .post("/v1/images/mine", &tar[..700])
        .error(ErrorKind::Invalid);
    let left = fs::read_dir(daemon.data.join("images")).unwrap().count();
    assert_eq!(left, 1, "only base");
    assert_eq!(daemon.delete("/v1/images/base").status, 204);
    assert_eq!(
        listed(),
        ["base"],
        "the built-in image comes back when needed"
    );
}

#[test]
fn an_import_cut_short_leaves_nothing() {
    let daemon = Daemon::start();
    let mut stream = crate::client::connect(&daemon.socket()).unwrap();
    let tar = tar_of(&[("big", &[7; 200_000])]);
    write!(
        stream,
        "POST /v1/images/cut HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n",
        tar.len()
    )
    .unwrap();
    stream.write_all(&tar[..100_000]).unwrap();
    let images = daemon.data.join("images");
    eventually("it is being made", || {
        fs::read_dir(&images).unwrap().count() > 0
    });
    drop(stream);
    eventually("nothing is left", || {
        fs::read_dir(&images).unwrap().count() == 0
    });
}

#[test]
fn kernels_are_kept_and_listed() {
    let daemon = Daemon::start();
    let listed: Vec<KernelInfo> = daemon.get("/v1/kernels").json();
    assert_eq!(listed.len(), 1);
    assert_eq!((listed[0].name.as_str(), listed[0].size), ("base", 8));
    let refused = daemon
        .ask("PUT", "/v1/kernels/mine", b"not a kernel")
        .error(ErrorKind::Invalid);
    assert!(refused.hint.unwrap().contains("PVH"));
    assert_eq!(
        fs::read_dir(daemon.data.join("kernels")).unwrap().count(),
        0
    );
    let bz = bzimage();
    let kept: KernelInfo = daemon.ask("PUT", "/v1/kernels/mine", &bz).json();
    assert_eq!(kept.size, bz.len() as u64);
    let listed: Vec<KernelInfo> = daemon.get("/v1/kernels").json();
    assert_eq!(
        listed
            .iter()
            .map(|kernel| kernel.name.as_str())
            .collect::<Vec<_>>(),
        ["base", "mine"]
    );
}

/// The smallest file with the header of a bzImage.
pub fn bzimage() -> Vec<u8> {
    let mut image = vec![0; 4096];
    image[0x1f1] = 1;
    image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x020fu16.to_le_bytes());
    image[0x211] = 1;
    image
}

#[test]
fn invalid_http_ends_only_its_own_connection() {
    let daemon = Daemon::start();
    for nonsense in [&b"\x16\x03\x01 TLS?"[..], &[0; 100_000], b"GET\r\n\r\n"] {
        let mut stream = crate::client::connect(&daemon.socket()).unwrap();
        let _ = stream.write_all(nonsense);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
    }
    assert_eq!(daemon.get("/v1/info").status, 200);
}

#[test]
fn the_next_daemon_knows_which_requests_had_begun() {
    let mut daemon = Daemon::start();
    let id = |number: u32| format!("{number:032x}");
    let create = |daemon: &Daemon, id: &str| {
        let head = format!("POST /v1/vms HTTP/1.1\r\n{REQUEST_HEADER}: {id}");
        request(connect(&daemon.socket()).unwrap(), &head, b"{}").unwrap()
    };
    let begun = |daemon: &Daemon, id: &str| {
        let answer = daemon.get(&format!("/v1/requests/{id}"));
        answer.json::<RequestState>().begun
    };
    assert_eq!(create(&daemon, &id(1)).status, 200);
    assert_eq!(begun(&daemon, &id(1)), Some(true));
    // A daemon of an earlier release may have begun it.
    assert_eq!(begun(&daemon, &id(2)), None);
    daemon.killed();
    daemon.up();
    assert_eq!(begun(&daemon, &id(1)), Some(true));
    assert_eq!(begun(&daemon, &id(2)), Some(false));
    // The request comes late, after its client was told that it had not begun.
    create(&daemon, &id(2)).error(ErrorKind::Conflict);
    // A request that is refused for its id has no effect.
    create(&daemon, "no id").error(ErrorKind::Invalid);
    let answer = daemon.get("/v1/requests/1");
    answer.error(ErrorKind::Invalid);
    let vms: Vec<Vm> = daemon.get("/v1/vms?all=true").json();
    assert_eq!(vms.len(), 1);
}
