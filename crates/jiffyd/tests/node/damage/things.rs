//! The objects of a node: checks whether each works, and whether its damage is reported.

use super::node::{Original, put_kernel, volume};
use crate::client::Answer;
use crate::daemon::{Daemon, command, named, shell, vm};
use crate::images::encoded;
use jiffy_wire::agent::ExitStatus;
use jiffy_wire::api::{ApiError, CreateVm, Image, KernelInfo, Snapshot, Vm, VmState, Volume};
use std::fs;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thing {
    Running,
    Stopped,
    Asleep,
    Base,
    Whole,
    Lazy,
    Early,
    Late,
    Golden,
    Free,
    Held,
    Kernel,
}

/// All objects, the slowest to check last.
pub const THINGS: [Thing; 12] = [
    Thing::Running,
    Thing::Stopped,
    Thing::Asleep,
    Thing::Base,
    Thing::Whole,
    Thing::Lazy,
    Thing::Early,
    Thing::Late,
    Thing::Golden,
    Thing::Free,
    Thing::Held,
    Thing::Kernel,
];

/// A copy of the node with its second daemon.
pub struct Copy<'a> {
    pub original: &'a Original,
    pub daemon: &'a Daemon,
    /// The id of the running VM.
    pub running: &'a str,
    /// The log of the second daemon so far.
    pub log: String,
}

impl Thing {
    /// Objects that can't work without this one.
    pub fn needed_by(self) -> &'static [Thing] {
        match self {
            Thing::Base => &[Thing::Golden],
            Thing::Whole => &[Thing::Stopped],
            Thing::Lazy | Thing::Held => &[Thing::Running],
            _ => &[],
        }
    }

    fn vm(self) -> Option<&'static str> {
        match self {
            Thing::Running => Some("running"),
            Thing::Stopped => Some("stopped"),
            Thing::Asleep => Some("asleep"),
            _ => None,
        }
    }
}

type Works = Result<(), String>;

impl Copy<'_> {
    /// Uses the object.
    pub fn works(&self, thing: Thing) -> Works {
        match thing {
            Thing::Running => self.answers("running"),
            Thing::Stopped => {
                good(self.daemon.post("/v1/vms/stopped/start", b""))?;
                let ended: Vm = json(self.daemon.post("/v1/vms/stopped/wait", b""))?;
                match (ended.exit, ended.error) {
                    (Some(ExitStatus::Code(0)), None) => Ok(()),
                    other => Err(format!("it ended with {other:?}")),
                }
            }
            Thing::Asleep => {
                let vm: Vm = json(self.daemon.get("/v1/vms/asleep"))?;
                if vm.state != VmState::Hibernated {
                    return Err(format!("it is {:?}", vm.state));
                }
                good(self.daemon.post("/v1/vms/asleep/wake", b""))?;
                self.answers("asleep")
            }
            Thing::Early => self.goes_on_from("early"),
            Thing::Late => self.goes_on_from("late"),
            Thing::Golden => self.runs(CreateVm {
                cold: false,
                ..plain()
            }),
            // A VM has it.
            Thing::Held => self.listed(thing)?.map_or(Ok(()), Err),
            Thing::Base => self.runs(plain()),
            Thing::Whole => self.runs(CreateVm {
                image: Some("whole".into()),
                ..plain()
            }),
            Thing::Lazy => self.runs(CreateVm {
                image: Some(self.original.lazy.clone()),
                ..plain()
            }),
            Thing::Free => self.runs(CreateVm {
                disks: vec![volume("free")],
                ..plain()
            }),
            Thing::Kernel => self.runs(CreateVm {
                kernel: Some("own".into()),
                ..plain()
            }),
        }
    }

    /// Uses all objects but these, in fewer steps.
    pub fn others_work(&self, but: &[Thing]) -> Works {
        for thing in THINGS.iter().filter(|thing| !but.contains(thing)) {
            let is_run_below = matches!(
                thing,
                Thing::Base | Thing::Whole | Thing::Free | Thing::Kernel
            );
            if !is_run_below {
                self.works(*thing)
                    .map_err(|why| format!("{thing:?}: {why}"))?;
            }
            match self.listed(*thing) {
                Ok(None) => {}
                Ok(Some(error)) => return Err(format!("{thing:?} is shown with: {error}")),
                Err(why) => return Err(format!("{thing:?}: {why}")),
            }
        }
        let is_intact = |thing: Thing| !but.contains(&thing);
        let image = match is_intact(Thing::Whole) {
            true => "whole",
            false => "base",
        };
        self.runs(CreateVm {
            image: Some(image.into()),
            kernel: is_intact(Thing::Kernel).then(|| "own".into()),
            disks: is_intact(Thing::Free)
                .then(|| volume("free"))
                .into_iter()
                .collect(),
            ..plain()
        })
        .map_err(|why| format!("an image, a kernel and a volume: {why}"))
    }

    /// The error with which it is listed, if it is listed.
    pub fn listed(&self, thing: Thing) -> Result<Option<String>, String> {
        let daemon = self.daemon;
        let found = match thing {
            Thing::Running | Thing::Stopped | Thing::Asleep => {
                let id = self.id(thing);
                let all: Vec<Vm> = json(daemon.get("/v1/vms?all=true"))?;
                let vm = all.into_iter().find(|vm| vm.id == id);
                vm.map(|vm| vm.error.or(vm.warnings.last().cloned()))
            }
            Thing::Base | Thing::Whole | Thing::Lazy => {
                let all: Vec<Image> = json(daemon.get("/v1/images"))?;
                let image = all.into_iter().find(|image| image.name == self.name(thing));
                image.map(|image| image.error)
            }
            Thing::Early | Thing::Late | Thing::Golden => {
                let all: Vec<Snapshot> = json(daemon.get("/v1/snapshots?all=true"))?;
                let is_it = |snapshot: &Snapshot| match thing {
                    Thing::Golden => snapshot.golden,
                    _ => snapshot.name == self.name(thing),
                };
                all.into_iter().find(is_it).map(|snapshot| snapshot.error)
            }
            Thing::Free | Thing::Held => {
                let all: Vec<Volume> = json(daemon.get("/v1/volumes"))?;
                let volume = all.into_iter().find(|one| one.name == self.name(thing));
                volume.map(|volume| volume.error)
            }
            Thing::Kernel => {
                let all: Vec<KernelInfo> = json(daemon.get("/v1/kernels"))?;
                let kernel = all.into_iter().find(|one| one.name == self.name(thing));
                kernel.map(|kernel| kernel.error)
            }
        };
        found.ok_or_else(|| ABSENT.to_owned())
    }

    /// Does `inspect` report its damage? Not all objects have one.
    pub fn inspected(&self, thing: Thing) -> Works {
        let kind = match thing {
            Thing::Running | Thing::Stopped | Thing::Asleep => {
                let vm: Vm = json(self.daemon.get(&format!("/v1/vms/{}", self.id(thing))))?;
                return match vm.error.or(vm.warnings.last().cloned()) {
                    Some(error) => sentence(&error),
                    None => Err("inspect says nothing of an error".into()),
                };
            }
            Thing::Base | Thing::Whole | Thing::Lazy => "images",
            Thing::Early | Thing::Late => "snapshots",
            _ => return Ok(()),
        };
        let path = format!("/v1/{kind}/{}", encoded(&self.name(thing)));
        let answer = self.daemon.get(&path);
        if answer.status == 200 {
            let shown: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
            return match shown["error"].as_str() {
                Some(error) => sentence(error),
                None => Err("inspect says nothing of an error".into()),
            };
        }
        sentence(&refusal(&answer)?)
    }

    /// Does the log name it?
    pub fn logged(&self, thing: Thing) -> bool {
        let names = match thing {
            Thing::Golden => vec!["golden".to_owned()],
            _ => vec![self.name(thing), self.id(thing)],
        };
        let mut lines = self.log.lines();
        lines.any(|line| {
            let counts = [" WARN ", " ERROR ", " INFO "]
                .iter()
                .any(|it| line.contains(it));
            counts && names.iter().any(|name| line.contains(name.as_str()))
        })
    }

    /// Removes it, after the objects that need it.
    pub fn removed(&self, thing: Thing) -> Works {
        let mut users: Vec<_> = thing.needed_by().iter().filter_map(|it| it.vm()).collect();
        if thing == Thing::Base {
            // The hibernated VM's memory does not need it, but its record names it.
            users.push("asleep");
        }
        for user in users {
            let _ = self.daemon.delete(&format!("/v1/vms/{user}?force=true"));
        }
        let path = match thing {
            Thing::Running | Thing::Stopped | Thing::Asleep => {
                format!("/v1/vms/{}?force=true", self.id(thing))
            }
            Thing::Base | Thing::Whole | Thing::Lazy => {
                format!("/v1/images/{}", encoded(&self.name(thing)))
            }
            Thing::Early | Thing::Late => format!("/v1/snapshots/{}", self.name(thing)),
            Thing::Free | Thing::Held => format!("/v1/volumes/{}", self.name(thing)),
            // Its replacement removes it.
            Thing::Kernel => {
                put_kernel(self.daemon);
                return self.works(thing);
            }
            Thing::Golden => return good(self.daemon.post("/v1/snapshots/prune", b"")),
        };
        good(self.daemon.delete(&path))?;
        let place = self.original.place(thing, self.daemon, self.running);
        match place.filter(|path| fs::symlink_metadata(path).is_ok()) {
            Some(path) => Err(format!("it was removed, and {} is there", path.display())),
            None => Ok(()),
        }
    }

    fn id(&self, thing: Thing) -> String {
        match thing {
            Thing::Running => self.running.to_owned(),
            Thing::Stopped => self.original.stopped.clone(),
            Thing::Asleep => self.original.asleep.clone(),
            _ => self.name(thing),
        }
    }

    fn name(&self, thing: Thing) -> String {
        match thing {
            Thing::Lazy => self.original.lazy.clone(),
            Thing::Kernel => "own".into(),
            other => format!("{other:?}").to_lowercase(),
        }
    }

    fn answers(&self, vm: &str) -> Works {
        let frames = self.daemon.exec(vm, &shell("echo well"));
        let finished = frames.map_err(|answer| refused(&answer))?.finish();
        match finished.text().as_str() {
            "well\n" => Ok(()),
            other => Err(format!("it says {other:?}, {:?}", finished.end)),
        }
    }

    fn runs(&self, wanted: CreateVm) -> Works {
        let frames = self.daemon.try_run(wanted);
        let finished = frames.map_err(|answer| refused(&answer))?.finish();
        match (&finished.end, finished.text().as_str()) {
            (Some(jiffy_wire::agent::ExecOutput::Exited(ExitStatus::Code(0))), "well\n") => Ok(()),
            (end, text) => Err(format!("{text:?}, then {end:?}")),
        }
    }

    fn goes_on_from(&self, snapshot: &str) -> Works {
        let child = CreateVm {
            from: Some(snapshot.into()),
            ..named("child", CreateVm::default())
        };
        let answers = good(self.daemon.run_detached(child)).and_then(|()| self.answers("child"));
        let removed = good(self.daemon.delete("/v1/vms/child?force=true"));
        answers.and(removed)
    }
}

/// No list shows it.
pub const ABSENT: &str = "it is not listed";

/// A VM that is removed when it has answered.
fn plain() -> CreateVm {
    CreateVm {
        remove: true,
        cold: true,
        ..vm(command(&["echo", "well"]))
    }
}

fn json<T: serde::de::DeserializeOwned>(answer: Answer) -> Result<T, String> {
    match answer.status {
        200 => Ok(answer.json()),
        _ => Err(refused(&answer)),
    }
}

fn good(answer: Answer) -> Works {
    match answer.status {
        200 | 204 => Ok(()),
        _ => Err(refused(&answer)),
    }
}

fn refused(answer: &Answer) -> String {
    refusal(answer).unwrap_or_else(|why| why)
}

/// The message of a refusal.
pub fn refusal(answer: &Answer) -> Result<String, String> {
    let error: Result<ApiError, _> = serde_json::from_slice(&answer.body);
    match error {
        Ok(error) => Ok(error.message),
        Err(_) => Err(format!("{answer:?} is no refusal")),
    }
}

pub fn sentence(text: &str) -> Works {
    match text.ends_with('.') || text.contains("last line") {
        true => Ok(()),
        false => Err(format!("{text:?} is no sentence")),
    }
}
