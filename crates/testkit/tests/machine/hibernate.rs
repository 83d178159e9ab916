//! Hibernate and wake: a VM on disk instead of in memory.

use crate::support::{Jiffy, jiffy};

const MIB: u64 = 1 << 20;

/// The identity of a VM's machine, and then a random number that it draws.
fn identity(jiffy: &Jiffy, vm: &str) -> (String, String) {
    let script = "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id; \
                  cat /proc/sys/kernel/random/uuid";
    let text = jiffy.ok(&["exec", vm, "sh", "-c", script]);
    let (machine, number) = text.rsplit_once('\n').expect("four lines");
    assert_eq!(machine.lines().count(), 3, "{text}");
    (machine.to_owned(), number.to_owned())
}

/// Free memory of a VM, KiB.
fn free_kib(jiffy: &Jiffy, vm: &str) -> u64 {
    let text = jiffy.ok(&["exec", vm, "grep", "MemFree", "/proc/meminfo"]);
    let number = text.split_whitespace().nth(1);
    number.and_then(|kib| kib.parse().ok()).expect("KiB")
}

/// Hibernates a VM; returns the bytes of its memory and state on disk.
fn hibernate(jiffy: &Jiffy, vm: &str) -> u64 {
    assert_eq!(jiffy.ok(&["hibernate", vm]), vm);
    let inspected = jiffy.inspect(vm);
    assert_eq!(inspected["state"], "hibernated");
    let id = inspected["id"].as_str().expect("an id");
    let folder = format!("/var/lib/jiffy/vms/{id}/hibernated");
    // root.erofs is a hard link to the image's own file.
    let kib: u64 = jiffy
        .sh(&format!(
            "cd {folder} && du -ck ram.* state snapshot.json | tail -n 1 | cut -f1"
        ))
        .parse()
        .expect("KiB");
    kib << 10
}

#[test]
fn a_hibernated_idle_vm_takes_16_mib_and_resumes_unchanged() {
    let jiffy = jiffy();
    let before = jiffy.settled_traces();
    // A VM with nothing but a counting shell.
    let count = "n=0; while :; do n=$((n+1)); echo $n > /tmp/n; sleep 0.1; done";
    jiffy.ok(&["run", "-d", "--name", "sleeper", "--", "sh", "-c", count]);
    jiffy.wait_for_count_above("sleeper", 2);
    let script = "echo note > /root/note; echo its-own > /etc/machine-id; hostname";
    let before_sleep = jiffy.ok(&["exec", "sleeper", "sh", "-c", script]);
    let was = identity(&jiffy, "sleeper");
    let counted = jiffy.counted("sleeper");
    let free = free_kib(&jiffy, "sleeper");
    let id = jiffy.inspect("sleeper")["id"].clone();
    let bytes = hibernate(&jiffy, "sleeper");
    println!("an idle VM of 128 MiB sleeps in {} KiB", bytes >> 10);
    assert!(bytes <= 16 * MIB, "{} KiB", bytes >> 10);
    assert!(jiffy.pids("jiffy-vmm").is_empty(), "its VMM is gone");
    assert!(jiffy.ok(&["ps"]).contains("Hibernated"), "it is listed");
    for arguments in [
        &["hibernate", "sleeper"][..],
        &["snapshot", "create", "sleeper", "no"],
        &["fork", "sleeper"],
        &["pause", "sleeper"],
    ] {
        let sentence = jiffy.refuses(125, arguments);
        assert!(sentence.contains("sleeper"), "{sentence}");
        assert!(sentence.contains("hibernated"), "{arguments:?}: {sentence}");
    }
    // The hibernated VM survives the daemon.
    jiffy.sh("killall -9 jiffyd; while killall -0 jiffyd 2>/dev/null; do sleep 0.05; done");
    assert!(jiffy.ok(&["ps"]).contains("Hibernated"));
    assert_eq!(jiffy.ok(&["wake", "sleeper"]), "sleeper");
    assert_eq!(jiffy.inspect("sleeper")["id"], id);
    assert_eq!(jiffy.inspect("sleeper")["state"], "running");
    jiffy.wait_for_count_above("sleeper", counted + 5);
    let script = "cat /root/note; hostname";
    let after_wake = jiffy.ok(&["exec", "sleeper", "sh", "-c", script]);
    assert_eq!(after_wake, "note\nsleeper");
    assert_eq!(before_sleep, "sleeper");
    let is = identity(&jiffy, "sleeper");
    assert_eq!(is.0, was.0, "its identity is unchanged");
    assert_ne!(is.1, was.1, "and draws new numbers");
    jiffy.eventually("the balloon has returned its memory", || {
        free_kib(&jiffy, "sleeper") + (16 << 10) > free
    });
    let clock = "export JIFFY_MACHINE=never; date +%s; /bin/jiffy exec sleeper date +%s; date +%s";
    let times = jiffy.sh(clock);
    let times: Vec<u64> = times
        .lines()
        .map(|line| line.parse().expect("seconds"))
        .collect();
    assert!(
        times[0] <= times[1] + 1 && times[1] <= times[2] + 1,
        "{times:?}"
    );
    // Waking a running VM does nothing.
    assert_eq!(jiffy.ok(&["wake", "sleeper"]), "sleeper");
    let sentence = jiffy.refuses(125, &["wake", "nobody"]);
    assert!(sentence.contains("nobody"), "{sentence}");
    // A command for the VM wakes it.
    hibernate(&jiffy, "sleeper");
    assert_eq!(jiffy.ok(&["exec", "sleeper", "hostname"]), "sleeper");
    assert_eq!(jiffy.inspect("sleeper")["state"], "running");
    // A hibernated VM can be removed.
    hibernate(&jiffy, "sleeper");
    jiffy.ok(&["rm", "-f", "sleeper"]);
    jiffy.assert_nothing_left(&before, "after the sleeper");
}

#[test]
fn freed_guest_memory_takes_no_space_in_hibernation() {
    let jiffy = jiffy();
    jiffy.ok(&["run", "--cold", "-d", "--name", "eater", "--memory", "512"]);
    // 200 MiB of files, twice: a tmpfs of this guest holds no more.
    let script = "head -c 4194304 /dev/urandom > /tmp/noise && \
                  for n in $(seq 50); do cat /tmp/noise; done > /tmp/much && \
                  cp /tmp/much /dev/shm/more && \
                  [ $(stat -c %s /dev/shm/more) = 209715200 ] && \
                  rm /tmp/noise /tmp/much /dev/shm/more && echo gone";
    assert_eq!(jiffy.ok(&["exec", "eater", "sh", "-c", script]), "gone");
    let bytes = hibernate(&jiffy, "eater");
    println!(
        "a VM that freed 400 of 512 MiB sleeps in {} KiB",
        bytes >> 10
    );
    assert!(bytes <= 32 * MIB, "{} KiB", bytes >> 10);
    jiffy.ok(&["wake", "eater"]);
    // Memory that the guest returned is available to it again.
    let script = "head -c 52428800 /dev/zero > /tmp/more && wc -c < /tmp/more";
    assert_eq!(jiffy.ok(&["exec", "eater", "sh", "-c", script]), "52428800");
}
