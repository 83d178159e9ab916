//! Relays a connection to a VM's port.

use super::{InboundConnection, Peer};
use rustix::net::sockopt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How long the VM's port may take to accept. The VM is awake, but may just have been woken.
const CONNECT_TIME: Duration = Duration::from_secs(20);
/// Idle time after which keep-alive probes are sent to a client.
const KEEPALIVE: Duration = Duration::from_secs(60);

impl InboundConnection {
    /// Connects to the VM and copies data in both directions until both have ended; either side may
    /// shut down its direction first. If one side resets or does not answer, the other is reset.
    ///
    /// Datagrams are relayed until there are none for some time.
    ///
    /// # Errors
    ///
    /// If the VM does not accept the connection within 20 seconds, one side resets it, or a
    /// datagram can't be sent or received.
    pub async fn relay(self) -> io::Result<()> {
        match self.peer {
            Peer::Stream { client, guest } => relay_stream(client, guest).await,
            Peer::Datagrams(flow) => flow.relay().await,
        }
    }
}

async fn relay_stream(mut client: TcpStream, guest: SocketAddr) -> io::Result<()> {
    let connected = timeout(CONNECT_TIME, TcpStream::connect(guest)).await;
    let mut guest = connected.map_err(|_| io::ErrorKind::TimedOut)??;
    sockopt::set_socket_linger(&guest, Some(Duration::ZERO))?;
    for stream in [&client, &guest] {
        stream.set_nodelay(true)?;
    }
    // Without keep-alive, a client that vanished would keep the VM awake.
    sockopt::set_socket_keepalive(&client, true)?;
    sockopt::set_tcp_keepidle(&client, KEEPALIVE)?;
    copy_bidirectional(&mut client, &mut guest).await?;
    for stream in [&client, &guest] {
        sockopt::set_socket_linger(stream, None)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{Acceptor, Reached, SleepingVm};
    use crate::VmId;
    use crate::policy::hold::Held;
    use crate::policy::publish::Publish;
    use std::io::ErrorKind;
    use std::net::SocketAddr;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::sync::mpsc::UnboundedReceiver;
    use tokio::time::timeout;

    struct PublishedPort {
        held: Held,
        inbound: UnboundedReceiver<super::InboundConnection>,
        /// The host's port.
        port: u16,
        publish: Publish,
    }

    /// A published port of a VM with the address 127.0.0.1. `vms` is the range of VMs' addresses.
    async fn published(guest: u16, vms: &str) -> PublishedPort {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let publish: Publish = format!("{port}:{guest}").parse().unwrap();
        let mut held = Held::all(&[publish]).unwrap();
        let (to, inbound) = Acceptor::new(16);
        to.accept(&mut held, SleepingVm::here(vms));
        PublishedPort {
            held,
            inbound,
            port,
            publish,
        }
    }

    async fn guest() -> (TcpListener, u16) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let SocketAddr::V4(at) = listener.local_addr().unwrap() else {
            panic!()
        };
        (listener, at.port())
    }

    #[tokio::test]
    async fn data_of_both_sides_arrives_and_either_may_close_first() {
        let (listener, port) = guest().await;
        let mut published = published(port, "10.118.0.0/16").await;
        let mut client = TcpStream::connect(("127.0.0.1", published.port))
            .await
            .unwrap();
        client.write_all(b"question").await.unwrap();
        client.shutdown().await.unwrap();
        // The connection waits, with its data, until it is relayed.
        let caller = published.inbound.recv().await.unwrap();
        let carried = tokio::spawn(caller.relay());
        let (mut served, _) = listener.accept().await.unwrap();
        let mut asked = Vec::new();
        served.read_to_end(&mut asked).await.unwrap();
        assert_eq!(asked, b"question");
        // The other direction is still open, and carries more than any buffer holds.
        let answer = vec![7; 8 << 20];
        let sent = answer.clone();
        let serving = tokio::spawn(async move {
            served.write_all(&sent).await.unwrap();
            served.shutdown().await.unwrap();
        });
        let mut heard = Vec::new();
        client.read_to_end(&mut heard).await.unwrap();
        assert_eq!(heard, answer);
        serving.await.unwrap();
        carried.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_connection_that_is_not_forwarded_is_reset() {
        let (listener, port) = guest().await;
        let mut published = published(port, "10.118.0.0/16").await;
        let reset = async |client: &mut TcpStream| {
            let mut heard = [0; 8];
            let read = timeout(Duration::from_secs(10), client.read(&mut heard));
            read.await.unwrap().unwrap_err().kind()
        };
        // The connection is dropped.
        let mut client = TcpStream::connect(("127.0.0.1", published.port))
            .await
            .unwrap();
        drop(published.inbound.recv().await.unwrap());
        assert_eq!(reset(&mut client).await, ErrorKind::ConnectionReset);
        // The relay is aborted.
        let mut client = TcpStream::connect(("127.0.0.1", published.port))
            .await
            .unwrap();
        let carried = tokio::spawn(published.inbound.recv().await.unwrap().relay());
        let (mut served, _) = listener.accept().await.unwrap();
        client.write_all(b"a").await.unwrap();
        served.read_exact(&mut [0]).await.unwrap();
        carried.abort();
        assert_eq!(reset(&mut client).await, ErrorKind::ConnectionReset);
        assert_eq!(reset(&mut served).await, ErrorKind::ConnectionReset);
        // Nothing listens in the VM.
        drop(listener);
        let mut client = TcpStream::connect(("127.0.0.1", published.port))
            .await
            .unwrap();
        published
            .inbound
            .recv()
            .await
            .unwrap()
            .relay()
            .await
            .unwrap_err();
        assert_eq!(reset(&mut client).await, ErrorKind::ConnectionReset);
        // The ports are free as soon as they are released.
        drop(published.held);
        Held::all(&[published.publish]).expect("free again");
        assert!(published.inbound.recv().await.is_none(), "nobody accepts");
    }

    #[tokio::test]
    async fn a_port_that_another_process_takes_over_is_reached_there() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let publish: Publish = format!("{port}:80").parse().unwrap();
        let mut held = Held::all(&[publish]).unwrap();
        let (to, mut inbound) = Acceptor::new(16);
        let sleeping = SleepingVm {
            vm: VmId::parse("0123456789ab").unwrap(),
            reached: Reached::ByItsPort,
        };
        to.accept(&mut held, sleeping);
        let mut client = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        client.write_all(b"question").await.unwrap();
        let waiting = inbound.recv().await.unwrap();
        // The VM is awake: its ports belong to another process, and nothing is lost.
        drop(held);
        let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
        tokio::spawn(waiting.relay());
        let (mut served, _) = listener.accept().await.unwrap();
        let mut asked = [0; 8];
        served.read_exact(&mut asked).await.unwrap();
        assert_eq!(&asked, b"question");
    }

    #[tokio::test]
    async fn a_connection_of_another_vm_is_reset() {
        let mut published = published(1, "127.0.0.0/16").await;
        let from = tokio::net::TcpSocket::new_v4().unwrap();
        from.bind("127.0.0.9:0".parse().unwrap()).unwrap();
        let to = SocketAddr::from(([127, 0, 0, 1], published.port));
        let mut client = from.connect(to).await.unwrap();
        let read = client.read(&mut [0; 8]).await;
        assert_eq!(read.unwrap_err().kind(), ErrorKind::ConnectionReset);
        assert!(published.inbound.try_recv().is_err());
        // The first address is the host's own.
        let _client = TcpStream::connect(to).await.unwrap();
        published.inbound.recv().await.expect("a caller");
    }
}
