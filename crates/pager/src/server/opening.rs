//! Opens VMs' images and disks on threads of their own, because it can be slow: a whole manifest is
//! read, and a disk cache may have to be created chunk by chunk.

use super::Server;
use super::served::Served;
use crate::disk::Disk;
use crate::image::StoredImage;
use jiffy_wire::pager::{OpenDisk, PagerRequest};
use std::mem;
use std::path::Path;
use std::sync::Arc;

/// What to open.
#[derive(PartialEq)]
pub(super) enum Wanted {
    /// A `Serve` request with all its fields.
    Memory(PagerRequest),
    Disk(OpenDisk),
}

/// The result.
pub(super) enum Opened {
    Memory(Arc<StoredImage>),
    Disk(Arc<Disk>),
}

pub(super) struct Opening {
    wanted: Wanted,
    /// Clients that wait for the result; none if the request was forgotten.
    clients: Vec<u64>,
    /// Clients that asked to forget it.
    forgetting: Vec<u64>,
}

impl Opening {
    pub fn new(wanted: Wanted, client: u64) -> Opening {
        Opening {
            wanted,
            clients: vec![client],
            forgetting: Vec::new(),
        }
    }

    pub fn name(&self) -> &str {
        match &self.wanted {
            Wanted::Memory(PagerRequest::Serve { name, .. }) => name,
            Wanted::Memory(_) => "",
            Wanted::Disk(request) => &request.name,
        }
    }

    pub fn socket(&self) -> &Path {
        match &self.wanted {
            Wanted::Memory(PagerRequest::Serve { socket, .. }) => socket,
            Wanted::Memory(_) => Path::new(""),
            Wanted::Disk(request) => &request.socket,
        }
    }

    pub fn disk(&self) -> Option<&OpenDisk> {
        match &self.wanted {
            Wanted::Disk(request) => Some(request),
            Wanted::Memory(_) => None,
        }
    }

    /// Adds a client that waits, if it wants the same.
    pub fn join(&mut self, wanted: &Wanted, client: u64) -> bool {
        let same = self.wanted == *wanted && !self.clients.is_empty();
        if same {
            self.clients.push(client);
        }
        same
    }
}

impl Server {
    /// Serves what was opened, and answers the clients that wait.
    pub(super) fn opened(&mut self, name: &str, outcome: Result<Opened, String>) {
        let Some(opening) = self.opening.remove(name) else {
            return;
        };
        if opening.clients.is_empty() {
            // Dropped before the answer, because the client may open the files after it.
            drop(outcome);
        } else {
            let outcome = outcome.and_then(|opened| match (opening.wanted, opened) {
                (Wanted::Memory(request), Opened::Memory(image)) => {
                    let served = Served::new(request, image)?;
                    tracing::info!(vm = name, "waiting for its VMM");
                    self.served.insert(name.to_owned(), served);
                    Ok(())
                }
                (Wanted::Disk(request), Opened::Disk(disk)) => self.serve_disk(request, disk),
                _ => Err("something else was opened".to_owned()),
            });
            for client in opening.clients {
                self.answer_late(client, outcome.clone().err());
            }
        }
        for client in opening.forgetting {
            self.answer_late(client, None);
        }
    }

    /// Drops what is being opened as soon as it is open; false if nothing of this name is being
    /// opened.
    pub(super) fn forget_opening(&mut self, name: &str, client: u64) -> bool {
        let Some(opening) = self.opening.get_mut(name) else {
            return false;
        };
        opening.forgetting.push(client);
        for client in mem::take(&mut opening.clients) {
            self.answer_late(client, Some(format!("{name} was forgotten")));
        }
        true
    }
}
