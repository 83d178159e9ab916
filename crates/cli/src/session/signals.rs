//! The signals a session forwards.

use std::future::poll_fn;
use std::io;
use std::task::Poll;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Receives signals while a session runs; none of them ends jiffy itself.
pub struct Signals {
    listeners: Vec<(i32, Signal)>,
}

/// SIGINT.
pub const INTERRUPT: i32 = 2;
/// SIGPIPE.
pub const PIPE: i32 = 13;
/// SIGCONT.
pub const CONTINUED: i32 = 18;
/// SIGWINCH.
pub const WINDOW: i32 = 28;

/// HUP, INT, QUIT, TERM: the signals by which users and the system end a program.
pub const ENDING: [i32; 4] = [1, INTERRUPT, 3, 15];

/// HUP, INT, QUIT, USR1, USR2, TERM, CONT, WINCH.
const LISTENED: [i32; 8] = [1, INTERRUPT, 3, 10, 12, 15, CONTINUED, WINDOW];

impl Signals {
    /// Receives signals from now on.
    ///
    /// # Errors
    ///
    /// If a signal handler can't be installed.
    pub fn new() -> io::Result<Signals> {
        let listeners = LISTENED
            .iter()
            .map(|number| Ok((*number, signal(SignalKind::from_raw(*number))?)))
            .collect::<io::Result<_>>()?;
        Ok(Signals { listeners })
    }

    /// Waits for the next signal; returns its number.
    pub async fn next(&mut self) -> i32 {
        poll_fn(|context| {
            for (number, listener) in &mut self.listeners {
                if listener.poll_recv(context).is_ready() {
                    return Poll::Ready(*number);
                }
            }
            Poll::Pending
        })
        .await
    }
}
