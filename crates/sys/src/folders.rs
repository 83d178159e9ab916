//! Jiffy's folders, for `jiffy` and `jiffyd`.
//!
//! | folder | variable | as root | else |
//! |---|---|---|---|
//! | data | `JIFFY_DATA` | `/var/lib/jiffy` | `$XDG_DATA_HOME/jiffy`, `~/.local/share/jiffy` |
//! | run | `JIFFY_RUN` | `/run/jiffy` | `$XDG_RUNTIME_DIR/jiffy`, `/tmp/jiffy-UID` |
//! | lib | `JIFFY_LIB` | `lib/jiffy` beside the program's `bin`, or the program's own folder | |
//! | share | `JIFFY_SHARE` | `share/jiffy` beside the program's `bin` | |
//!
//! A variable that is empty counts as unset. Paths are absolute: a daemon has another working
//! directory than the command that started it.

use std::env;
use std::path::{Path, PathBuf};

/// The user's choices. `None` or empty means the default.
#[derive(Debug, Clone, Default)]
pub struct Chosen {
    /// `JIFFY_DATA`
    pub data: Option<PathBuf>,
    /// `JIFFY_RUN`
    pub run: Option<PathBuf>,
    /// `JIFFY_LIB`
    pub lib: Option<PathBuf>,
    /// `JIFFY_SHARE`
    pub share: Option<PathBuf>,
}

/// Jiffy's folders on this host. None of them need exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Folders {
    /// Data that survives a restart of the host: images, volumes, VMs. `None` if no home is known.
    pub data: Option<PathBuf>,
    /// Sockets of running processes.
    pub run: PathBuf,
    /// Jiffy's programs beside `jiffy`.
    pub lib: PathBuf,
    /// Kernels, the initramfs and images of the installation.
    pub share: PathBuf,
}

impl Chosen {
    /// The choices in the environment.
    pub fn by_environment() -> Chosen {
        let of = |name: &str| variable(name);
        Chosen {
            data: of("JIFFY_DATA"),
            run: of("JIFFY_RUN"),
            lib: of("JIFFY_LIB"),
            share: of("JIFFY_SHARE"),
        }
    }
}

impl Folders {
    /// The chosen folders; defaults depend on the user and on the path of this program.
    pub fn find(chosen: &Chosen) -> Folders {
        let program = env::current_exe().ok();
        let beside = program.as_deref().and_then(Path::parent);
        let user = rustix::process::geteuid();
        Folders::with(
            chosen,
            user.as_raw(),
            beside.unwrap_or(Path::new("/")),
            variable,
        )
    }

    fn with(
        chosen: &Chosen,
        user: u32,
        program: &Path,
        variable: impl Fn(&str) -> Option<PathBuf>,
    ) -> Folders {
        let given = |path: &Option<PathBuf>| {
            let path = path.as_ref().filter(|path| !path.as_os_str().is_empty())?;
            Some(std::path::absolute(path).unwrap_or_else(|_| path.clone()))
        };
        let is_root = user == 0;
        let data = || match is_root {
            true => Some("/var/lib/jiffy".into()),
            false => variable("XDG_DATA_HOME")
                .or_else(|| Some(variable("HOME")?.join(".local/share")))
                .map(|folder| folder.join("jiffy")),
        };
        let run = || match (is_root, variable("XDG_RUNTIME_DIR")) {
            (true, _) => "/run/jiffy".into(),
            (false, Some(folder)) => folder.join("jiffy"),
            (false, None) => format!("/tmp/jiffy-{user}").into(),
        };
        // Programs are in PREFIX/bin or PREFIX/lib/jiffy.
        let prefix = match program.ends_with("lib/jiffy") {
            true => program.ancestors().nth(2),
            false => program.parent(),
        };
        let prefix = prefix.unwrap_or(program);
        let lib = || {
            let installed = prefix.join("lib/jiffy");
            match !installed.join("jiffyd").exists() && program.join("jiffyd").exists() {
                true => program.to_owned(),
                false => installed,
            }
        };
        Folders {
            data: given(&chosen.data).or_else(data),
            run: given(&chosen.run).unwrap_or_else(run),
            lib: given(&chosen.lib).unwrap_or_else(lib),
            share: given(&chosen.share).unwrap_or_else(|| prefix.join("share/jiffy")),
        }
    }
}

/// Value of an environment variable that is set and not empty.
fn variable(name: &str) -> Option<PathBuf> {
    let value = env::var_os(name).filter(|value| !value.is_empty())?;
    Some(value.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(user: u32, program: &Path, variables: &[(&str, &str)]) -> Folders {
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| PathBuf::from(value))
        };
        Folders::with(&Chosen::default(), user, program, variable)
    }

    #[test]
    fn root_uses_the_systems_folders_in_any_environment() {
        let variables = [("HOME", "/root"), ("XDG_RUNTIME_DIR", "/run/user/0")];
        let found = find(0, Path::new("/usr/bin"), &variables);
        assert_eq!(found.data.as_deref(), Some(Path::new("/var/lib/jiffy")));
        assert_eq!(found.run, Path::new("/run/jiffy"));
    }

    #[test]
    fn a_users_folders_are_below_the_home_folder() {
        let program = Path::new("/usr/bin");
        let found = find(7, program, &[("HOME", "/home/u")]);
        let data = Path::new("/home/u/.local/share/jiffy");
        assert_eq!(found.data.as_deref(), Some(data));
        assert_eq!(found.run, Path::new("/tmp/jiffy-7"));
        let found = find(7, program, &[("HOME", "/home/u"), ("XDG_DATA_HOME", "/d")]);
        assert_eq!(found.data.as_deref(), Some(Path::new("/d/jiffy")));
        let found = find(7, program, &[("XDG_RUNTIME_DIR", "/run/user/7")]);
        assert_eq!(found.data, None);
        assert_eq!(found.run, Path::new("/run/user/7/jiffy"));
    }

    #[test]
    fn command_and_daemon_find_the_same_installation() {
        let prefix = tempfile::tempdir().unwrap();
        let lib = prefix.path().join("lib/jiffy");
        std::fs::create_dir_all(&lib).unwrap();
        std::fs::write(lib.join("jiffyd"), "").unwrap();
        let by_command = find(7, &prefix.path().join("bin"), &[]);
        assert_eq!(by_command, find(7, &lib, &[]));
        assert_eq!(by_command.lib, lib);
        assert_eq!(by_command.share, prefix.path().join("share/jiffy"));
    }

    #[test]
    fn programs_in_a_build_folder_are_found_side_by_side() {
        let built = tempfile::tempdir().unwrap();
        std::fs::write(built.path().join("jiffyd"), "").unwrap();
        assert_eq!(find(7, built.path(), &[]).lib, built.path());
    }

    #[test]
    fn chosen_folders_become_absolute_and_empty_ones_are_ignored() {
        let chosen = Chosen {
            data: Some("here".into()),
            run: Some("".into()),
            ..Chosen::default()
        };
        let found = Folders::with(&chosen, 7, Path::new("/usr/bin"), |_| None);
        assert!(found.data.unwrap().is_absolute());
        assert_eq!(found.run, Path::new("/tmp/jiffy-7"));
    }
}
