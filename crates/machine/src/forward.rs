//! Forwards ports of the host to the machine, for the ports that its VMs publish. QEMU's user
//! network forwards them; the list of ports changes while QEMU runs.

use crate::error::MachineError;
use crate::instance;
use crate::listeners;
use crate::machine::Machine;
use crate::protocol::{AGENT_PORT, API_PORT, GUEST};
use crate::qmp::Control;
use jiffy_sys::locked::{self, Locked};
use serde_json::json;
use std::collections::BTreeSet;
use std::net::Ipv4Addr;

/// The network's name in QEMU (`-netdev user,id=net`).
const NETDEV: &str = "net";

/// A port of the host that is forwarded to the same port of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Forward {
    /// True for UDP, false for TCP.
    pub udp: bool,
    /// Address of the host; the unspecified address means all.
    pub address: Ipv4Addr,
    /// The port.
    pub port: u16,
}

impl Forward {
    /// The host's ports of `[ADDRESS:]HOST[-HOST]:GUEST[-GUEST][/PROTOCOL]`; by default TCP on
    /// 127.0.0.1. Empty for an IPv6 address, which QEMU's user network does not forward.
    pub fn of_published(text: &str) -> Vec<Forward> {
        let parse = || {
            let (rest, protocol) = text.rsplit_once('/').unwrap_or((text, "tcp"));
            let (host, _) = rest.rsplit_once(':')?;
            let (address, ports) = match host.rsplit_once(':') {
                Some((address, ports)) => (address.parse().ok()?, ports),
                None => (Ipv4Addr::LOCALHOST, host),
            };
            let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
            let ports = first.parse::<u16>().ok()?..=last.parse().ok()?;
            let forward = |port| Forward {
                udp: protocol == "udp",
                address,
                port,
            };
            Some(ports.map(forward).collect())
        };
        parse().unwrap_or_default()
    }

    fn host_side(&self) -> String {
        let protocol = if self.udp { "udp" } else { "tcp" };
        format!("{protocol}:{}:{}", self.address, self.port)
    }
}

/// Held by the command that reads which ports VMs publish and then changes QEMU's list. Without it,
/// a slow command would apply an older list after a faster one, and close the port of a new VM.
#[derive(Debug)]
pub struct PortsLock {
    _file: Locked,
}

impl Machine {
    /// Locks the list of forwarded ports; `None` if another command holds it.
    ///
    /// # Errors
    ///
    /// If the lock file can't be opened or locked.
    pub fn try_lock_ports(&self) -> Result<Option<PortsLock>, MachineError> {
        let path = self.ports_lock_file();
        let locked = locked::open(&path)
            .and_then(Locked::try_exclusive)
            .map_err(|error| MachineError::file(&path, error))?;
        Ok(locked.map(|_file| PortsLock { _file }))
    }

    /// Makes QEMU forward exactly these ports besides the machine's own. The lock must have been
    /// taken before the list was read.
    ///
    /// # Errors
    ///
    /// If the machine does not run, its control socket fails, or a port is not available on the
    /// host; then the others are forwarded.
    pub fn forward(
        &self,
        _lock: &PortsLock,
        wanted: &BTreeSet<Forward>,
    ) -> Result<(), MachineError> {
        let mut control = self.control()?;
        let there = forwards(&table(&mut control)?);
        for gone in there.difference(wanted) {
            monitor(
                &mut control,
                &format!("hostfwd_remove {NETDEV} {}", gone.host_side()),
            )?;
        }
        let mut refused = None;
        for new in wanted.difference(&there) {
            // Forwarded, it would lead to the machine's own server, and stay.
            if is_own(new.udp, new.port) || !add(&mut control, new)? {
                refused = Some(MachineError::PortInUse {
                    address: new.address,
                    port: new.port,
                });
            }
        }
        if !wanted.is_subset(&there)
            && let Some(qemu) = instance::running_pid(&self.current_setup().pid_file())
        {
            listeners::enlarge_backlogs(qemu);
        }
        refused.map_or(Ok(()), Err)
    }

    fn control(&self) -> Result<Control, MachineError> {
        let setup = self.current_setup();
        instance::running_pid(&setup.pid_file()).ok_or(MachineError::NotRunning)?;
        Control::connect(&setup.control_socket())
    }
}

/// Makes QEMU forward a port; false if it refuses.
fn add(control: &mut Control, new: &Forward) -> Result<bool, MachineError> {
    let line = format!(
        "hostfwd_add {NETDEV} {}-{GUEST}:{}",
        new.host_side(),
        new.port
    );
    Ok(monitor(control, &line)?.trim().is_empty())
}

/// Whether the machine itself listens at this port.
fn is_own(udp: bool, port: u16) -> bool {
    !udp && (port == API_PORT || port == AGENT_PORT)
}

fn table(control: &mut Control) -> Result<String, MachineError> {
    monitor(control, "info usernet")
}

fn monitor(control: &mut Control, line: &str) -> Result<String, MachineError> {
    let answer = control.execute("human-monitor-command", json!({ "command-line": line }))?;
    Ok(answer.as_str().unwrap_or_default().to_owned())
}

/// Parses `info usernet`; leaves out the machine's own ports.
fn forwards(table: &str) -> BTreeSet<Forward> {
    let lines = table.lines().filter_map(|line| {
        let columns: Vec<_> = line.split_whitespace().collect();
        let [protocol, _, address, host, _, guest, ..] = columns[..] else {
            return None;
        };
        let guest: u16 = guest.parse().ok()?;
        let forward = Forward {
            udp: match protocol {
                "TCP[HOST_FORWARD]" => false,
                "UDP[HOST_FORWARD]" => true,
                _ => return None,
            },
            // `*` means all addresses.
            address: address.parse().unwrap_or(Ipv4Addr::UNSPECIFIED),
            port: host.parse().ok()?,
        };
        (!is_own(forward.udp, guest)).then_some(forward)
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forward(udp: bool, address: [u8; 4], port: u16) -> Forward {
        Forward {
            udp,
            address: address.into(),
            port,
        }
    }

    #[test]
    fn published_ports_are_forwarded_one_by_one() {
        assert_eq!(
            Forward::of_published("127.0.0.1:8080-8081:80-81/tcp"),
            [
                forward(false, [127, 0, 0, 1], 8080),
                forward(false, [127, 0, 0, 1], 8081)
            ]
        );
        assert_eq!(
            Forward::of_published("8080:80"),
            [forward(false, [127, 0, 0, 1], 8080)]
        );
        assert_eq!(
            Forward::of_published("0.0.0.0:53:53/udp"),
            [forward(true, [0; 4], 53)]
        );
        for other in ["[::]:80:80/tcp", "80", "", "a:b:c/d"] {
            assert!(Forward::of_published(other).is_empty(), "{other}");
        }
    }

    #[test]
    fn published_forwards_are_parsed_without_the_agents_own() {
        let table = "Hub -1 (net):\r\n  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ\r\n  \
            TCP[HOST_FORWARD]  13       127.0.0.1 35113       10.0.2.15  7071     0     0\r\n  \
            TCP[ESTABLISHED]   14       127.0.0.1  8080       10.0.2.15  8080     0     0\r\n  \
            TCP[HOST_FORWARD]  15       127.0.0.1  8080       10.0.2.15  8080     0     0\r\n  \
            UDP[HOST_FORWARD]  12               *    53       10.0.2.15    53     0     0\r\n  \
            UDP[HOST_FORWARD]  16       127.0.0.1  7070       10.0.2.15  7070     0     0\r\n";
        assert_eq!(
            forwards(table),
            [
                forward(false, [127, 0, 0, 1], 8080),
                forward(true, [0; 4], 53),
                forward(true, [127, 0, 0, 1], 7070)
            ]
            .into()
        );
    }
}
