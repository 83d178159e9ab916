//! `jiffy-ssh-guest`, the program that SSH needs in a VM: static and small, because `jiffy-ssh`
//! copies it into the VM's memory when it is first needed. It runs as the session's user.
//!
//! * `check`: does nothing; success shows that the program can run.
//! * `shell USER [COMMAND]`: the user's shell ([`login`]).
//! * `sftp USER`: SFTP on stdin and stdout ([`sftp`]).
//! * `connect HOST PORT`, `connect-unix PATH`: a connection on stdin and stdout ([`connect`]).

pub mod connect;
pub mod login;
pub mod sftp;
mod stdio;

use std::process::ExitCode;

/// The main function.
pub fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["check"] => Ok(()),
        ["shell", user] => login::shell(user, None),
        ["shell", user, command] => login::shell(user, Some(command)),
        ["sftp", user] => login::enter(user).and_then(|_| {
            stdio::unbuffered()
                .and_then(|(input, output)| sftp::serve(input, output))
                .map_err(|error| format!("SFTP ended: {error}"))
        }),
        ["connect", host, port] => connect::port(host, port),
        ["connect-unix", path] => connect::socket(path),
        _ => Err("jiffy starts this program; use `jiffy ssh VM` instead".to_owned()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("jiffy: {message}");
            ExitCode::from(127)
        }
    }
}
