//! Snapshots of running VMs, and VMs started from them.

use crate::support::{Jiffy, PYTHON, jiffy};
use std::collections::HashSet;

/// Values that no two VMs may share.
#[derive(Debug)]
struct Identity {
    hostname: String,
    machine_id: String,
    boot_id: String,
    uuid: String,
    cid: String,
    /// `AT_RANDOM` of a newly started process, and the first bytes it draws.
    seeds: [String; 2],
}

fn identity(jiffy: &Jiffy, vm: &str) -> Identity {
    let text = jiffy.ok(&[
        "exec",
        vm,
        "sh",
        "-c",
        "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id \
         /proc/sys/kernel/random/uuid; witness cid; witness seeds | tr ' ' '\\n'",
    ]);
    let lines: Vec<String> = text.lines().map(String::from).collect();
    let [hostname, machine_id, boot_id, uuid, cid, given, drawn] =
        lines.try_into().expect("seven lines");
    Identity {
        hostname,
        machine_id,
        boot_id,
        uuid,
        cid,
        seeds: [given, drawn],
    }
}

fn assert_distinct(one: &Identity, other: &Identity) {
    let what = format!("{one:?} and {other:?}");
    assert_ne!(one.hostname, other.hostname, "{what}");
    assert_ne!(one.machine_id, other.machine_id, "{what}");
    assert_ne!(one.boot_id, other.boot_id, "{what}");
    assert_ne!(one.uuid, other.uuid, "{what}");
    assert_ne!(one.cid, other.cid, "{what}");
    for at in 0..2 {
        assert_ne!(one.seeds[at], other.seeds[at], "{what}");
    }
}

/// The random numbers that a VM's witness has drawn.
fn numbers(jiffy: &Jiffy, vm: &str) -> Vec<String> {
    let text = jiffy.ok(&["exec", vm, "cat", "/tmp/n.random"]);
    text.lines().map(String::from).collect()
}

/// How many numbers two VMs share; they must be the first ones of both.
fn common_count(one: &[String], other: &[String]) -> u64 {
    let same = one.iter().zip(other).take_while(|(a, b)| a == b).count();
    let ours: HashSet<_> = one.iter().collect();
    let all = other.iter().filter(|number| ours.contains(number)).count();
    assert_eq!(all, same, "a number was drawn twice");
    same as u64
}

/// Python's hash of a word in a new process; its hashes are seeded.
fn hash(jiffy: &Jiffy, vm: &str) -> String {
    let script = format!("{PYTHON} -c 'print(hash(\"jiffy\"))'");
    let hash = jiffy.ok(&["exec", vm, "sh", "-c", &script]);
    assert!(hash.parse::<i64>().is_ok(), "{hash}");
    hash
}

/// Checks that a VM's wall clock equals the machine's to 100 ms. The reading is between two
/// readings of the machine's clock, so a slow exec does not matter.
fn assert_clock_is_right(jiffy: &Jiffy, vm: &str) {
    let text = jiffy.sh(&format!(
        "export JIFFY_MACHINE=never; /tests/witness clock; \
         /bin/jiffy exec {vm} witness clock; /tests/witness clock"
    ));
    let times: Vec<f64> = text
        .lines()
        .map(|line| line.parse().unwrap_or_else(|_| panic!("{text}")))
        .collect();
    assert!(
        times[1] > times[0] - 0.1 && times[1] < times[2] + 0.1,
        "the clock of {vm} is wrong: {times:?}"
    );
}

#[test]
fn a_captured_vm_continues_and_is_restored_twice() {
    let jiffy = jiffy();
    jiffy.witness("origin", &[], "count /tmp/n");
    // The image has no machine id; a VM whose id is "uninitialized" gets a new one.
    let script = "echo kept > /tmp/kept; echo uninitialized > /etc/machine-id";
    jiffy.ok(&["exec", "origin", "sh", "-c", script]);
    jiffy.install_python("origin");
    jiffy.wait_for_count_above("origin", 2);
    // A file whose pages are then in the guest's memory.
    let sum = |vm: &str| jiffy.ok(&["exec", vm, "md5sum", "/bin/busybox"]);
    let read = sum("origin");
    let before = jiffy.counted("origin");
    assert_eq!(jiffy.ok(&["snapshot", "create", "origin", "one"]), "one");
    let summary = jiffy.ok(&["snapshot", "inspect", "one"]);
    let in_root = summary.lines().find_map(|line| line.strip_prefix("root "));
    let chunks = in_root.and_then(|line| line.split_whitespace().next());
    let chunks: Option<u64> = chunks.and_then(|number| number.parse().ok());
    assert!(chunks > Some(20), "{summary}");
    let after = jiffy.counted("origin");
    jiffy.ok(&["exec", "origin", "sh", "-c", "echo late > /tmp/kept"]);
    jiffy.sh(
        "export JIFFY_MACHINE=never; /bin/jiffy run --from one -d --name left & left=$!; \
         /bin/jiffy run --from one -d --name right && wait $left",
    );
    for vm in ["origin", "left", "right"] {
        jiffy.wait_for_count_above(vm, after + 3);
    }
    for vm in ["left", "right"] {
        assert_eq!(jiffy.ok(&["exec", vm, "cat", "/tmp/kept"]), "kept");
        assert_eq!(sum(vm), read);
        assert_eq!(jiffy.inspect(vm)["origin"]["from"], "one");
    }
    let [origin, left, right] =
        ["origin", "left", "right"].map(|vm| (identity(&jiffy, vm), numbers(&jiffy, vm)));
    for (one, other) in [(&origin, &left), (&origin, &right), (&left, &right)] {
        assert_distinct(&one.0, &other.0);
        let same = common_count(&one.1, &other.1);
        assert!(
            (before..=after).contains(&same),
            "{same} random numbers are the same; {before} to {after} had been drawn"
        );
    }
    let hashes: HashSet<String> = ["origin", "left", "right"]
        .map(|vm| hash(&jiffy, vm))
        .into();
    assert_eq!(hashes.len(), 3, "{hashes:?}");
    assert_eq!(left.0.hostname, "left");
    // Seeds drawn before the snapshot are the same in all.
    let before =
        ["origin", "left", "right"].map(|vm| jiffy.ok(&["exec", vm, "cat", "/tmp/n.seeds"]));
    assert!(
        before[0] == before[1] && before[0] == before[2],
        "{before:?}"
    );
    assert!(!before[0].contains(&left.0.seeds[0]), "{before:?}");
    for vm in ["origin", "left", "right"] {
        assert_clock_is_right(&jiffy, vm);
    }

    // The capture of a restored VM holds its changes only, and does not need the first snapshot's
    // folder.
    let counted = jiffy.counted("left");
    jiffy.ok(&["snapshot", "create", "left", "two"]);
    let summary = jiffy.ok(&["snapshot", "inspect", "two"]);
    assert!(
        summary.contains("parent ") && summary.contains("built on"),
        "{summary}"
    );
    jiffy.ok(&["rm", "-f", "left", "right"]);
    let removed = jiffy.run(&["snapshot", "rm", "one"]);
    assert_eq!(removed.code(), 0, "{}", removed.error_text());
    assert!(
        removed.error_text().contains("built on it: two"),
        "{}",
        removed.error_text()
    );
    jiffy.ok(&["run", "-d", "--name", "grandchild", "--from", "two"]);
    assert_eq!(
        jiffy.ok(&["exec", "grandchild", "cat", "/tmp/kept"]),
        "kept"
    );
    assert_eq!(sum("grandchild"), read);
    jiffy.wait_for_count_above("grandchild", counted + 3);
}

#[test]
fn restores_of_an_optimised_snapshot_share_their_working_set() {
    let jiffy = jiffy();
    jiffy.ok(&["run", "-d", "--name", "origin"]);
    let script = "seq 100000 > /tmp/data";
    jiffy.ok(&["exec", "origin", "sh", "-c", script]);
    let sum = |vm: &str| jiffy.ok(&["exec", vm, "md5sum", "/tmp/data", "/bin/busybox"]);
    let expected = sum("origin");
    jiffy.ok(&["snapshot", "create", "--stop", "origin", "one"]);
    let restore = |name: &str| {
        jiffy.ok(&["run", "-d", "--name", name, "--from", "one"]);
        assert_eq!(sum(name), expected, "{name}");
    };
    // The first restore is recorded. The recording is written when the VM ends, soon after its
    // command.
    let look = ["md5sum", "/tmp/data", "/bin/busybox"];
    let run = ["run", "--rm", "--from", "one", "--"];
    assert_eq!(jiffy.ok(&[&run[..], &look].concat()), expected);
    jiffy.eventually("what it needed is recorded", || {
        let files = jiffy.sh("ls /var/lib/jiffy/snapshots/one");
        files.lines().any(|file| file == "recording")
    });
    jiffy.ok(&["snapshot", "optimise", "one"]);
    let sharing = || {
        let list = jiffy.sh("cat /proc/[0-9]*/maps | grep -c 'jiffy working set' || true");
        list.trim().parse::<u32>().unwrap()
    };
    // The pager keeps the working set of one restore in memory for later ones.
    let mut number = 0;
    while sharing() == 0 {
        number += 1;
        assert!(number < 10, "nothing is shared");
        restore(&format!("early-{number}"));
    }
    let before = sharing();
    restore("last");
    assert!(sharing() > before);

    // Writes of one VM are invisible to the others, and are in its forks and snapshots.
    jiffy.ok(&["exec", "last", "sh", "-c", "echo mine >> /tmp/data"]);
    let changed = sum("last");
    assert_ne!(changed, expected);
    assert_eq!(sum(&format!("early-{number}")), expected);
    let child = jiffy.ok(&["fork", "last"]);
    jiffy.ok(&["snapshot", "create", "last", "two"]);
    jiffy.ok(&["hibernate", "last"]);
    jiffy.ok(&["wake", "last"]);
    jiffy.ok(&["run", "-d", "--name", "later", "--from", "two"]);
    for vm in [child.as_str(), "last", "later"] {
        assert_eq!(sum(vm), changed, "{vm}");
    }
}

#[test]
fn a_snapshot_is_listed_inspected_restored_and_removed() {
    let jiffy = jiffy();
    let nothing = jiffy.settled_traces();
    jiffy.ok(&["run", "-d", "--name", "plain"]);
    jiffy.ok(&["exec", "plain", "sh", "-c", "echo here > /root/mark"]);
    jiffy.ok(&["snapshot", "create", "--stop", "plain", "kept"]);
    assert!(!jiffy.ok(&["ps"]).contains("plain"), "--stop ends it");
    let list = jiffy.ok(&["snapshot", "ls"]);
    assert!(list.contains("kept") && list.contains("plain"), "{list}");
    let summary = jiffy.ok(&["snapshot", "inspect", "--summary", "kept"]);
    for word in ["zero", "zstd", "128.0 MiB", "table load time"] {
        assert!(summary.contains(word), "{word}: {summary}");
    }
    let map = jiffy.ok(&["snapshot", "inspect", "--map", "kept"]);
    assert!(map.lines().count() > 10 && map.contains("0x"), "{map}");
    jiffy.ok(&["snapshot", "inspect", "--png", "/tmp/kept.png", "kept"]);
    let picture = jiffy.lab.read("/tmp/kept.png").expect("a picture");
    jiffy.sh("rm /tmp/kept.png");
    assert!(picture.starts_with(b"\x89PNG\r\n\x1a\n") && picture.ends_with(b"IEND\xaeB`\x82"));

    let read = ["run", "--rm", "--from", "kept", "--", "cat", "/root/mark"];
    assert_eq!(jiffy.ok(&read), "here", "a command of its own");
    jiffy.ok(&["run", "-d", "--from", "kept", "--name", "user"]);
    let sentence = jiffy.refuses(125, &["snapshot", "rm", "kept"]);
    assert!(sentence.contains("in use by the VM user"), "{sentence}");
    jiffy.ok(&["rm", "-f", "user"]);
    jiffy.ok(&["snapshot", "rm", "kept"]);
    jiffy.ok(&["rm", "plain"]);
    jiffy.assert_nothing_left(&nothing, "after all was removed");
}

#[test]
fn impossible_snapshot_requests_are_refused() {
    let jiffy = jiffy();
    jiffy.ok(&["run", "-d", "--name", "plain"]);
    jiffy.ok(&["snapshot", "create", "plain", "taken"]);
    for (arguments, word) in [
        (&["snapshot", "create", "plain", "taken"][..], "taken"),
        (&["snapshot", "create", "plain", "../up"], "../up"),
        (&["snapshot", "create", "plain", ""], "name"),
        (&["snapshot", "create", "nobody", "new"], "nobody"),
        (&["snapshot", "inspect", "missing"], "missing"),
        (&["snapshot", "rm", "missing"], "missing"),
        (&["run", "-d", "--from", "missing"], "missing"),
        // There is no running command to attach to.
        (&["run", "--from", "taken"], "taken"),
    ] {
        let sentence = jiffy.refuses(125, arguments);
        assert!(sentence.contains(word), "{arguments:?}: {sentence}");
    }
    // A host whose processor lacks a feature that the VM may have used.
    let manifest = "/var/lib/jiffy/snapshots/taken/snapshot.json";
    let good = jiffy.lab.read(manifest).expect("it is there");
    let text = String::from_utf8(good).expect("JSON");
    let leaf = r#""00000007.0":""#;
    let ecx = text.find(leaf).expect("a leaf of CPUID") + leaf.len() + 18;
    let mut strange = text.clone();
    strange.replace_range(ecx..ecx + 8, "ffffffff");
    assert_ne!(strange, text);
    jiffy
        .lab
        .write(manifest, 0o600, with_checksum(&strange))
        .expect("written");
    let sentence = jiffy.refuses(125, &["run", "-d", "--from", "taken"]);
    assert!(
        sentence.contains("it lacks ") && sentence.contains("tme, "),
        "{sentence}"
    );
    // Of an unknown version; with a flipped bit; cut off.
    let next = strange.replacen(r#""version":1"#, r#""version":2"#, 1);
    jiffy
        .lab
        .write(manifest, 0o600, with_checksum(&next))
        .expect("written");
    let sentence = jiffy.refuses(125, &["run", "-d", "--from", "taken"]);
    assert!(sentence.contains("version 2"), "{sentence}");
    for damaged in [strange.clone(), text[..text.len() / 2].to_owned()] {
        jiffy
            .lab
            .write(manifest, 0o600, damaged.into())
            .expect("written");
        let sentence = jiffy.refuses(125, &["run", "-d", "--from", "taken"]);
        assert!(sentence.contains("taken can't be used"), "{sentence}");
    }
    assert_eq!(
        jiffy.ok(&["ps", "-a"]).lines().count(),
        2,
        "only plain is left"
    );
    jiffy.ok(&["snapshot", "rm", "taken"]);
}

/// The manifest with a correct checksum of its content.
fn with_checksum(text: &str) -> Vec<u8> {
    let (head, content) = text.split_once(r#","content":"#).expect("an envelope");
    let content = content.trim_end().strip_suffix('}').expect("an envelope");
    let crc = !content.bytes().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg())
        })
    });
    let (head, _) = head.split_once(r#","crc32c":""#).expect("a checksum");
    format!(r#"{head},"crc32c":"{crc:08x}","content":{content}}}"#).into()
}
