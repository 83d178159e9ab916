//! A node with one object of each kind, and copies of it.

use super::things::Thing;
use crate::daemon::{Daemon, eventually, named, pagers, shell, tar_of, vm};
use crate::images::{by_name, encoded, pull, push};
use crate::registry::Registry;
use crate::snapshots::counter;
use jiffy_wire::api::{
    CreateVm, Hibernated, Image, KernelInfo, RootDisk, Snapshot, SnapshotMade, Vm, VmState, Volume,
    VolumeUse,
};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Disables all background work during a test.
const OPTIONS: [&str; 4] = ["--standby", "0", "--spare", "0"];
/// A stopped VM, needed only for its record.
pub const STOPPED: &str = "echo done";

/// The original of all copies; its daemon has ended.
pub struct Original {
    pub daemon: Daemon,
    /// A lazy image.
    pub lazy: String,
    pub stopped: String,
    pub asleep: String,
    _registry: Registry,
}

impl Original {
    pub fn make() -> Original {
        let registry = Registry::start();
        let lazy = registry.name("lazy:1");
        let tar = tar_of(&[("noise", &crate::images::noise(300 << 10))]);
        let maker = Daemon::start();
        maker
            .post("/v1/images/mine?kind=root", &tar)
            .json::<Image>();
        push(&maker, "mine", &lazy).unwrap();
        drop(maker);

        let mut daemon = Daemon::with(&OPTIONS);
        pull(&daemon, &by_name(&lazy)).unwrap();
        daemon
            .post("/v1/images/whole?kind=root", &tar)
            .json::<Image>();
        for volume in ["free", "held"] {
            let path = format!("/v1/volumes/{volume}");
            daemon.post(&path, b"{\"size_mib\":2}").json::<Volume>();
        }
        put_kernel(&daemon);
        let with_disk = CreateVm {
            image: Some("whole".into()),
            root_disk: Some(RootDisk::Layer { size_mib: 64 }),
            ..vm(shell(STOPPED))
        };
        let stopped: Vm = daemon.run_detached(named("stopped", with_disk)).json();
        daemon.when("stopped", VmState::Exited);
        let asleep: Vm = daemon.run_detached(named("asleep", counter())).json();
        daemon
            .post("/v1/vms/asleep/hibernate", b"")
            .json::<Hibernated>();
        // Two snapshots; the second is built on the first.
        daemon.run_detached(named("source", counter())).json::<Vm>();
        for name in ["early", "late"] {
            let wanted = format!("{{\"name\":\"{name}\"}}");
            daemon
                .post("/v1/vms/source/snapshots", wanted.as_bytes())
                .json::<SnapshotMade>();
        }
        assert_eq!(daemon.delete("/v1/vms/source?force=true").status, 204);
        eventually("a golden snapshot is made", || {
            let all: Vec<Snapshot> = daemon.get("/v1/snapshots?all=true").json();
            all.iter().any(|snapshot| snapshot.golden)
        });
        daemon.shut_down();
        Original {
            daemon,
            lazy,
            stopped: stopped.id,
            asleep: asleep.id,
            _registry: registry,
        }
    }

    /// A copy with a running VM and no daemon, and that VM's id.
    pub fn copy(&self) -> (Daemon, String) {
        let mut daemon = Daemon::prepared(&OPTIONS);
        for folder in ["lib", "share"] {
            // The digests of these files are known.
            let path = daemon.folder.path().join(folder);
            fs::remove_dir_all(&path).unwrap();
            symlink(self.daemon.folder.path().join(folder), path).unwrap();
        }
        let copied = Command::new("cp")
            .args(["-a", "--sparse=always"])
            .args([&self.daemon.data, &daemon.data])
            .status();
        assert!(copied.unwrap().success());
        daemon.up();
        let running = CreateVm {
            image: Some(self.lazy.clone()),
            disks: vec![volume("held")],
            ..counter()
        };
        let vm: Vm = daemon.run_detached(named("running", running)).json();
        let record = daemon.vm_folder(&vm.id).join("vm.json");
        eventually("it is written down", || record.exists());
        daemon.killed();
        // Temporary files of the killed daemon belong to no object.
        let _ = fs::remove_file(record.with_extension("tmp"));
        (daemon, vm.id)
    }

    /// The object to which a path belongs, if it is one.
    pub fn owner(&self, path: &Path, running: &str) -> Option<Thing> {
        let mut parts = path.iter().map(|part| part.to_str().unwrap());
        let (top, store) = (parts.next()?, parts.next()?);
        let name = parts.next();
        let vm_of = |id: &str| match id {
            id if id == running => Some(Thing::Running),
            id if id == self.stopped => Some(Thing::Stopped),
            id if id == self.asleep => Some(Thing::Asleep),
            _ => None,
        };
        match (top, store) {
            ("run", "vms") | ("data", "vms") => vm_of(name?),
            ("run", "pager") => name.map(|_| Thing::Running),
            ("data", "images") => Some(match name? {
                "base" => Thing::Base,
                "whole" => Thing::Whole,
                _ => Thing::Lazy,
            }),
            ("data", "chunks" | "disks") => name.map(|_| Thing::Lazy),
            ("data", "snapshots") => Some(match name? {
                "early" => Thing::Early,
                _ => Thing::Late,
            }),
            ("data", "golden") => name.map(|_| Thing::Golden),
            ("data", "volumes") => Some(match name? {
                "free.img" => Thing::Free,
                _ => Thing::Held,
            }),
            ("data", "kernels") => name.map(|_| Thing::Kernel),
            _ => None,
        }
    }

    /// The path of an object that has only one.
    pub fn place(&self, thing: Thing, daemon: &Daemon, running: &str) -> Option<PathBuf> {
        let data = |folder: &str, name: &str| daemon.data.join(folder).join(name);
        Some(match thing {
            Thing::Running => daemon.vm_folder(running),
            Thing::Stopped => daemon.vm_folder(&self.stopped),
            Thing::Asleep => daemon.vm_folder(&self.asleep),
            Thing::Base => data("images", "base"),
            Thing::Whole => data("images", "whole"),
            Thing::Lazy => data("images", &encoded(&self.lazy).replace(':', "%3A")),
            Thing::Early => data("snapshots", "early"),
            Thing::Late => data("snapshots", "late"),
            Thing::Free => data("volumes", "free.img"),
            Thing::Held => data("volumes", "held.img"),
            Thing::Kernel => data("kernels", "own"),
            Thing::Golden => return None,
        })
    }
}

/// Installs the kernel that only the checks of copies boot.
pub fn put_kernel(daemon: &Daemon) {
    let bz = crate::api::bzimage();
    daemon
        .ask("PUT", "/v1/kernels/own", &bz)
        .json::<KernelInfo>();
}

pub fn volume(name: &str) -> VolumeUse {
    VolumeUse {
        name: name.into(),
        ..VolumeUse::default()
    }
}

/// Ends the pagers of a node, which outlive its daemon.
pub fn end_pagers(daemon: &Daemon) {
    for pid in pagers(daemon.folder.path()) {
        crate::daemon::kill(pid);
    }
}
