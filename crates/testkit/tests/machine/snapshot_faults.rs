//! Processes are killed, files damaged and disks filled. A snapshot is complete or absent, and no
//! VM freezes silently.

use crate::support::{Jiffy, Traces, jiffy};
use jiffy_testkit::Output;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// A shell script that counts in `/tmp/n`.
const COUNT: &str = "n=0; while :; do n=$((n+1)); echo $n > /tmp/n; sleep 0.1; done";

/// Starts a command, kills every process of that name after a delay, and waits for the command. It
/// must succeed or report an error.
fn run_and_kill(jiffy: &Jiffy, arguments: &[&str], after: Duration, program: &str) -> Output {
    let running = jiffy.command(arguments).start().expect("it starts");
    std::thread::sleep(after);
    jiffy.kill_all(program);
    let what = format!(
        "{} while {program} is killed after {after:?}",
        arguments.join(" ")
    );
    let output = running
        .wait()
        .unwrap_or_else(|error| panic!("{what}: {error:#}"));
    let said = output.error_text();
    let explained =
        output.code() == 125 && said.starts_with("jiffy: ") && !said.contains("panicked");
    assert!(
        output.code() == 0 || explained,
        "{what}: {} {said}",
        output.code()
    );
    output
}

/// Well below the time limit of a start.
const RESTORE_LIMIT: Duration = Duration::from_secs(150);

/// Delays within an operation that takes about one and a half seconds here.
fn delays() -> impl Iterator<Item = Duration> {
    [50, 400, 1000].into_iter().map(Duration::from_millis)
}

/// No unfinished file is on the disk, VMs run, and every listed snapshot can be used.
fn assert_recovered(jiffy: &Jiffy, what: &str) {
    let output = jiffy.run(&["run", "--rm", "--", "echo", "well"]);
    assert_eq!(output.text(), "well", "{what}: {}", output.error_text());
    jiffy.eventually(&format!("{what}: no temporary folder"), || {
        let unfinished = jiffy.sh("find /var/lib/jiffy -name '.new-*' -o -name '.gone-*'");
        unfinished.is_empty()
    });
    for name in snapshots(jiffy) {
        jiffy.ok(&["snapshot", "inspect", &name]);
        let output = jiffy.run(&["run", "--rm", "--from", &name, "--", "echo", "back"]);
        assert_eq!(
            output.text(),
            "back",
            "{what}: {name}: {}",
            output.error_text()
        );
    }
}

fn snapshots(jiffy: &Jiffy) -> Vec<String> {
    let list = jiffy.ok(&["snapshot", "ls"]);
    let names = list
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().next());
    names.map(String::from).collect()
}

fn assert_nothing_left(jiffy: &Jiffy, before: &Traces) {
    jiffy.remove_all();
    assert_eq!(jiffy.ok(&["ps", "-aq"]), "");
    jiffy.assert_nothing_left(before, "after all was removed");
    assert!(jiffy.pids("jiffy-pager").len() <= 1);
}

#[test]
fn the_daemon_may_be_killed_while_it_makes_a_snapshot() {
    let jiffy = jiffy();
    let before = jiffy.settled_traces();
    jiffy.ok(&["run", "-d", "--name", "busy", "--", "sh", "-c", COUNT]);
    for (n, after) in delays().enumerate() {
        let name = format!("s{n}");
        let counted = jiffy.counted("busy");
        let made = run_and_kill(
            &jiffy,
            &["snapshot", "create", "busy", &name],
            after,
            "jiffyd",
        );
        // The VM may have been paused: the next daemon resumes it.
        jiffy.wait_for_count_above("busy", counted + 2);
        let there = snapshots(&jiffy).contains(&name);
        assert!(
            there || made.code() != 0,
            "{name} was reported as created but does not exist"
        );
        assert_recovered(&jiffy, &name);
        if there {
            jiffy.ok(&["snapshot", "rm", &name]);
        }
    }
    assert_nothing_left(&jiffy, &before);
}

#[test]
fn a_vmm_may_be_killed_while_it_is_captured_or_forks() {
    let jiffy = jiffy();
    let before = jiffy.settled_traces();
    for (n, after) in delays().enumerate() {
        let (vm, made) = (format!("v{n}"), format!("made{n}"));
        jiffy.ok(&["run", "-d", "--name", &vm]);
        let arguments = match n % 2 {
            0 => ["snapshot", "create", &vm, &made],
            _ => ["fork", &vm, "--name", &made],
        };
        run_and_kill(&jiffy, &arguments, after, "jiffy-vmm");
        jiffy.eventually("the VM has ended", || {
            jiffy.inspect(&vm)["state"] == "exited"
        });
        assert_recovered(&jiffy, &arguments.join(" "));
    }
    assert_nothing_left(&jiffy, &before);
}

#[test]
fn the_daemon_may_be_killed_during_fork_restore_or_hibernate() {
    let jiffy = jiffy();
    let before = jiffy.settled_traces();
    jiffy.ok(&["run", "-d", "--name", "busy", "--", "sh", "-c", COUNT]);
    jiffy.ok(&["snapshot", "create", "busy", "one"]);
    for after in [50, 250].map(Duration::from_millis) {
        for arguments in [
            &["fork", "busy", "-n", "2", "--name", "kid"][..],
            &["run", "-d", "--from", "one", "--name", "kid"],
            &["hibernate", "busy"],
        ] {
            let counted = jiffy.counted("busy");
            run_and_kill(&jiffy, arguments, after, "jiffyd");
            jiffy.ok(&["wake", "busy"]);
            jiffy.wait_for_count_above("busy", counted + 2);
            // A child that is listed as running answers.
            for vm in jiffy.ok(&["ps", "-q"]).lines() {
                let output = jiffy.run(&["exec", vm, "echo", "here"]);
                let said = output.error_text();
                assert!(
                    output.text() == "here" || said.starts_with("jiffy: "),
                    "{said}"
                );
            }
            jiffy.sh(
                "for vm in kid kid-1 kid-2; do JIFFY_MACHINE=never /bin/jiffy rm -f $vm; done \
                 >/dev/null 2>&1; true",
            );
        }
    }
    assert_recovered(&jiffy, "at the end");
    assert_nothing_left(&jiffy, &before);
}

#[test]
fn a_vm_continues_when_the_pager_is_killed() {
    let jiffy = jiffy();
    jiffy.ok(&["run", "-d", "--name", "origin", "--", "sh", "-c", COUNT]);
    let script = "head -c 2000000 /dev/urandom > /tmp/blob; md5sum < /tmp/blob";
    let sum = jiffy.ok(&["exec", "origin", "sh", "-c", script]);
    jiffy.ok(&["snapshot", "create", "--stop", "origin", "one"]);
    // Rare enough that the daemon restarts the pager each time.
    for after in [0, 150, 300, 500].map(Duration::from_millis) {
        // The pager is killed while a VM is restored: the VM starts or reports an error, before the
        // time limit of a start.
        let arguments = ["run", "--rm", "--from", "one", "--", "echo", "up"];
        let begun = Instant::now();
        run_and_kill(&jiffy, &arguments, after, "jiffy-pager");
        assert!(begun.elapsed() < RESTORE_LIMIT, "killed after {after:?}");
    }
    jiffy.ok(&["run", "-d", "--name", "lazy", "--from", "one"]);
    let pager = jiffy.pids("jiffy-pager");
    assert_eq!(pager.len(), 1);
    jiffy.sh("killall -9 jiffy-pager");
    // All data comes from the next pager.
    assert_eq!(
        jiffy.ok(&["exec", "lazy", "sh", "-c", "md5sum < /tmp/blob"]),
        sum
    );
    let counted = jiffy.counted("lazy");
    jiffy.wait_for_count_above("lazy", counted);
    assert_ne!(jiffy.pids("jiffy-pager"), pager);
    // Without a daemon that starts a pager, the VM must not hang forever. This daemon is started
    // with default settings: its VMs wait for a pager for a shorter time.
    jiffy.ok(&["rm", "-f", "lazy"]);
    jiffy.sh(
        "killall -9 jiffyd; while killall -0 jiffyd 2>/dev/null; do sleep 0.05; done; \
         unset JIFFY_PAGER_PATIENCE_MS; \
         JIFFY_MACHINE=never /bin/jiffy run -d --name lost --from one",
    );
    jiffy.sh("killall -9 jiffyd jiffy-pager");
    jiffy.eventually("it ends", || {
        // `pidof` instead of `ps`, which would start a daemon.
        jiffy.pids("jiffy-vmm").is_empty()
    });
    let inspected = jiffy.inspect("lost");
    assert_eq!(inspected["state"], "exited");
    assert!(
        inspected["error"]
            .as_str()
            .is_some_and(|error| error.contains("pager")),
        "{inspected}"
    );
}

#[test]
fn a_damaged_chunk_ends_only_the_vm_that_needs_it() {
    let jiffy = jiffy();
    jiffy.ok(&["run", "-d", "--name", "origin", "--", "sh", "-c", COUNT]);
    jiffy.ok(&[
        "exec",
        "origin",
        "sh",
        "-c",
        "head -c 4000000 /dev/urandom > /tmp/blob",
    ]);
    let blob = jiffy
        .command(&["exec", "origin", "cat", "/tmp/blob"])
        .output()
        .expect("it runs")
        .stdout;
    // The transfer left copies in free memory of the guest, which any process may get: overwrite
    // them with zeros.
    let script = "for folder in /tmp /dev/shm; do head -c 36000000 /dev/zero > $folder/zeros; \
                  done; rm /tmp/zeros /dev/shm/zeros";
    jiffy.ok(&["exec", "origin", "sh", "-c", script]);
    jiffy.ok(&["snapshot", "create", "--stop", "origin", "one"]);
    // Random bytes are stored uncompressed. Only bytes that occur nowhere else are damaged: pages
    // that every guest reads may contain copies of others.
    let path = "/var/lib/jiffy/snapshots/one/ram.image";
    let image = jiffy.lab.read(path).expect("it is there");
    let mut places: HashMap<&[u8], Vec<usize>> = (0..12)
        .map(|n| (&blob[(1 << 20) + n * 200_000..][..8], Vec::new()))
        .collect();
    for (at, window) in image.windows(8).enumerate() {
        if let Some(places) = places.get_mut(window) {
            places.push(at);
        }
    }
    let mut alone: Vec<usize> = places
        .into_values()
        .filter_map(|places| <[usize; 1]>::try_from(places).ok())
        .flatten()
        .collect();
    assert!(!alone.is_empty(), "raw bytes");
    alone.truncate(4);
    for at in alone {
        jiffy.sh(&format!(
            "printf '\\{:o}' | dd of={path} bs=1 seek={at} conv=notrunc 2>/dev/null",
            image[at] ^ 1
        ));
    }
    jiffy.ok(&["run", "-d", "--name", "calm", "--from", "one"]);
    jiffy.ok(&["run", "-d", "--name", "hurt", "--from", "one"]);
    let output = jiffy.run(&["exec", "hurt", "cat", "/tmp/blob"]);
    assert_eq!(output.code(), 125, "{}", output.error_text());
    assert!(
        output.error_text().starts_with("jiffy: "),
        "{}",
        output.error_text()
    );
    jiffy.eventually("it ends", || jiffy.inspect("hurt")["state"] == "exited");
    let inspected = jiffy.inspect("hurt");
    let error = inspected["error"].as_str().unwrap_or_default();
    assert!(error.contains("chunk"), "{inspected}");
    let counted = jiffy.counted("calm");
    jiffy.wait_for_count_above("calm", counted);
}

#[test]
fn a_full_disk_is_explained_and_nothing_is_left() {
    let jiffy = jiffy();
    jiffy.ok(&["run", "-d", "--name", "busy", "--", "sh", "-c", COUNT]);
    jiffy.ok(&[
        "exec",
        "busy",
        "sh",
        "-c",
        "head -c 20000000 /dev/urandom > /tmp/blob",
    ]);
    let before = jiffy.traces();
    jiffy.sh(
        "free=$(df -k /var/lib/jiffy | awk 'NR == 2 { print $4 }'); \
         fallocate -l $(((free - 4096) * 1024)) /var/lib/jiffy/filler",
    );
    for arguments in [
        &["snapshot", "create", "busy", "big"][..],
        &["snapshot", "create", "--stop", "busy", "big"],
        &["hibernate", "busy"],
    ] {
        let output = jiffy.run(arguments);
        jiffy.sh("true");
        let said = output.error_text();
        assert_eq!(output.code(), 125, "{arguments:?}: {said}");
        assert!(
            said.starts_with("jiffy: The memory of the VM needs up to")
                && said.contains("MiB left"),
            "{arguments:?}: {said}"
        );
        let counted = jiffy.counted("busy");
        jiffy.wait_for_count_above("busy", counted);
        jiffy.assert_nothing_left(&before, &arguments.join(" "));
    }
    jiffy.sh("rm /var/lib/jiffy/filler");
    jiffy.ok(&["snapshot", "create", "busy", "big"]);
}
