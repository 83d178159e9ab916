//! Runs from golden snapshots behave like cold runs.

use crate::support::{Jiffy, jiffy};
use jiffy_wire::timeline::{Timeline, names};
use std::time::{Duration, Instant};

const TIMELINE: &str = "--timeline=json:/tmp/golden.json";

/// The timeline that the last `run` with [`TIMELINE`] wrote.
fn timeline(jiffy: &Jiffy) -> Timeline {
    let bytes = jiffy.lab.read("/tmp/golden.json").expect("it was written");
    jiffy.sh("rm /tmp/golden.json");
    serde_json::from_slice(&bytes).expect("a timeline")
}

/// Whether that run restored its guest; otherwise it booted it.
fn was_golden(jiffy: &Jiffy) -> bool {
    let timeline = timeline(jiffy);
    let has = |name| timeline.find(name).is_some();
    let (golden, cold) = (has(names::GATE_ACKNOWLEDGED), has(names::KERNEL_ENTRY));
    assert_ne!(golden, cold, "{timeline:?}");
    golden
}

fn folder(jiffy: &Jiffy) -> String {
    let folders = jiffy.sh("ls -d /var/lib/jiffy/golden/*");
    assert_eq!(folders.lines().count(), 1, "{folders}");
    folders
}

#[test]
fn runs_after_the_first_start_from_the_golden_snapshot() {
    let jiffy = jiffy();
    let forgotten = jiffy.ok(&["snapshot", "prune"]);
    assert!(forgotten.contains("golden-"), "{forgotten}");
    assert!(!jiffy.ok(&["snapshot", "ls", "--all"]).contains("golden-"));
    jiffy.ok(&["run", "--rm", TIMELINE, "--", "true"]);
    assert!(!was_golden(&jiffy), "there was no golden snapshot");
    jiffy.warm_up();
    jiffy.ok(&["run", "--rm", TIMELINE, "--", "true"]);
    assert!(was_golden(&jiffy));
    jiffy.ok(&["run", "--rm", "--cold", TIMELINE, "--", "true"]);
    assert!(!was_golden(&jiffy), "--cold boots");
    let list = jiffy.ok(&["snapshot", "ls"]);
    assert!(!list.contains("golden-"), "no user's: {list}");
    // The next daemon knows the snapshot as well.
    jiffy.sh("killall -9 jiffyd; while killall -0 jiffyd 2>/dev/null; do sleep 0.05; done");
    jiffy.ok(&["run", "--rm", TIMELINE, "--", "true"]);
    assert!(was_golden(&jiffy));
}

/// Of a run that takes over a standby, whose memory is mapped ahead. Without that there are 800.
#[test]
fn the_guest_of_a_golden_run_takes_few_page_faults() {
    const MOST: u64 = 200;
    let jiffy = jiffy();
    jiffy.warm_up();
    let few = || {
        jiffy.ok(&["run", "--detach", "--name", "faults", "--", "sleep", "1000"]);
        let pid = jiffy.sh("jiffy inspect faults | grep '\"pid\"' | tr -dc 0-9");
        let stats = format!(
            "mountpoint -q /sys/kernel/debug || mount -t debugfs debugfs /sys/kernel/debug; \
             cat /sys/kernel/debug/kvm/{pid}-*/pf_fixed"
        );
        let faults = jiffy.sh(&stats);
        jiffy.ok(&["rm", "--force", "faults"]);
        faults.parse::<u64>().expect("a number") < MOST
    };
    jiffy.eventually("a standby is ready, and its guest has few page faults", few);
}

#[test]
fn a_run_that_takes_over_a_standby_has_its_own_limits() {
    let jiffy = jiffy();
    jiffy.warm_up();
    let script = "dd if=/dev/vda of=/dev/null bs=4k count=60 iflag=direct 2>/dev/null";
    let run = ["run", "--rm", "--root-limit", "iops=20", TIMELINE, "--"];
    jiffy.eventually("a standby is taken over", || {
        let begin = Instant::now();
        jiffy.ok(&[&run[..], &["sh", "-c", script]].concat());
        // The first second's worth is free.
        let took = begin.elapsed();
        assert!(took >= Duration::from_secs(2), "{took:?}");
        timeline(&jiffy).find(names::STANDBY_TAKEN).is_some()
    });
}

/// Prints everything a program can see of its environment and input.
const LOOK: &str = r#"
    echo "arguments: $0 $*"; echo "input: $(cat)"
    env | sort; pwd; id; umask; hostname; ulimit -a
    [ -t 0 ] && echo "in: terminal"; [ -t 1 ] && echo "out: terminal"; [ -t 2 ] && echo "err: terminal"
    cat /proc/self/cgroup /proc/mounts /etc/hosts /etc/resolv.conf /etc/hostname 2>&1
    cat /proc/cmdline /proc/version /proc/sys/kernel/hostname /proc/swaps
    grep -e ^Sig -e ^Shd -e ^Cap -e ^NoNew -e ^Seccomp -e ^Groups /proc/self/status
    for fd in /proc/$$/fd/*; do echo "descriptor ${fd##*/}"; done
    ls -la / /etc /tmp /run /dev | awk '{ print $1, $3, $4, $NF }'
    ps -o comm > /tmp/all; sort -u /tmp/all | grep -v kworker
    nproc; grep MemTotal /proc/meminfo; cat /proc/sys/vm/overcommit_memory
    ls /sys/fs/cgroup | sort | tr '\n' ' '; cat /sys/class/net/*/address
    echo to stderr >&2; exit 9
"#;

#[test]
fn a_program_sees_the_same_as_in_a_booted_guest() {
    let jiffy = jiffy();
    let ways: [(&[&str], &str); 3] = [
        (&["-i"], "some input\nof two lines"),
        (
            &[
                "-i",
                "-e",
                "A=b c",
                "-e",
                "PATH=/bin",
                "-w",
                "/usr/bin",
                "-u",
                "nobody",
                "--hostname",
                "elsewhere",
            ],
            "",
        ),
        (&["--no-tty"], ""),
    ];
    for (options, input) in ways {
        let look = |more: &[&str]| {
            let mut argv = vec!["run", "--rm", "--name", "same", TIMELINE];
            argv.extend(more.iter().chain(options));
            argv.extend(["--", "sh", "-c", LOOK, "zero", "one", "two words"]);
            let output = jiffy.command(&argv).stdin(input).output().expect("it runs");
            assert_eq!(
                output.code(),
                9,
                "{} {}",
                output.text(),
                output.error_text()
            );
            assert_eq!(output.error_text(), "to stderr");
            (output.text(), was_golden(&jiffy))
        };
        let (cold, booted) = look(&["--cold"]);
        let (golden, restored) = look(&[]);
        assert!(!booted && restored);
        let differences: Vec<_> = cold
            .lines()
            .zip(golden.lines())
            .filter(|(one, other)| one != other)
            .collect();
        assert!(
            cold == golden,
            "cold and golden with {options:?} differ: {differences:#?}\n{cold}\n---\n{golden}"
        );
    }
}

#[test]
fn golden_runs_have_their_own_tty_time_randomness_and_identity() {
    let jiffy = jiffy();
    let script = "tty; stty size; cat /proc/sys/kernel/random/boot_id; \
                  head -c 16 /dev/urandom | md5sum; date +%s; exit 3";
    let mut seen: Vec<Vec<String>> = Vec::new();
    for _ in 0..2 {
        let before: u64 = jiffy.sh("date +%s").parse().expect("seconds");
        let output = jiffy
            .command(&["run", "--rm", "-it", "--", "sh", "-c", script])
            .tty(30, 100)
            .output()
            .expect("it runs");
        let after: u64 = jiffy.sh("date +%s").parse().expect("seconds");
        assert_eq!(output.code(), 3, "{}", output.text());
        let lines: Vec<String> = output
            .text()
            .lines()
            .map(|line| line.trim().to_owned())
            .collect();
        assert_eq!(lines.len(), 5, "{lines:?}");
        assert_eq!(lines[..2], ["/dev/pts/0", "30 100"]);
        let time: u64 = lines[4].parse().expect("seconds");
        assert!((before..=after).contains(&time), "{before} {time} {after}");
        seen.push(lines[2..4].to_vec());
    }
    for (one, other) in seen[0].iter().zip(&seen[1]) {
        assert_ne!(one, other, "{seen:?}");
    }
}

#[test]
fn a_damaged_golden_snapshot_is_dropped_and_the_run_boots() {
    let jiffy = jiffy();
    for damage in [
        "truncate -s 1M ram.raw",
        "printf '\\377\\377\\377\\377' | dd of=state bs=1 seek=200 conv=notrunc 2>/dev/null",
        "rm state",
    ] {
        let folder = folder(&jiffy);
        // A standby has opened the files already and would not notice the damage, so it is killed.
        jiffy.kill_all("jiffy-vmm");
        jiffy.sh(&format!("cd {folder} && {damage}"));
        let output = jiffy.run(&["run", "--rm", TIMELINE, "--", "echo", "well"]);
        assert_eq!(
            (
                output.code(),
                output.text().as_str(),
                output.error_text().as_str()
            ),
            (0, "well", ""),
            "after {damage}"
        );
        assert!(!was_golden(&jiffy), "after {damage}");
        jiffy.eventually("the bad one is gone", || {
            !jiffy.ok(&["snapshot", "ls", "--all"]).contains("golden-")
        });
        // It is retried only after a prune.
        jiffy.ok(&["snapshot", "prune"]);
        jiffy.warm_up();
    }
}
