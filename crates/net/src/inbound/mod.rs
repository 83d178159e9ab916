//! Connections and datagrams to published ports of hibernated VMs.
//!
//! While a VM sleeps, the rules do not forward its ports, so the sockets that hold the ports accept
//! the connections and receive the datagrams. Each connection, and the datagrams of each client to
//! a port, become an [`InboundConnection`]. When the VM is awake, [`InboundConnection::relay`]
//! connects to the VM's port and copies data in both directions. Later connections, and datagrams of
//! further clients, are forwarded by the rules again.

mod datagrams;
mod relay;

use crate::VmId;
use crate::policy::hold::{Accepted, Held};
use crate::pool::Ranges;
use datagrams::Flow;
use rustix::net::sockopt;
use std::future::poll_fn;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tracing::warn;

/// Most connections of one VM that wait or are relayed; further ones wait in the kernel.
const OF_ONE: usize = 1024;
/// Pause after an error that may persist, such as no free descriptors.
const AFTER_ERROR: Duration = Duration::from_millis(100);

/// Accepts connections for all VMs.
#[derive(Debug, Clone)]
pub struct Acceptor {
    to: mpsc::UnboundedSender<InboundConnection>,
    places: Arc<Semaphore>,
}

/// A VM for which connections are accepted.
#[derive(Debug, Clone, Copy)]
pub struct SleepingVm {
    /// Its id.
    pub vm: VmId,
    /// How the host reaches it once it is awake.
    pub reached: Reached,
}

/// How the host reaches the port of a VM.
#[derive(Debug, Clone, Copy)]
pub enum Reached {
    /// At its addresses.
    At {
        /// Its IPv4 address.
        v4: Ipv4Addr,
        /// Its IPv6 address.
        v6: Option<Ipv6Addr>,
        /// All VMs' addresses: VMs may not reach one another by ports of the host.
        ranges: Ranges,
    },
    /// At the published port, where another process listens then.
    ByItsPort,
}

#[cfg(test)]
impl SleepingVm {
    /// One with the address 127.0.0.1, on a node whose VMs have addresses in `vms`.
    fn here(vms: &str) -> SleepingVm {
        let v6 = "fd00:6a69:6666:7900::/64".parse().unwrap();
        SleepingVm {
            vm: VmId::parse("0123456789ab").unwrap(),
            reached: Reached::At {
                v4: Ipv4Addr::LOCALHOST,
                v6: None,
                ranges: Ranges::new(vms.parse().unwrap(), v6).unwrap(),
            },
        }
    }
}

impl Reached {
    /// The VM's port `guest`, for a connection of `from` to the host's address `to`; `None` to
    /// refuse it.
    fn server(self, from: IpAddr, to: SocketAddr, guest: u16) -> Option<SocketAddr> {
        match self {
            Reached::ByItsPort => Some(to),
            Reached::At { ranges, .. } if is_vm(from, ranges) => None,
            Reached::At { v4, .. } if to.is_ipv4() => Some((v4, guest).into()),
            // The VM may have lost its IPv6 address since the port was published.
            Reached::At { v6, .. } => Some((v6?, guest).into()),
        }
    }
}

/// An accepted connection to a published port, which is reset if this is dropped; or the datagrams
/// of one client to one port.
#[derive(Debug)]
pub struct InboundConnection {
    /// The VM that the port is published for.
    pub vm: VmId,
    peer: Peer,
    _places: [OwnedSemaphorePermit; 2],
}

#[derive(Debug)]
enum Peer {
    Stream {
        client: TcpStream,
        guest: SocketAddr,
    },
    Datagrams(Flow),
}

impl InboundConnection {
    /// Is it of datagrams?
    pub fn is_flow(&self) -> bool {
        matches!(self.peer, Peer::Datagrams(_))
    }
}

fn is_vm(address: IpAddr, ranges: Ranges) -> bool {
    let is_host = address == ranges.gateway() || address == ranges.gateway6();
    !is_host && (ranges.v4().contains(address) || ranges.v6().contains(address))
}

impl Acceptor {
    /// At most `most` connections of all VMs wait or are relayed at a time.
    pub fn new(most: usize) -> (Acceptor, mpsc::UnboundedReceiver<InboundConnection>) {
        let (to, connections) = mpsc::unbounded_channel();
        let places = Arc::new(Semaphore::new(most));
        (Acceptor { to, places }, connections)
    }

    /// Accepts connections to these ports, and receives datagrams, until they are released, in tokio
    /// tasks.
    pub fn accept(&self, held: &mut Held, sleeping: SleepingVm) {
        self.receive(held, sleeping);
        let Some(listeners) = held.listeners() else {
            return;
        };
        let acceptor = self.clone();
        let accepting = tokio::spawn(async move {
            let own = Arc::new(Semaphore::new(OF_ONE));
            loop {
                let accepted = match poll_fn(|context| listeners.poll_accept(context)).await {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        warn!(vm = %sleeping.vm, %error, "a connection to a published port could not be accepted");
                        tokio::time::sleep(AFTER_ERROR).await;
                        continue;
                    }
                };
                if acceptor.enqueue(&sleeping, accepted, &own).await.is_none() {
                    return;
                }
            }
        });
        held.set_acceptor(accepting.abort_handle());
    }

    /// Queues a connection. `None` if the receiver is gone.
    async fn enqueue(
        &self,
        sleeping: &SleepingVm,
        accepted: Accepted,
        own: &Arc<Semaphore>,
    ) -> Option<()> {
        let Accepted {
            stream,
            from,
            guest,
        } = accepted;
        // Closing it resets it, unless it is relayed to its end.
        let _ = sockopt::set_socket_linger(&stream, Some(Duration::ZERO));
        let server = |to| sleeping.reached.server(from.ip(), to, guest);
        let Some(guest) = stream.local_addr().ok().and_then(server) else {
            return Some(());
        };
        let place = Arc::clone(own).acquire_owned().await.ok()?;
        let of_all = Arc::clone(&self.places).acquire_owned().await.ok()?;
        let connection = InboundConnection {
            vm: sleeping.vm,
            peer: Peer::Stream {
                client: stream,
                guest,
            },
            _places: [place, of_all],
        };
        self.to.send(connection).ok()
    }
}
