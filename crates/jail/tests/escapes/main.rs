//! A compromised program in a jail: it attacks with everything that the jail leaves it, and must
//! reach nothing.
//!
//! This test is its own victim and its own attacker: it starts itself in two jails. The attacker
//! makes all attempts twice: with the jail alone, and with the system call filter of a monitor's
//! main thread on top. Started by root, it does all of that again as a user without privileges, whose
//! jails are user namespaces: there the jail alone keeps it from that user's sockets.

mod attempts;
#[path = "../common/calls.rs"]
mod calls;
mod stage;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["victim"] => stage::be_victim(),
        ["unprivileged"] => stage::run(),
        ["memory bomb"] => stage::be_memory_bomb(),
        ["attacker", aims @ ..] => attempts::run(aims),
        // Arguments that a test harness is started with.
        ["--list", ..] => println!("a_compromised_program_reaches_nothing: test"),
        _ => {
            stage::run();
            stage::run_unprivileged();
        }
    }
}
