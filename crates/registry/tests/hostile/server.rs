//! A server with scripted replies.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// A received request.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    /// Path and query.
    pub path: String,
    headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// First and last byte of `Range`.
    pub fn range(&self) -> Option<(usize, usize)> {
        let (first, last) = self
            .header("range")?
            .strip_prefix("bytes=")?
            .split_once('-')?;
        Some((first.parse().ok()?, last.parse().ok()?))
    }
}

/// A reply. The connection is closed after every reply that is not complete and valid.
#[derive(Clone, Debug)]
pub struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    end: End,
}

#[derive(Clone, Debug)]
enum End {
    /// The whole body, with its length.
    Whole,
    /// Only so many bytes of the body, although the head announces all.
    Cut(usize),
    /// The whole body without a length.
    Unsaid,
    /// The head and the body, then nothing until the client closes the connection.
    Stall,
    /// The body again and again, until the client closes the connection.
    Endless,
    /// The body byte by byte, until the client closes the connection.
    Drip,
    /// Nothing at all.
    Nothing,
}

impl Reply {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: body.into(),
            end: End::Whole,
        }
    }

    /// A range of some content.
    pub fn part(whole: &[u8], (first, last): (usize, usize)) -> Self {
        let range = format!("bytes {first}-{last}/{}", whole.len());
        Self::new(206, &whole[first..=last]).with("content-range", range)
    }

    pub fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.headers.push((name.to_owned(), value.to_string()));
        self
    }

    pub fn cut(mut self, after: usize) -> Self {
        self.end = End::Cut(after);
        self
    }

    pub fn of_unsaid_length(mut self) -> Self {
        self.end = End::Unsaid;
        self
    }

    pub fn then_stall(mut self) -> Self {
        self.end = End::Stall;
        self
    }

    pub fn dripping(mut self) -> Self {
        self.end = End::Drip;
        self
    }

    pub fn endless(mut self) -> Self {
        self.end = End::Endless;
        self
    }

    /// Whether the reply is whole and its length is its own.
    fn is_true(&self) -> bool {
        matches!(self.end, End::Whole) && !self.says_a_length()
    }

    fn says_a_length(&self) -> bool {
        self.headers
            .iter()
            .any(|(name, _)| name == "content-length")
    }

    /// Closes the connection without a reply.
    pub fn nothing() -> Self {
        let mut reply = Self::new(200, "");
        reply.end = End::Nothing;
        reply
    }
}

type Script = dyn Fn(&Request) -> Reply + Send + Sync;

/// A running server; stops when it is dropped.
pub struct Server {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<Request>>>,
    connections: Arc<AtomicUsize>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start(script: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let script: Arc<Script> = Arc::new(script);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let ends = Arc::new(AtomicBool::new(false));
        let connections = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&connections);
        let (log, stop) = (Arc::clone(&seen), Arc::clone(&ends));
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stop.load(Ordering::Acquire) {
                    return;
                }
                count.fetch_add(1, Ordering::SeqCst);
                let (script, log) = (Arc::clone(&script), Arc::clone(&log));
                std::thread::spawn(move || serve_connection(&stream.unwrap(), &*script, &log));
            }
        });
        Self {
            address,
            seen,
            connections,
            ends,
            thread: Some(thread),
        }
    }

    /// `127.0.0.1:PORT`.
    pub fn host(&self) -> String {
        self.address.to_string()
    }

    /// Number of connections so far.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// All requests so far, in order.
    pub fn seen(&self) -> Vec<Request> {
        self.seen.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Release);
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Answers the requests of one connection. A client that disconnects early is not an error.
fn serve_connection(stream: &TcpStream, script: &Script, log: &Mutex<Vec<Request>>) {
    while let Some(request) = read_request(stream) {
        log.lock().unwrap().push(request.clone());
        let reply = script(&request);
        if write_reply(stream, &request, &reply).is_err() || !reply.is_true() {
            return;
        }
    }
}

fn read_request(stream: &TcpStream) -> Option<Request> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace();
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else {
            break;
        };
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let mut request = Request {
        method,
        path,
        headers,
        body: Vec::new(),
    };
    let length: usize = request
        .header("content-length")
        .unwrap_or("0")
        .parse()
        .ok()?;
    request.body = vec![0; length];
    reader.read_exact(&mut request.body).ok()?;
    Some(request)
}

fn write_reply(mut stream: &TcpStream, request: &Request, reply: &Reply) -> std::io::Result<()> {
    if matches!(reply.end, End::Nothing) {
        return Ok(());
    }
    let mut head = format!("HTTP/1.1 {} Whatever\r\n", reply.status);
    if !reply.is_true() {
        head.push_str("connection: close\r\n");
    }
    if !reply.says_a_length() && !matches!(reply.end, End::Unsaid | End::Endless) {
        head.push_str(&format!("content-length: {}\r\n", reply.body.len()));
    }
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    if matches!(reply.end, End::Stall) && reply.body.is_empty() {
        // The reply stops before the end of the head.
        head.truncate(head.len() - 2);
    }
    stream.write_all(head.as_bytes())?;
    if request.method == "HEAD" {
        return Ok(());
    }
    match reply.end {
        End::Cut(after) => stream.write_all(&reply.body[..after.min(reply.body.len())])?,
        End::Endless => loop {
            stream.write_all(&reply.body)?;
        },
        End::Drip => {
            for byte in &reply.body {
                stream.write_all(&[*byte])?;
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
        }
        End::Stall => {
            stream.write_all(&reply.body)?;
            // Waits until the client closes the connection.
            stream.read_exact(&mut [0])?;
        }
        End::Whole | End::Unsaid | End::Nothing => stream.write_all(&reply.body)?,
    }
    Ok(())
}
