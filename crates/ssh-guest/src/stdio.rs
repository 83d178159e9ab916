//! Stdin and stdout.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

/// Stdin and stdout without buffers.
///
/// # Errors
///
/// If `dup` fails.
pub fn unbuffered() -> io::Result<(File, File)> {
    let input = io::stdin().as_fd().try_clone_to_owned()?;
    let output = io::stdout().as_fd().try_clone_to_owned()?;
    Ok((File::from(input), File::from(output)))
}
