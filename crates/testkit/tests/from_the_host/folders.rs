//! Folders of the host, shared with VMs through the machine.

use super::{assert_one_sentence, host, text};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Process ids and command lines of the programs at this path.
fn processes(program: &str) -> Vec<(String, String)> {
    let all = std::fs::read_dir("/proc").expect("processes").flatten();
    let all = all.filter_map(|entry| {
        let line = std::fs::read(entry.path().join("cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let id = entry.file_name().into_string().ok()?;
        line.starts_with(program).then_some((id, line))
    });
    all.collect()
}

#[test]
fn vms_share_folders_that_the_machine_shares() {
    let host = host();
    let path = |name: &str| {
        let path = host.folder.path().join(name);
        path.into_os_string().into_string().expect("UTF-8")
    };
    for folder in ["project", "project/src", "data", "other"] {
        std::fs::create_dir(path(folder)).expect("made");
    }
    let sent: Vec<u8> = (0..3_000_000u32).map(|i| (i % 251) as u8).collect();
    std::fs::write(path("project/src/sent"), &sent).expect("written");
    std::fs::write(path("data/given"), "given").expect("written");
    // By this path no other test starts its servers.
    let bin = host.jiffy.parent().expect("a folder");
    let lib = bin.join("../lib/jiffy").canonicalize();
    let lib = lib.expect("the programs are installed");
    std::os::unix::fs::symlink(lib, path("lib")).expect("linked");
    let servers = || processes(&path("lib/jiffy-files"));
    let start = |shares: &[&str]| {
        let start = [&["machine", "start"], shares].concat();
        let mut start = host.command(&start);
        start
            .env("JIFFY_LIB", path("lib"))
            .output()
            .expect("jiffy runs")
    };
    let said = assert_one_sentence(&start(&["--share", &path("missing")]));
    assert!(said.contains("missing"), "{said}");
    let data = path("data") + ":ro";
    let started = start(&["--share", &path("project"), "--share", &data]);
    assert!(started.status.success(), "{started:?}");
    assert_eq!(servers().len(), 2, "{:?}", servers());
    let status = host.ok(&["machine", "status"]);
    let shown = format!("{} (read-only)", path("data"));
    assert!(status.contains(&shown), "{status}");

    // A folder below a share, in both directions.
    let run = |folder: &str, script: &str| {
        host.run(&["run", "--rm", "-v", folder, "--", "sh", "-c", script])
    };
    let copy = "cp /src/sent /src/copied && mkdir /src/new && echo guest >/src/new/file
        && ln -s file /src/new/link && mv /src/new /src/moved && cat /src/moved/link";
    let copy = copy.replace('\n', " ");
    let source = path("project/src") + ":/src";
    let output = run(&source, &copy);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text(&output.stdout), "guest");
    let copied = std::fs::read(path("project/src/copied")).expect("copied");
    assert!(copied == sent);
    let written = std::fs::read_to_string(path("project/src/moved/file"));
    assert_eq!(written.expect("written"), "guest\n");

    // A share for reading only, and folders that are not shared.
    let whole = path("data") + ":/data";
    let said = assert_one_sentence(&run(&whole, "true"));
    assert!(said.contains("for reading only"), "{said}");
    let output = run(&format!("{whole}:ro"), "cat /data/given; touch /data/new");
    assert!(!output.status.success(), "{output:?}");
    assert_eq!(text(&output.stdout), "given");
    assert!(text(&output.stderr).contains("Read-only"), "{output:?}");
    let said = assert_one_sentence(&run(&(path("other") + ":/x"), "true"));
    assert!(said.contains("not shared with the machine"), "{said}");
    let machine = |words: &[&str]| host.run(&[&["machine", "shell"], words].concat());
    let write = format!("echo x >/host{}", path("data/new"));
    assert!(!machine(&["sh", "-c", &write]).status.success());
    assert!(!Path::new(&path("data/new")).exists());

    // After the death of the agent the next one mounts the shares again.
    let agent = "kill -9 $(pidof jiffy-machine-agent)";
    machine(&["sh", "-c", agent]);
    let until = Instant::now() + Duration::from_secs(60);
    let given = format!("/host{}", path("data/given"));
    loop {
        let output = machine(&["cat", &given]);
        if text(&output.stdout) == "given" {
            break;
        }
        assert!(Instant::now() < until, "{output:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    let output = run(&source, "cat /src/moved/file");
    assert_eq!(text(&output.stdout), "guest");

    // The death of a server ends only its share.
    let (id, _) = servers()
        .into_iter()
        .find(|(_, line)| line.contains("--read-only"))
        .expect("a server");
    let killed = Command::new("kill").args(["-9", &id]).status();
    assert!(killed.expect("kill runs").success());
    let gone = format!("/host{}", path("data/given"));
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let output = machine(&["cat", &gone]);
        if text(&output.stderr).contains("not connected") {
            break;
        }
        assert!(Instant::now() < until, "{output:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    let output = run(&source, "cat /src/moved/file");
    assert_eq!(text(&output.stdout), "guest");

    host.ok(&["machine", "stop"]);
    let until = Instant::now() + Duration::from_secs(60);
    while !servers().is_empty() {
        assert!(Instant::now() < until, "{:?}", servers());
        std::thread::sleep(Duration::from_millis(50));
    }
}
