//! The socket file: its permissions, what it replaces, and its removal.

use super::super::{Vsock, VsockArgs, VsockError};
use super::Host;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};

#[test]
fn the_socket_file_is_private_and_removed_with_the_device() {
    let host = Host::new();
    let device = Vsock::new(host.args()).unwrap();
    let mode = std::fs::metadata(host.path()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    drop(device);
    assert!(!host.path().exists());
}

#[test]
fn a_stale_socket_is_replaced() {
    let host = Host::new();
    drop(UnixListener::bind(host.path()).unwrap());
    assert!(host.path().exists());
    let _device = Vsock::new(host.args()).unwrap();
    UnixStream::connect(host.path()).unwrap();
}

#[test]
fn a_live_socket_is_not_replaced() {
    let host = Host::new();
    let first = Vsock::new(host.args()).unwrap();
    assert!(matches!(
        Vsock::new(host.args()),
        Err(VsockError::InUse { .. })
    ));
    UnixStream::connect(host.path()).unwrap();
    drop(first);
    Vsock::new(host.args()).unwrap();
}

#[test]
fn other_files_are_not_replaced() {
    let host = Host::new();
    std::fs::write(host.path(), b"precious").unwrap();
    assert!(matches!(
        Vsock::new(host.args()),
        Err(VsockError::NotASocket { .. })
    ));
    assert_eq!(std::fs::read(host.path()).unwrap(), b"precious");
    std::fs::remove_file(host.path()).unwrap();
    std::os::unix::fs::symlink("/nowhere/else", host.path()).unwrap();
    assert!(matches!(
        Vsock::new(host.args()),
        Err(VsockError::NotASocket { .. })
    ));
}

#[test]
fn a_replaced_socket_file_is_not_removed() {
    let host = Host::new();
    let device = Vsock::new(host.args()).unwrap();
    std::fs::remove_file(host.path()).unwrap();
    let _other = UnixListener::bind(host.path()).unwrap();
    drop(device);
    assert!(host.path().exists());
}

#[test]
fn unusable_socket_paths_are_refused() {
    let host = Host::new();
    let long = host.folder.path().join("x".repeat(120));
    let error = Vsock::new(VsockArgs {
        path: long,
        ..host.args()
    })
    .err()
    .unwrap();
    assert!(error.to_string().contains("107 bytes"), "{error}");
    let path = host.folder.path().join("no/such/folder");
    let error = Vsock::new(VsockArgs {
        path,
        ..host.args()
    })
    .err()
    .unwrap();
    assert!(error.to_string().contains("cannot listen on"), "{error}");
}

#[test]
fn a_passed_socket_is_made_nonblocking_and_its_file_is_left() {
    let host = Host::new();
    let given = UnixListener::bind(host.path()).unwrap();
    let same = given.try_clone().unwrap();
    jiffy_sys::handed::add(host.path(), given.into());
    let device = Vsock::new(host.args()).unwrap();
    let flags = rustix::fs::fcntl_getfl(&same).unwrap();
    assert!(flags.contains(rustix::fs::OFlags::NONBLOCK));
    drop(device);
    assert!(host.path().exists());
}
