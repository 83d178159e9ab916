//! Writes recordings on a thread of its own, so that a slow sync does not delay page faults or
//! handshakes.

use super::{Notice, Notifier};
use jiffy_store::Recording;
use jiffy_sys::log_limit::LogLimit;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};

/// A recording to be written.
struct Order {
    path: PathBuf,
    recording: Recording,
    client: Option<u64>,
}

/// The thread that writes recordings, one after the other.
pub(super) struct Recorder {
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Recorder {
    /// Starts the thread that writes recordings.
    ///
    /// # Errors
    ///
    /// If the thread can't be started.
    pub fn start(notifier: Notifier) -> io::Result<Recorder> {
        let (orders, incoming) = mpsc::channel::<Order>();
        let thread = thread::Builder::new()
            .name("recorder".into())
            .spawn(move || {
                // A VMM that disconnects causes a write, as often as it likes.
                let log = LogLimit::new();
                for order in incoming {
                    let problem = order.recording.write(&order.path).err().map(|error| {
                        format!(
                            "the recording {} was not written: {error}",
                            order.path.display()
                        )
                    });
                    if let Some(problem) = &problem
                        && (order.client.is_some() || log.admits())
                    {
                        tracing::warn!("{problem}");
                    }
                    if let Some(client) = order.client {
                        notifier.send(Notice::Answer { client, problem });
                    }
                }
            })?;
        Ok(Recorder {
            orders: Some(orders),
            thread: Some(thread),
        })
    }

    /// Writes a recording, if there is one, and then answers the client.
    pub fn write(&self, recording: Option<(PathBuf, Recording)>, client: Option<u64>) {
        if let (Some((path, recording)), Some(orders)) = (recording, &self.orders) {
            let order = Order {
                path,
                recording,
                client,
            };
            // The thread ends only when this end is dropped.
            let _ = orders.send(order);
        }
    }

    /// Returns when all is written.
    pub fn finish(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
