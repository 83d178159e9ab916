use super::*;
use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

const TO_LOCK: &str = "JIFFY_TEST_LOCKS";

/// `Locker` runs this test in a process of its own. It locks a file as QEMU locks its pid file,
/// until its input ends.
#[test]
fn locks_a_file_for_another_test() {
    let Some(path) = std::env::var_os(TO_LOCK) else {
        return;
    };
    let file = OpenOptions::new().write(true).open(path).unwrap();
    rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    println!("\nlocked");
    let _ = std::io::stdin().read(&mut [0]);
}

/// A process that keeps a file locked until this is dropped.
struct Locker(Child);

impl Locker {
    fn of(path: &Path) -> Locker {
        fs::write(path, b"").unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture"])
            .arg("machine::tests::locks_a_file_for_another_test")
            .env(TO_LOCK, path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        let said = lines.map_while(Result::ok).any(|line| line == "locked");
        assert!(said, "{} could not be locked", path.display());
        Locker(child)
    }
}

impl Drop for Locker {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Two machines with the same data folder and different run folders.
fn machines(root: &Path) -> [Machine; 2] {
    let data = root.join("data");
    instance::private_folder(&data.join("machine")).unwrap();
    ["login", "cron"].map(|run| {
        let run = root.join(run);
        instance::private_folder(&in_run(&run)).unwrap();
        Machine::open(Paths {
            data: data.clone(),
            run,
            lib: root.join("lib"),
            share: root.join("share"),
        })
    })
}

#[test]
fn a_running_machine_is_found_from_any_run_folder() {
    let root = tempfile::tempdir().unwrap();
    let [login, cron] = machines(root.path());
    let run = login.own_run_folder();
    let qemu = Locker::of(&run.join("pid"));
    let running = Running {
        format: 1,
        pid: qemu.0.id() as i32,
        api: "127.0.0.1:1".parse().unwrap(),
        agent: "127.0.0.1:2".parse().unwrap(),
        token: "token".into(),
        started: 0,
        shares: vec!["ro:/a".parse().unwrap()],
    };
    fs::write(running_file(&run), serde_json::to_vec(&running).unwrap()).unwrap();
    login.save_run_folder().unwrap();
    for machine in [&login, &cron] {
        assert_eq!(machine.endpoint().unwrap().address, running.api);
        assert_eq!(machine.status().unwrap().pid, Some(running.pid));
        assert_eq!(machine.shares(), running.shares);
    }
    // A run folder that others can write to is not trusted.
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(&login.paths.run, fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(cron.endpoint(), None);
    fs::set_permissions(&login.paths.run, fs::Permissions::from_mode(0o700)).unwrap();
    drop(qemu);
    assert_eq!(cron.run_folder(), cron.own_run_folder());
}

#[test]
fn a_disk_that_is_in_use_is_neither_used_nor_removed() {
    let root = tempfile::tempdir().unwrap();
    let [_, machine] = machines(root.path());
    let _qemu = Locker::of(&machine.disk_file());
    fs::write(machine.console_file(), b"its words").unwrap();
    let failures = [
        machine.start(Options::default(), &mut |_| {}).unwrap_err(),
        machine.stop().unwrap_err(),
        machine.remove().unwrap_err(),
    ];
    for failure in failures {
        assert!(
            matches!(failure, MachineError::DiskInUse { .. }),
            "{failure}"
        );
    }
    assert!(machine.disk_file().exists());
    assert_eq!(fs::read(machine.console_file()).unwrap(), b"its words");
}

#[test]
fn another_size_for_a_disk_that_exists_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let [machine, _] = machines(root.path());
    let disk = fs::File::create(machine.disk_file()).unwrap();
    disk.set_len(64 << 30).unwrap();
    let start = |gib| {
        let options = Options {
            disk_gib: Some(gib),
            ..Options::default()
        };
        machine.start(options, &mut |_| {}).unwrap_err()
    };
    let refused = start(128);
    assert!(refused.to_string().contains("64 GiB"), "{refused}");
    assert!(refused.hint().unwrap().contains("jiffy machine rm"));
    assert!(!machine.size_file().exists(), "nothing was saved");
    // The start itself fails without a kernel.
    assert!(!matches!(start(64), MachineError::DiskSize { .. }));
}

#[test]
fn the_status_has_the_size_of_the_disk_itself() {
    let root = tempfile::tempdir().unwrap();
    let [machine, _] = machines(root.path());
    let options = Options {
        disk_gib: Some(128),
        ..Options::default()
    };
    let saved = Size::default_for_host().with(options).unwrap();
    saved.save(&machine.size_file()).unwrap();
    assert_eq!(machine.status().unwrap().size.disk_gib, 128);
    let disk = fs::File::create(machine.disk_file()).unwrap();
    disk.set_len(64 << 30).unwrap();
    assert_eq!(machine.status().unwrap().size.disk_gib, 64);
}
