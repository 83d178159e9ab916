//! `jiffy-vmm`: one process, one VM.

mod arguments;
mod run;

use arguments::Command;
use jiffy_vmm::error::sentence;
use std::process::ExitCode;

const USAGE: &str = "\
usage: jiffy-vmm run --config FILE [--events-fd N | --spare-fd N] [--seccomp on|off]
       jiffy-vmm probe
       jiffy-vmm --version
";

fn main() -> ExitCode {
    let begun = jiffy_sys::clock::monotonic_ns();
    match arguments::parse(std::env::args_os().skip(1)) {
        Ok(Command::Run(options)) => run::run(&options, begun),
        Ok(Command::Probe) => {
            let probe = jiffy_vmm::probe::probe();
            println!(
                "{}",
                serde_json::to_string(&probe).expect("a probe is plain data")
            );
            ExitCode::SUCCESS
        }
        Ok(Command::Version) => {
            println!("jiffy-vmm {}", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        Ok(Command::Help) => {
            print!("{USAGE}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("jiffy-vmm: {}", sentence(&error));
            eprint!("{USAGE}");
            ExitCode::from(2)
        }
    }
}
