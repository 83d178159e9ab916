//! Images: their configuration, references, registries.

use crate::client::Answer;
use crate::daemon::{Daemon, command, eventually, id_of, tar_of, vm};
use crate::registry::Registry;
use crate::snapshots::chunks;
use jiffy_wire::agent::{Command, ExitStatus};
use jiffy_wire::api::{
    ApiError, Committed, CreateVm, ErrorKind, Image, NoCommand, PullImage, PullStep, PushArtifact,
    VmState,
};
use jiffy_wire::guest::{GuestConfig, Root};
use jiffy_wire::vmm::{FwCfgContents, VmmConfig};
use serde_json::json;
use std::fs;
use std::os::unix::fs::FileExt;

/// The last step of a pull or push, and the number of steps.
pub fn steps(answer: &Answer) -> Vec<PullStep> {
    assert_eq!(
        answer.status,
        200,
        "{}",
        String::from_utf8_lossy(&answer.body)
    );
    let lines = answer.body.split(|byte| *byte == b'\n');
    lines
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_slice(line).unwrap())
        .collect()
}

pub fn pull(daemon: &Daemon, wanted: &PullImage) -> Result<(Image, u64), ApiError> {
    let answer = daemon.post("/v1/pulls", &serde_json::to_vec(wanted).unwrap());
    if answer.status != 200 {
        return Err(serde_json::from_slice(&answer.body).unwrap());
    }
    match steps(&answer).pop().unwrap() {
        PullStep::Pulled { image, fetched } => Ok((image, fetched)),
        PullStep::Failed(error) => Err(error),
        other => panic!("{other:?}"),
    }
}

pub fn by_name(reference: &str) -> PullImage {
    PullImage {
        reference: reference.into(),
        renew: true,
        ..PullImage::default()
    }
}

pub fn push(daemon: &Daemon, name: &str, reference: &str) -> Result<(String, u64, u64), ApiError> {
    let wanted = PushArtifact {
        name: name.into(),
        kind: None,
        reference: reference.into(),
        access: Default::default(),
    };
    let answer = daemon.post("/v1/pushes", &serde_json::to_vec(&wanted).unwrap());
    if answer.status != 200 {
        return Err(serde_json::from_slice(&answer.body).unwrap());
    }
    match steps(&answer).pop().unwrap() {
        PullStep::Pushed {
            manifest,
            sent,
            had,
        } => Ok((manifest, sent, had)),
        PullStep::Failed(error) => Err(error),
        other => panic!("{other:?}"),
    }
}

pub fn encoded(name: &str) -> String {
    name.replace('/', "%2F")
}

pub fn configs(daemon: &Daemon, id: &str) -> (VmmConfig, GuestConfig) {
    let config = fs::read(daemon.vm_folder(id).join("vmm.json")).unwrap();
    let config: VmmConfig = serde_json::from_slice(&config).unwrap();
    let FwCfgContents::Text(text) = &config.fw_cfg[0].contents else {
        panic!("no text");
    };
    let guest = serde_json::from_str(text).unwrap();
    (config, guest)
}

/// Incompressible bytes.
pub fn noise(count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    blake3::Hasher::new().finalize_xof().fill(&mut bytes);
    bytes
}

/// An OCI layout of one image, as a tar.
pub fn layout(run: serde_json::Value) -> Vec<u8> {
    let layer = tar_of(&[("hello", b"world")]);
    let digest = |bytes: &[u8]| jiffy_registry::Digest::of(bytes);
    let config = serde_json::to_vec(&json!({
        "architecture": "amd64", "os": "linux", "config": run,
        "rootfs": {"type": "layers", "diff_ids": [digest(&layer).to_string()]},
    }))
    .unwrap();
    let manifest = serde_json::to_vec(&json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": digest(&config).to_string(), "size": config.len()},
        "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar",
            "digest": digest(&layer).to_string(), "size": layer.len()}],
    }))
    .unwrap();
    let index = serde_json::to_vec(&json!({
        "schemaVersion": 2,
        "manifests": [{"mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": digest(&manifest).to_string(), "size": manifest.len()}],
    }))
    .unwrap();
    let blob = |bytes: &[u8]| format!("blobs/sha256/{}", digest(bytes).hex());
    let names = [blob(&layer), blob(&config), blob(&manifest)];
    tar_of(&[
        ("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#),
        ("index.json", &index),
        (&names[0], &layer),
        (&names[1], &config),
        (&names[2], &manifest),
    ])
}

#[test]
fn commands_start_with_the_images_configuration() {
    let daemon = Daemon::start();
    let tar = layout(json!({
        "Entrypoint": ["/bin/echo", "-n"], "Cmd": ["from", "image"],
        "Env": ["PATH=/usr/bin:/bin", "KIND=image", "LEFT=1"], "WorkingDir": "/tmp",
        "User": "0:0", "StopSignal": "SIGINT", "ExposedPorts": {"80/tcp": {}},
        "Labels": {"maker": "test"},
    }));
    for kind in ["?kind=layout", ""] {
        let image: Image = daemon.post(&format!("/v1/images/web{kind}"), &tar).json();
        assert_eq!(image.config.entrypoint, ["/bin/echo", "-n"]);
        assert_eq!(image.config.exposed_ports, ["80/tcp"]);
    }
    let shown: Image = daemon.get("/v1/images/web").json();
    assert_eq!(shown.config.labels["maker"], "test");
    assert_eq!(shown.present, shown.size);
    assert!(shown.used_by.is_empty());
    let run = |vm: CreateVm| {
        let frames = daemon.run(CreateVm {
            image: Some("web".into()),
            ..vm
        });
        let id = id_of(&frames);
        (id, frames.finish())
    };
    let (id, finished) = run(vm(Command::default()));
    assert_eq!(finished.status(), ExitStatus::Code(0));
    assert_eq!(finished.text(), "from image");
    let (_, guest) = configs(&daemon, &id);
    let main = guest.main.unwrap();
    assert_eq!(main.env, ["PATH=/usr/bin:/bin", "KIND=image", "LEFT=1"]);
    assert_eq!(
        (main.cwd.as_deref(), main.user.as_deref()),
        (Some("/tmp"), Some("0:0"))
    );
    let shown = daemon.vm(&id);
    assert_eq!(shown.exposed_ports, ["80/tcp"]);
    assert_eq!(shown.labels["maker"], "test");

    let (_, finished) = run(vm(command(&["given"])));
    assert_eq!(finished.text(), "given");
    let own = CreateVm {
        entrypoint: Some(vec!["/bin/sh".into(), "-c".into()]),
        ..vm(Command {
            env: vec!["KIND=own".into()],
            ..command(&["echo $KIND $LEFT; pwd"])
        })
    };
    let (_, finished) = run(own);
    assert_eq!(finished.text(), "own 1\n/tmp\n");
    // exec has the image's environment, but no entrypoint.
    daemon.create(&CreateVm {
        name: Some("box".into()),
        image: Some("web".into()),
        ..CreateVm::default()
    });
    assert_eq!(daemon.post("/v1/vms/box/start", b"").status, 200);
    daemon.when("box", VmState::Running);
    let frames = daemon.exec("box", &command(&["/bin/sh", "-c", "echo $KIND; pwd"]));
    assert_eq!(frames.unwrap().finish().text(), "image\n/tmp\n");
    let users: Image = daemon.get("/v1/images/web").json();
    assert!(users.used_by.contains(&"box".to_owned()));
}

#[test]
fn without_an_image_command_the_request_decides() {
    let daemon = Daemon::start();
    let request = |no_command| CreateVm {
        no_command,
        ..vm(Command::default())
    };
    let refused = daemon.create(&request(NoCommand::Refuse));
    assert!(refused.error(ErrorKind::Invalid).message.contains("base"));
    let waits = daemon.run_detached(request(NoCommand::Wait));
    let vm: jiffy_wire::api::Vm = waits.json();
    assert_eq!(vm.command, None);
    let shell = daemon.run_detached(request(NoCommand::Shell));
    let vm: jiffy_wire::api::Vm = shell.json();
    assert_eq!(vm.command.unwrap(), ["/bin/sh"]);
}

#[test]
fn the_stop_signal_of_an_image_ends_its_command() {
    let daemon = Daemon::start();
    let tar = layout(json!({"StopSignal": "SIGUSR1"}));
    daemon
        .post("/v1/images/web?kind=layout", &tar)
        .json::<Image>();
    let script = "trap 'echo asked; exit 3' USR1; echo up; while :; do sleep 0.1; done";
    let mut frames = daemon.run(CreateVm {
        image: Some("web".into()),
        ..vm(command(&["/bin/sh", "-c", script]))
    });
    let id = id_of(&frames);
    frames.until("up");
    assert_eq!(
        daemon
            .post(&format!("/v1/vms/{id}/stop?grace_ms=60000"), b"")
            .status,
        200
    );
    let finished = frames.finish();
    assert_eq!(finished.status(), ExitStatus::Code(3));
    assert!(finished.text().contains("asked"));
}

#[test]
fn an_image_is_pulled_run_and_pruned() {
    let registry = Registry::start();
    let daemon = Daemon::start();
    let digest = registry.put(
        "team/web:1",
        &[("hello", b"world")],
        json!({"Cmd": ["/bin/echo", "pulled"]}),
    );
    let name = registry.name("team/web:1");
    let (image, fetched) = pull(&daemon, &by_name(&name)).unwrap();
    assert_eq!(image.name, name);
    assert_eq!(image.source.unwrap().manifest.unwrap(), digest);
    assert!(fetched > 0);
    assert_eq!(
        fs::read_dir(daemon.data.join("pulls")).unwrap().count(),
        0,
        "blobs are not kept"
    );
    let (_, again) = pull(&daemon, &by_name(&name)).unwrap();
    assert_eq!(again, 0, "nothing is fetched twice");

    // By a short name, with the registry from the request.
    let frames = daemon.run(CreateVm {
        image: Some("team/web:1".into()),
        registry: Some(registry.host.clone()),
        name: Some("user".into()),
        ..vm(Command::default())
    });
    assert_eq!(frames.finish().text(), "pulled\n");
    assert_eq!(daemon.vm("user").image, name);
    let path = format!("/v1/images/{}", encoded(&name));
    let refused = daemon.delete(&path).error(ErrorKind::Conflict);
    assert!(refused.message.contains("user"), "{}", refused.message);
    let pruned: jiffy_wire::api::Pruned = daemon.post("/v1/prune/images", b"").json();
    assert!(pruned.names.is_empty(), "a VM needs it");

    // The tag moves to another image.
    registry.put("team/web:1", &[("hello", b"moon")], json!({}));
    let refused = pull(&daemon, &by_name(&name)).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Conflict);
    assert_eq!(daemon.delete("/v1/vms/user").status, 204);
    let (newer, _) = pull(&daemon, &by_name(&name)).unwrap();
    assert_ne!(newer.digest, image.digest);
    let (old, _) = pull(
        &daemon,
        &by_name(&format!("{}@{digest}", registry.name("team/web"))),
    )
    .unwrap();
    assert_eq!(old.digest, image.digest, "the digest names the first image");
    let pruned: jiffy_wire::api::Pruned = daemon.post("/v1/prune/images", b"").json();
    assert_eq!(pruned.names.len(), 2);
    let left: Vec<Image> = daemon.get("/v1/images").json();
    assert_eq!(left.len(), 1, "only base");
}

#[test]
fn a_failed_pull_is_reported_in_one_sentence() {
    let registry = Registry::start();
    let daemon = Daemon::start();
    registry.put("web:1", &[("a", b"b")], json!({}));
    let error = |wanted: PullImage| pull(&daemon, &wanted).unwrap_err();
    let missing = error(by_name(&registry.name("web:2")));
    assert_eq!(missing.kind, ErrorKind::NotFound);
    assert!(missing.message.contains("web:2"), "{}", missing.message);
    assert!(missing.hint.is_some());
    let unnamed = error(by_name("web:1"));
    assert!(unnamed.hint.unwrap().contains("JIFFY_REGISTRY"));
    assert_eq!(
        error(by_name("localhost:5000/UPPER")).kind,
        ErrorKind::Invalid
    );
    let platform = PullImage {
        platform: Some("linux".into()),
        ..by_name(&registry.name("web:1"))
    };
    assert!(error(platform).message.contains("platform"));
    let left = fs::read_dir(daemon.data.join("images")).unwrap();
    assert!(left.count() <= 1, "a failed pull leaves an image");
}

#[test]
fn two_pulls_of_one_image_share_the_work() {
    let registry = Registry::start();
    let daemon = Daemon::start();
    let noise = noise(4 << 20);
    registry.put("big:1", &[("noise", &noise)], json!({}));
    let wanted = by_name(&registry.name("big:1"));
    let images = std::thread::scope(|scope| {
        let pulls: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| pull(&daemon, &wanted)))
            .collect();
        pulls
            .into_iter()
            .map(|pull| pull.join().unwrap().unwrap().0.digest)
            .collect::<Vec<_>>()
    });
    assert!(images.windows(2).all(|pair| pair[0] == pair[1]));
    eventually("nothing is left of it", || {
        fs::read_dir(daemon.data.join("pulls")).unwrap().count() == 0
    });
}

#[test]
fn a_pushed_image_is_pulled_lazily() {
    let registry = Registry::start();
    let daemon = Daemon::start();
    let noise = noise(1 << 20);
    let image: Image = daemon
        .post(
            "/v1/images/mine",
            &tar_of(&[("noise", &noise), ("etc/name", b"x")]),
        )
        .json();
    let to = registry.name("out/mine:1");
    let (manifest, sent, _) = push(&daemon, "mine", &to).unwrap();
    assert!(sent > noise.len() as u64 / 4);
    let (same, nothing, had) = push(&daemon, "mine", &to).unwrap();
    assert_eq!((same, nothing), (manifest.clone(), 0), "it is there");
    assert!(had >= sent);
    let pinned = push(&daemon, "mine", &format!("{to}@{manifest}")).unwrap_err();
    assert!(pinned.message.contains("digest"));
    assert_eq!(
        push(&daemon, "nope", &to).unwrap_err().kind,
        ErrorKind::NotFound
    );

    let other = Daemon::start();
    let (lazy, fetched) = pull(&other, &by_name(&to)).unwrap();
    assert_eq!(
        (lazy.digest.as_str(), lazy.size),
        (image.digest.as_str(), image.size)
    );
    assert!(fetched * 10 < sent, "{fetched} of {sent} bytes");
    assert_eq!(lazy.present, 0);
    let frames = other.run(CreateVm {
        image: Some(to.clone()),
        name: Some("user".into()),
        ..vm(command(&["true"]))
    });
    let id = id_of(&frames);
    assert_eq!(frames.finish().status(), ExitStatus::Code(0));
    let (config, _) = configs(&other, &id);
    let residency = config.disks[0].residency.as_ref().unwrap();
    assert!(config.disks[0].path.ends_with("contents") && config.disks[0].read_only);
    assert!(residency.present.ends_with("present"));
    assert!(residency.pager_socket.starts_with(other.folder.path()));
    // A lazily pulled image can be pushed: the registry has its chunks.
    let (_, sent, _) = push(&other, &to, &registry.name("out/mine:2")).unwrap();
    assert!(sent < 4096, "{sent}");
    assert_eq!(other.delete("/v1/vms/user").status, 204);
    assert_eq!(
        other.delete(&format!("/v1/images/{}", encoded(&to))).status,
        204
    );
    let chunks = fs::read_dir(other.data.join("chunks")).unwrap().count();
    assert_eq!(chunks, 0, "its chunks outlive it");
}

#[test]
fn a_committed_image_shares_chunks_with_its_parent() {
    let registry = Registry::start();
    let daemon = Daemon::start();
    let noise = noise(1 << 20);
    let tar = tar_of(&[("noise", &noise)]);
    let parent: Image = daemon.post("/v1/images/mine?kind=root", &tar).json();
    daemon.create(&CreateVm {
        name: Some("box".into()),
        image: Some("mine".into()),
        ..CreateVm::default()
    });
    let commit = |to: &str| {
        let body = serde_json::to_vec(&json!({ "image": to })).unwrap();
        daemon.post("/v1/vms/box/commit", &body)
    };
    commit("next").error(ErrorKind::WrongState);
    assert_eq!(daemon.post("/v1/vms/box/start", b"").status, 200);
    daemon.when("box", VmState::Running);
    let refused = commit("mine").error(ErrorKind::Conflict);
    assert!(refused.message.contains("box"), "{}", refused.message);
    let made: Committed = commit("next").json();
    assert_eq!(made.image.name, "next");
    assert_ne!(made.image.digest, parent.digest);
    assert!(made.bytes > 0);
    assert!(made.image.source.unwrap().reference.contains("box"));
    let folder = daemon.data.join("images/next");
    let files: Vec<_> = fs::read_dir(&folder).unwrap().collect();
    assert_eq!(files.len(), 2, "{files:?}");

    let (_, sent, _) = push(&daemon, "mine", &registry.name("mine:1")).unwrap();
    let (_, more, had) = push(&daemon, "next", &registry.name("mine:2")).unwrap();
    assert!(sent > noise.len() as u64);
    assert!(more * 4 < sent, "{more} of {sent} bytes were sent again");
    assert!(had >= noise.len() as u64);
    let other = Daemon::start();
    let (lazy, fetched) = pull(&other, &by_name(&registry.name("mine:2"))).unwrap();
    assert_eq!(lazy.digest, made.image.digest);
    assert!(fetched * 4 < sent, "{fetched}");
}

#[test]
fn a_snapshot_goes_through_a_registry() {
    let registry = Registry::start();
    let daemon = Daemon::with_memory_in_its_root();
    let frames = daemon.run_captured(vm(command(&["/bin/sleep", "1000"])));
    // The pushed artifact needs no other file.
    assert_eq!(chunks(&daemon, "ready", "root"), 1);
    let to = registry.name("snap:1");
    let (manifest, sent, _) = push(&daemon, "ready", &to).unwrap();
    assert!(sent > 0);
    drop(frames);

    let other = Daemon::start();
    let pulled = |wanted: &PullImage| {
        let answer = other.post("/v1/pulls", &serde_json::to_vec(wanted).unwrap());
        match steps(&answer).pop().unwrap() {
            PullStep::PulledSnapshot { snapshot, fetched } => (snapshot, fetched),
            step => panic!("{step:?}"),
        }
    };
    let (snapshot, fetched) = pulled(&by_name(&to));
    assert_eq!(
        (snapshot.name.as_str(), snapshot.vm.as_str()),
        (to.as_str(), "box")
    );
    assert!(fetched > 0);
    let memory = encoded(&to);
    assert_eq!(chunks(&other, &memory, "root"), 0);
    assert_eq!(chunks(&other, &memory, "zstd"), 2);
    assert_eq!(pulled(&by_name(&to)).1, 0, "{manifest} is here");
    let vm: jiffy_wire::api::Vm = other
        .run_detached(CreateVm {
            from: Some(to.clone()),
            name: Some("again".into()),
            ..CreateVm::default()
        })
        .json();
    let (config, _) = configs(&other, &vm.id);
    assert!(config.disks[0].residency.is_some());
    let listed: Vec<jiffy_wire::api::Snapshot> = other.get("/v1/snapshots").json();
    assert_eq!(listed[0].name, to);
    // A child keeps the data of its parent's snapshot, even after that is removed.
    let forked = other.post("/v1/vms/again/fork", br#"{"name":"child"}"#);
    assert_eq!(forked.status, 200);
    assert_eq!(other.delete("/v1/vms/again?force=true").status, 204);
    let path = format!("/v1/snapshots/{}", encoded(&to));
    assert_eq!(other.delete(&path).status, 204);
    let left = |folder: &str| fs::read_dir(other.data.join(folder)).unwrap().count();
    assert!(left("chunks") > 0 && left("disks") > 0);
    assert_eq!(other.delete("/v1/vms/child?force=true").status, 204);
    pulled(&by_name(&to));
    assert_eq!(other.delete(&path).status, 204);
    assert_eq!((left("chunks"), left("disks")), (0, 0));
}

#[test]
fn a_vm_of_a_pulled_snapshot_is_forked_without_its_image() {
    let registry = Registry::start();
    let daemon = Daemon::start();
    let tar = tar_of(&[("noise", &noise(1 << 20))]);
    assert_eq!(daemon.post("/v1/images/mine?kind=root", &tar).status, 200);
    let frames = daemon.run_captured(CreateVm {
        image: Some("mine".into()),
        ..vm(command(&["/bin/sleep", "1000"]))
    });
    let to = registry.name("snap:1");
    push(&daemon, "ready", &to).unwrap();
    drop(frames);

    let other = Daemon::start();
    let wanted = serde_json::to_vec(&by_name(&to)).unwrap();
    let pulled = steps(&other.post("/v1/pulls", &wanted)).pop().unwrap();
    assert!(
        matches!(pulled, PullStep::PulledSnapshot { .. }),
        "{pulled:?}"
    );
    let again = CreateVm {
        from: Some(to),
        name: Some("again".into()),
        ..CreateVm::default()
    };
    other.run_detached(again).json::<jiffy_wire::api::Vm>();
    other.get("/v1/images/mine").error(ErrorKind::NotFound);
    let forked = other.post("/v1/vms/again/fork", br#"{"name":"child"}"#);
    let said = String::from_utf8_lossy(&forked.body);
    assert_eq!(forked.status, 200, "{said}");
}

#[test]
fn the_file_system_type_survives_a_push_and_pull() {
    let registry = Registry::start();
    let daemon = Daemon::start();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let file = fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    let options = jiffy_ext4::Options {
        bytes: 16 << 20,
        ..jiffy_ext4::Options::default()
    };
    jiffy_ext4::format(&file, &options).unwrap();
    file.write_all_at(&noise(1 << 20), 12 << 20).unwrap();
    let bytes = fs::read(&path).unwrap();
    let image: Image = daemon.post("/v1/images/mine", &bytes).json();
    let to = registry.name("mine:1");
    push(&daemon, "mine", &to).unwrap();

    let other = Daemon::start();
    let (pulled, fetched) = pull(&other, &by_name(&to)).unwrap();
    assert_eq!(pulled.digest, image.digest);
    assert!(fetched < 1 << 20, "{fetched}");
    // None of its data is here yet, but its type is known.
    let vm: jiffy_wire::api::Vm = other
        .run_detached(CreateVm {
            image: Some(to),
            ..vm(command(&["/bin/sleep", "1000"]))
        })
        .json();
    let (config, guest) = configs(&other, &vm.id);
    assert!(config.disks[0].residency.is_some());
    assert!(
        matches!(&guest.root, Root::Overlay { fstype, .. } if fstype == "ext4"),
        "{:?}",
        guest.root
    );
}
