//! Datagrams to published ports. Those of one client to one port are a *flow*.
//!
//! The kernel tracks the flow of a datagram that reached a socket of the host, and leads the flow's
//! later ones there, too, although the VM is awake. So a flow is relayed until it is idle.

use super::{Acceptor, InboundConnection, OF_ONE, Peer, SleepingVm};
use crate::policy::datagrams::{Datagrams, Received};
use crate::policy::hold::Held;
use std::collections::HashMap;
use std::future::poll_fn;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;
use tokio::net::UdpSocket;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;
use tracing::warn;

/// Bytes of a VM's datagrams that wait; further datagrams are dropped. The largest fits.
const WAITING: usize = 64 << 10;
/// A datagram counts with at least as many.
const LEAST: usize = 1 << 10;
/// More than the largest UDP datagram has.
const LARGEST: usize = 64 << 10;
/// A flow ends when neither side has sent a datagram for so long.
const IDLE: Duration = Duration::from_secs(10);

/// A flow's datagrams.
#[derive(Debug)]
pub(super) struct Flow {
    waiting: mpsc::UnboundedReceiver<Waiting>,
    sockets: Arc<Datagrams>,
    socket: usize,
    client: SocketAddr,
    guest: SocketAddr,
}

#[derive(Debug)]
struct Waiting {
    bytes: Vec<u8>,
    _room: OwnedSemaphorePermit,
}

/// The flows of one VM.
struct Flows {
    of: HashMap<(usize, SocketAddr), mpsc::UnboundedSender<Waiting>>,
    room: Arc<Semaphore>,
    places: Arc<Semaphore>,
}

impl Acceptor {
    /// Receives datagrams to these ports until they are released, in a tokio task.
    pub fn receive(&self, held: &mut Held, sleeping: SleepingVm) {
        let Some(sockets) = held.datagrams() else {
            return;
        };
        let acceptor = self.clone();
        let receiving = tokio::spawn(async move {
            let mut buffer = vec![0; LARGEST];
            let mut flows = Flows {
                of: HashMap::new(),
                room: Arc::new(Semaphore::new(WAITING)),
                places: Arc::new(Semaphore::new(OF_ONE)),
            };
            loop {
                let receive =
                    |context: &mut Context<'_>| sockets.poll_receive(context, &mut buffer);
                let received = match poll_fn(receive).await {
                    Ok(received) => received,
                    Err(error) => {
                        warn!(vm = %sleeping.vm, %error, "a datagram to a published port could not be received");
                        tokio::time::sleep(super::AFTER_ERROR).await;
                        continue;
                    }
                };
                let bytes = &buffer[..received.length];
                flows.take(&acceptor, &sleeping, &sockets, received, bytes);
            }
        });
        held.set_receiver(receiving.abort_handle());
    }
}

impl Flows {
    /// Passes a datagram to its flow, or drops it.
    fn take(
        &mut self,
        acceptor: &Acceptor,
        sleeping: &SleepingVm,
        sockets: &Arc<Datagrams>,
        received: Received,
        bytes: &[u8],
    ) {
        let counts = bytes.len().max(LEAST) as u32;
        let Ok(room) = Arc::clone(&self.room).try_acquire_many_owned(counts) else {
            return;
        };
        let mut datagram = Waiting {
            bytes: bytes.to_vec(),
            _room: room,
        };
        let key = (received.socket, received.from);
        if let Some(flow) = self.of.get(&key) {
            match flow.send(datagram) {
                Ok(()) => return,
                Err(mpsc::error::SendError(back)) => datagram = back,
            }
        }
        let from = received.from.ip();
        let server = sleeping.reached.server(from, received.at, received.guest);
        let Some(guest) = server else { return };
        let place = Arc::clone(&self.places).try_acquire_owned();
        let of_all = Arc::clone(&acceptor.places).try_acquire_owned();
        let (Ok(place), Ok(of_all)) = (place, of_all) else {
            return;
        };
        if self.of.len() >= OF_ONE {
            self.of.retain(|_, flow| !flow.is_closed());
        }
        let (to, waiting) = mpsc::unbounded_channel();
        // It can't fail: the receiver is here.
        let _ = to.send(datagram);
        self.of.insert(key, to);
        let flow = Flow {
            waiting,
            sockets: Arc::clone(sockets),
            socket: received.socket,
            client: received.from,
            guest,
        };
        // After the receiver's end nobody forwards.
        let _ = acceptor.to.send(InboundConnection {
            vm: sleeping.vm,
            peer: Peer::Datagrams(flow),
            _places: [place, of_all],
        });
    }
}

impl Flow {
    /// Relays datagrams in both directions until there are none for some time, or the ports were
    /// released.
    pub(super) async fn relay(mut self) -> io::Result<()> {
        let any: SocketAddr = match self.guest {
            SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
        };
        let guest = UdpSocket::bind(any).await?;
        guest.connect(self.guest).await?;
        loop {
            let step = async {
                tokio::select! {
                    datagram = self.waiting.recv() => match datagram {
                        Some(datagram) => guest.send(&datagram.bytes).await.map(|_| true),
                        None => Ok(false),
                    },
                    ready = guest.readable() => ready.map(|()| true),
                }
            };
            match timeout(IDLE, step).await {
                Ok(Ok(true)) => {}
                Ok(Ok(false)) | Err(_) => return Ok(()),
                Ok(Err(error)) => return Err(error),
            }
            let mut answer = Vec::with_capacity(LARGEST);
            match guest.try_recv_buf(&mut answer) {
                Ok(_) => self.sockets.send(self.socket, &answer, self.client)?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::publish::Publish;

    /// A published UDP port of a VM with the address 127.0.0.1, and its host's port.
    fn published(guest: u16, vms: &str) -> (Held, mpsc::UnboundedReceiver<InboundConnection>, u16) {
        let free = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let publish: Publish = format!("{port}:{guest}/udp").parse().unwrap();
        let mut held = Held::all(&[publish]).unwrap();
        let (to, inbound) = Acceptor::new(16);
        to.accept(&mut held, SleepingVm::here(vms));
        (held, inbound, port)
    }

    async fn client(port: u16) -> UdpSocket {
        let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        client.connect(("127.0.0.1", port)).await.unwrap();
        client
    }

    async fn hear(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
        let mut buffer = vec![0; LARGEST];
        let heard = timeout(Duration::from_secs(20), socket.recv_from(&mut buffer));
        let (length, from) = heard.await.unwrap().unwrap();
        buffer.truncate(length);
        (buffer, from)
    }

    #[tokio::test]
    async fn datagrams_wait_and_answers_come_from_the_published_port() {
        let guest = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let (held, mut inbound, port) =
            published(guest.local_addr().unwrap().port(), "10.118.0.0/16");
        let (one, two) = (client(port).await, client(port).await);
        one.send(b"a").await.unwrap();
        let first = inbound.recv().await.unwrap();
        one.send(b"b").await.unwrap();
        two.send(&[7; 40_000]).await.unwrap();
        let second = inbound.recv().await.unwrap();
        assert!(first.is_flow() && second.is_flow());
        let relays = [first, second].map(|flow| tokio::spawn(flow.relay()));
        let mut heard = Vec::new();
        for _ in 0..3 {
            let (bytes, from) = hear(&guest).await;
            guest.send_to(&bytes, from).await.unwrap();
            heard.push(bytes);
        }
        heard.sort();
        assert_eq!(heard, [vec![7; 40_000], b"a".to_vec(), b"b".to_vec()]);
        // Each client gets its own answers, in order.
        assert_eq!(hear(&one).await.0, b"a");
        assert_eq!(hear(&one).await.0, b"b");
        assert_eq!(hear(&two).await.0, [7; 40_000]);
        // Later datagrams belong to the same flow.
        one.send(b"c").await.unwrap();
        assert_eq!(hear(&guest).await.0, b"c");
        assert!(inbound.try_recv().is_err());
        drop(held);
        for relay in relays {
            timeout(IDLE / 2, relay).await.unwrap().unwrap().unwrap();
        }
        std::net::UdpSocket::bind(("127.0.0.1", port)).expect("free as soon as it is released");
    }

    #[tokio::test]
    async fn waiting_datagrams_are_bounded_and_a_flow_that_has_ended_begins_again() {
        let guest = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let (_held, mut inbound, port) =
            published(guest.local_addr().unwrap().port(), "10.118.0.0/16");
        let client = client(port).await;
        for number in 0..200u8 {
            client.send(&[number]).await.unwrap();
            tokio::task::yield_now().await;
        }
        let flow = inbound.recv().await.unwrap();
        // All were read and most dropped, or this one would wait, too.
        timeout(Duration::from_secs(20), async {
            let Peer::Datagrams(flow) = &flow.peer else {
                panic!()
            };
            while flow.waiting.len() < WAITING / LEAST {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
        .unwrap();
        drop(flow);
        client.send(b"again").await.unwrap();
        let flow = inbound.recv().await.expect("another flow");
        tokio::spawn(flow.relay());
        let mut heard = hear(&guest).await.0;
        while heard != b"again" {
            heard = hear(&guest).await.0;
        }
    }

    #[tokio::test]
    async fn datagrams_of_another_vm_are_dropped() {
        let (_held, mut inbound, port) = published(1, "127.0.0.0/16");
        let other = UdpSocket::bind("127.0.0.9:0").await.unwrap();
        other.send_to(b"a", ("127.0.0.1", port)).await.unwrap();
        // The first address is the host's own.
        let own = client(port).await;
        own.send(b"b").await.unwrap();
        let Peer::Datagrams(mut flow) = inbound.recv().await.unwrap().peer else {
            panic!()
        };
        assert_eq!(flow.waiting.recv().await.unwrap().bytes, b"b");
        assert!(inbound.try_recv().is_err());
    }
}
