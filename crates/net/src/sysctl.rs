//! Settings of the kernel's under /proc/sys/net.

use crate::Error;
use std::fs;
use std::io;

/// Where they are, in the network namespace of the thread that looks.
const ROOT: &str = "/proc/sys/net";

/// The first digit of one: `None` if this kernel has no such setting.
pub(crate) fn read(name: &str) -> Option<u8> {
    let text = fs::read(format!("{ROOT}/{name}")).ok()?;
    text.first()
        .filter(|it| it.is_ascii_digit())
        .map(|it| it - b'0')
}

/// Sets one.
pub(crate) fn write(name: &str, value: u8) -> Result<(), Error> {
    let path = format!("{ROOT}/{name}");
    fs::write(&path, [b'0' + value]).map_err(|source| Error::Sysctl { path, source })
}

/// Sets one that a link has, if the link is still there.
pub(crate) fn write_if_there(name: &str, value: u8) -> Result<(), Error> {
    match write(name, value) {
        Err(Error::Sysctl { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
