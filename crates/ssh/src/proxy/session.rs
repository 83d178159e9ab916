//! A session: a shell, a command or SFTP.

use super::login::Login;
use super::pump::{End, pump, size};
use jiffy_wire::agent::{Command, ExitStatus, WindowSize};
use jiffy_wire::signal;
use russh::server::{Handle, Msg};
use russh::{Channel, ChannelMsg, ChannelReadHalf, ChannelWriteHalf, Sig};

/// Name of the subsystem for files.
pub const SFTP: &str = "sftp";

/// Most variables of a session; sshd has the same limit.
const MAX_VARIABLES: usize = 1000;

/// Exit status of a session whose program could not be started or was lost.
const LOST: u32 = 255;

/// Settings that the client requests before it starts a program.
#[derive(Default)]
struct Setup {
    variables: Vec<String>,
    terminal: Option<WindowSize>,
}

/// The program of a session.
enum Program {
    Shell,
    Command(Vec<u8>),
    Sftp,
}

/// Serves a session to its end.
pub async fn serve(channel: Channel<Msg>, handle: Handle, login: Login) {
    let (mut from_client, to_client) = channel.split();
    let mut setup = Setup::default();
    let Some(program) = receive_setup(&mut from_client, &mut setup).await else {
        return;
    };
    let end = match command(&login, setup, program) {
        Some(command) => match login.guest.exec(&command).await {
            Ok(upgraded) => {
                let frames = upgraded.frames;
                pump(from_client, &to_client, frames, &login.backlog).await
            }
            Err(failure) => End::Failed(failure.message, LOST),
        },
        None => End::Failed("the command is not UTF-8".into(), LOST),
    };
    // A failure means that the client has disconnected.
    let _ = finish(&to_client, &handle, end).await;
}

async fn receive_setup(from_client: &mut ChannelReadHalf, setup: &mut Setup) -> Option<Program> {
    loop {
        match from_client.wait().await? {
            ChannelMsg::RequestPty {
                term,
                col_width,
                row_height,
                ..
            } => {
                setup.terminal = Some(size(col_width, row_height));
                setup.variables.extend(variable("TERM", &term));
            }
            ChannelMsg::WindowChange {
                col_width,
                row_height,
                ..
            } if setup.terminal.is_some() => {
                setup.terminal = Some(size(col_width, row_height));
            }
            ChannelMsg::SetEnv {
                variable_name,
                variable_value,
                ..
            } if setup.variables.len() < MAX_VARIABLES => {
                let entry = variable(&variable_name, &variable_value);
                setup.variables.extend(entry);
            }
            ChannelMsg::RequestShell { .. } => return Some(Program::Shell),
            ChannelMsg::Exec { command, .. } => return Some(Program::Command(command)),
            ChannelMsg::RequestSubsystem { name, .. } if name == SFTP => {
                return Some(Program::Sftp);
            }
            ChannelMsg::Close => return None,
            _ => {}
        }
    }
}

/// The environment's entry for a variable; `None` if it can't be set.
pub fn variable(name: &str, value: &str) -> Option<String> {
    let mut bytes = name.bytes();
    let begins = bytes
        .next()
        .is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_');
    let is_name = begins && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    (is_name && !value.contains('\0')).then(|| format!("{name}={value}"))
}

/// The command for the guest; `None` if it can't be sent.
fn command(login: &Login, setup: Setup, program: Program) -> Option<Command> {
    let (guest, user) = (&login.guest, &*login.user);
    let mut command = match &program {
        Program::Shell => guest.command(user, &["shell", user]),
        Program::Command(bytes) => {
            let text = str::from_utf8(bytes).ok()?;
            guest.command(user, &["shell", user, text])
        }
        Program::Sftp => guest.command(user, &["sftp", user]),
    };
    command.env = setup.variables;
    if !matches!(program, Program::Sftp) {
        command.tty = setup.terminal;
    }
    Some(command)
}

/// Tells the client how the program ended.
async fn finish(
    to_client: &ChannelWriteHalf<Msg>,
    handle: &Handle,
    end: End,
) -> Result<(), russh::Error> {
    let status = match end {
        End::ClientClosed => return Ok(()),
        End::Exited(ExitStatus::Code(code)) => Some(code as u32 & 0xff),
        End::Exited(ExitStatus::Signal(number)) => {
            let name = signal::name(number).unwrap_or("KILL");
            let (signal, id) = (sig(name), to_client.id());
            let told = handle.exit_signal_request(id, signal, false, String::new(), String::new());
            told.await.map_err(|()| russh::Error::SendError)?;
            None
        }
        End::Failed(message, status) => {
            let line = format!("jiffy: {}\r\n", message.trim_end_matches(['.', '\n']));
            to_client.extended_data_bytes(1, line.into_bytes()).await?;
            Some(status)
        }
    };
    if let Some(status) = status {
        to_client.exit_status(status).await?;
    }
    to_client.eof().await?;
    to_client.close().await
}

/// A signal as russh names it.
fn sig(name: &str) -> Sig {
    match name {
        "ABRT" => Sig::ABRT,
        "ALRM" => Sig::ALRM,
        "FPE" => Sig::FPE,
        "HUP" => Sig::HUP,
        "ILL" => Sig::ILL,
        "INT" => Sig::INT,
        "KILL" => Sig::KILL,
        "PIPE" => Sig::PIPE,
        "QUIT" => Sig::QUIT,
        "SEGV" => Sig::SEGV,
        "TERM" => Sig::TERM,
        "USR1" => Sig::USR1,
        other => Sig::Custom(other.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_environment_variables_are_set() {
        assert_eq!(variable("LC_ALL", "C").as_deref(), Some("LC_ALL=C"));
        assert_eq!(variable("_a1", "").as_deref(), Some("_a1="));
        for (name, value) in [
            ("", "x"),
            ("1a", "x"),
            ("A=B", "x"),
            ("A", "a\0b"),
            ("Ä", "x"),
        ] {
            assert_eq!(variable(name, value), None, "{name:?}");
        }
    }
}
