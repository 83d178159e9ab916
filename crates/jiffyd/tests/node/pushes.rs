//! Contents and sources of pushes.

use crate::daemon::{Daemon, command, tar_of, vm};
use crate::images::{by_name, noise, pull, push, steps};
use crate::registry::Registry;
use jiffy_registry::testing::{LocalRegistry, PASSWORD, RegistryOptions, USER};
use jiffy_registry::{Client, ClientOptions, Reference, RemoteArtifact};
use jiffy_wire::api::{
    CreateVm, Image, PullImage, PullStep, PushArtifact, RegistryAccess, VmState,
};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Makes an image's record claim this digest of its file system.
fn claim(folder: &Path, digest: &str) {
    let path = folder.join("image.json");
    let text = fs::read_to_string(&path).unwrap();
    let (_, content) = text.split_once("\"content\":").unwrap();
    let content = content.trim_end().strip_suffix('}').unwrap();
    let of = |text: &str| format!("{:08x}", crc_fast::crc32_iscsi(text.as_bytes()));
    let record: Value = serde_json::from_str(content).unwrap();
    let claimed = content.replace(record["digest"].as_str().unwrap(), digest);
    let text = text.replace(content, &claimed);
    let text = text.replace(&of(content), &of(&claimed));
    // Written as a new file: the daemon compares inode numbers.
    let new = folder.join("new");
    fs::write(&new, text).unwrap();
    fs::rename(&new, &path).unwrap();
}

/// The configuration of a pushed artifact.
fn config(reference: &str) -> Value {
    let client = Client::new(ClientOptions::default()).unwrap();
    let reference = Reference::parse(reference, None).unwrap();
    let artifact = RemoteArtifact::open(&client, &reference, &()).unwrap();
    serde_json::from_slice(artifact.config()).unwrap()
}

#[test]
fn a_pushed_snapshot_keeps_its_root_despite_forged_digests() {
    let registry = Registry::start();
    let daemon = Daemon::start();
    let tar = tar_of(&[("noise", &noise(64 << 10))]);
    let mine: Image = daemon.post("/v1/images/mine?kind=root", &tar).json();

    let stranger = Daemon::start();
    let tar = tar_of(&[("evil", b"evil")]);
    stranger
        .post("/v1/images/evil?kind=root", &tar)
        .json::<Image>();
    claim(&stranger.data.join("images/evil"), &mine.digest);
    let name = registry.name("a/evil:1");
    push(&stranger, "evil", &name).unwrap();
    let (evil, _) = pull(&daemon, &by_name(&name)).unwrap();
    assert_eq!(evil.digest, mine.digest);
    assert!(
        evil.name < mine.name,
        "the other image is not the first of that digest"
    );

    let snapshot_of = |image: &str, vm_name: &str| {
        let frames = daemon.run(CreateVm {
            name: Some(vm_name.into()),
            image: Some(image.into()),
            ..vm(command(&["/bin/sleep", "1000"]))
        });
        daemon.when(vm_name, VmState::Running);
        let body = format!(r#"{{"name":"of-{vm_name}"}}"#);
        let path = format!("/v1/vms/{vm_name}/snapshots");
        let made = daemon.post(&path, body.as_bytes());
        assert_eq!(made.status, 200, "{}", String::from_utf8_lossy(&made.body));
        drop(frames);
        let to = registry.name(&format!("{vm_name}:1"));
        push(&daemon, &format!("of-{vm_name}"), &to).unwrap();
        config(&to)["chunks"].clone()
    };
    let pushed = snapshot_of("mine", "box");
    let shown: Image = daemon.get("/v1/images/mine").json();
    assert_eq!(
        pushed[0],
        shown.chunks.unwrap(),
        "the image's own chunks are not pushed"
    );
    // And vice versa.
    let pushed = snapshot_of(&name, "other");
    assert_eq!(pushed, config(&name)["chunks"]);
}

#[test]
fn a_pulled_snapshot_is_pushed_after_fetching_its_memory() {
    let registry = Registry::start();
    let maker = Daemon::start();
    let frames = maker.run_captured(vm(command(&["/bin/sleep", "1000"])));
    drop(frames);
    let name = registry.name("ready:1");
    push(&maker, "ready", &name).unwrap();

    let daemon = Daemon::start();
    let wanted = serde_json::to_vec(&by_name(&name)).unwrap();
    let pulled = steps(&daemon.post("/v1/pulls", &wanted)).pop();
    assert!(matches!(pulled, Some(PullStep::PulledSnapshot { .. })));
    let to = registry.name("again:1");
    let refused = push(&daemon, &name, &to).unwrap_err();
    assert!(refused.message.contains("parts"), "{}", refused.message);
    // The state that `optimise` leaves.
    let snapshots = fs::read_dir(daemon.data.join("snapshots")).unwrap();
    let folder = snapshots.last().unwrap().unwrap().path();
    let whole = maker.data.join("snapshots/ready/ram.image");
    fs::copy(whole, folder.join("ram.image")).unwrap();
    fs::remove_file(folder.join(".ram.image.present")).unwrap();
    push(&daemon, &name, &to).unwrap();
    for key in ["chunks", "memory"] {
        assert_eq!(config(&to)[key], config(&name)[key], "{key}");
    }
}

#[test]
fn a_push_fetches_lazy_chunks_from_any_origin_that_has_them() {
    let private = LocalRegistry::start(&RegistryOptions {
        password: true,
        tls: true,
    })
    .unwrap();
    let gone = LocalRegistry::start(&RegistryOptions::default()).unwrap();
    let target = Registry::start();
    let named = |registry: &LocalRegistry| format!("{}/team/mine:1", registry.host());
    let access = RegistryAccess {
        credentials: Some((USER.into(), PASSWORD.into())),
        ca: Some(fs::read_to_string(private.certificate()).unwrap()),
        ..RegistryAccess::default()
    };
    let maker = Daemon::start();
    let tar = tar_of(&[("noise", &noise(64 << 10))]);
    maker
        .post("/v1/images/mine?kind=root", &tar)
        .json::<Image>();
    let wanted = PushArtifact {
        name: "mine".into(),
        kind: None,
        reference: named(&private),
        access: access.clone(),
    };
    let pushed = maker.post("/v1/pushes", &serde_json::to_vec(&wanted).unwrap());
    assert!(matches!(
        steps(&pushed).pop(),
        Some(PullStep::Pushed { .. })
    ));
    push(&maker, "mine", &named(&gone)).unwrap();

    let daemon = Daemon::start();
    let with_access = PullImage {
        access,
        ..by_name(&named(&private))
    };
    pull(&daemon, &with_access).unwrap();
    // The next origin has the chunks, too, and would be used; but it has lost them.
    pull(&daemon, &by_name(&named(&gone))).unwrap();
    let lose = |registry: &LocalRegistry| {
        let repositories = registry.storage().join("docker/registry/v2/repositories");
        fs::remove_dir_all(repositories).unwrap();
    };
    lose(&gone);
    let to = target.name("other:1");
    let (_, sent, _) = push(&daemon, &named(&private), &to).unwrap();
    assert!(sent > 64 << 10, "{sent}");
    let other = Daemon::start();
    pull(&other, &by_name(&to)).unwrap();
    // If no origin has them, the error says why.
    lose(&private);
    let failed = push(&daemon, &named(&gone), &target.name("more:1")).unwrap_err();
    assert!(failed.message.contains(gone.host()), "{}", failed.message);
}
