//! `jiffy-ssh-guest`: the program that SSH needs in a VM.

use std::process::ExitCode;

fn main() -> ExitCode {
    jiffy_ssh_guest::main()
}
