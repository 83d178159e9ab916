//! A working guest is captured repeatedly.

use crate::support::{Jiffy, jiffy};
use jiffy_machine::image::cpio::Archive;
use std::path::Path;
use std::time::Duration;

/// Checks the witness's lines up to the last complete one: the numbers have no gap, and each sum is
/// right. Returns the first and last number.
fn check_lines(what: &str, text: &str, first: Option<u64>) -> (u64, u64) {
    let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
    let numbers: Vec<(u64, &str)> = whole
        .lines()
        .map(|line| {
            let (number, sum) = line
                .split_once(' ')
                .unwrap_or_else(|| panic!("{what}: {line:?}"));
            (
                number
                    .parse()
                    .unwrap_or_else(|_| panic!("{what}: {line:?}")),
                sum,
            )
        })
        .collect();
    let begin = numbers
        .first()
        .unwrap_or_else(|| panic!("{what}: nothing"))
        .0;
    assert!(
        first.is_none_or(|first| first == begin),
        "{what} begins with {begin}"
    );
    let last = begin + numbers.len() as u64 - 1;
    let mut sum = 1u32;
    for n in 1..=last {
        for turn in 0..2000 {
            sum = sum.wrapping_mul(1_664_525).wrapping_add(n as u32 ^ turn);
        }
        if n >= begin {
            let (number, said) = numbers[(n - begin) as usize];
            assert_eq!((number, said), (n, format!("{sum:08x}").as_str()), "{what}");
        }
    }
    (begin, last)
}

fn file(jiffy: &Jiffy, vm: &str) -> String {
    let output = jiffy
        .command(&["exec", vm, "cat", "/tmp/lines"])
        .output()
        .expect("it runs");
    assert_eq!(output.code(), 0, "{}", output.error_text());
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn six_captures_and_a_restore_lose_or_repeat_no_line() {
    let jiffy = jiffy();
    jiffy.witness("worker", &[], "lines /tmp/lines");
    // A second witness, whose lines come over a connection that stays open.
    let mut stream = jiffy
        .command(&["exec", "worker", "witness", "lines", "/tmp/streamed"])
        .start()
        .expect("it starts");
    stream.read_until("1 ").expect("lines arrive");
    for n in 1..=6 {
        jiffy.ok(&["snapshot", "create", "worker", &format!("at{n}")]);
        if n < 6 {
            jiffy.ok(&["snapshot", "rm", &format!("at{n}")]);
        }
    }
    jiffy.kill_witnesses("worker");
    let streamed = stream.wait().expect("it ends");
    let text = String::from_utf8(streamed.stdout).expect("text");
    let (_, last) = check_lines("what was streamed", &text, Some(1));
    assert!(last > 100, "only {last} lines");
    let log = jiffy
        .command(&["logs", "worker"])
        .output()
        .expect("it runs")
        .stdout;
    let log = String::from_utf8(log).expect("text");
    let (_, in_log) = check_lines("the log", &log, Some(1));

    // A VM from the last capture continues at its line, and so does its log.
    jiffy.ok(&["run", "-d", "--from", "at6", "--name", "again"]);
    let (_, captured) = check_lines("the file", &file(&jiffy, "again"), Some(1));
    assert!(captured > 50, "{captured}");
    let reaches = captured + 20;
    jiffy.eventually("it continues", || {
        check_lines("the file", &file(&jiffy, "again"), Some(1)).1 > reaches
    });
    let log = jiffy
        .command(&["logs", "again"])
        .output()
        .expect("it runs")
        .stdout;
    let (first, _) = check_lines("its log", &String::from_utf8(log).expect("text"), None);
    assert!(
        first <= in_log + 1,
        "lines {in_log} to {first} are in no log"
    );
}

/// A hundred restores, each by a new process from the capture of the one before, with files, disk
/// and connection; see the program. A node is left out, because it would take most of the time.
#[test]
fn a_hundred_successive_restores_lose_or_repeat_no_byte() {
    let jiffy = jiffy();
    let program = Path::new(env!("CARGO_BIN_EXE_jiffy-endurance"));
    let init = std::fs::read(program).expect("it is built");
    let mut archive = Archive::new(Vec::new());
    for folder in ["dev", "proc"] {
        archive.folder(folder, 0o755).expect("a folder");
    }
    for (device, major, minor) in [("dev/console", 5, 1), ("dev/null", 1, 3)] {
        archive
            .character_device(device, 0o600, major, minor)
            .expect("a device");
    }
    archive.file("init", 0o755, &init).expect("a file");
    let initramfs = archive.finish().expect("an archive");
    let write = |path, mode, contents| jiffy.lab.write(path, mode, contents).expect("written");
    write("/tests/endurance", 0o755, init);
    write("/tests/endurance.cpio", 0o600, initramfs);
    let restores = ["/tests/endurance", "host", "100", "128"];
    let restores = jiffy
        .lab
        .command(restores)
        .time_limit(Duration::from_secs(3600));
    let output = restores.output().expect("it runs");
    let said = output.text();
    assert_eq!(output.code(), 0, "{said} {}", output.error_text());
    jiffy.sh("rm /tests/endurance /tests/endurance.cpio");
    assert!(
        said.starts_with("100 restores, ") && said.ends_with("lines are right"),
        "{said}"
    );
}
