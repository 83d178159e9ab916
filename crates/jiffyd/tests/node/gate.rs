//! A proxy in front of a registry: requests pass one by one, and one of them can be held, before it
//! is forwarded or in the middle of its answer.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Longest wait for a request to be held.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Where a request is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// Before it reaches the registry.
    Request,
    /// After the client has received half of the answer.
    Answer,
}

#[derive(Debug, Default)]
struct State {
    /// Requests since the last [`Gate::hold`].
    count: usize,
    /// The number of the request to hold.
    held: Option<(usize, Hold)>,
    /// Whether it is held now.
    reached: bool,
    /// Counts finished holds.
    released: usize,
}

/// The proxy. Held connections wait until it is opened.
pub struct Gate {
    address: SocketAddr,
    state: Arc<(Mutex<State>, Condvar)>,
}

impl Gate {
    /// Starts a gate in front of a registry.
    pub fn before(registry: &str) -> Gate {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state: Arc<(Mutex<State>, Condvar)> = Arc::default();
        let (registry, shared) = (registry.to_owned(), Arc::clone(&state));
        // Runs until the test program ends.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (registry, shared) = (registry.clone(), Arc::clone(&shared));
                std::thread::spawn(move || {
                    // A client may disconnect in the middle.
                    let _ = pass(&stream, &registry, &shared);
                    let _ = stream.shutdown(Shutdown::Both);
                });
            }
        });
        Gate { address, state }
    }

    /// Splits `127.0.0.1:PORT/` from the rest.
    pub fn name(&self, rest: &str) -> String {
        format!("{}/{rest}", self.address)
    }

    /// Holds the request of this number from now on, the first being 1.
    pub fn hold(&self, number: usize, how: Hold) {
        let mut state = self.state.0.lock().unwrap();
        state.count = 0;
        state.held = Some((number, how));
        state.reached = false;
    }

    /// Releases the held request, and holds no more.
    pub fn open(&self) {
        let mut state = self.state.0.lock().unwrap();
        state.held = None;
        state.released += 1;
        self.state.1.notify_all();
    }

    /// Waits until a request is held; false if `over` comes before.
    pub fn reached(&self, over: impl Fn() -> bool) -> bool {
        let mut state = self.state.0.lock().unwrap();
        let mut waited = Duration::ZERO;
        let step = Duration::from_millis(10);
        while !state.reached {
            if over() {
                return false;
            }
            assert!(waited < TIMEOUT, "no request came to be held");
            state = self.state.1.wait_timeout(state, step).unwrap().0;
            waited += step;
        }
        true
    }
}

/// Passes one request and its answer, on separate connections.
fn pass(
    mut client: &TcpStream,
    registry: &str,
    shared: &(Mutex<State>, Condvar),
) -> io::Result<()> {
    let mut reader = BufReader::new(client);
    let mut head = String::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        if line.trim_end().is_empty() {
            break;
        }
        if !line.to_ascii_lowercase().starts_with("connection:") {
            head.push_str(&line);
        }
    }
    head.push_str("connection: close\r\n\r\n");
    let (hold, round) = {
        let mut state = shared.0.lock().unwrap();
        state.count += 1;
        let mine = state.held.filter(|(number, _)| *number == state.count);
        (mine.map(|(_, how)| how), state.released)
    };
    let wait = || {
        let mut state = shared.0.lock().unwrap();
        state.reached = true;
        shared.1.notify_all();
        while state.released == round {
            state = shared.1.wait(state).unwrap();
        }
    };
    if hold == Some(Hold::Request) {
        wait();
    }
    let mut upstream = TcpStream::connect(registry)?;
    upstream.write_all(head.as_bytes())?;
    let mut answer = Vec::new();
    upstream.read_to_end(&mut answer)?;
    let (first, rest) = answer.split_at(answer.len() / 2);
    client.write_all(first)?;
    if hold == Some(Hold::Answer) {
        wait();
    }
    client.write_all(rest)
}
