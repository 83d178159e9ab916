//! Sysctls under /proc/sys/net.

use crate::Error;
use std::fs;
use std::io;

/// The folder of the sysctls; it shows the network namespace of the calling thread.
const ROOT: &str = "/proc/sys/net";

/// The first digit of a sysctl's value; `None` if this kernel does not have it.
pub(crate) fn read(name: &str) -> Option<u8> {
    let text = fs::read(format!("{ROOT}/{name}")).ok()?;
    text.first()
        .filter(|it| it.is_ascii_digit())
        .map(|it| it - b'0')
}

/// A sysctl's value, if it is a number.
pub(crate) fn number(name: &str) -> Option<u32> {
    let text = fs::read_to_string(format!("{ROOT}/{name}")).ok()?;
    text.trim().parse().ok()
}

/// Sets a sysctl.
pub(crate) fn write(name: &str, value: u8) -> Result<(), Error> {
    let path = format!("{ROOT}/{name}");
    fs::write(&path, [b'0' + value]).map_err(|source| Error::Sysctl { path, source })
}

/// Sets a sysctl of a link, unless the link has been removed.
pub(crate) fn write_if_there(name: &str, value: u8) -> Result<(), Error> {
    match write(name, value) {
        Err(Error::Sysctl { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
