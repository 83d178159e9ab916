//! Limits the numbers of connections and of uploads, in all and for each client.
//!
//! A connection has a place until it is closed, also as a stream of frames, and an upload until
//! it is read. No client gets all places, so a client that floods the node does not lock others
//! out.

use jiffy_content::error::{Error, Result};
use jiffy_sys::mutex::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// Connections may use one in this many of the daemon's descriptors.
const DESCRIPTORS_EACH: u64 = 4;

/// The client of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Client {
    /// A process on this host.
    Process(i32),
    /// Any client over TCP: in the machine, all of them have the address of the machine's host.
    Network,
}

/// The places of all connections, or of all uploads.
#[derive(Debug)]
pub struct Places {
    /// What has a place, in the plural.
    what: &'static str,
    most: usize,
    taken: Mutex<HashMap<Client, usize>>,
}

/// The place of a connection or of an upload; dropping it releases it.
#[derive(Debug)]
pub struct Place {
    all: Arc<Places>,
    client: Client,
}

impl Places {
    /// `wanted` connections, but no more than fit a daemon with so many descriptors.
    pub fn of_connections(wanted: u32, descriptors: Option<u64>) -> Arc<Places> {
        let can_have = descriptors.map_or(u64::MAX, |files| files / DESCRIPTORS_EACH);
        Places::new("open connections", can_have.min(wanted.into()) as usize)
    }

    /// Places for `most` of `what`, a plural.
    pub fn new(what: &'static str, most: usize) -> Arc<Places> {
        Arc::new(Places {
            what,
            most,
            taken: Mutex::default(),
        })
    }

    /// A place for this client.
    ///
    /// # Errors
    ///
    /// If all places are taken, or three quarters of them by this client.
    pub fn take(self: &Arc<Self>, client: Client) -> Result<Arc<Place>> {
        let mut taken = self.taken();
        let all: usize = taken.values().sum();
        let of_client = taken.get(&client).copied().unwrap_or(0);
        // One client may have three quarters; the rest is for others.
        let share = self.most - self.most / 4;
        if all >= self.most || of_client >= share {
            let whose = match client {
                Client::Process(pid) if all < self.most => format!(" of process {pid}"),
                Client::Network if all < self.most => " by TCP".to_owned(),
                _ => String::new(),
            };
            let open = if all < self.most { of_client } else { all };
            return Err(Error::no_room(format!(
                "The node has {open} {}{whose}, and accepts no more.",
                self.what
            ))
            .hint("Try again when some have ended."));
        }
        *taken.entry(client).or_default() += 1;
        Ok(Arc::new(Place {
            all: Arc::clone(self),
            client,
        }))
    }

    fn taken(&self) -> MutexGuard<'_, HashMap<Client, usize>> {
        lock(&self.taken)
    }
}

impl Place {
    /// Whose place this is.
    pub fn client(&self) -> Client {
        self.client
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.all.taken();
        if let Some(count) = taken.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_client_can_take_all_connections() {
        let places = Places::of_connections(1000, Some(64));
        let take = |client| places.take(client);
        let flood: Vec<_> = (0..12).map(|_| take(Client::Process(1)).unwrap()).collect();
        let error = take(Client::Process(1)).unwrap_err();
        assert!(error.0.message.contains("12 open connections of process 1"));
        let other = take(Client::Process(2)).unwrap();
        let net: Vec<_> = (0..3).map(|_| take(Client::Network).unwrap()).collect();
        let error = take(Client::Process(3)).unwrap_err();
        assert!(error.0.message.contains("16 open connections,"));
        drop(other);
        take(Client::Process(3)).unwrap();
        drop(flood);
        take(Client::Process(1)).unwrap();
        drop(net);
        assert!(places.taken().is_empty());
    }
}
