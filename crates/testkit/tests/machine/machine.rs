//! Tests of the machine.

use crate::support::{TIMEOUT, jiffy, turn};
use jiffy_testkit::{Lab, LabOptions};
use std::time::{Duration, Instant};

fn boot(options: LabOptions) -> Lab {
    Lab::boot(options).unwrap_or_else(|error| panic!("{error:#}"))
}

#[test]
fn a_machine_without_a_disk_has_kvm() {
    let _turn = turn();
    // The boot fails unless there is a working KVM.
    let lab = boot(LabOptions {
        disk_gib: None,
        ..LabOptions::default()
    });
    let used = lab.cpu_time().expect("it runs");
    println!("ready after {:?}, CPU time {used:?}", lab.boot_time());
    let answer = lab.sh("ls /dev/kvm").expect("it answers");
    assert_eq!(answer.text(), "/dev/kvm");
    // What does not end in time is reported with what it waits for.
    let endless = lab
        .command(["sleep", "1000"])
        .time_limit(Duration::from_secs(1));
    let error = endless.output().expect_err("it does not end").to_string();
    assert!(error.contains("did not end in time"), "{error}");
    assert!(error.contains("nanosleep"), "{error}");
}

#[test]
fn boot_and_doctor_take_the_expected_number_of_instructions() {
    let _turn = turn();
    let lab = boot(LabOptions::instruction_clock());
    // 0.73 G instructions when this was written; 2.5 G before modules were stripped. Measured by
    // the machine, because its clock advances while it waits for the host.
    let boot = lab.ready_after();
    let likely = Duration::from_millis(300)..Duration::from_millis(1200);
    assert!(likely.contains(&boot), "{boot:?}");
    // About 22 M instructions per call.
    let script = "cut -d' ' -f1 /proc/uptime; n=0; while [ $n -lt 8 ]; do n=$((n+1)); \
                  JIFFY_MACHINE=never /bin/jiffy doctor --format json >/dev/null; done; \
                  cut -d' ' -f1 /proc/uptime";
    let run = lab.command(["/bin/sh", "-c", script]).keep_output();
    let text = run.output().expect("it runs").text();
    let times: Vec<f64> = text
        .lines()
        .map(|line| line.parse().expect("seconds"))
        .collect();
    let each = (times[1] - times[0]) / 8.0;
    assert!((0.001..0.05).contains(&each), "{each} s each");
}

/// QEMU loses timer interrupts; this interrupt ends the resulting hang.
#[test]
fn the_hardware_clock_interrupts_once_a_second() {
    let jiffy = jiffy();
    let interrupts = || -> u64 {
        let counted = jiffy.sh(
            "awk '/rtc/ { for (field = 2; $field ~ /^[0-9]+$/; field++) sum += $field } \
             END { print sum + 0 }' /proc/interrupts",
        );
        counted.parse().expect("a number")
    };
    // The time includes both readings, which may take long.
    let (began, before) = (Instant::now(), interrupts());
    let until = began + TIMEOUT;
    while interrupts() < before + 3 {
        assert!(
            Instant::now() < until,
            "no interrupts of the hardware clock"
        );
        std::thread::sleep(Duration::from_millis(200));
    }
    // Not more often either: each costs an idle machine a wake-up.
    let after = interrupts();
    let most = before + began.elapsed().as_secs() + 2;
    assert!(after <= most, "{after} of {most}");
}

#[test]
fn a_low_priority_session_yields_to_another() {
    let jiffy = jiffy();
    let setting = jiffy.sh("cat /proc/sys/kernel/sched_autogroup_enabled");
    assert_eq!(setting, "0");
    // Two sessions on one processor: one with a low priority that is always busy, and one that
    // ends. Field 14 is user time, in ticks.
    let text = jiffy.sh(
        r#"used() { cut -d' ' -f14 "/proc/$1/stat"; }
        setsid sh -c 'renice -n 19 -p $$ && echo $$ >/tmp/low && while :; do :; done' &
        until [ -s /tmp/low ]; do sleep 0.1; done
        read -r low </tmp/low
        trap 'kill $low; rm /tmp/low' EXIT
        until [ "$(used $low)" -ge 10 ]; do sleep 0.1; done
        before=$(used $low)
        setsid sh -c 'n=0; while [ $n -lt 40000 ]; do n=$((n+1)); done; cut -d" " -f14 /proc/$$/stat'
        echo $(($(used $low) - before))"#,
    );
    let ticks: Vec<u64> = text.lines().map(|line| line.parse().unwrap()).collect();
    println!("ticks of the ordinary session and of the low-priority one: {ticks:?}");
    assert!(ticks[0] >= 20, "too short to tell: {ticks:?}");
    assert!(ticks[1] * 4 <= ticks[0], "{ticks:?}");
}
