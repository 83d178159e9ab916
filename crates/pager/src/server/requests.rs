//! What clients of the control socket ask for.

use super::served::Served;
use super::{Client, Notice, Server, listen};
use crate::image::{ChunkImage, StoredImage};
use crate::pool::Job;
use jiffy_wire::pager::{PagerRequest, PagerResponse};
use std::path::Path;
use std::sync::Arc;

/// An answer, unless it comes later.
type Answer = Option<PagerResponse>;

impl Server {
    pub(super) fn accept_client(&mut self) {
        if let Some(stream) = listen::accept(&self.control) {
            self.clients.insert(self.next, Client::new(stream));
            self.next += 1;
        }
    }

    pub(super) fn hear_client(&mut self, number: u64) {
        let there = self.clients.get_mut(&number).is_some_and(Client::exchange);
        if there {
            self.continue_client(number);
        } else {
            self.clients.remove(&number);
        }
    }

    /// Answers the requests that have come.
    pub(super) fn continue_client(&mut self, number: u64) {
        loop {
            let request = self.clients.get_mut(&number).and_then(Client::next_request);
            let Some(request) = request else {
                break;
            };
            let answer = self.answer(request, number);
            if let Some(client) = self.clients.get_mut(&number) {
                match answer {
                    Some(answer) => client.answer(&answer),
                    None => client.wait(),
                }
            }
        }
        if self
            .clients
            .get_mut(&number)
            .is_some_and(|client| !client.flush())
        {
            self.clients.remove(&number);
        }
    }

    fn answer(&mut self, request: PagerRequest, client: u64) -> Answer {
        let result = match request {
            PagerRequest::Ping => Ok(Some(PagerResponse::Ok)),
            PagerRequest::Serve { .. } => self.serve(request),
            PagerRequest::Origins { .. }
            | PagerRequest::OpenDisk(_)
            | PagerRequest::EndRecording { .. }
            | PagerRequest::CompleteImage { .. } => Err("this pager serves no disks".into()),
            PagerRequest::Complete { name } => self.complete(&name, client),
            PagerRequest::Forget { name } => self.forget(&name, client),
            PagerRequest::Stats { name } => self
                .find(&name)
                .map(|served| Some(PagerResponse::Stats(served.stats()))),
        };
        result.unwrap_or_else(|problem| Some(PagerResponse::Error(problem)))
    }

    fn find(&mut self, name: &str) -> Result<&mut Served, String> {
        self.served
            .get_mut(name)
            .ok_or_else(|| format!("no VM {name} is served here"))
    }

    fn serve(&mut self, request: PagerRequest) -> Result<Answer, String> {
        let PagerRequest::Serve {
            name,
            socket,
            image,
            ..
        } = &request
        else {
            return Ok(None);
        };
        if let Some(served) = self.served.get(name) {
            // A node that was started anew may ask again.
            return if *served.request() == request {
                Ok(Some(PagerResponse::Ok))
            } else {
                Err(format!(
                    "VM {name} is served already, otherwise; forget it first"
                ))
            };
        }
        if self.served.values().any(|other| other.socket() == socket) {
            return Err(format!("{} serves another VM", socket.display()));
        }
        let opened = self.open_image(image)?;
        let name = name.clone();
        let served = Served::new(request, opened)?;
        tracing::info!(vm = name, "waiting for its VMM");
        self.served.insert(name, served);
        Ok(Some(PagerResponse::Ok))
    }

    /// Opens an image, once for all VMs that have it.
    fn open_image(&mut self, path: &Path) -> Result<Arc<dyn ChunkImage>, String> {
        self.images.retain(|_, image| image.strong_count() > 0);
        let identity = StoredImage::identity(path);
        let known = identity.and_then(|identity| self.images.get(&identity)?.upgrade());
        if let Some(image) = known {
            return Ok(image);
        }
        let image = Arc::new(StoredImage::open(path).map_err(|error| error.0)?);
        if let Some(identity) = identity {
            self.images.insert(identity, Arc::downgrade(&image));
        }
        Ok(image)
    }

    fn complete(&mut self, name: &str, client: u64) -> Result<Answer, String> {
        let served = self.find(name)?;
        if let Some(failed) = served.failed() {
            return Err(failed.to_owned());
        }
        let Some(vm) = served.vm() else {
            return Err(format!("the VMM of VM {name} is not connected"));
        };
        let job_vm = vm.clone();
        let notifier = self.notifier.clone();
        let name = name.to_owned();
        let done = Box::new(move |problem| {
            notifier.send(Notice::Completed {
                name,
                client,
                problem,
            });
        });
        self.pool.push(Job::complete(job_vm, done));
        Ok(None)
    }

    fn forget(&mut self, name: &str, client: u64) -> Result<Answer, String> {
        let Some(mut served) = self.served.remove(name) else {
            return Err(format!("no VM {name} is served here"));
        };
        served.let_go(&self.pool);
        served.remove_socket();
        served.remove_notes();
        tracing::info!(vm = name, "forgotten");
        match served.recording() {
            None => Ok(Some(PagerResponse::Ok)),
            recording => {
                self.scribe.write(recording, Some(client));
                Ok(None)
            }
        }
    }
}
