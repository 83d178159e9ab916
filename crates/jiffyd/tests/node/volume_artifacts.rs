//! Snapshots of VMs with volumes in a registry: valid and hostile ones.

use crate::client::Answer;
use crate::daemon::{Daemon, command, vm};
use crate::images::{by_name, encoded, push, steps};
use crate::registry::Registry;
use jiffy_registry::artifact::{Config, FileToPush, SNAPSHOT_TYPE};
use jiffy_registry::{Artifact, Client, ClientOptions, Reference, RemoteArtifact};
use jiffy_store::{WriteOptions, write_image};
use jiffy_wire::api::{ApiError, CreateVm, ErrorKind, PullStep, Snapshot};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

const SIZE: u64 = (3 << 20) + 512;

/// A pushed snapshot, and the parts that one with a volume would have in addition.
struct Stage {
    registry: Registry,
    client: Client,
    there: RemoteArtifact,
    folder: tempfile::TempDir,
    /// Id of the volume's image.
    image: String,
    other: Daemon,
}

impl Stage {
    fn new() -> Stage {
        let registry = Registry::start();
        let daemon = Daemon::start();
        let frames = daemon.run_captured(vm(command(&["/bin/sleep", "1000"])));
        let name = registry.name("plain:1");
        push(&daemon, "ready", &name).unwrap();
        drop(frames);
        let client = Client::new(ClientOptions::default()).unwrap();
        let reference = Reference::parse(&name, None).unwrap();
        let there = RemoteArtifact::open(&client, &reference, &()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(folder.path().join("data.img"))
            .unwrap();
        file.set_len(SIZE).unwrap();
        file.write_all_at(b"what the VM wrote", 2 << 20).unwrap();
        file.write_all_at(b"end", SIZE - 3).unwrap();
        let to = folder.path().join("volume-data.image");
        let image = write_image(&to, &file, &WriteOptions::default()).unwrap();
        Stage {
            registry,
            client,
            there,
            folder,
            image: image.id.to_string(),
            other: Daemon::start(),
        }
    }

    /// Changes the configuration of the snapshot, uploads it with the volume's file, and pulls it.
    fn pull(&self, change: impl Fn(&mut Value)) -> Result<Snapshot, ApiError> {
        let mut config: Value = serde_json::from_slice(self.there.config()).unwrap();
        config["manifest"]["spec"]["disks"] = json!([{"name": "data", "mount": "/data"}]);
        config["volumes"] = json!([{"name": "data", "size": SIZE, "image": self.image}]);
        change(&mut config);
        let files = self.there.files().iter();
        let mut files: Vec<FileToPush> = files
            .map(|file| FileToPush::remote(file.name(), file))
            .collect();
        let volume = self.folder.path().join("volume-data.image");
        files.push(FileToPush::local("volume-data.image", volume, "data"));
        let name = self.registry.name("plain:2");
        let reference = Reference::parse(&name, None).unwrap();
        let config = Config {
            media_type: "application/vnd.jiffy.snapshot.config.v1+json".into(),
            bytes: serde_json::to_vec(&config).unwrap(),
        };
        Artifact::plan(SNAPSHOT_TYPE, config, Default::default(), &files, &())
            .unwrap()
            .push(&self.client, &reference, self.folder.path(), &())
            .unwrap();
        let wanted = serde_json::to_vec(&by_name(&name)).unwrap();
        let answer: Answer = self.other.post("/v1/pulls", &wanted);
        match steps(&answer).pop().unwrap() {
            PullStep::PulledSnapshot { snapshot, .. } => Ok(snapshot),
            PullStep::Failed(error) => Err(error),
            step => panic!("{step:?}"),
        }
    }
}

#[test]
fn a_volume_is_pulled_with_its_snapshot_but_no_hostile_one() {
    let stage = Stage::new();
    let here = |folder: &str| {
        let entries = fs::read_dir(stage.other.data.join(folder)).unwrap();
        entries.count()
    };
    let refused = |why: &str, change: &dyn Fn(&mut Value)| {
        let error = stage.pull(change).unwrap_err();
        assert!(error.message.contains(why), "{why}: {}", error.message);
        assert!(error.message.ends_with('.'), "{}", error.message);
        assert_eq!(here("snapshots"), 0, "{why}");
    };
    let volume = |field: &'static str, value: Value| {
        move |config: &mut Value| config["volumes"][0][field] = value.clone()
    };
    let renamed = |name: &'static str| {
        move |config: &mut Value| {
            config["volumes"][0]["name"] = json!(name);
            config["manifest"]["spec"]["disks"][0]["name"] = json!(name);
        }
    };
    for name in ["../../up", ".root", "", "a/b"] {
        refused("can't be the name of a volume", &renamed(name));
    }
    refused("no file volume-gone.image", &renamed("gone"));
    refused(
        "do not match its configuration",
        &volume("name", json!("other")),
    );
    refused("do not match its configuration", &|config| {
        config["volumes"] = json!([])
    });
    refused("do not match its configuration", &|config| {
        config["manifest"]["spec"]["disks"] = json!([]);
    });
    refused("do not match its configuration", &|config| {
        config["manifest"]["spec"]["own_volumes"] = json!(true);
    });
    refused("given twice", &|config| {
        for list in ["/volumes", "/manifest/spec/disks"] {
            let list = config.pointer_mut(list).unwrap().as_array_mut().unwrap();
            list.push(list[0].clone());
        }
    });
    refused("at most 24", &|config| {
        for list in ["/volumes", "/manifest/spec/disks"] {
            let list = config.pointer_mut(list).unwrap().as_array_mut().unwrap();
            *list = vec![list[0].clone(); 25];
        }
    });
    refused("absolute path", &|config| {
        config["manifest"]["spec"]["disks"][0]["mount"] = json!("/../etc");
    });
    for size in [0, 511, 513, u64::MAX, (256 << 30) + 512] {
        refused("of an invalid size", &volume("size", json!(size)));
    }
    refused("not the one", &volume("size", json!(SIZE + 512)));
    refused("not the one", &volume("image", json!("0".repeat(32))));
    refused("is not the id", &volume("image", json!("../data")));
    // Only valid volumes are accepted.
    let snapshot = stage.pull(|_| ()).unwrap();
    assert_eq!(snapshot.volumes.len(), 1);
    assert_eq!(snapshot.volumes[0].mount.as_deref(), Some("/data"));
    let folder = fs::read_dir(stage.other.data.join("snapshots"))
        .unwrap()
        .next();
    let file = folder.unwrap().unwrap().path().join("volumes/data.img");
    let wrote = fs::read(stage.folder.path().join("data.img")).unwrap();
    assert!(fs::read(&file).unwrap() == wrote);
    assert!(snapshot.other_bytes > 0);
    // Its VMs get clones of it, where files can be cloned.
    let vm = stage.other.run_detached(CreateVm {
        from: Some(snapshot.name.clone()),
        name: Some("again".into()),
        ..CreateVm::default()
    });
    if vm.status == 200 {
        let id = stage.other.vm("again").id;
        let clone = stage.other.vm_folder(&id).join("volumes/data.img");
        assert!(fs::read(clone).unwrap() == wrote);
        stage.other.delete("/v1/vms/again?force=true");
    } else {
        vm.error(ErrorKind::WrongState);
    }
    let path = format!("/v1/snapshots/{}", encoded(&snapshot.name));
    assert_eq!(stage.other.delete(&path).status, 204);
    assert_eq!(here("snapshots"), 0);
}
