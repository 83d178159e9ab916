//! Access of a jailed program to folders and sockets, by their group.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

/// Lets the program with this user traverse a folder, and nothing else; does nothing if programs
/// have no user of their own.
///
/// # Errors
///
/// If chown(2) or chmod(2) fails.
pub fn open_folder(folder: &Path, user: Option<u32>) -> io::Result<()> {
    user.map_or(Ok(()), |user| open_to(folder, user, 0o710))
}

/// Lets the members of this folder's group connect to the socket: one program, or all of them. Does
/// nothing if it is this process's group.
///
/// # Errors
///
/// If the folder can't be examined, or chown(2) or chmod(2) of the socket fails.
pub fn open_socket(socket: &Path, folder: &Path) -> io::Result<()> {
    let group = fs::metadata(folder)?.gid();
    match group == rustix::process::getegid().as_raw() {
        true => Ok(()),
        false => open_to(socket, group, 0o660),
    }
}

fn open_to(path: &Path, group: u32, mode: u32) -> io::Result<()> {
    chown(path, None, Some(group))?;
    fs::set_permissions(path, Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_socket_is_open_to_the_group_of_its_folder() {
        let above = tempfile::tempdir().unwrap();
        let (folder, socket) = (above.path().join("vm"), above.path().join("vm/socket"));
        fs::create_dir(&folder).unwrap();
        let _listener = UnixListener::bind(&socket).unwrap();
        let facts = |path: &Path| {
            let facts = fs::metadata(path).unwrap();
            (facts.gid(), facts.mode() & 0o777)
        };
        let before = facts(&socket);
        open_folder(&folder, None).unwrap();
        open_socket(&socket, &folder).unwrap();
        assert_eq!(facts(&socket), before);
        if !rustix::process::geteuid().is_root() {
            return;
        }
        open_folder(&folder, Some(54321)).unwrap();
        open_socket(&socket, &folder).unwrap();
        assert_eq!(facts(&folder), (54321, 0o710));
        assert_eq!(facts(&socket), (54321, 0o660));
    }
}
