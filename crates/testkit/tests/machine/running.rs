//! `jiffy run`: a command, its output, its exit.

use crate::support::{Jiffy, jiffy};

#[test]
fn a_command_runs_in_a_kernel_of_its_own() {
    let jiffy = jiffy();
    let machine = jiffy.sh("uname -r");
    let guest = jiffy.ok(&["run", "--rm", "--", "uname", "-r"]);
    assert_ne!(guest, machine, "the guest has its own kernel");
    assert!(guest.starts_with("6.12."), "{guest}");
}

#[test]
fn the_first_screen_of_the_readme() {
    let jiffy = jiffy();
    let date = jiffy.ok(&["run", "--", "/usr/bin/date"]);
    let year = jiffy.sh("date +%Y");
    assert!(date.contains("UTC") && date.ends_with(&year), "{date}");
}

#[test]
fn the_exit_status_is_the_commands_own() {
    let jiffy = jiffy();
    for (script, code) in [
        ("exit 0", 0),
        ("exit 7", 7),
        ("exit 255", 255),
        ("kill -9 $$", 137),
    ] {
        let output = jiffy.run(&["run", "--rm", "--", "sh", "-c", script]);
        assert_eq!(output.code(), code, "{script}: {}", output.error_text());
    }
}

/// A program that reads a byte from port 0x511, where fw_cfg has the guest's configuration, and
/// exits with 0.
fn reads_a_port() -> Vec<u8> {
    const CODE: [u8; 14] = [
        0x66, 0xba, 0x11, 0x05, // mov dx, 0x511
        0xec, // in al, dx
        0x31, 0xff, // xor edi, edi
        0xb8, 60, 0, 0, 0, // mov eax, exit
        0x0f, 0x05, // syscall
    ];
    const BASE: u64 = 0x40_0000;
    const HEADERS: u64 = 64 + 56;
    let length = HEADERS + CODE.len() as u64;
    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
    // Entry, program headers, no section headers.
    elf.extend([BASE + HEADERS, 64, 0].map(u64::to_le_bytes).concat());
    elf.extend(b"\0\0\0\0\x40\0\x38\0\x01\0\x40\0\0\0\0\0");
    // PT_LOAD, readable and executable, the whole file.
    elf.extend(b"\x01\0\0\0\x05\0\0\0");
    let segment = [0, BASE, BASE, length, length, 0x1000];
    elf.extend(segment.map(u64::to_le_bytes).concat());
    elf.extend(CODE);
    elf
}

#[test]
fn no_program_inherits_port_access_from_init() {
    let jiffy = jiffy();
    let script = "cat >/tmp/reads && chmod 755 /tmp/reads && exec /tmp/reads";
    for user in ["root", "nobody"] {
        let run = ["run", "--rm", "-i", "-u", user, "--", "sh", "-c", script];
        let output = jiffy.command(&run).stdin(reads_a_port()).output();
        let output = output.expect("it runs");
        assert_eq!(output.code(), 139, "{user}: {}", output.error_text());
    }
}

#[test]
fn missing_and_non_executable_commands_are_told_apart() {
    let jiffy = jiffy();
    let sentence = jiffy.refuses(127, &["run", "--rm", "--", "no-such-program"]);
    assert!(sentence.contains("no-such-program"), "{sentence}");
    let sentence = jiffy.refuses(126, &["run", "--rm", "--", "/etc/passwd"]);
    assert!(sentence.contains("/etc/passwd"), "{sentence}");
}

#[test]
fn environment_folder_user_and_host_name_are_applied() {
    let jiffy = jiffy();
    let answer = jiffy.ok(&[
        "run",
        "--rm",
        "--name",
        "asked",
        "-e",
        "GREETING=good morning",
        "-w",
        "/usr",
        "-u",
        "nobody",
        "--",
        "sh",
        "-c",
        "echo $GREETING; pwd; id -un; hostname",
    ]);
    assert_eq!(answer, "good morning\n/usr\nnobody\nasked");
}

#[test]
fn memory_and_vcpus_are_applied() {
    let jiffy = jiffy();
    let script = "nproc; free -m | awk '/^Mem:/ { print $2 }'";
    let answer = jiffy.ok(&[
        "run", "--rm", "--cold", "--cpus", "4", "--memory", "512", "--", "sh", "-c", script,
    ]);
    let numbers: Vec<u64> = answer
        .lines()
        .map(|line| line.parse().expect("a number"))
        .collect();
    assert_eq!(numbers[0], 4);
    assert!((460..=512).contains(&numbers[1]), "{numbers:?}");
}

#[test]
fn vcpus_go_on_and_off_line_while_a_guest_runs() {
    let jiffy = jiffy();
    let nproc = |vm: &str| jiffy.ok(&["exec", vm, "nproc"]);
    let update = |vm: &str, cpus: &str| jiffy.ok(&["update", "--cpus", cpus, vm]);
    jiffy.ok(&[
        "run",
        "-d",
        "--name",
        "elastic",
        "--cold",
        "--cpus",
        "2",
        "--max-cpus",
        "4",
        "--",
        "sleep",
        "1000000",
    ]);
    assert_eq!(nproc("elastic"), "2");
    update("elastic", "4");
    assert_eq!(nproc("elastic"), "4");
    let busy =
        "for cpu in 0 1 2 3; do taskset -c $cpu sh -c 'cut -d\" \" -f39 /proc/self/stat'; done";
    assert_eq!(
        jiffy.ok(&["exec", "elastic", "sh", "-c", busy]),
        "0\n1\n2\n3"
    );
    // vCPUs that are offline are captured, and can go online in what comes of it.
    update("elastic", "1");
    jiffy.ok(&["hibernate", "elastic"]);
    assert_eq!(nproc("elastic"), "1", "woken by exec");
    update("elastic", "3");
    jiffy.ok(&["fork", "--name", "child", "elastic"]);
    assert_eq!(nproc("child"), "3");
    update("child", "4");
    assert_eq!((nproc("child"), nproc("elastic")), ("4".into(), "3".into()));
    let shown = jiffy.inspect("elastic");
    assert_eq!((&shown["cpus"], &shown["max_cpus"]), (&3.into(), &4.into()));
    let sentence = jiffy.refuses(125, &["update", "--cpus", "5", "elastic"]);
    assert!(sentence.contains("it can have 1 to 4"), "{sentence}");
    jiffy.ok(&["rm", "--force", "elastic", "child"]);
}

/// Memory that programs of a VM see, MiB.
fn total_mib(jiffy: &Jiffy, vm: &str) -> u64 {
    let text = jiffy.ok(&["exec", vm, "sh", "-c", "free -m | grep Mem:"]);
    let total = text.split_whitespace().nth(1);
    total.and_then(|mib| mib.parse().ok()).expect("MiB")
}

/// Host memory of a VM's own pages, MiB.
fn own_mib(jiffy: &Jiffy, vm: &str) -> u64 {
    let pid = jiffy.inspect(vm)["pid"].to_string();
    let sum = "awk '/RssAnon|RssShmem/ {kib += $2} END {print int(kib / 1024)}'";
    let text = jiffy.sh(&format!("{sum} /proc/{pid}/status"));
    text.trim().parse().expect("MiB")
}

#[test]
fn memory_grows_and_shrinks_while_a_vm_runs() {
    let jiffy = jiffy();
    let update = |vm: &str, size: &str| {
        assert_eq!(jiffy.ok(&["update", "--memory", size, vm]), vm);
    };
    // A kernel needs some of it for itself.
    let sees = |vm: &str, mib: u64| {
        let total = total_mib(&jiffy, vm);
        assert!(
            (mib - 40..=mib).contains(&total),
            "{vm} sees {total} of {mib}"
        );
    };
    let sized = ["--memory", "128", "--max-memory", "512"];
    let run = |more: &[&str]| jiffy.ok(&[&["run"], &sized[..], more].concat());
    let at_once = run(&["--rm", "--cold", "--", "sh", "-c", "free -m | grep Mem:"]);
    let at_once = at_once.split_whitespace().nth(1).map(str::to_owned);
    let at_once: u64 = at_once.and_then(|mib| mib.parse().ok()).expect("MiB");
    assert!(at_once <= 128, "the first command sees {at_once} MiB");
    run(&["-d", "--name", "roomy", "--", "sleep", "1000000"]);
    sees("roomy", 128);
    update("roomy", "512");
    sees("roomy", 512);
    // Programs use it, and keep it.
    let fill = "mkdir -p /much && mount -t tmpfs -o size=300m much /much && \
                head -c 209715200 /dev/zero > /much/file";
    jiffy.ok(&["exec", "roomy", "sh", "-c", fill]);
    let full = own_mib(&jiffy, "roomy");
    assert!(full > 200, "{full} MiB");
    let sentence = jiffy.refuses(125, &["update", "--memory", "128", "roomy"]);
    assert!(sentence.contains("keeps its 512 MiB"), "{sentence}");
    jiffy.eventually("it has its memory", || total_mib(&jiffy, "roomy") > 472);
    jiffy.ok(&["exec", "roomy", "umount", "/much"]);
    update("roomy", "128");
    sees("roomy", 128);
    let shrunk = own_mib(&jiffy, "roomy");
    println!("{full} MiB of the host's memory, {shrunk} after it shrank to 128");
    assert!(shrunk < 128, "{shrunk} MiB");
    // Captures keep it, and what comes of them changes on its own.
    jiffy.ok(&["snapshot", "create", "roomy", "small"]);
    jiffy.ok(&["run", "--from", "small", "-d", "--name", "again"]);
    sees("again", 128);
    update("again", "512");
    sees("again", 512);
    jiffy.ok(&["exec", "again", "sh", "-c", fill]);
    let full = own_mib(&jiffy, "again");
    jiffy.ok(&["exec", "again", "umount", "/much"]);
    update("again", "128");
    sees("again", 128);
    let shrunk = own_mib(&jiffy, "again");
    println!("restored: {full} MiB, then {shrunk}");
    assert!(full > 200 && shrunk < 128, "{full} MiB, then {shrunk}");
    jiffy.ok(&["rm", "--force", "again"]);
    update("roomy", "300");
    jiffy.ok(&["fork", "--name", "child", "roomy"]);
    sees("child", 300);
    update("child", "512");
    jiffy.ok(&["exec", "child", "sh", "-c", fill]);
    let full = own_mib(&jiffy, "child");
    jiffy.ok(&["exec", "child", "umount", "/much"]);
    update("child", "100");
    sees("child", 100);
    let shrunk = own_mib(&jiffy, "child");
    println!("forked: {full} MiB, then {shrunk}");
    assert!(full > 200 && shrunk < 100, "{full} MiB, then {shrunk}");
    jiffy.ok(&["hibernate", "roomy"]);
    sees("roomy", 300);
    let shown = jiffy.inspect("roomy");
    let sizes = (&shown["memory_mib"], &shown["max_memory_mib"]);
    assert_eq!(sizes, (&300.into(), &512.into()));
    jiffy.ok(&["rm", "--force", "roomy", "child"]);
    jiffy.ok(&["snapshot", "rm", "small"]);
}

/// The most vCPUs that a VM may have.
#[test]
fn thirty_two_vcpus_run_and_are_restored_from_a_snapshot() {
    let jiffy = jiffy();
    let script = "nproc; cat /sys/devices/system/cpu/online; \
                  for cpu in $(seq 0 31); do taskset -c $cpu sh -c \
                  'i=0; while [ $i -lt 100 ]; do i=$((i+1)); done; \
                  cut -d\" \" -f39 /proc/self/stat' > /tmp/$cpu & done; wait; \
                  cd /tmp; for cpu in $(seq 0 31); do echo $cpu-$(cat $cpu); done";
    let expected: Vec<String> = ["32".into(), "0-31".into()]
        .into_iter()
        .chain((0..32).map(|cpu| format!("{cpu}-{cpu}")))
        .collect();
    jiffy.ok(&[
        "run", "-d", "--name", "many", "--cold", "--cpus", "32", "--", "sleep", "1000000",
    ]);
    let works = |vm: &str| {
        let answer = jiffy.ok(&["exec", vm, "sh", "-c", script]);
        assert_eq!(answer.lines().collect::<Vec<_>>(), expected, "{vm}");
    };
    works("many");
    jiffy.ok(&["snapshot", "create", "many", "all"]);
    jiffy.ok(&["run", "--from", "all", "-d", "--name", "again"]);
    works("again");
    assert_eq!(jiffy.ok(&["exec", "many", "nproc"]), "32", "it continued");
}

#[test]
fn the_smallest_vm_boots_in_64_mib() {
    let jiffy = jiffy();
    assert_eq!(
        jiffy.ok(&[
            "run", "--rm", "--cold", "--memory", "64", "--", "echo", "small"
        ]),
        "small"
    );
}

#[test]
fn the_root_is_writable_and_discarded_at_the_end() {
    let jiffy = jiffy();
    jiffy.ok(&[
        "run",
        "--rm",
        "--",
        "sh",
        "-c",
        "echo x > /etc/mark && cat /etc/mark",
    ]);
    let output = jiffy.run(&["run", "--rm", "--", "cat", "/etc/mark"]);
    assert_ne!(output.code(), 0, "the next VM sees a fresh image");
}

#[test]
fn json_output_is_one_object() {
    let jiffy = jiffy();
    let answer = jiffy.json(&[
        "run",
        "--rm",
        "--format",
        "json",
        "--",
        "sh",
        "-c",
        "echo out; echo err >&2",
    ]);
    let text = answer.to_string();
    for part in ["out\\n", "err\\n", "\"vm\""] {
        assert!(text.contains(part), "{part} is missing in {text}");
    }
}
