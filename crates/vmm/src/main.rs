//! `jiffy-vmm`: one process, one VM.
#![cfg_attr(not(test), no_main)]

mod arguments;
mod logging;
mod run;

use arguments::Command;
use jiffy_vmm::error::sentence;

const USAGE: &str = "\
usage: jiffy-vmm run --config FILE [--events-fd N | --spare-fd N] [--fd NAME=N]... [--seccomp on|off]
       jiffy-vmm probe
       jiffy-vmm cpu
       jiffy-vmm --version
";

const SUCCESS: i32 = 0;
const FAILURE: i32 = 1;
const MISUSE: i32 = 2;

/// Called by the C library without Rust's runtime, which reads `/proc/self/maps` and gives each
/// thread a second stack only to report stack overflows. Here a thread that overflows its stack
/// ends with SIGSEGV at the guard page.
// SAFETY: this is the only `main` of the program, and has the type that C expects.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[allow(unsafe_code)] // The name, and a signal's disposition.
extern "C" fn main(_count: libc::c_int, _arguments: *const *const libc::c_char) -> libc::c_int {
    let begun = jiffy_sys::clock::monotonic_ns();
    // SAFETY: no handler is installed. A write to a pipe without a reader then fails with an error.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    match arguments::parse(std::env::args_os().skip(1)) {
        Ok(Command::Run(options)) => match run::run(&options, begun) {
            true => SUCCESS,
            false => FAILURE,
        },
        Ok(Command::Probe) => {
            let probe = jiffy_vmm::probe::probe();
            println!(
                "{}",
                serde_json::to_string(&probe).expect("a probe is plain data")
            );
            SUCCESS
        }
        Ok(Command::Cpu) => match jiffy_vmm::cpu::profile::of_host() {
            Ok(host) => {
                println!(
                    "{}",
                    serde_json::to_string(&host).expect("a profile is plain data")
                );
                SUCCESS
            }
            Err(error) => {
                eprintln!("jiffy-vmm: {}", sentence(&error));
                FAILURE
            }
        },
        Ok(Command::Version) => {
            println!("jiffy-vmm {}", env!("CARGO_PKG_VERSION"));
            SUCCESS
        }
        Ok(Command::Help) => {
            print!("{USAGE}");
            SUCCESS
        }
        Err(error) => {
            eprintln!("jiffy-vmm: {}", sentence(&error));
            eprint!("{USAGE}");
            MISUSE
        }
    }
}
