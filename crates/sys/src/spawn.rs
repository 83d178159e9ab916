//! Starts a program in its own session with posix_spawn(3).
//!
//! glibc's `posix_spawn` uses `CLONE_VM | CLONE_VFORK`. The cost does not grow with the parent's
//! memory, and no code of the parent runs in the child, so it is safe in a program with threads.

#![allow(unsafe_code)] // posix_spawn has no safe wrapper that can setsid.

use std::ffi::{CString, OsStr};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

unsafe extern "C" {
    // glibc 2.34 and later; some versions of the libc crate lack it.
    fn posix_spawn_file_actions_addclosefrom_np(
        actions: *mut libc::posix_spawn_file_actions_t,
        from: libc::c_int,
    ) -> libc::c_int;
}

/// A detached program to start.
#[derive(Debug)]
pub struct Detached<'a> {
    /// The program's file.
    pub program: &'a Path,
    /// Arguments after the program's name.
    pub arguments: &'a [&'a OsStr],
    /// Working directory.
    pub directory: &'a Path,
    /// Standard output and standard error; stdin is /dev/null.
    pub output: BorrowedFd<'a>,
    /// They become descriptors 3, 4, …; all others are closed.
    pub descriptors: &'a [BorrowedFd<'a>],
    /// Its environment.
    pub environment: Environment,
}

/// The environment of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Environment {
    /// That of this process.
    Inherited,
    /// None.
    Empty,
}

/// Number of the first of [`Detached::descriptors`] in the program.
pub const FIRST_DESCRIPTOR: i32 = 3;

/// Starts the program in its own session with no blocked signals and default signal handling.
/// Returns its process id; the caller must reap it.
///
/// # Errors
///
/// `InvalidInput` if a path, an argument or a variable contains a zero byte. Otherwise if no
/// descriptor is free, or posix_spawn(3) fails: such as `NotFound` if there is no such program or
/// folder. No process exists then.
pub fn spawn_detached(what: &Detached<'_>) -> io::Result<u32> {
    let program = c_string(what.program.as_os_str())?;
    let directory = c_string(what.directory.as_os_str())?;
    let arguments = std::iter::once(what.program.as_os_str())
        .chain(what.arguments.iter().copied())
        .map(c_string)
        .collect::<io::Result<Vec<_>>>()?;
    let mut argv: Vec<*mut libc::c_char> = arguments
        .iter()
        .map(|argument| argument.as_ptr().cast_mut())
        .collect();
    argv.push(ptr::null_mut());
    let inherited = match what.environment {
        Environment::Inherited => Some(std::env::vars_os()),
        Environment::Empty => None,
    };
    let environment = inherited
        .into_iter()
        .flatten()
        .map(|(name, value)| {
            let mut entry = name;
            entry.push("=");
            entry.push(value);
            c_string(&entry)
        })
        .collect::<io::Result<Vec<_>>>()?;
    let mut envp: Vec<*mut libc::c_char> = environment
        .iter()
        .map(|entry| entry.as_ptr().cast_mut())
        .collect();
    envp.push(ptr::null_mut());

    let moved = dup_conflicting(what.descriptors)?;
    let sources = sources(what.descriptors, &moved);
    let actions = Actions::new(&directory, what.output, &sources)?;
    let attributes = Attributes::new()?;
    let mut pid: libc::pid_t = 0;
    // SAFETY: every pointer is to a live, initialised object; argv and envp end with a null pointer
    // and their strings outlive the call.
    check(unsafe {
        libc::posix_spawn(
            &mut pid,
            program.as_ptr(),
            &actions.0,
            &attributes.0,
            argv.as_ptr(),
            envp.as_ptr(),
        )
    })?;
    Ok(pid as u32)
}

/// Duplicates descriptors whose numbers are also targets, so that no file action
/// overwrites the source of a later one.
fn dup_conflicting(descriptors: &[BorrowedFd<'_>]) -> io::Result<Vec<Option<OwnedFd>>> {
    let free = free_number(descriptors);
    descriptors
        .iter()
        .map(|descriptor| {
            if descriptor.as_raw_fd() >= free {
                return Ok(None);
            }
            Ok(Some(rustix::io::fcntl_dupfd_cloexec(descriptor, free)?))
        })
        .collect()
}

/// The first number that is not a target.
fn free_number(descriptors: &[BorrowedFd<'_>]) -> RawFd {
    let count = RawFd::try_from(descriptors.len()).unwrap_or(RawFd::MAX - FIRST_DESCRIPTOR);
    FIRST_DESCRIPTOR + count
}

fn sources(descriptors: &[BorrowedFd<'_>], moved: &[Option<OwnedFd>]) -> Vec<RawFd> {
    descriptors
        .iter()
        .zip(moved)
        .map(|(given, moved)| match moved {
            Some(moved) => moved.as_raw_fd(),
            None => given.as_raw_fd(),
        })
        .collect()
}

fn c_string(text: &OsStr) -> io::Result<CString> {
    CString::new(text.as_bytes()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

/// posix_spawn functions return the error number instead of setting errno.
fn check(code: libc::c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

struct Actions(libc::posix_spawn_file_actions_t);

impl Actions {
    fn new(directory: &CString, output: BorrowedFd<'_>, sources: &[RawFd]) -> io::Result<Actions> {
        let mut raw = MaybeUninit::uninit();
        // SAFETY: `raw` is valid for writes; init fills it or fails.
        check(unsafe { libc::posix_spawn_file_actions_init(raw.as_mut_ptr()) })?;
        // SAFETY: init succeeded.
        let mut actions = Actions(unsafe { raw.assume_init() });
        let this = &mut actions.0;
        // In this order no step overwrites the source of a later one: the output is duplicated
        // before its number could be a target, and no source is a target.
        // SAFETY: `this` is initialised; strings are copied, and descriptors are numbers.
        unsafe {
            check(libc::posix_spawn_file_actions_adddup2(
                this,
                output.as_raw_fd(),
                1,
            ))?;
            check(libc::posix_spawn_file_actions_adddup2(this, 1, 2))?;
            for (source, target) in sources.iter().zip(FIRST_DESCRIPTOR..) {
                check(libc::posix_spawn_file_actions_adddup2(
                    this, *source, target,
                ))?;
            }
            check(libc::posix_spawn_file_actions_addopen(
                this,
                0,
                c"/dev/null".as_ptr(),
                libc::O_RDONLY,
                0,
            ))?;
            check(posix_spawn_file_actions_addclosefrom_np(
                this,
                FIRST_DESCRIPTOR + sources.len() as libc::c_int,
            ))?;
            check(libc::posix_spawn_file_actions_addchdir_np(
                this,
                directory.as_ptr(),
            ))?;
        }
        Ok(actions)
    }
}

impl Drop for Actions {
    fn drop(&mut self) {
        // SAFETY: initialised in `new`, destroyed once.
        unsafe { libc::posix_spawn_file_actions_destroy(&mut self.0) };
    }
}

struct Attributes(libc::posix_spawnattr_t);

impl Attributes {
    fn new() -> io::Result<Attributes> {
        let mut raw = MaybeUninit::uninit();
        // SAFETY: `raw` is valid for writes; init fills it or fails.
        check(unsafe { libc::posix_spawnattr_init(raw.as_mut_ptr()) })?;
        // SAFETY: init succeeded.
        let mut attributes = Attributes(unsafe { raw.assume_init() });
        let this = &mut attributes.0;
        let flags = libc::POSIX_SPAWN_SETSIGMASK as libc::c_short
            | libc::POSIX_SPAWN_SETSIGDEF as libc::c_short
            | libc::POSIX_SPAWN_SETSID as libc::c_short;
        let mut signals = MaybeUninit::uninit();
        // SAFETY: `this` is initialised. sigemptyset fills `signals`, which the setters copy.
        unsafe {
            libc::sigemptyset(signals.as_mut_ptr());
            check(libc::posix_spawnattr_setsigmask(this, signals.as_ptr()))?;
            libc::sigfillset(signals.as_mut_ptr());
            check(libc::posix_spawnattr_setsigdefault(this, signals.as_ptr()))?;
            check(libc::posix_spawnattr_setflags(this, flags))?;
        }
        Ok(attributes)
    }
}

impl Drop for Attributes {
    fn drop(&mut self) {
        // SAFETY: initialised in `new`, destroyed once.
        unsafe { libc::posix_spawnattr_destroy(&mut self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, WaitOptions, waitpid};
    use std::fs::{self, File};
    use std::io::{Read, Seek, Write};
    use std::os::fd::AsFd;

    fn wait(pid: u32) -> i32 {
        let pid = Pid::from_raw(pid as i32).unwrap();
        let (_, status) = waitpid(Some(pid), WaitOptions::empty()).unwrap().unwrap();
        status.exit_status().unwrap()
    }

    #[test]
    fn a_detached_program_has_its_own_session_folder_and_descriptors() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("here"), b"").unwrap();
        let mut output = tempfile::tempfile().unwrap();
        let mut passed = tempfile::tempfile().unwrap();
        passed.write_all(b"passed").unwrap();
        passed.rewind().unwrap();
        let leaked = File::open("/dev/null").unwrap();
        // A descriptor without close-on-exec must not reach the program.
        rustix::io::fcntl_setfd(&leaked, rustix::io::FdFlags::empty()).unwrap();
        let script = "ls; cat <&3; echo; echo $(cut -d' ' -f6 </proc/$$/stat) $$; ls /proc/self/fd | sort -n | tr '\\n' ' '";
        let pid = spawn_detached(&Detached {
            program: Path::new("/bin/sh"),
            arguments: &[OsStr::new("-c"), OsStr::new(script)],
            directory: folder.path(),
            output: output.as_fd(),
            descriptors: &[passed.as_fd()],
            environment: Environment::Inherited,
        })
        .unwrap();
        assert_eq!(wait(pid), 0);
        output.rewind().unwrap();
        let mut text = String::new();
        output.read_to_string(&mut text).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "here");
        assert_eq!(lines[1], "passed");
        assert_eq!(lines[2], format!("{pid} {pid}"), "session leader");
        // 0 to 3, and the folder that `ls` itself opened.
        assert_eq!(lines[3].trim(), "0 1 2 3 4");
    }

    #[test]
    fn passed_descriptors_keep_their_order() {
        let mut output = tempfile::tempfile().unwrap();
        let mut files: Vec<File> = (0..40)
            .map(|index| {
                let mut file = tempfile::tempfile().unwrap();
                write!(file, "{index} ").unwrap();
                file.rewind().unwrap();
                file
            })
            .collect();
        files.reverse();
        let passed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let script =
            "for i in $(seq 3 42); do cat /proc/self/fd/$i; done; ls /proc/self/fd | wc -l";
        let pid = spawn_detached(&Detached {
            program: Path::new("/bin/sh"),
            arguments: &[OsStr::new("-c"), OsStr::new(script)],
            directory: Path::new("/"),
            output: output.as_fd(),
            descriptors: &passed,
            environment: Environment::Inherited,
        })
        .unwrap();
        assert_eq!(wait(pid), 0);
        output.rewind().unwrap();
        let mut text = String::new();
        output.read_to_string(&mut text).unwrap();
        let wanted: String = (0..40).rev().map(|index| format!("{index} ")).collect();
        // 0 to 2, the forty descriptors, and the folder that `ls` itself opened.
        assert_eq!(text, format!("{wanted}44\n"));
    }

    #[test]
    fn a_program_can_be_started_without_an_environment() {
        for (environment, found) in [(Environment::Inherited, true), (Environment::Empty, false)] {
            let mut output = tempfile::tempfile().unwrap();
            let pid = spawn_detached(&Detached {
                program: Path::new("/usr/bin/env"),
                arguments: &[],
                directory: Path::new("/"),
                output: output.as_fd(),
                descriptors: &[],
                environment,
            })
            .unwrap();
            assert_eq!(wait(pid), 0);
            output.rewind().unwrap();
            let mut text = String::new();
            output.read_to_string(&mut text).unwrap();
            assert_eq!(!text.is_empty(), found, "{text}");
        }
    }

    #[test]
    fn spawning_a_missing_program_fails_at_once() {
        let output = tempfile::tempfile().unwrap();
        let error = spawn_detached(&Detached {
            program: Path::new("/nonexistent/program"),
            arguments: &[],
            directory: Path::new("/"),
            output: output.as_fd(),
            descriptors: &[],
            environment: Environment::Inherited,
        })
        .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
