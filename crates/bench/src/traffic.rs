//! What passes between a measuring guest and the host, and how the two agree on it.
//!
//! The guest is a server ([`Server`]); the host says with each [`Request`] what it measures.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};

/// Address of the host on the link.
pub const HOST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
/// Address of the guest.
pub const GUEST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
/// Bits of their network.
pub const PREFIX: u8 = 30;

/// Port of a server that sends [`ANSWER`] to whoever connects, and closes.
pub const ANSWER_PORT: u16 = 7000;
/// Port of the server of [`Request`]s.
pub const STREAM_PORT: u16 = 7001;
/// Port of a server that sends each datagram back.
pub const PACKET_PORT: u16 = 7002;
/// What the server at [`ANSWER_PORT`] sends.
pub const ANSWER: u8 = b'J';

/// Kernel parameter of guests that serve; it arrives in the environment of PID 1.
pub const PARAMETER: &str = "serve_traffic";

/// Bytes that pass in a measured run, in all streams together.
pub const BYTES: u64 = 64 << 20;
/// Bytes that each stream passes before.
pub const WARM_UP_BYTES: u64 = 2 << 20;
/// Bytes of a read or write.
pub const PIECE: usize = 256 << 10;
/// Bytes of a small packet.
pub const PACKET: usize = 64;
/// Small packets that are on their way at once.
pub const WINDOW: usize = 64;
/// Windows of small packets in a measured run.
pub const WINDOWS: usize = 100;
/// Round trips in a measured run.
pub const ROUND_TRIPS: u64 = 200;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Traffic {
    /// The guest sends, in this number of TCP streams.
    Sent(u32),
    /// The guest receives, in this number of TCP streams.
    Received(u32),
    /// Small datagrams to the guest and back, a window of them at a time.
    Packets,
    /// A byte to the guest and back by TCP, one at a time.
    RoundTrips,
}

impl Traffic {
    /// All kinds.
    pub const ALL: [Traffic; 6] = [
        Traffic::Sent(1),
        Traffic::Sent(8),
        Traffic::Received(1),
        Traffic::Received(8),
        Traffic::Packets,
        Traffic::RoundTrips,
    ];

    /// The case that measures it.
    pub fn case(self) -> &'static str {
        match self {
            Traffic::Sent(1) => "net/tx/instructions-per-mib",
            Traffic::Sent(_) => "net/tx-8/instructions-per-mib",
            Traffic::Received(1) => "net/rx/instructions-per-mib",
            Traffic::Received(_) => "net/rx-8/instructions-per-mib",
            Traffic::Packets => "net/udp/instructions-per-packet",
            Traffic::RoundTrips => "net/rtt",
        }
    }

    /// The number of units by which a run's instructions are divided.
    pub fn units(self) -> u64 {
        match self {
            Traffic::Sent(_) | Traffic::Received(_) => BYTES >> 20,
            Traffic::Packets => (2 * WINDOW * WINDOWS) as u64,
            Traffic::RoundTrips => ROUND_TRIPS,
        }
    }
}

/// What the client of a stream asks for; a stream may have any number of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// The server sends this number of bytes.
    Send(u64),
    /// The server receives this number of bytes, and then sends one.
    Receive(u64),
    /// The server sends this number of bytes back, each as it comes.
    Echo(u64),
}

impl Request {
    /// Its bytes.
    pub fn encode(self) -> [u8; 9] {
        let (kind, count) = match self {
            Request::Send(count) => (b'S', count),
            Request::Receive(count) => (b'R', count),
            Request::Echo(count) => (b'E', count),
        };
        let mut bytes = [kind; 9];
        bytes[1..].copy_from_slice(&count.to_le_bytes());
        bytes
    }

    fn decode(bytes: [u8; 9]) -> Result<Request> {
        let [kind, count @ ..] = bytes;
        let count = u64::from_le_bytes(count);
        match kind {
            b'S' => Ok(Request::Send(count)),
            b'R' => Ok(Request::Receive(count)),
            b'E' => Ok(Request::Echo(count)),
            other => bail!("{other} is no kind of request"),
        }
    }
}

/// Sends this number of bytes.
///
/// # Errors
///
/// If `write` fails.
pub fn send(stream: &mut TcpStream, mut count: u64, piece: &[u8]) -> Result<()> {
    while count > 0 {
        let now = count.min(piece.len() as u64) as usize;
        stream.write_all(&piece[..now])?;
        count -= now as u64;
    }
    Ok(())
}

/// Receives this number of bytes.
///
/// # Errors
///
/// If `read` fails, or the other end closes the stream before.
pub fn receive(stream: &mut TcpStream, mut count: u64, piece: &mut [u8]) -> Result<()> {
    while count > 0 {
        let now = count.min(piece.len() as u64) as usize;
        match stream.read(&mut piece[..now])? {
            0 => bail!("the other end closed the stream, {count} bytes before its end"),
            got => count -= got as u64,
        }
    }
    Ok(())
}

/// The guest's servers.
#[derive(Debug)]
pub struct Server {
    answers: TcpListener,
    streams: TcpListener,
    packets: UdpSocket,
}

impl Server {
    /// Listens on all addresses.
    ///
    /// # Errors
    ///
    /// If a port is in use.
    pub fn listen() -> Result<Server> {
        let any = Ipv4Addr::UNSPECIFIED;
        Ok(Server {
            answers: TcpListener::bind((any, ANSWER_PORT)).context("the port of answers")?,
            streams: TcpListener::bind((any, STREAM_PORT)).context("the port of streams")?,
            packets: UdpSocket::bind((any, PACKET_PORT)).context("the port of packets")?,
        })
    }

    /// Serves until the guest ends. A client that fails ends only its own stream.
    ///
    /// # Errors
    ///
    /// If `accept` fails. Otherwise it does not return.
    pub fn serve(self) -> Result<()> {
        let Server {
            answers,
            streams,
            packets,
        } = self;
        std::thread::spawn(move || echo_packets(&packets));
        std::thread::spawn(move || {
            for stream in streams.incoming().flatten() {
                std::thread::spawn(move || serve_stream(stream));
            }
        });
        answer(&answers)
    }
}

/// Sends [`ANSWER`] to each client.
///
/// # Errors
///
/// If `accept` fails. Otherwise it does not return.
pub fn answer(listener: &TcpListener) -> Result<()> {
    loop {
        let (mut client, _) = listener.accept()?;
        // The client may have left.
        let _ = client.write_all(&[ANSWER]);
    }
}

fn echo_packets(socket: &UdpSocket) -> Result<()> {
    let mut packet = [0; 2048];
    loop {
        let (length, client) = socket.recv_from(&mut packet)?;
        socket.send_to(&packet[..length], client)?;
    }
}

fn serve_stream(mut stream: TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut piece = vec![1; PIECE];
    loop {
        let mut request = [0; 9];
        stream.read_exact(&mut request)?;
        match Request::decode(request)? {
            Request::Send(count) => send(&mut stream, count, &piece)?,
            Request::Receive(count) => {
                receive(&mut stream, count, &mut piece)?;
                stream.write_all(&[ANSWER])?;
            }
            Request::Echo(count) => {
                let byte = &mut piece[..1];
                for _ in 0..count {
                    stream.read_exact(byte)?;
                    stream.write_all(byte)?;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_served_in_order_on_one_stream() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let server = std::thread::spawn(move || serve_stream(stream));
        let mut piece = vec![0; 1000];
        client.write_all(&Request::Send(2500).encode()).unwrap();
        receive(&mut client, 2500, &mut piece).unwrap();
        client.write_all(&Request::Receive(2500).encode()).unwrap();
        send(&mut client, 2500, &piece).unwrap();
        receive(&mut client, 1, &mut piece).unwrap();
        assert_eq!(piece[0], ANSWER);
        client.write_all(&Request::Echo(2).encode()).unwrap();
        for byte in [7, 8] {
            client.write_all(&[byte]).unwrap();
            receive(&mut client, 1, &mut piece).unwrap();
            assert_eq!(piece[0], byte);
        }
        client.write_all(&[b'?'; 9]).unwrap();
        let error = server.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("no kind"), "{error}");
        assert!(receive(&mut client, 1, &mut piece).is_err());
    }

    #[test]
    fn each_kind_of_traffic_has_a_case_of_its_own() {
        let names: std::collections::BTreeSet<_> = Traffic::ALL.map(Traffic::case).into();
        assert_eq!(names.len(), Traffic::ALL.len());
    }
}
