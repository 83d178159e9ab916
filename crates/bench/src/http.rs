//! HTTP between a client on the host and a server in a guest.

use anyhow::{Context, Result, bail, ensure};
use jiffy_sys::clock::monotonic_ns;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// Port of the server.
pub const PORT: u16 = 7003;
/// Argument with which the guest's program is this server.
pub const ARGUMENT: &str = "http";

/// Time limit of an answer.
const TIMEOUT: Duration = Duration::from_secs(30);
const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nJ\n";
/// The end of a request.
const HEADER_END: &[u8] = b"\r\n\r\n";
/// The end of an answer.
const ANSWER_END: &[u8] = b"\r\n\r\nJ\n";
/// Longest request or answer, bytes.
const MOST: usize = 4096;

/// Answers the requests of one client after another; each client keeps its connection as long as it
/// wants.
///
/// # Errors
///
/// If `accept` fails. Otherwise it does not return.
pub fn serve(listener: &TcpListener) -> Result<()> {
    loop {
        let (client, _) = listener.accept()?;
        // The client may leave at any time.
        let _ = serve_client(client);
    }
}

fn serve_client(mut client: TcpStream) -> Result<()> {
    client.set_nodelay(true)?;
    loop {
        read_until(&mut client, HEADER_END)?;
        client.write_all(ANSWER)?;
    }
}

/// A client that keeps its connection.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    request: Vec<u8>,
}

impl Client {
    /// Connects to a server, or to a proxy that finds the server by `host`.
    ///
    /// # Errors
    ///
    /// If it does not accept within 30 s.
    pub fn connect(address: SocketAddr, host: &str) -> Result<Client> {
        let stream = TcpStream::connect_timeout(&address, TIMEOUT)
            .with_context(|| format!("{address} can't be reached"))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").into_bytes();
        Ok(Client { stream, request })
    }

    /// Makes a request, and reads its answer. Returns the time of the answer's first byte
    /// (CLOCK_MONOTONIC, nanoseconds).
    ///
    /// # Errors
    ///
    /// If the answer does not have the status 200, is incomplete or too long, or stops for 30 s.
    pub fn get(&mut self) -> Result<u64> {
        self.stream.write_all(&self.request)?;
        read_until(&mut self.stream, ANSWER_END)
    }
}

/// Reads a message up to its end, after which nothing follows; the time of its first byte.
fn read_until(stream: &mut TcpStream, end: &[u8]) -> Result<u64> {
    let mut message = [0; MOST];
    let (mut length, mut first) = (0, 0);
    while !message[..length].ends_with(end) {
        let got = stream.read(&mut message[length..])?;
        if length == 0 {
            first = monotonic_ns();
        }
        length += got;
        let so_far = String::from_utf8_lossy(&message[..length]);
        ensure!(length < MOST, "a message that is too long: {so_far}");
        if got == 0 {
            bail!("the connection was closed after {so_far:?}");
        }
        let refused = so_far.starts_with("HTTP/1.1 ") && !so_far.starts_with("HTTP/1.1 200 ");
        ensure!(!refused, "another answer: {so_far}");
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn listen() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    #[test]
    fn clients_are_served_one_after_another_and_keep_their_connection() {
        let (listener, address) = listen();
        std::thread::spawn(move || serve(&listener));
        for _ in 0..2 {
            let mut client = Client::connect(address, "a.localhost").unwrap();
            let before = monotonic_ns();
            let (first, second) = (client.get().unwrap(), client.get().unwrap());
            assert!(before < first && first < second);
        }
    }

    #[test]
    fn a_refusal_and_an_incomplete_answer_are_errors() {
        let answers = ["HTTP/1.1 502 Bad Gateway\r\n\r\nno", "HTTP/1.1 200 OK\r\n"];
        for (answer, expected) in answers.into_iter().zip(["502", "closed"]) {
            let (listener, address) = listen();
            let server = std::thread::spawn(move || {
                let (mut client, _) = listener.accept().unwrap();
                read_until(&mut client, HEADER_END).unwrap();
                client.write_all(answer.as_bytes()).unwrap();
            });
            let error = Client::connect(address, "a").unwrap().get().unwrap_err();
            assert!(error.to_string().contains(expected), "{error:#}");
            server.join().unwrap();
        }
    }
}
