//! The machine itself.

use crate::support::turn;
use jiffy_testkit::{Lab, LabOptions};
use std::time::Duration;

fn boot(options: LabOptions) -> Lab {
    Lab::boot(options).unwrap_or_else(|error| panic!("{error:#}"))
}

#[test]
fn a_machine_without_a_disk_has_a_kvm_too() {
    let _turn = turn();
    // A machine without one would not come up.
    let lab = boot(LabOptions {
        disk_gib: None,
        ..LabOptions::default()
    });
    let used = lab.cpu_time().expect("it runs");
    println!("ready after {:?}, CPU time {used:?}", lab.boot_time());
    let answer = lab.sh("ls /dev/kvm").expect("it answers");
    assert_eq!(answer.text(), "/dev/kvm");
}

#[test]
fn on_the_instruction_clock_boot_and_doctor_cost_what_they_did() {
    let _turn = turn();
    let lab = boot(LabOptions::instruction_clock());
    // 0.73 G instructions when this was written; 2.5 before modules were made
    // light. The machine's own word: while it waits for us, its clock goes on.
    let boot = lab.ready_after();
    let likely = Duration::from_millis(300)..Duration::from_millis(1200);
    assert!(likely.contains(&boot), "{boot:?}");
    // 22 M instructions a time.
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
