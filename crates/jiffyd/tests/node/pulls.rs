//! Pulls with failures of the registry, the disk or the daemon.

use crate::client::connect;
use crate::daemon::{Daemon, command, eventually, named, vm};
use crate::gate::{Gate, Hold};
use crate::images::{by_name, encoded, noise, pull, push, steps};
use crate::registry::Registry;
use crate::room::{SmallDisk, daemon_on};
use crate::snapshots::{counter, from, snapshot};
use jiffy_registry::testing::{LocalRegistry, PASSWORD, RegistryOptions, USER};
use jiffy_registry::{
    Client, ClientOptions, Credentials, Reference, RegistryError, RemoteArtifact,
};
use jiffy_wire::agent::ExitStatus;
use jiffy_wire::api::{
    ApiError, CreateVm, ErrorKind, Image, PullImage, PullStep, RegistryAccess, Vm,
};
use jiffy_wire::pager::{Origin, RegistryOrigin};
use serde_json::json;
use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// All files in the data folder, except those that every daemon has.
pub fn kept(daemon: &Daemon) -> BTreeSet<PathBuf> {
    fn walk(folder: &Path, found: &mut BTreeSet<PathBuf>) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            match path.is_dir() {
                true => walk(&path, found),
                false => drop(found.insert(path)),
            }
        }
    }
    let mut found = BTreeSet::new();
    for folder in ["images", "chunks", "disks", "pulls", "snapshots"] {
        walk(&daemon.data.join(folder), &mut found);
    }
    found.retain(|path| !path.starts_with(daemon.data.join("images/base")));
    found
}

fn names(daemon: &Daemon) -> Vec<String> {
    let images: Vec<Image> = daemon.get("/v1/images").json();
    let names = images.into_iter().map(|image| image.name);
    names.filter(|name| name != "base").collect()
}

fn remove(daemon: &Daemon, name: &str) {
    let answer = daemon.delete(&format!("/v1/images/{}", encoded(name)));
    assert_eq!(answer.status, 204);
}

/// Starts a pull and does not wait for it.
fn begin(daemon: &Daemon, wanted: &PullImage, over: &'static AtomicBool) {
    let body = serde_json::to_vec(wanted).unwrap();
    let head = format!(
        "POST /v1/pulls HTTP/1.1\r\nhost: jiffy\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = connect(&daemon.socket()).unwrap();
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(&body).unwrap();
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
        over.store(true, Ordering::Release);
    });
}

/// Kills the daemon at every request of a pull, before it is answered and in the middle of the
/// answer.
fn killed_at_every_step(daemon: &mut Daemon, gate: &Gate, name: &str) -> usize {
    let wanted = by_name(name);
    let before = kept(daemon);
    for step in 2.. {
        let how = if step % 2 == 0 {
            Hold::Request
        } else {
            Hold::Answer
        };
        gate.hold(step / 2, how);
        let over: &'static AtomicBool = Box::leak(Box::default());
        begin(daemon, &wanted, over);
        let reached = gate.reached(|| over.load(Ordering::Acquire));
        if !reached {
            assert_eq!(names(daemon), [name], "nothing was held, so it is there");
            return step / 2 - 1;
        }
        daemon.killed();
        gate.open();
        daemon.up();
        assert_eq!(names(daemon), [""; 0], "step {step}");
        // Only fetched data may be kept.
        let pulls = daemon.data.join("pulls");
        let more: Vec<_> = kept(daemon)
            .into_iter()
            .filter(|path| !before.contains(path))
            .collect();
        assert!(
            more.iter().all(|path| path.starts_with(&pulls)),
            "step {step}: {more:?}"
        );
        let (image, _) = pull(daemon, &wanted).unwrap();
        assert_eq!(image.name, name);
        remove(daemon, name);
        assert_eq!(kept(daemon), before, "step {step}");
    }
    unreachable!()
}

/// A node with an incompressible image `mine`.
fn maker() -> Daemon {
    let maker = Daemon::start();
    let tar = crate::daemon::tar_of(&[("noise", &noise(300 << 10))]);
    maker
        .post("/v1/images/mine?kind=root", &tar)
        .json::<Image>();
    maker
}

#[test]
fn a_daemon_killed_at_any_step_of_a_pull_resumes_it() {
    let registry = Registry::start();
    let gate = Gate::before(&registry.host);
    let mut daemon = Daemon::start();
    registry.put("web:1", &[("noise", &noise(300 << 10))], json!({}));
    let requests = killed_at_every_step(&mut daemon, &gate, &gate.name("web:1"));
    // The requests are for manifest, configuration, layer.
    assert!(requests >= 3, "{requests}");
}

#[test]
fn a_daemon_killed_at_any_step_of_a_lazy_pull_leaves_nothing() {
    let registry = Registry::start();
    let gate = Gate::before(&registry.host);
    let maker = maker();
    push(&maker, "mine", &registry.name("mine:1")).unwrap();
    let mut daemon = Daemon::start();
    let requests = killed_at_every_step(&mut daemon, &gate, &gate.name("mine:1"));
    // The requests are for manifest, configuration, tables.
    assert!(requests >= 3, "{requests}");

    // An image that is partly here is so for the next daemon, too.
    let before = kept(&daemon);
    assert!(
        before
            .iter()
            .any(|path| path.to_string_lossy().ends_with(".jimg.present"))
    );
    daemon.killed();
    daemon.up();
    assert_eq!(kept(&daemon), before);
    let frames = daemon.run(CreateVm {
        image: Some(gate.name("mine:1")),
        remove: true,
        ..vm(command(&["true"]))
    });
    assert_eq!(frames.finish().status(), ExitStatus::Code(0));
}

#[test]
fn files_of_a_running_pull_are_not_swept() {
    let registry = Registry::start();
    let gate = Gate::before(&registry.host);
    let maker = maker();
    for tag in ["mine:1", "mine:2"] {
        push(&maker, "mine", &registry.name(tag)).unwrap();
    }
    let daemon = Daemon::start();
    let (one, two) = (gate.name("mine:1"), gate.name("mine:2"));
    pull(&daemon, &by_name(&one)).unwrap();
    // The second pull shares all chunks with the first, and fetches its configuration.
    gate.hold(2, Hold::Request);
    let over: &'static AtomicBool = Box::leak(Box::default());
    begin(&daemon, &by_name(&two), over);
    assert!(gate.reached(|| over.load(Ordering::Acquire)));
    // Two concurrent pulls share the work, and the image does not exist before they end.
    let late: &'static AtomicBool = Box::leak(Box::default());
    begin(&daemon, &by_name(&two), late);
    daemon
        .delete(&format!("/v1/images/{}", encoded(&two)))
        .error(ErrorKind::NotFound);
    remove(&daemon, &one);
    gate.open();
    eventually("both pulls are over", || {
        over.load(Ordering::Acquire) && late.load(Ordering::Acquire)
    });
    assert_eq!(names(&daemon), [two.as_str()]);
    let frames = daemon.run(CreateVm {
        image: Some(two.clone()),
        name: Some("user".into()),
        ..vm(command(&["true"]))
    });
    assert_eq!(frames.finish().status(), ExitStatus::Code(0));
    let refused = daemon
        .delete(&format!("/v1/images/{}", encoded(&two)))
        .error(ErrorKind::Conflict);
    assert!(refused.message.contains("user"), "{}", refused.message);
    assert_eq!(daemon.delete("/v1/vms/user").status, 204);
    remove(&daemon, &two);
    assert_eq!(kept(&daemon), BTreeSet::new());
}

#[test]
fn an_image_removed_during_its_update_check_is_pulled_again() {
    let registry = Registry::start();
    let gate = Gate::before(&registry.host);
    push(&maker(), "mine", &registry.name("mine:1")).unwrap();
    let daemon = Daemon::start();
    let name = gate.name("mine:1");
    pull(&daemon, &by_name(&name)).unwrap();
    gate.hold(1, Hold::Request);
    let over: &'static AtomicBool = Box::leak(Box::default());
    let wanted = PullImage {
        renew: true,
        ..by_name(&name)
    };
    begin(&daemon, &wanted, over);
    assert!(gate.reached(|| over.load(Ordering::Acquire)));
    remove(&daemon, &name);
    gate.open();
    eventually("the pull is over", || over.load(Ordering::Acquire));
    assert_eq!(names(&daemon), [name.as_str()]);
    remove(&daemon, &name);
    assert_eq!(kept(&daemon), BTreeSet::new());
}

#[test]
fn a_full_disk_during_a_pull_is_reported_and_leaves_nothing() {
    let Some(disk) = SmallDisk::new("24m") else {
        return;
    };
    let registry = Registry::start();
    let daemon = daemon_on(&disk);
    let maker = Daemon::start();
    registry.put("web:1", &[("noise", &noise(6 << 20))], json!({}));
    let tar = crate::daemon::tar_of(&[("noise", &noise(6 << 20))]);
    maker
        .post("/v1/images/mine?kind=root", &tar)
        .json::<Image>();
    push(&maker, "mine", &registry.name("mine:1")).unwrap();
    assert_eq!(names(&daemon), [""; 0]);
    let before = kept(&daemon);
    disk.fill();
    for tag in ["web:1", "mine:1"] {
        let error = pull(&daemon, &by_name(&registry.name(tag))).unwrap_err();
        assert_eq!(error.kind, ErrorKind::NoRoom, "{}", error.message);
        assert!(error.message.ends_with('.'), "{}", error.message);
    }
    let files = |found: &BTreeSet<PathBuf>| {
        // Fetched data of a layer may be kept.
        let pulls = daemon.data.join("pulls");
        let found = found.iter().filter(|path| !path.starts_with(&pulls));
        found.cloned().collect::<BTreeSet<_>>()
    };
    assert_eq!(files(&kept(&daemon)), files(&before));
    disk.free();
    for tag in ["web:1", "mine:1"] {
        let name = registry.name(tag);
        pull(&daemon, &by_name(&name)).unwrap();
        remove(&daemon, &name);
    }
    assert_eq!(kept(&daemon), before);
}

#[test]
fn blocks_read_at_boot_are_the_working_set_of_a_pushed_image() {
    let registry = Registry::start();
    let daemon = Daemon::start();
    let tar = crate::daemon::tar_of(&[("noise", &noise(300 << 10))]);
    daemon
        .post("/v1/images/mine?kind=root", &tar)
        .json::<Image>();
    let frames = daemon.run(CreateVm {
        image: Some("mine".into()),
        ..vm(command(&["true"]))
    });
    assert_eq!(frames.finish().status(), ExitStatus::Code(0));
    eventually("a guest that booted in the background was kept", || {
        let all: Vec<jiffy_wire::api::Snapshot> = daemon.get("/v1/snapshots?all=true").json();
        all.iter().any(|snapshot| snapshot.golden)
    });
    let name = registry.name("mine:1");
    push(&daemon, "mine", &name).unwrap();
    let other = Daemon::start();
    pull(&other, &by_name(&name)).unwrap();
    let mut file = kept(&other).into_iter();
    let file = file.rfind(|path| path.extension().is_some_and(|end| end == "jimg"));
    let image = jiffy_store::ImageReader::open(&file.unwrap()).unwrap();
    // As the VMM has reported, and contiguous.
    assert_eq!(image.working_set().unwrap(), [3..5, 0..1]);
    assert!(image.hot_range().end > image.hot_range().start);
}

/// The image of chunks among a node's files.
fn jimg_of(daemon: &Daemon) -> PathBuf {
    let jimg = |path: &PathBuf| path.extension().is_some_and(|end| end == "jimg");
    kept(daemon).into_iter().find(jimg).unwrap()
}

/// The registries where the rest of such a file is, as the node has recorded.
fn registries_of(file: &Path) -> Vec<String> {
    let origins = origins_in(&file.with_extension("origins.json"));
    let reference = |origin| match origin {
        Origin::Registry(origin) => origin.reference,
        Origin::Folder { folder } => panic!("{folder:?}"),
    };
    origins.into_iter().map(reference).collect()
}

#[test]
fn an_artifact_with_a_forged_id_does_not_replace_the_real_one() {
    let registry = Registry::start();
    // An artifact with invalid chunks, and with the tables and id of a public image.
    let hostile = maker();
    push(&hostile, "mine", &registry.name("honest:1")).unwrap();
    let file = jimg_of(&hostile);
    let good = fs::read(&file).unwrap();
    let image = jiffy_store::ImageReader::open(&file).unwrap();
    let tables = image.file_bytes() + 64 - image.metadata_bytes();
    let mut bytes = good.clone();
    bytes[64..tables as usize].fill(7);
    fs::write(&file, &bytes).unwrap();
    push(&hostile, "mine", &registry.name("hostile:1")).unwrap();
    // And an honest node that has packed it differently.
    let other = maker();
    let options = jiffy_store::WriteOptions {
        chunk_size: image.chunk_size(),
        working_set: Some(vec![5, 3]),
        ..jiffy_store::WriteOptions::default()
    };
    let root = fs::File::open(other.data.join("images/mine/image.erofs")).unwrap();
    let theirs = other.data.join("chunks").join(file.file_name().unwrap());
    let written = jiffy_store::write_image(&theirs, &root, &options).unwrap();
    assert_eq!(written.id, image.id());
    push(&other, "mine", &registry.name("other:1")).unwrap();

    let daemon = Daemon::start();
    let before = kept(&daemon);
    for name in ["hostile:1", "other:1", "honest:1"] {
        pull(&daemon, &by_name(&registry.name(name))).unwrap();
    }
    let first = daemon.data.join("chunks").join(file.file_name().unwrap());
    let second = first.with_extension("2.jimg");
    // The hostile tables equal the honest ones; those of the other node differ.
    assert_eq!(registries_of(&first).len(), 2);
    let [packed_otherwise] = &registries_of(&second)[..] else {
        panic!("one origin");
    };
    assert!(packed_otherwise.contains("/other"), "{packed_otherwise}");
    let reader = jiffy_store::ImageReader::open(&second).unwrap();
    assert_eq!(reader.id(), image.id());
    assert_eq!(reader.working_set().unwrap(), [5..6, 3..4]);
    drop(reader);
    // Another pull downloads nothing again.
    let all = kept(&daemon);
    pull(&daemon, &by_name(&registry.name("other:1"))).unwrap();
    assert_eq!(kept(&daemon), all);
    // Both files stay as long as one of the images exists, and are removed with the last.
    for name in ["hostile:1", "other:1"] {
        remove(&daemon, &registry.name(name));
        assert!(first.exists() && second.exists());
    }
    remove(&daemon, &registry.name("honest:1"));
    assert_eq!(kept(&daemon), before);
}

#[test]
fn concurrent_pulls_reserve_no_more_space_than_is_free() {
    let Some(disk) = SmallDisk::new("24m") else {
        return;
    };
    let registry = Registry::start();
    let gate = Gate::before(&registry.host);
    let daemon = daemon_on(&disk);
    registry.put("web:1", &[("noise", &noise(5 << 20))], json!({}));
    registry.put("web:2", &[("noise", &noise(8 << 20))], json!({}));
    let (one, two) = (gate.name("web:1"), registry.name("web:2"));
    // Of the first image only the size is fetched yet.
    gate.hold(4, Hold::Request);
    let over: &'static AtomicBool = Box::leak(Box::default());
    begin(&daemon, &by_name(&one), over);
    assert!(gate.reached(|| over.load(Ordering::Acquire)));
    let error = pull(&daemon, &by_name(&two)).unwrap_err();
    assert_eq!(error.kind, ErrorKind::NoRoom);
    let said = &error.message;
    assert!(
        said.contains("11 MiB are reserved for other operations"),
        "{said}"
    );
    gate.open();
    eventually("the first is over", || over.load(Ordering::Acquire));
    pull(&daemon, &by_name(&two)).unwrap();
    let all = names(&daemon);
    assert!(all.len() == 2 && all.contains(&one) && all.contains(&two));
}

#[test]
fn a_pull_larger_than_free_space_is_refused_before_fetching() {
    let Some(disk) = SmallDisk::new("24m") else {
        return;
    };
    let registry = Registry::start();
    let daemon = daemon_on(&disk);
    registry.put("web:1", &[("noise", &noise(16 << 20))], json!({}));
    let before = kept(&daemon);
    let error = pull(&daemon, &by_name(&registry.name("web:1"))).unwrap_err();
    assert_eq!(error.kind, ErrorKind::NoRoom);
    assert!(error.message.contains("MiB left"), "{}", error.message);
    let blobs = |found: &BTreeSet<PathBuf>| {
        let sizes = found.iter().map(|path| fs::metadata(path).unwrap().len());
        sizes.sum::<u64>()
    };
    assert_eq!(blobs(&kept(&daemon)), blobs(&before));
}

/// Pushes an image of 3 MiB that can't be compressed; returns its name.
fn pushed_noise(maker: &Daemon, registry: &Registry) -> String {
    let tar = crate::daemon::tar_of(&[("noise", &noise(3 << 20))]);
    maker
        .post("/v1/images/mine?kind=root", &tar)
        .json::<Image>();
    let name = registry.name("mine:1");
    push(maker, "mine", &name).unwrap();
    name
}

#[test]
fn cached_disk_contents_stay_within_the_cache_size() {
    let registry = Registry::start();
    let maker = Daemon::start();
    let name = pushed_noise(&maker, &registry);
    let mut daemon = Daemon::with(&["--cache", "1M"]);
    pull(&daemon, &by_name(&name)).unwrap();
    daemon.shut_down();
    // The state that a pager leaves after its guest has read everything.
    let jimg = |path: &&PathBuf| path.extension().is_some_and(|end| end == "jimg");
    let found = kept(&daemon);
    let found = found.iter().find(jimg).unwrap();
    let theirs = kept(&maker);
    let image = jiffy_store::ImageReader::open(theirs.iter().find(jimg).unwrap()).unwrap();
    let folder = daemon.data.join("disks").join(image.id().to_string());
    assert_eq!(found.file_stem(), folder.file_name());
    let cache = jiffy_store::DiskCache::open(&folder, &image).unwrap();
    let mut bytes = vec![0; image.chunk_size() as usize];
    for chunk in 0..image.chunks() {
        image.read_chunk(chunk, &mut bytes).unwrap();
        cache.put(chunk, &bytes).unwrap();
    }
    cache.close().unwrap();
    drop(cache);
    let stored = || fs::metadata(folder.join("contents")).unwrap().blocks() * 512;
    assert!(stored() > 3 << 20);
    // A running VM keeps all of it.
    let vm = fs::File::open(folder.join("contents")).unwrap();
    rustix::fs::flock(&vm, rustix::fs::FlockOperation::LockShared).unwrap();
    daemon.up();
    pull(&daemon, &by_name(&name)).unwrap();
    assert!(stored() > 3 << 20);
    rustix::fs::flock(&vm, rustix::fs::FlockOperation::Unlock).unwrap();
    daemon.shut_down();
    daemon.up();
    eventually("it takes no more than its bound", || stored() <= 1 << 20);
    // The daemon holds an exclusive lock until it is done.
    let mut cache = None;
    eventually("the daemon releases the lock", || {
        cache = jiffy_store::DiskCache::open(&folder, &image).ok();
        cache.is_some()
    });
    assert!(!cache.unwrap().is_full());
    assert!(
        names(&daemon).contains(&name),
        "the image is there as before"
    );
}

fn cold(name: &str) -> CreateVm {
    CreateVm {
        cold: true,
        ..named(name, CreateVm::default())
    }
}

/// A daemon whose VM `lazy` has read more of its image than the caches may have, and the cache's file.
fn with_a_full_cache() -> (Daemon, PathBuf) {
    let registry = Registry::start();
    let maker = Daemon::start();
    let name = pushed_noise(&maker, &registry);
    let daemon = Daemon::with(&["--cache", "1M"]);
    pull(&daemon, &by_name(&name)).unwrap();
    let lazy = CreateVm {
        image: Some(name),
        ..cold("lazy")
    };
    daemon.run_detached(lazy).json::<Vm>();
    let disk = fs::read_dir(daemon.data.join("disks")).unwrap().next();
    let contents = disk.unwrap().unwrap().path().join("contents");
    fs::write(&contents, noise(3 << 20)).unwrap();
    (daemon, contents)
}

#[test]
fn caches_are_trimmed_after_a_vm_that_was_beginning() {
    let (daemon, contents) = with_a_full_cache();
    daemon.run_detached(named("box", counter())).json::<Vm>();
    snapshot(&daemon, "box", "one", true);
    let run = daemon.folder.path().join("run");
    fs::write(run.join("slow-begin"), "").unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| daemon.run_detached(named("two", from("one"))).json::<Vm>());
        eventually("a VM begins", || run.join("beginning").exists());
        daemon.delete("/v1/vms/lazy?force=true");
        // Longer than trimming waits for VMs that start.
        std::thread::sleep(Duration::from_secs(6));
        fs::remove_file(run.join("slow-begin")).unwrap();
    });
    let stored = || fs::metadata(&contents).map_or(0, |file| file.blocks() * 512);
    eventually("the cache is trimmed", || stored() <= 1 << 20);
}

#[test]
fn vms_start_while_a_disk_is_closed_to_trim_its_cache() {
    let (daemon, _) = with_a_full_cache();
    let run = daemon.folder.path().join("run");
    fs::write(run.join("slow"), "").unwrap();
    daemon.delete("/v1/vms/lazy?force=true");
    eventually("its disk is being closed", || {
        run.join("forgetting").exists()
    });
    daemon.run_detached(cold("other")).json::<Vm>();
    let log = fs::read_to_string(daemon.folder.path().join("jiffyd.log")).unwrap();
    assert!(!log.contains("did not stop serving"), "it waited for that");
    fs::remove_file(run.join("slow")).unwrap();
}

pub fn with(access: RegistryAccess, name: &str) -> PullImage {
    PullImage {
        access,
        ..by_name(name)
    }
}

/// Reads a part of a file like the pager, with the access that the node passed to it.
fn read_with_stored_access(origin: &RegistryOrigin) -> Vec<u8> {
    try_with_stored_access(origin).unwrap()
}

fn try_with_stored_access(origin: &RegistryOrigin) -> Result<Vec<u8>, RegistryError> {
    let client = Client::new(ClientOptions {
        credentials: Credentials::docker_config(origin.docker_config.clone().unwrap()),
        authorities: origin.authorities.clone(),
        ..ClientOptions::default()
    });
    let reference = Reference::parse(&origin.reference, None).unwrap();
    let artifact = RemoteArtifact::open(&client?, &reference, &())?;
    artifact.file(&origin.file).unwrap().read(0..64, &())
}

#[test]
fn registry_credentials_are_kept_privately_for_later_fetches() {
    let registry = LocalRegistry::start(&RegistryOptions {
        password: true,
        tls: true,
    })
    .unwrap();
    let name = format!("{}/team/mine:1", registry.host());
    let access = |password: &str, ca: bool| RegistryAccess {
        credentials: Some((USER.into(), password.into())),
        ca: ca.then(|| fs::read_to_string(registry.certificate()).unwrap()),
        ..RegistryAccess::default()
    };
    let maker = maker();
    let wanted = jiffy_wire::api::PushArtifact {
        name: "mine".into(),
        kind: None,
        reference: name.clone(),
        access: access(PASSWORD, true),
    };
    let pushed = maker.post("/v1/pushes", &serde_json::to_vec(&wanted).unwrap());
    assert!(String::from_utf8_lossy(&pushed.body).contains("sha256:"));

    let mut daemon = Daemon::start();
    let refused = |wanted: PullImage| -> ApiError {
        let error = pull(&daemon, &wanted).unwrap_err();
        assert!(!error.message.contains("sesame"), "{}", error.message);
        assert!(kept(&daemon).is_empty(), "{:?}", kept(&daemon));
        error
    };
    let wrong = refused(with(access("open barley", true), &name));
    assert!(wrong.message.contains(registry.host()), "{}", wrong.message);
    assert!(wrong.hint.unwrap().contains("--creds"));
    let nobody = RegistryAccess {
        credentials: None,
        ..access("", true)
    };
    assert_eq!(refused(with(nobody, &name)).kind, ErrorKind::Invalid);
    let distrusted = refused(with(access(PASSWORD, false), &name));
    assert!(
        distrusted
            .hint
            .is_some_and(|hint| hint.contains("authority"))
    );

    pull(&daemon, &with(access(PASSWORD, true), &name)).unwrap();
    daemon.killed();
    daemon.up();
    let chunks = daemon.data.join("chunks");
    let secrets: Vec<PathBuf> = kept(&daemon)
        .into_iter()
        .filter(|path| path.to_string_lossy().ends_with(".auth.json"))
        .collect();
    assert_eq!(secrets.len(), 1, "{secrets:?}");
    let mode = fs::metadata(&secrets[0]).unwrap().permissions().mode();
    assert_eq!(mode & 0o077, 0, "{mode:o}");
    let origins = fs::read_dir(&chunks).unwrap().flatten();
    let origins = origins.map(|entry| entry.path());
    let [file] = &origins
        .filter(|path| path.to_string_lossy().ends_with(".origins.json"))
        .collect::<Vec<_>>()[..]
    else {
        panic!("one image");
    };
    let origins = origins_in(file);
    let [Origin::Registry(origin)] = &origins[..] else {
        panic!("{origins:?}");
    };
    assert_eq!(read_with_stored_access(origin).len(), 64);
    // A new password is stored by another pull.
    fs::write(&secrets[0], "{}").unwrap();
    let (_, fetched) = pull(&daemon, &with(access(PASSWORD, true), &name)).unwrap();
    assert_eq!(fetched, 0);
    assert_eq!(read_with_stored_access(origin).len(), 64);
    remove(&daemon, &name);
    assert_eq!(
        kept(&daemon),
        BTreeSet::new(),
        "the credentials outlive the image"
    );
}

#[test]
fn a_pull_replaces_a_damaged_snapshot() {
    let registry = Registry::start();
    let name = registry.name("team/ready:1");
    let maker = Daemon::start();
    let frames = maker.run_captured(vm(command(&["/bin/sleep", "1000"])));
    push(&maker, "ready", &name).unwrap();
    drop(frames);

    let daemon = Daemon::start();
    let pulled = |renew| {
        let wanted = PullImage {
            renew,
            ..by_name(&name)
        };
        let answer = daemon.post("/v1/pulls", &serde_json::to_vec(&wanted).unwrap());
        match steps(&answer).pop().unwrap() {
            PullStep::PulledSnapshot { snapshot, fetched } => {
                assert_eq!(snapshot.error, None);
                fetched
            }
            step => panic!("{step:?}"),
        }
    };
    assert!(pulled(false) > 0);
    assert_eq!(pulled(false), 0, "it is here");
    let is_manifest = |path: &PathBuf| path.ends_with("snapshot.json");
    let manifest = kept(&daemon).into_iter().find(is_manifest).unwrap();
    for damaged in ["snapshot.json", "state"] {
        for renew in [false, true] {
            fs::write(manifest.with_file_name(damaged), "damaged").unwrap();
            assert!(pulled(renew) > 0, "{damaged} {renew}");
        }
    }
}

/// The recorded origins of an image.
fn origins_in(file: &Path) -> Vec<Origin> {
    let file: serde_json::Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    serde_json::from_value(file["content"].clone()).unwrap()
}

#[test]
fn renewed_registry_credentials_reach_a_snapshots_memory() {
    let registry = LocalRegistry::start(&RegistryOptions {
        password: true,
        tls: true,
    })
    .unwrap();
    let name = format!("{}/team/ready:1", registry.host());
    let access = RegistryAccess {
        credentials: Some((USER.into(), PASSWORD.into())),
        ca: Some(fs::read_to_string(registry.certificate()).unwrap()),
        ..RegistryAccess::default()
    };
    let maker = Daemon::start();
    let frames = maker.run_captured(vm(command(&["/bin/sleep", "1000"])));
    let wanted = jiffy_wire::api::PushArtifact {
        name: "ready".into(),
        kind: None,
        reference: name.clone(),
        access: access.clone(),
    };
    let pushed = maker.post("/v1/pushes", &serde_json::to_vec(&wanted).unwrap());
    assert!(String::from_utf8_lossy(&pushed.body).contains("sha256:"));
    drop(frames);

    let mut daemon = Daemon::start();
    let pulled = |daemon: &Daemon, access: &RegistryAccess| {
        let wanted = with(access.clone(), &name);
        let answer = daemon.post("/v1/pulls", &serde_json::to_vec(&wanted).unwrap());
        match steps(&answer).pop().unwrap() {
            PullStep::PulledSnapshot { fetched, .. } => fetched,
            step => panic!("{step:?}"),
        }
    };
    assert!(pulled(&daemon, &access) > 0);
    let find = |daemon: &Daemon, end: &str| -> Vec<PathBuf> {
        let ends = |path: &PathBuf| path.to_string_lossy().ends_with(end);
        kept(daemon).into_iter().filter(ends).collect()
    };
    let file = find(&daemon, "/origins.json").remove(0);
    let told = file.with_file_name("ram.told");
    assert!(!told.exists(), "no VM has it");
    let vm: jiffy_wire::api::Vm = daemon
        .run_detached(CreateVm {
            from: Some(name.clone()),
            ..CreateVm::default()
        })
        .json();
    fs::remove_file(&told).unwrap();
    // Makes the root file system complete, and the stored access to the registry useless.
    for present in find(&daemon, ".jimg.present") {
        fs::remove_file(present).unwrap();
    }
    for secret in find(&daemon, ".auth.json") {
        fs::write(secret, "{}").unwrap();
    }
    for authority in find(&daemon, ".ca.pem") {
        fs::write(authority, "").unwrap();
    }
    let as_told = |file: &Path| {
        let [Origin::Registry(origin)] = &origins_in(file)[..] else {
            panic!("one registry");
        };
        assert_eq!(origin.file, "ram.image");
        try_with_stored_access(origin)
    };
    assert!(as_told(&file).is_err());
    // A wrong password changes nothing.
    let wrong = RegistryAccess {
        credentials: Some((USER.into(), "open barley".into())),
        ..access.clone()
    };
    let refused = daemon.post(
        "/v1/pulls",
        &serde_json::to_vec(&with(wrong, &name)).unwrap(),
    );
    assert!(matches!(steps(&refused).pop(), Some(PullStep::Failed(_))));
    assert!(as_told(&file).is_err());
    assert!(!told.exists());
    assert_eq!(pulled(&daemon, &access), 0);
    assert_eq!(as_told(&file).unwrap().len(), 64);
    assert!(told.exists(), "the pager of the VM that runs knows, too");
    // So does that of the next daemon, if the VM starts again.
    daemon.killed();
    daemon.up();
    assert_eq!(as_told(&file).unwrap().len(), 64);
    let path = format!("/v1/vms/{}?force=true", vm.id);
    assert_eq!(daemon.delete(&path).status, 204);
}
