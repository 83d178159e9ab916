#![allow(unsafe_code)] // Calls that a filter allows or refuses.

use super::*;
use std::process::Command;

/// Set in a child process that runs one scene.
const CHILD_VARIABLE: &str = "JIFFY_SANDBOX_SCENE";

/// Runs one test of this binary in a process of its own, because filters can't be removed.
fn run_child(test: &str, scene: &str) -> std::process::Output {
    Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD_VARIABLE, scene)
        // One heap, as in the program itself: glibc opens a file before it shrinks another heap.
        .env("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
        .output()
        .unwrap()
}

#[test]
fn each_role_runs_and_exits_in_its_sandbox() {
    if std::env::var_os(CHILD_VARIABLE).is_none() {
        let output = run_child(
            "sandbox::tests::each_role_runs_and_exits_in_its_sandbox",
            "live",
        );
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(text.matches("lived").count(), Role::all().count(), "{text}");
        return;
    }
    Sandbox::On.prepare().unwrap();
    for role in Role::all() {
        std::thread::spawn(move || {
            Sandbox::On.enter(role).unwrap();
            let kept: Vec<Vec<u8>> = (0..64).map(|size| vec![1; size << 12]).collect();
            drop(kept);
            std::thread::sleep(std::time::Duration::from_millis(1));
            let mut byte = [0];
            // SAFETY: a buffer of one byte.
            unsafe { libc::getrandom(byte.as_mut_ptr().cast(), 1, 0) };
            println!("{role:?} lived");
        })
        .join()
        .unwrap();
    }
    assert_eq!(violation::first(), None);
}

#[test]
fn a_forbidden_call_is_reported_and_blocked() {
    if std::env::var_os(CHILD_VARIABLE).is_none() {
        let output = run_child(
            "sandbox::tests::a_forbidden_call_is_reported_and_blocked",
            "forbidden",
        );
        assert!(output.status.success(), "{output:?}");
        return;
    }
    Sandbox::On.prepare().unwrap();
    let thread = std::thread::spawn(|| {
        Sandbox::On.enter(Role::Vcpu).unwrap();
        let path = c"/proc/self/status";
        // SAFETY: a string; the call is refused.
        unsafe { libc::open(path.as_ptr(), libc::O_RDONLY) };
        println!("went on");
        std::process::exit(3);
    });
    for _ in 0..60_000 {
        if let Some(violation) = violation::first() {
            assert_eq!(violation.call, libc::SYS_openat);
            std::process::exit(0);
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    drop(thread);
    panic!("the violation was not reported");
}

#[test]
fn seccomp_filters_are_small() {
    for role in Role::all() {
        let length = policy::filter(role).as_slice().len();
        println!("{role:?}: {length}");
        assert!(length <= 90, "{role:?}: {length} instructions");
    }
}
