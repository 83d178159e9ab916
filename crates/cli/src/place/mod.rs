//! Finds the node: `jiffyd` on this host if it has a real KVM, otherwise in the machine.

pub mod daemon;
pub mod folders;
pub mod kvm;
pub mod machine;
mod wait;

pub use folders::Folders;

use crate::args::MachineUse;
use crate::client::{Client, Endpoint};
use crate::failure::{Failure, Result};
use jiffy_wire::timeline::{Span, Track, names};
use jiffy_wire::vmm::KvmKind;

/// A node that was found.
pub struct Found {
    /// A client of the node.
    pub client: Client,
    /// Whether it is in the machine.
    pub in_machine: bool,
    /// The span of the machine's start, if it was started.
    pub machine_start: Option<Span>,
}

/// Finds the node for this command; starts it if it does not run.
///
/// # Errors
///
/// If the run folder can't be used, KVM can't be probed, or the machine or jiffyd can't be started.
pub fn find(choice: MachineUse, folders: &Folders) -> Result<Found> {
    folders.make_run()?;
    if let Some(why) = in_machine(choice, folders)? {
        let began = jiffy_sys::clock::monotonic_ns();
        let reached = machine::reach(folders, &why)?;
        let machine_start = reached.started.then(|| {
            let now = jiffy_sys::clock::monotonic_ns();
            Span::new(Track::Cli, names::MACHINE_START, began, now)
        });
        return Ok(Found {
            client: in_machine_client(reached.endpoint, folders),
            in_machine: true,
            machine_start,
        });
    }
    let connection = daemon::connect_or_start(folders)?;
    Ok(Found {
        client: Client::connected(Endpoint::Unix(folders.socket()), connection)?,
        in_machine: false,
        machine_start: None,
    })
}

/// Finds the node for this command if it runs; starts nothing.
///
/// # Errors
///
/// If another user could have created the run folder, or KVM can't be probed.
pub fn find_running(choice: MachineUse, folders: &Folders) -> Result<Option<Client>> {
    let has_run = folders.has_run()?;
    if in_machine(choice, folders)?.is_some() {
        let endpoint = machine::running(folders);
        return Ok(endpoint.map(|endpoint| in_machine_client(endpoint, folders)));
    }
    if !has_run {
        return Ok(None);
    }
    daemon::connect(folders)
        .map(|connection| Client::connected(Endpoint::Unix(folders.socket()), connection))
        .transpose()
}

fn in_machine_client(endpoint: Endpoint, folders: &Folders) -> Client {
    let folders = folders.clone();
    Client::new(endpoint).when_slow(move || machine::nudge(&folders))
}

/// Why VMs run in the machine, if they do.
fn in_machine(choice: MachineUse, folders: &Folders) -> Result<Option<String>> {
    match choice {
        MachineUse::Always => Ok(Some("VMs run in the machine, as requested".into())),
        MachineUse::Never => Ok(None),
        MachineUse::Auto => kvm::kind(folders)
            .map(|kind| (kind != KvmKind::Real).then(|| no_kvm(kvm::is_refused())))
            .map_err(|failure: Failure| Failure {
                hint: failure.hint.or_else(|| {
                    Some("`--machine never` or `--machine always` skips this check".into())
                }),
                ..failure
            }),
    }
}

fn no_kvm(is_refused: bool) -> String {
    if is_refused {
        let (device, join) = (kvm::DEVICE, kvm::JOIN);
        return format!(
            "you have no permission to use {device} ({join}), so VMs run in the machine"
        );
    }
    "this host has no real KVM, so VMs run in the machine".into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    #[test]
    fn the_reason_for_starting_the_machine_is_stated_correctly() {
        let root = tempfile::tempdir().unwrap();
        let folders = Folders::below(root.path());
        let asked = in_machine(MachineUse::Always, &folders).unwrap().unwrap();
        assert!(asked.contains("as requested"), "{asked}");
        assert_eq!(in_machine(MachineUse::Never, &folders).unwrap(), None);
        assert!(no_kvm(false).contains("no real KVM"));
        let refused = no_kvm(true);
        assert!(refused.contains("usermod -aG kvm"), "{refused}");
        assert!(!refused.contains("no real KVM"), "{refused}");
    }

    #[test]
    fn a_socket_in_a_world_writable_folder_is_not_connected_to() {
        let root = tempfile::tempdir().unwrap();
        let folders = Folders::below(root.path());
        fs::create_dir(&folders.run).unwrap();
        fs::set_permissions(&folders.run, fs::Permissions::from_mode(0o777)).unwrap();
        let listener = UnixListener::bind(folders.socket()).unwrap();
        listener.set_nonblocking(true).unwrap();
        for choice in [MachineUse::Never, MachineUse::Always, MachineUse::Auto] {
            let failures = [
                find(choice, &folders).map(|_| ()).unwrap_err(),
                find_running(choice, &folders).map(|_| ()).unwrap_err(),
            ];
            for failure in failures {
                assert!(failure.message.contains("only you"), "{failure}");
            }
        }
        assert!(
            listener.accept().is_err(),
            "a client connected to the socket"
        );
        fs::set_permissions(&folders.run, fs::Permissions::from_mode(0o700)).unwrap();
        assert!(find_running(MachineUse::Never, &folders).unwrap().is_some());
    }
}
