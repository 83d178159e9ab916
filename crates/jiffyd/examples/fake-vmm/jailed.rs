//! The stand-in in a jail: it inherits its files and sockets, and the guest's programs are this
//! program, because a jail contains no other.
#![allow(unsafe_code)] // fexecve(3) in a new process.

use jiffy_sys::handed;
use nix::libc;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

/// Argument of this program as a program of the guest; the guest's script follows.
const PROGRAM: &str = "program";

static OWN: OnceLock<File> = OnceLock::new();

/// Takes the inherited descriptors, `--fd NAME=NUMBER`, out of the arguments.
pub fn take_descriptors(arguments: Vec<String>) -> Vec<String> {
    let mut others = Vec::new();
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        if argument != "--fd" {
            others.push(argument);
            continue;
        }
        let named = arguments.next().unwrap();
        let (name, number) = named.rsplit_once('=').unwrap();
        handed::add_inherited(name.into(), number.parse().unwrap()).unwrap();
    }
    if handed::copy(Path::new(handed::PROC)).is_some() {
        OWN.set(handed::open_proc("exe").unwrap()).unwrap();
        handed::close_proc().unwrap();
    }
    others
}

/// Was it inherited, or does it exist?
pub fn exists(file: &Path) -> bool {
    handed::copy(file).is_some() || file.exists()
}

/// The socket that was inherited, or a new one.
pub fn listener(path: &Path) -> UnixListener {
    match handed::take(path) {
        Some(socket) => socket.into(),
        None => UnixListener::bind(path).unwrap(),
    }
}

/// Writes to the file that was inherited, or to a new one.
pub fn write(path: &Path, contents: &[u8]) -> io::Result<()> {
    match handed::take(path) {
        Some(file) => File::from(file).write_all(contents),
        None => std::fs::write(path, contents),
    }
}

/// A process for a program of the guest.
pub fn command(argv: &[String]) -> Command {
    let mut command = Command::new(&argv[0]);
    command.args(&argv[1..]);
    if let Some(own) = OWN.get() {
        let script = CString::new(argv.last().unwrap().as_str()).unwrap();
        let words = [c"fake-vmm".into(), CString::new(PROGRAM).unwrap(), script];
        let own = own.as_raw_fd();
        let become_program = move || {
            let arguments = [words[0].as_ptr(), words[1].as_ptr(), words[2].as_ptr()];
            let arguments = [&arguments[..], &[std::ptr::null()]].concat();
            let none = [std::ptr::null()];
            // SAFETY: an open file, and arrays of strings that end with null.
            unsafe { libc::fexecve(own, arguments.as_ptr(), none.as_ptr()) };
            Err(io::Error::last_os_error())
        };
        // SAFETY: the heap's lock is free in the new process, because glibc's fork takes it.
        unsafe { command.pre_exec(become_program) };
    }
    command
}

/// Is this process a program of the guest? Then it executes `echo WORD`, or runs as long as its VMM.
pub fn run_program(arguments: &[String]) -> bool {
    let [_, PROGRAM, script] = &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] else {
        return false;
    };
    match script.strip_prefix("echo ") {
        Some(word) => println!("{word}"),
        None => loop {
            std::thread::sleep(Duration::from_secs(1));
        },
    }
    true
}
