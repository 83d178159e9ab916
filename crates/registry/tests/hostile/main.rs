//! Tests with a registry that misbehaves.
//!
//! The registry is a script: a function from requests to replies. Waits between retries are
//! recorded instead of slept.

mod server;

mod blobs;
mod manifests;
mod redirects;
mod tokens;
mod uploads;

use jiffy_registry::{Client, ClientOptions, Progress, Reference, Retries};
use server::Server;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The waits between retries.
#[derive(Clone, Default)]
struct Waits(Arc<Mutex<Vec<Duration>>>);

impl Waits {
    fn options(&self) -> ClientOptions {
        let waits = Arc::clone(&self.0);
        ClientOptions {
            retries: Retries {
                sleep: Some(Arc::new(move |wait| waits.lock().unwrap().push(wait))),
                ..Retries::default()
            },
            // No test waits that long, unless it is about to fail.
            stall_timeout: Duration::from_secs(60),
            ..ClientOptions::default()
        }
    }

    fn all(&self) -> Vec<Duration> {
        self.0.lock().unwrap().clone()
    }
}

fn client() -> (Client, Waits) {
    let waits = Waits::default();
    (Client::new(waits.options()).unwrap(), waits)
}

fn reference(server: &Server, rest: &str) -> Reference {
    Reference::parse(&format!("{}/{rest}", server.host()), None).unwrap()
}

/// Cancels after this many calls.
struct GivesUp(Mutex<u32>);

impl Progress for GivesUp {
    fn moved(&self, _: &jiffy_registry::Descriptor, _: u64) {
        let mut left = self.0.lock().unwrap();
        *left = left.saturating_sub(1);
    }

    fn cancelled(&self) -> bool {
        *self.0.lock().unwrap() == 0
    }
}
