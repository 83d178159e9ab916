//! A user's shell, as sshd starts it.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

/// The shell of a user without one in /etc/passwd (passwd(5)).
const DEFAULT_SHELL: &str = "/bin/sh";
/// sshd's value for a connection that is not a socket.
const NO_ADDRESS: &str = "UNKNOWN 65535";

/// A user in /etc/passwd.
#[derive(Debug, PartialEq, Eq)]
pub struct Account {
    /// Name, or the number if there is no entry.
    pub name: String,
    /// Home folder.
    pub home: String,
    /// Login shell.
    pub shell: String,
}

/// Replaces this process by the shell of the user: a login shell, or one that runs `command`.
///
/// # Errors
///
/// If neither the home folder nor `/` can be entered, or the shell can't be executed. The error is
/// a sentence. Otherwise it does not return.
pub fn shell(user: &str, command: Option<&str>) -> Result<(), String> {
    let account = enter(user)?;
    let shell = account.shell.as_str();
    let mut process = Command::new(shell);
    process
        .env("HOME", &account.home)
        .env("USER", &account.name)
        .env("LOGNAME", &account.name)
        .env("SHELL", shell)
        .env("SSH_CLIENT", format!("{NO_ADDRESS} 22"))
        .env("SSH_CONNECTION", format!("{NO_ADDRESS} {NO_ADDRESS}"));
    if let Ok(terminal) = rustix::termios::ttyname(std::io::stdin(), Vec::new()) {
        process.env("SSH_TTY", terminal.to_string_lossy().as_ref());
    }
    match command {
        Some(command) => process.arg("-c").arg(command),
        // A dash before its name makes it a login shell.
        None => process.arg0(format!("-{}", shell.rsplit('/').next().unwrap_or(shell))),
    };
    let error = process.exec();
    Err(format!(
        "the shell {shell} of {} can't be run: {error}",
        account.name
    ))
}

/// Changes to the user's home folder; to `/` with a warning on stderr if that can't be entered.
/// Returns the user's account.
///
/// # Errors
///
/// If `/` can't be entered either. The error is a sentence.
pub fn enter(user: &str) -> Result<Account, String> {
    let uid = rustix::process::geteuid().as_raw();
    let account = Account::find(user, uid, &passwd());
    if let Err(error) = std::env::set_current_dir(&account.home) {
        eprintln!(
            "jiffy: the home folder {} can't be entered: {error}",
            account.home
        );
        std::env::set_current_dir("/").map_err(|error| format!("/ can't be entered: {error}"))?;
    }
    Ok(account)
}

/// The home folder of the user of this name.
pub fn home(user: &str) -> Option<PathBuf> {
    let passwd = passwd();
    let mut entries = passwd.lines().filter_map(Entry::new);
    entries
        .find(|entry| entry.name == user)
        .map(|entry| entry.home.into())
}

fn passwd() -> String {
    let database = fs::read("/etc/passwd").unwrap_or_default();
    String::from_utf8_lossy(&database).into_owned()
}

/// A line of /etc/passwd.
struct Entry<'a> {
    name: &'a str,
    uid: u32,
    home: &'a str,
    shell: &'a str,
}

impl Entry<'_> {
    fn new(line: &str) -> Option<Entry<'_>> {
        let fields: Vec<&str> = line.split(':').collect();
        let [name, _, uid, _, _, home, shell] = fields[..] else {
            return None;
        };
        Some(Entry {
            name,
            uid: uid.parse().ok()?,
            home,
            shell,
        })
    }
}

impl Account {
    /// The entry of this name and number, or else the first of this number. Without one, the shell
    /// is /bin/sh, and the home folder is /.
    fn find(user: &str, uid: u32, passwd: &str) -> Account {
        let mut entries = passwd
            .lines()
            .filter_map(Entry::new)
            .filter(|it| it.uid == uid);
        let named = entries.clone().find(|entry| entry.name == user);
        let (name, home, shell) = match named.or_else(|| entries.next()) {
            Some(entry) => (entry.name, entry.home, entry.shell),
            None => (user, "", ""),
        };
        let or = |text: &str, other: &str| match text {
            "" => other.to_owned(),
            text => text.to_owned(),
        };
        Account {
            name: or(name, user),
            home: or(home, "/"),
            shell: or(shell.trim_end(), DEFAULT_SHELL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\n\
                          toor:x:0:0::/toor:\n\
                          broken\n\
                          me:x:1000:1000:Me:/home/me:/bin/zsh\n";

    fn found(user: &str, uid: u32) -> (String, String, String) {
        let account = Account::find(user, uid, PASSWD);
        (account.name, account.home, account.shell)
    }

    fn wanted(name: &str, home: &str, shell: &str) -> (String, String, String) {
        (name.into(), home.into(), shell.into())
    }

    #[test]
    fn a_user_is_found_by_name_and_number() {
        assert_eq!(found("root", 0), wanted("root", "/root", "/bin/bash"));
        assert_eq!(found("toor", 0), wanted("toor", "/toor", "/bin/sh"));
        assert_eq!(found("1000", 1000), wanted("me", "/home/me", "/bin/zsh"));
        assert_eq!(found("7", 7), wanted("7", "/", "/bin/sh"));
        // A name with another number is another user.
        assert_eq!(found("me", 0), wanted("root", "/root", "/bin/bash"));
    }
}
