//! Handles the requests on the control socket.

use super::opening::{Opened, Opening, Wanted};
use super::served::Served;
use super::{Client, MAX_CLIENTS, Notice, Server, listen, spawn_thread};
use crate::image::Unreadable;
use crate::io_pool::Urgency;
use crate::vm::Vm;
use jiffy_wire::pager::{PagerRequest, PagerResponse};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// The answer; `None` if it is sent later.
pub(super) type Answer = Option<PagerResponse>;

impl Server {
    pub(super) fn accept_client(&mut self) {
        if let Some(stream) = listen::accept(&self.control) {
            if self.clients.len() >= MAX_CLIENTS {
                // The oldest idle connection is closed: clients send their request right after
                // connecting.
                let silent = self.clients.iter().find(|(_, client)| client.is_idle());
                if let Some(silent) = silent.map(|(number, _)| *number) {
                    self.clients.remove(&silent);
                }
            }
            self.clients.insert(self.next, Client::new(stream));
            self.next += 1;
        }
    }

    pub(super) fn read_client(&mut self, number: u64) {
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
            PagerRequest::Serve { .. } => self.serve(request, client),
            PagerRequest::Origins { image, origins } => {
                let (images, notifier) = (self.images.clone(), self.notifier.clone());
                spawn_thread("origins", move || {
                    let problem = images.set_origins(&image, origins).err();
                    notifier.send(Notice::Answer { client, problem });
                })
                .map(|()| None)
            }
            PagerRequest::OpenDisk(request) => self.open_disk(request, client),
            PagerRequest::EndRecording { name } => self.end_recording(&name, client),
            PagerRequest::CompleteImage { image } => self.complete_image(&image, client),
            PagerRequest::Complete { name } => self.complete(&name, client),
            PagerRequest::Forget { name } => self.forget(&name, client),
            PagerRequest::Stats { name } => match self.disks.get(&name) {
                Some(served) => Ok(Some(PagerResponse::Stats(served.disk.stats()))),
                None => self
                    .find(&name)
                    .map(|served| Some(PagerResponse::Stats(served.stats()))),
            },
        };
        result.unwrap_or_else(|problem| Some(PagerResponse::Error(problem)))
    }

    fn find(&mut self, name: &str) -> Result<&mut Served, String> {
        self.served
            .get_mut(name)
            .ok_or_else(|| format!("no VM or disk {name} is served here"))
    }

    fn serve(&mut self, request: PagerRequest, client: u64) -> Result<Answer, String> {
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
            // A restarted node may repeat its request.
            return if *served.request() == request {
                Ok(Some(PagerResponse::Ok))
            } else {
                Err(format!(
                    "VM {name} is already served with other options; forget it first"
                ))
            };
        }
        if self.disks.contains_key(name) {
            return Err(format!("{name} is a disk that is open here"));
        }
        let wanted = Wanted::Memory(request.clone());
        if let Some(opening) = self.opening.get_mut(name) {
            return match opening.join(&wanted, client) {
                true => Ok(None),
                false => Err(format!(
                    "{name} is being opened with other options; forget it first"
                )),
            };
        }
        self.check_socket(socket)?;
        let (images, notifier) = (self.images.clone(), self.notifier.clone());
        let (path, opened) = (image.clone(), name.clone());
        spawn_thread("image-open", move || {
            let outcome = images.open(&path).map(Opened::Memory);
            let name = opened;
            notifier.send(Notice::Opened { name, outcome });
        })?;
        let opening = Opening::new(wanted, client);
        self.opening.insert(name.clone(), opening);
        Ok(None)
    }

    /// Writes the recording of a disk, and stops recording.
    fn end_recording(&mut self, name: &str, client: u64) -> Result<Answer, String> {
        let Some(served) = self.disks.get(name) else {
            return Err(format!("no disk {name} is open here"));
        };
        match served.recording(true) {
            None => Ok(Some(PagerResponse::Ok)),
            recording => {
                self.recorder.write(recording, Some(client));
                Ok(None)
            }
        }
    }

    /// Fetches all of an image that is missing.
    fn complete_image(&mut self, image: &Path, client: u64) -> Result<Answer, String> {
        let (images, notifier) = (self.images.clone(), self.notifier.clone());
        let (io_pool, path) = (self.io_pool.clone(), image.to_owned());
        spawn_thread("image-open", move || {
            let image = match images.open(&path) {
                Ok(image) => image,
                Err(problem) => {
                    let problem = Some(problem);
                    return notifier.send(Notice::Answer { client, problem });
                }
            };
            io_pool.push(Urgency::Ahead, image.reader().waits_for(), move |_| {
                let problem = image.reader().complete().err();
                let problem = problem.map(|error| Unreadable::from_error(&error).0);
                drop(image);
                notifier.send(Notice::Answer { client, problem });
            });
        })?;
        Ok(None)
    }

    fn complete(&mut self, name: &str, client: u64) -> Result<Answer, String> {
        if let Some(served) = self.disks.get(name) {
            let notifier = self.notifier.clone();
            let done = Box::new(move |problem| notifier.send(Notice::Answer { client, problem }));
            served.disk.complete(&self.io_pool, done);
            return Ok(None);
        }
        let served = self.find(name)?;
        if let Some(failed) = served.failed() {
            return Err(failed.to_owned());
        }
        match served.vm().cloned() {
            Some(vm) => self.complete_vm(name, vm, client),
            // The VMM has lost the previous pager, and will connect to this one soon.
            None => served.await_vmm(client),
        }
        Ok(None)
    }

    fn complete_vm(&self, name: &str, vm: Arc<Vm>, client: u64) {
        let notifier = self.notifier.clone();
        let name = name.to_owned();
        let done = Box::new(move |problem| {
            notifier.send(Notice::Completed {
                name,
                client,
                problem,
            });
        });
        self.pool.complete(vm, done);
    }

    /// A VMM has connected: starts the completions that waited for it.
    pub(super) fn start_completions(&mut self, name: &str) {
        let Some(served) = self.served.get_mut(name) else {
            return;
        };
        let Some(vm) = served.vm().cloned() else {
            return;
        };
        for client in served.take_waiting(None) {
            self.complete_vm(name, vm.clone(), client);
        }
    }

    /// Answers the clients that waited too long for a VMM.
    pub(super) fn expire_completions(&mut self, now: Instant) {
        let mut over = Vec::new();
        for (name, served) in &mut self.served {
            let clients = served.take_waiting(Some(now));
            over.extend(clients.into_iter().map(|client| (name.clone(), client)));
        }
        for (name, client) in over {
            let problem = format!("the VMM of VM {name} is not connected");
            self.answer_late(client, Some(problem));
        }
    }

    fn forget(&mut self, name: &str, client: u64) -> Result<Answer, String> {
        if self.forget_opening(name, client) || self.forget_disk(name, client)? {
            return Ok(None);
        }
        let Some(mut served) = self.served.remove(name) else {
            return Err(format!("no VM or disk {name} is served here"));
        };
        for client in served.take_waiting(None) {
            self.answer_late(client, Some(format!("{name} was forgotten")));
        }
        served.detach(&self.pool);
        served.remove_socket();
        served.remove_notes();
        tracing::info!(vm = name, "VM forgotten");
        match served.recording() {
            None => Ok(Some(PagerResponse::Ok)),
            recording => {
                self.recorder.write(recording, Some(client));
                Ok(None)
            }
        }
    }
}
