//! For tests, also of other crates.

use std::path::Path;
use std::process::Command;

/// Writes a program, such as a script. Another process does it: between fork and exec, a child of
/// another test in this process has its files open, and what is open for writing can't be executed
/// (ETXTBSY).
///
/// # Panics
///
/// If it can't be written.
pub fn write_program(path: &Path, text: &str) {
    let write = "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\"";
    let mut shell = Command::new("sh");
    let status = shell.args(["-c", write]).arg(path).arg(text).status();
    assert!(status.expect("sh runs").success(), "{}", path.display());
}
