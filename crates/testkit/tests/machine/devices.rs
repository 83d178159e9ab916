//! Disks, randomness, and isolation between devices under load.

use crate::support::jiffy;

#[test]
fn each_of_many_disks_keeps_its_data() {
    let jiffy = jiffy();
    let names: Vec<String> = (0..8).map(|n| format!("many{n}:8M")).collect();
    let mut write = vec!["run", "--rm"];
    for name in &names {
        write.extend(["--disk", name]);
    }
    let script = "for d in b c d e f g h i; do \
                  echo disk $d | dd of=/dev/vd$d bs=512 seek=77 conv=sync,fsync 2>/dev/null || exit 1; done; \
                  blockdev --getsize64 /dev/vdi";
    let answer = jiffy.ok(&[&write[..], &["--", "sh", "-c", script]].concat());
    assert_eq!(answer, (8u64 << 20).to_string());

    let bare: Vec<String> = (0..8).map(|n| format!("many{n}:ro")).collect();
    let mut read = vec!["run", "--rm"];
    for name in &bare {
        read.extend(["--disk", name]);
    }
    let script = "for d in b c d e f g h i; do \
                  dd if=/dev/vd$d bs=512 skip=77 count=1 2>/dev/null | head -n 1; done; \
                  dd if=/dev/zero of=/dev/vdb bs=512 count=1 2>/dev/null && echo written || echo refused";
    let answer = jiffy.ok(&[&read[..], &["--", "sh", "-c", script]].concat());
    let expected: String = "bcdefghi".chars().map(|d| format!("disk {d}\n")).collect();
    assert_eq!(answer, expected + "refused");
    for n in 0..8 {
        jiffy.ok(&["volume", "rm", &format!("many{n}")]);
    }
}

#[test]
fn a_volume_in_use_is_not_attached_again() {
    let jiffy = jiffy();
    jiffy.ok(&["run", "-d", "--name", "owner", "--disk", "shared:16M"]);
    let sentence = jiffy.refuses(125, &["run", "--rm", "--disk", "shared", "--", "true"]);
    assert!(sentence.contains("shared"), "{sentence}");
    jiffy.refuses(125, &["volume", "rm", "shared"]);
    jiffy.ok(&["rm", "-f", "owner"]);
    jiffy.ok(&["volume", "rm", "shared"]);
}

#[test]
fn guests_draw_different_random_numbers() {
    let jiffy = jiffy();
    let draw = || {
        jiffy.ok(&[
            "run",
            "--rm",
            "--",
            "sh",
            "-c",
            "head -c 16 /dev/urandom | md5sum",
        ])
    };
    assert_ne!(draw(), draw());
}

/// Sectors read, from the line of a disk's `stat`.
fn sectors(figures: &str) -> u64 {
    let sectors = figures.split_whitespace().nth(2);
    sectors.expect("a third figure").parse().expect("a number")
}

/// Sectors that a guest has read from its volume.
fn sectors_read(jiffy: &crate::support::Jiffy, vm: &str) -> u64 {
    sectors(&jiffy.ok(&["exec", vm, "cat", "/sys/block/vdb/stat"]))
}

#[test]
fn a_flood_of_disk_requests_does_not_delay_vsock() {
    let jiffy = jiffy();
    jiffy.ok(&[
        "run",
        "-d",
        "--name",
        "flooded",
        "--cpus",
        "2",
        "--disk",
        "flood:64M",
    ]);
    let before = sectors_read(&jiffy, "flooded");
    let flood = jiffy
        .command(&[
            "exec",
            "flooded",
            "sh",
            "-c",
            "echo flooding; while :; do dd if=/dev/vdb of=/dev/null bs=4k iflag=direct || exit; done",
        ])
        .start()
        .and_then(|mut flood| flood.read_until("flooding").map(|_| flood))
        .expect("the flood begins");
    jiffy.eventually("the flood", || {
        sectors_read(&jiffy, "flooded") > before + 1000
    });
    // The flood uses its share of the machine's one CPU. An answer must not wait until the flood
    // pauses, which it does after each pass over the disk. The flood is the clock. One command of
    // the machine takes all readings, so the host's speed does not affect the time between them.
    let pass = (64 << 20) / 512;
    let readings = jiffy.sh("for n in 1 2 3 4 5 6 7 8 9; do \
         /bin/jiffy exec flooded cat /sys/block/vdb/stat || exit; done");
    let readings: Vec<u64> = readings.lines().map(sectors).collect();
    assert_eq!(readings.len(), 9);
    for pair in readings.windows(2) {
        assert!(pair[1] > pair[0], "the flood has ended");
        let meanwhile = pair[1] - pair[0];
        assert!(meanwhile < pass, "{meanwhile} sectors meanwhile");
    }
    drop(flood);
    jiffy.ok(&["rm", "-f", "flooded"]);
    jiffy.ok(&["volume", "rm", "flood"]);
}
