//! jiffy-ssh-guest: what SSH needs in a VM.

use std::process::ExitCode;

fn main() -> ExitCode {
    jiffy_ssh_guest::main()
}
