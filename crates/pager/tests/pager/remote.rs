//! Memory and disks of partial images, filled from peers and registries.

use super::support::*;
use jiffy_registry::artifact::{Artifact, Config, FileToPush, IMAGE_TYPE};
use jiffy_registry::testing::{LocalRegistry, PASSWORD, RegistryOptions, USER};
use jiffy_registry::{Client, ClientOptions, Credentials, Reference};
use jiffy_store::{ImageReader, PeerFolder, partial};
use jiffy_wire::pager::{Origin, PagerRequest, PagerResponse, RegistryOrigin};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// An image, the same image without its chunks, and the file of a peer that has it.
fn partial_image(folder: &Path, working_set: Option<Vec<u32>>) -> (PathBuf, PathBuf, PathBuf) {
    let whole = image(folder, MIB, |options| options.working_set = working_set);
    let reader = ImageReader::open(&whole).unwrap();
    let bytes = fs::read(&whole).unwrap();
    let tail = bytes.len() + 64 - reader.metadata_bytes() as usize;
    let here = folder.join("here.img");
    partial::create(&here, bytes.len() as u64, &bytes[tail..], reader.id()).unwrap();
    let peer = folder.join("peer");
    fs::create_dir(&peer).unwrap();
    let theirs = peer.join(PeerFolder::file_name(reader.id()));
    fs::copy(&whole, &theirs).unwrap();
    (whole, here, theirs)
}

fn origins(pager: &Pager, image: &Path, origins: Vec<Origin>) {
    let answer = pager.ask(&PagerRequest::Origins {
        image: image.into(),
        origins,
    });
    assert_eq!(answer, PagerResponse::Ok);
}

fn folder_of(file: &Path) -> Origin {
    Origin::Folder {
        folder: file.parent().unwrap().into(),
    }
}

#[test]
fn memory_comes_from_a_peer_page_by_page() {
    let folder = tempfile::tempdir().unwrap();
    let (_, here, theirs) = partial_image(folder.path(), None);
    let pager = Pager::start(folder.path(), &["--workers", "2"]);
    origins(&pager, &here, vec![folder_of(&theirs)]);
    let memory = Memory::new(MIB);
    let connection = memory.connect(&pager.serve("vm", &here));
    for seed in 0..3 {
        join(memory.check(seed));
    }
    assert!(pager.stats("vm").bytes_fetched > 0);
    drop(connection);
}

#[test]
fn a_remote_working_set_is_fetched_and_filled_ahead() {
    let folder = tempfile::tempdir().unwrap();
    let set: Vec<u32> = (20..60).collect();
    let (_, here, theirs) = partial_image(folder.path(), Some(set));
    let pager = Pager::start(folder.path(), &[]);
    origins(&pager, &here, vec![folder_of(&theirs)]);
    let memory = Memory::new(MIB);
    let _connection = memory.connect(&pager.serve_as("vm", &here, None, true));
    eventually("the working set is not there", || {
        pager.stats("vm").prefetched_chunks >= 40
    });
    assert_eq!(pager.stats("vm").faults, 0);
    join(memory.check(1));
}

#[test]
fn an_unavailable_page_fails_its_vm_and_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, here, theirs) = partial_image(folder.path(), None);
    let pager = Pager::start(folder.path(), &["--workers", "1"]);
    origins(&pager, &here, vec![folder_of(&theirs)]);
    let (one, other) = (Memory::new(MIB), Memory::new(MIB));
    let connection = one.connect(&pager.serve("one", &here));
    let _connection = other.connect(&pager.serve("other", &whole));
    assert_page(one.read_page(3).bytes(), page(3));
    fs::remove_file(&theirs).unwrap();
    let stuck = one.read_page(250);
    let sentence = failure_message(&connection);
    for part in ["here.img", "chunk 125 ", "peer", "does not have this image"] {
        assert!(sentence.contains(part), "{sentence}");
    }
    assert!(stuck.is_stuck(), "nothing wrong was filled in");
    join(other.check(5));
}

/// The running children of a process.
fn children(parent: u32) -> Vec<u32> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_child = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
        let mut fields = fields.split_whitespace();
        fields.next() != Some("Z") && fields.next() == Some(&parent.to_string())
    };
    pids.filter(is_child).collect()
}

#[test]
fn the_origin_reader_restarts_and_ends_with_the_pager() {
    let folder = tempfile::tempdir().unwrap();
    let (_, here, theirs) = partial_image(folder.path(), None);
    let pager = Pager::start(folder.path(), &["--workers", "1"]);
    origins(&pager, &here, vec![folder_of(&theirs)]);
    let memory = Memory::new(MIB);
    let _connection = memory.connect(&pager.serve("vm", &here));
    assert_page(memory.read_page(3).bytes(), page(3));
    let [reader] = children(pager.pid())[..] else {
        panic!("it has one child");
    };
    let [worker] = children(reader)[..] else {
        panic!("which has one");
    };
    let before = pager.stats("vm").bytes_fetched;
    kill_process(Pid::from_raw(worker as i32).unwrap(), Signal::KILL).unwrap();
    join(memory.check(1));
    assert!(pager.stats("vm").bytes_fetched > before, "more was wanted");
    let [another] = children(reader)[..] else {
        panic!("there is another");
    };
    assert_ne!(another, worker);
    pager.kill();
    eventually("they continue without a pager", || {
        children(reader).is_empty() && !Path::new(&format!("/proc/{reader}/fd/0")).exists()
    });
}

#[test]
fn a_removed_page_is_not_fetched() {
    let folder = tempfile::tempdir().unwrap();
    let (_, here, theirs) = partial_image(folder.path(), None);
    let pager = Pager::start(folder.path(), &["--workers", "1"]);
    origins(&pager, &here, vec![folder_of(&theirs)]);
    let memory = Memory::new(MIB);
    let _connection = memory.connect(&pager.serve("vm", &here));
    assert_page(memory.read_page(3).bytes(), page(3));
    fs::remove_file(&theirs).unwrap();
    assert_ne!(page(251), vec![0; PAGE], "the image has contents here");
    memory.arena.discard(251 * PAGE, PAGE).unwrap();
    assert_page(memory.read_page(251).bytes(), [0; PAGE]);
    assert_eq!(pager.stats("vm").failed, None);
}

#[test]
fn completing_a_vm_fetches_all_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let (_, here, theirs) = partial_image(folder.path(), None);
    let pager = Pager::start(folder.path(), &[]);
    origins(&pager, &here, vec![folder_of(&theirs)]);
    let memory = Memory::new(MIB);
    let connection = memory.connect(&pager.serve("vm", &here));
    pager.wait_for(&memory);
    assert_eq!(pager.complete("vm"), PagerResponse::Ok);
    fs::remove_file(&theirs).unwrap();
    join(memory.check(2));
    drop(connection);
    let told = pager.ask(&PagerRequest::CompleteImage {
        image: here.clone(),
    });
    assert_eq!(told, PagerResponse::Ok, "all of it was there");
    assert!(!partial::is_partial(&here));
}

/// Pushes an image as the file `ram.image` of an artifact; returns its reference by digest.
fn push(registry: &LocalRegistry, options: ClientOptions, image: &Path) -> String {
    let client = Client::new(options).unwrap();
    let tag = Reference::parse(&format!("{}/team/app:1", registry.host()), None).unwrap();
    let config = Config {
        media_type: "application/vnd.jiffy.image.config.v1+json".into(),
        bytes: b"{}".to_vec(),
    };
    let file = FileToPush::local("ram.image", image, "data");
    let artifact = Artifact::plan(IMAGE_TYPE, config, BTreeMap::new(), &[file], &()).unwrap();
    let scratch = image.parent().unwrap();
    artifact.push(&client, &tag, scratch, &()).unwrap();
    format!("{}/team/app@{}", registry.host(), artifact.digest())
}

/// TLS with an authority of its own, and a password.
#[test]
fn a_private_registry_is_read_with_the_saved_credentials() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, here, _) = partial_image(folder.path(), None);
    let registry = LocalRegistry::start(&RegistryOptions {
        password: true,
        tls: true,
    })
    .expect("docker-registry");
    let options = ClientOptions {
        credentials: Credentials::basic(registry.host(), USER, PASSWORD),
        authorities: vec![registry.certificate()],
        ..ClientOptions::default()
    };
    let reference = push(&registry, options, &whole);
    let login = |password: &str| {
        let path = folder.path().join(format!("{}.json", password.len()));
        let auths = serde_json::json!({
            "auths": { registry.host(): { "username": USER, "password": password } }
        });
        fs::write(&path, auths.to_string()).unwrap();
        path
    };
    let pager = Pager::start(folder.path(), &[]);
    let cases = [
        (
            login("wrong"),
            vec![registry.certificate()],
            Some("credentials are not accepted"),
        ),
        (login(PASSWORD), Vec::new(), Some("certificate")),
        (login(PASSWORD), vec![registry.certificate()], None),
    ];
    for (number, (docker_config, authorities, fails)) in cases.into_iter().enumerate() {
        let origin = Origin::Registry(RegistryOrigin {
            reference: reference.clone(),
            file: "ram.image".into(),
            docker_config: Some(docker_config),
            plain_http: false,
            authorities,
        });
        origins(&pager, &here, vec![origin]);
        let name = format!("vm{number}");
        let memory = Memory::new(MIB);
        let connection = memory.connect(&pager.serve(&name, &here));
        match fails {
            Some(why) => {
                let _stuck = memory.read_page(3);
                let sentence = failure_message(&connection);
                assert!(sentence.contains(why), "{sentence}");
                assert!(!sentence.contains(PASSWORD), "{sentence}");
                assert_eq!(pager.forget(&name), PagerResponse::Ok);
            }
            None => join(memory.check(5)),
        }
    }
}

/// Processes of `jiffy-origins` that this pager, or a process that it started, started.
fn origins_of(pager: &Pager) -> Vec<u32> {
    let parent_of = |pid: u32| -> Option<u32> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let after_name = stat.rsplit_once(')')?.1;
        after_name.split_ascii_whitespace().nth(1)?.parse().ok()
    };
    let all = fs::read_dir("/proc").unwrap().flatten();
    let all = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_origins = |pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "jiffy-origins\n")
    };
    let origins: Vec<u32> = all.filter(is_origins).collect();
    let first = |pid: &&u32| parent_of(**pid) == Some(pager.pid());
    let first = *origins.iter().find(first).expect("jiffy-origins runs");
    let second = origins.iter().filter(|pid| parent_of(**pid) == Some(first));
    [first].into_iter().chain(second.copied()).collect()
}

#[test]
fn the_process_that_reads_from_a_registry_is_confined_and_credential_helpers_run_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, here, _) = partial_image(folder.path(), None);
    let registry = LocalRegistry::start(&RegistryOptions {
        password: true,
        tls: false,
    })
    .expect("docker-registry");
    let options = ClientOptions {
        credentials: Credentials::basic(registry.host(), USER, PASSWORD),
        ..ClientOptions::default()
    };
    let reference = push(&registry, options, &whole);
    let programs = folder.path().join("programs");
    fs::create_dir(&programs).unwrap();
    let helper = programs.join("docker-credential-test");
    // It notes its own system call filter, and that the pager's channel is not open in it.
    let script = format!(
        "#!/bin/sh\nread -r host\n\
         {{ grep ^Seccomp: /proc/self/status; echo $(ls /proc/self/fd | wc -l); }} >{}\n\
         printf '{{\"Username\":\"{USER}\",\"Secret\":\"{PASSWORD}\"}}'\n",
        folder.path().join("seen").display()
    );
    jiffy_sys::testing::write_program(&helper, &script);
    let config = folder.path().join("config.json");
    let helpers = serde_json::json!({ "credHelpers": { registry.host(): "test" } });
    fs::write(&config, helpers.to_string()).unwrap();
    let mut path = programs.into_os_string();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap());
    let pager = Pager::start_with_path(folder.path(), &[], &path);
    let origin = Origin::Registry(RegistryOrigin {
        reference,
        file: "ram.image".into(),
        docker_config: Some(config),
        plain_http: false,
        authorities: Vec::new(),
    });
    origins(&pager, &here, vec![origin]);
    let memory = Memory::new(MIB);
    let _connection = memory.connect(&pager.serve("vm", &here));
    join(memory.check(5));
    let seen = fs::read_to_string(folder.path().join("seen")).unwrap();
    // 0, 1, 2, and the folder that `ls` reads.
    assert_eq!(seen, "Seccomp:\t0\n4\n");

    let [broker, reader] = origins_of(&pager)[..] else {
        panic!("jiffy-origins is not two processes");
    };
    let status = |pid: u32, field: &str| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find(|line| line.starts_with(field));
        line.unwrap().rsplit('\t').next().unwrap().to_owned()
    };
    assert_eq!(status(broker, "Seccomp:"), "0");
    assert_eq!(status(reader, "Seccomp:"), "2");
    assert_eq!(status(reader, "NoNewPrivs:"), "1");
    // CAP_DAC_OVERRIDE at most.
    let effective = u64::from_str_radix(&status(reader, "CapEff:"), 16).unwrap();
    assert_eq!(effective & !2, 0);
}

/// The pager can't start it, because it is confined.
#[test]
fn a_pager_whose_jiffy_origins_was_killed_ends_so_that_the_next_one_has_another() {
    let folder = tempfile::tempdir().unwrap();
    let (_, here, theirs) = partial_image(folder.path(), None);
    let mut pager = Pager::start(folder.path(), &[]);
    // One that ends right after its start would end in the next pager, too.
    std::thread::sleep(std::time::Duration::from_secs(3));
    let [broker, reader] = origins_of(&pager)[..] else {
        panic!("jiffy-origins is not two processes");
    };
    let kill = |pid: u32| kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
    // The second one is restarted by the first.
    kill(reader);
    eventually("another one", || {
        let now = origins_of(&pager);
        now.len() == 2 && now[1] != reader
    });
    assert!(!pager.has_ended());
    kill(broker);
    eventually("the pager ends", || pager.has_ended());

    let pager = Pager::start(folder.path(), &[]);
    origins(&pager, &here, vec![folder_of(&theirs)]);
    let memory = Memory::new(MIB);
    let _connection = memory.connect(&pager.serve("vm", &here));
    join(memory.check(5));
}

/// A real registry on loopback, if there is one on this computer.
#[test]
fn memory_comes_from_a_registry_by_ranges() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, here, theirs) = partial_image(folder.path(), None);
    let registry = LocalRegistry::start(&RegistryOptions::default()).expect("docker-registry");
    let pinned = push(&registry, ClientOptions::default(), &whole);
    let origin = |file: &str| {
        Origin::Registry(RegistryOrigin {
            reference: pinned.clone(),
            file: file.into(),
            docker_config: None,
            plain_http: false,
            authorities: Vec::new(),
        })
    };
    let pager = Pager::start(folder.path(), &[]);
    origins(&pager, &here, vec![origin("other.image")]);
    let memory = Memory::new(MIB);
    let connection = memory.connect(&pager.serve("vm", &here));
    let _stuck = memory.read_page(3);
    let sentence = failure_message(&connection);
    assert!(
        sentence.contains("has no file \"other.image\""),
        "{sentence}"
    );
    assert_eq!(pager.forget("vm"), PagerResponse::Ok);

    origins(&pager, &here, vec![origin("ram.image"), folder_of(&theirs)]);
    let memory = Memory::new(MIB);
    let connection = memory.connect(&pager.serve("vm", &here));
    assert_page(memory.read_page(3).bytes(), page(3));
    let fetched = pager.stats("vm").bytes_fetched;
    assert!(
        fetched < fs::metadata(&whole).unwrap().len() / 2,
        "{fetched}"
    );
    // The registry stops; a peer has the rest.
    drop(registry);
    join(memory.check(4));
    drop(connection);
}
