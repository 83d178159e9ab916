use super::*;
use jiffy_store::partial::map_path;
use jiffy_store::presence::PresenceMap;
use jiffy_sys::locked::Locked;
use jiffy_wire::api::ErrorKind;
use jiffy_wire::disk::MapHeader;
use jiffy_wire::lines;
use std::collections::HashSet;
use std::os::unix::fs::PermissionsExt;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixListener;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// A pager that accepts every request, and the requests it gets.
async fn obeyed(folder: &Path) -> (Arc<Pager>, UnboundedReceiver<PagerRequest>) {
    answered(folder, PagerResponse::Ok).await
}

/// A pager that always gives this answer, and the requests it gets.
async fn answered(
    folder: &Path,
    answer: PagerResponse,
) -> (Arc<Pager>, UnboundedReceiver<PagerRequest>) {
    answered_but(folder, answer, |_| false).await
}

/// As [`answered`], but some requests are never answered.
async fn answered_but(
    folder: &Path,
    answer: PagerResponse,
    never: impl Fn(&PagerRequest) -> bool + Send + 'static,
) -> (Arc<Pager>, UnboundedReceiver<PagerRequest>) {
    let paths = Paths {
        data: folder.to_owned(),
        run: folder.to_owned(),
        lib: folder.to_owned(),
        share: folder.to_owned(),
        socket: folder.join("api"),
        peer: None,
    };
    let listener = UnixListener::bind(paths.pager_socket()).unwrap();
    let (told, asked) = unbounded_channel();
    tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok((stream, _)) = listener.accept().await {
            let mut stream = BufReader::new(stream);
            let mut line = Vec::new();
            stream.read_until(b'\n', &mut line).await.unwrap();
            // A connection that only checks for a listener sends nothing.
            if let Ok(request) = serde_json::from_slice(&line) {
                let stalls = never(&request);
                let _ = told.send(request);
                if stalls {
                    held.push(stream);
                    continue;
                }
            }
            let line = lines::encode(&answer).unwrap();
            stream.write_all(&line).await.unwrap();
        }
    });
    let pager = Pager::new(paths, Arc::default(), Arc::default());
    pager.state().pid = Some(std::process::id());
    (pager, asked)
}

#[tokio::test]
async fn a_completed_disk_stays_share_locked_while_it_is_held() {
    let folder = tempfile::tempdir().unwrap();
    let (pager, _asked) = obeyed(folder.path()).await;
    let disk = disk(1);
    let contents = disk.contents(&pager.paths);
    fs::create_dir_all(contents.parent().unwrap()).unwrap();
    fs::write(&contents, "").unwrap();
    let alone = || Locked::try_exclusive(std::fs::File::open(&contents).unwrap()).unwrap();
    let held = pager.complete_image(&disk).await.unwrap();
    assert!(alone().is_none());
    pager.close_disks(|_| false).await;
    assert!(alone().is_none(), "a VM has ended");
    drop(held);
    assert!(alone().is_some());
}

#[tokio::test]
async fn what_is_missing_is_fetched_only_if_it_fits() {
    let folder = tempfile::tempdir().unwrap();
    let (pager, mut asked) = obeyed(folder.path()).await;
    let disk = disk(1);
    let contents = disk.contents(&pager.paths);
    fs::create_dir_all(contents.parent().unwrap()).unwrap();
    fs::write(&contents, "").unwrap();
    let memory = folder.path().join("ram.image");
    // Larger than any disk.
    let length = 1 << 45;
    let header = MapHeader {
        unit: 2 << 20,
        length,
        tail: length,
        image: [0; 16],
        boot: [0; 16],
    };
    for map in [disk.present(&pager.paths), map_path(&memory)] {
        PresenceMap::create(&map, header).unwrap();
    }
    for refused in [
        pager.complete_disk(&disk).await.map(drop),
        pager.complete_memory(&memory).await,
    ] {
        let error = refused.unwrap_err().0;
        assert_eq!(error.kind, ErrorKind::NoRoom, "{error:?}");
    }
    while let Ok(request) = asked.try_recv() {
        let asks = format!("{request:?}");
        assert!(!asks.contains("Complete"), "{asks}");
    }
}

/// Whether a program of this user and group, and of no other group, gets to this path.
fn reaches(user: u32, path: &Path) -> bool {
    use std::os::unix::process::CommandExt;
    let mut test = std::process::Command::new("test");
    let test = test.arg("-S").arg(path).uid(user).gid(user);
    test.status().unwrap().success()
}

/// A configuration with such a root disk, where its VMM has it.
fn configured(paths: &Paths, id: &str, disk: &LazyDisk) {
    let config = serde_json::json!({
        "disks": [{
            "path": disk.contents(paths),
            "read_only": true,
            "residency": disk.residency(paths, id),
        }],
    });
    fs::create_dir_all(paths.vm(id)).unwrap();
    fs::write(paths.vm(id).join("vmm.json"), config.to_string()).unwrap();
}

#[tokio::test]
async fn a_vm_reaches_only_the_socket_of_its_own_disk() {
    let folder = tempfile::tempdir().unwrap();
    let (pager, _asked) = obeyed(folder.path()).await;
    let paths = &pager.paths;
    paths.prepare().unwrap();
    fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let is_root = rustix::process::geteuid().is_root();
    let disks = [("one", disk(1), 54321), ("two", disk(2), 54322)];
    for shared in ["vms", "pager"] {
        fs::set_permissions(folder.path().join(shared), PermissionsExt::from_mode(0o711)).unwrap();
    }
    let bind = |disk: &LazyDisk| {
        let socket = paths.disk_socket(&disk.name());
        let _ = fs::remove_file(&socket);
        std::os::unix::net::UnixListener::bind(socket).unwrap()
    };
    let mut listeners = Vec::new();
    for (id, disk, user) in &disks {
        fs::create_dir(paths.vm_run(id)).unwrap();
        let user = is_root.then_some(*user);
        jiffy_jail::access::open_folder(&paths.vm_run(id), user).unwrap();
        configured(paths, id, disk);
        listeners.push(bind(disk));
        pager.open_disk(disk).await.unwrap();
        links::link_disk(paths, disk, &paths.vm_disk_socket(id)).unwrap();
    }
    // Another pager listens elsewhere, under the same names.
    for (_, disk, _) in &disks {
        listeners.push(bind(disk));
        pager.send_open_disk(disk).await.unwrap();
    }
    for ((id, _, user), listener) in disks.iter().zip(&listeners[2..]) {
        let own = paths.vm_disk_socket(id);
        let _connection = std::os::unix::net::UnixStream::connect(&own).unwrap();
        listener.set_nonblocking(true).unwrap();
        listener.accept().expect("it is the new pager's");
        for (other, disk, _) in &disks {
            if !is_root {
                continue;
            }
            let theirs = paths.vm_disk_socket(other);
            assert_eq!(reaches(*user, &theirs), other == id, "{id} to {other}");
            for shared in [
                paths.disk_socket(&disk.name()),
                paths.pager_vm_socket(&disk.name()),
            ] {
                assert!(!reaches(*user, &shared), "{id} to {}", shared.display());
            }
        }
    }
}

#[tokio::test]
async fn a_vm_reaches_each_pager_of_its_memory_in_its_own_folder() {
    let folder = tempfile::tempdir().unwrap();
    let listeners = Arc::<Mutex<Vec<_>>>::default();
    let bound = Arc::clone(&listeners);
    let binds = move |request: &PagerRequest| {
        if let PagerRequest::Serve { socket, .. } = request {
            let listener = std::os::unix::net::UnixListener::bind(socket).unwrap();
            listener.set_nonblocking(true).unwrap();
            lock(&bound).push(listener);
        }
        false
    };
    let (pager, _asked) = answered_but(folder.path(), PagerResponse::Ok, binds).await;
    let paths = &pager.paths;
    paths.prepare().unwrap();
    fs::create_dir(paths.vm_run("one")).unwrap();
    for _ in 0..2 {
        pager
            .send_serve("one", &paged(folder.path()))
            .await
            .unwrap();
        std::os::unix::net::UnixStream::connect(paths.vm_memory_socket("one")).unwrap();
        let newest = lock(&listeners).pop().unwrap();
        newest.accept().expect("the newest pager is reached");
    }
    assert_eq!(fs::read_dir(paths.vm_run("one")).unwrap().count(), 1);
}

#[tokio::test]
async fn an_older_vmm_finds_the_disk_socket_at_its_old_path() {
    let folder = tempfile::tempdir().unwrap();
    let (pager, _asked) = obeyed(folder.path()).await;
    let paths = &pager.paths;
    paths.prepare().unwrap();
    let disk = disk(1);
    fs::create_dir(paths.vm_run("one")).unwrap();
    configured(paths, "one", &disk);
    let config = paths.vm("one").join("vmm.json");
    let old = fs::read_to_string(&config).unwrap();
    let shared = paths.pager_vm_socket(&disk.name());
    let here = paths.vm_disk_socket("one");
    let old = old.replace(here.to_str().unwrap(), shared.to_str().unwrap());
    fs::write(&config, old).unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(paths.disk_socket(&disk.name()));
    pager.open_disk(&disk).await.unwrap();
    std::os::unix::net::UnixStream::connect(shared).unwrap();
    assert!(!here.exists());
}

#[tokio::test]
async fn a_disk_that_fails_to_open_is_forgotten_by_the_pager() {
    let folder = tempfile::tempdir().unwrap();
    let busy = PagerResponse::Error("it is busy".into());
    let (pager, mut asked) = answered(folder.path(), busy).await;
    let disk = disk(1);
    pager.open_disk(&disk).await.unwrap_err();
    assert!(matches!(
        asked.try_recv().unwrap(),
        PagerRequest::OpenDisk(_)
    ));
    let name = disk.name();
    assert_eq!(asked.try_recv().unwrap(), PagerRequest::Forget { name });
}

#[tokio::test]
async fn sockets_left_by_a_dead_pager_are_removed_with_their_vm() {
    let folder = tempfile::tempdir().unwrap();
    let unknown = PagerResponse::Error("no VM or disk one is served here".into());
    let (pager, _asked) = answered(folder.path(), unknown).await;
    let sockets = folder.path().join("pager");
    fs::create_dir(&sockets).unwrap();
    for name in [
        "one.sock",
        "one.sock.removed",
        "two.sock",
        "two.sock.removed",
    ] {
        fs::write(sockets.join(name), "").unwrap();
    }
    pager.stop_serving("one").await;
    let mut left: Vec<_> = fs::read_dir(&sockets)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    left.sort();
    assert_eq!(left, ["two.sock", "two.sock.removed"]);
}

#[tokio::test]
async fn partly_fetched_memory_is_completed_from_its_origins() {
    let folder = tempfile::tempdir().unwrap();
    let (pager, mut asked) = obeyed(folder.path()).await;
    let memory = folder.path().join("ram.image");
    fs::write(&memory, "").unwrap();
    pager.complete_memory(&memory).await.unwrap();
    assert!(asked.try_recv().is_err(), "it is whole");
    fs::write(map_path(&memory), "").unwrap();
    let origin = jiffy_wire::pager::Origin::Folder {
        folder: "/peer".into(),
    };
    jiffy_content::snapshots::remote::add_origin(&memory, origin.clone()).unwrap();
    pager.complete_memory(&memory).await.unwrap();
    let image = memory.clone();
    let origins = vec![origin];
    let expected = [
        PagerRequest::Origins { image, origins },
        PagerRequest::CompleteImage { image: memory },
    ];
    for request in expected {
        assert_eq!(asked.try_recv().unwrap(), request);
    }
}

#[tokio::test]
async fn a_new_pager_is_told_of_memory_before_disks() {
    let folder = tempfile::tempdir().unwrap();
    let (pager, mut asked) = obeyed(folder.path()).await;
    for number in 0..3 {
        let memory = Served::adopted(paged(folder.path()), None);
        let mut state = pager.state();
        state.served.insert(format!("vm{number}"), memory);
        let disk = LazyDisk {
            chunks: vec![format!("{number:064x}")],
            ext4: false,
        };
        state
            .disks
            .insert(number.to_string(), Served::adopted(disk, None));
    }
    pager.tell_all().await;
    for (position, is_memory) in [true, true, true, false, false, false].iter().enumerate() {
        match asked.try_recv().unwrap() {
            PagerRequest::Serve { .. } => assert!(is_memory, "{position}"),
            PagerRequest::OpenDisk(_) => assert!(!is_memory, "{position}"),
            other => panic!("{other:?}"),
        }
    }
    pager.tell_all().await;
    assert!(asked.try_recv().is_err(), "it knows");
}

#[tokio::test]
async fn after_a_pagers_death_the_next_one_completes_memory() {
    let folder = tempfile::tempdir().unwrap();
    let (pager, mut asked) = obeyed(folder.path()).await;
    let known = Served::adopted(paged(folder.path()), None);
    let pid = pager.state().pid.take();
    pager.state().served.insert("vm".into(), known);
    let completing = {
        let pager = pager.clone();
        tokio::spawn(async move { pager.complete("vm").await })
    };
    // A request would be sent at once.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    pager.state().pid = pid;
    pager.tell_all().await;
    completing.await.unwrap().unwrap();
    let order = asked.recv().await.unwrap();
    assert!(matches!(order, PagerRequest::Serve { .. }), "{order:?}");
    let name = "vm".to_owned();
    assert_eq!(asked.recv().await, Some(PagerRequest::Complete { name }));
}

fn paged(folder: &Path) -> Paged {
    Paged {
        image: folder.join("ram.image"),
        record: None,
        prefetch: false,
    }
}

fn disk(number: u8) -> LazyDisk {
    LazyDisk {
        chunks: vec![format!("{number:032x}").chars().rev().collect()],
        ext4: false,
    }
}

/// The next request that begins or ends something.
async fn next_order(asked: &mut UnboundedReceiver<PagerRequest>) -> PagerRequest {
    asked.recv().await.unwrap()
}

#[tokio::test]
async fn a_slow_pager_request_delays_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let slow = disk(1);
    let name = slow.name();
    let stalls = move |request: &PagerRequest| match request {
        PagerRequest::OpenDisk(open) => open.name == name,
        PagerRequest::Serve { name, .. } => name == "slow",
        _ => false,
    };
    let (pager, mut asked) = answered_but(folder.path(), PagerResponse::Ok, stalls).await;
    let waiting = {
        let (one, two) = (pager.clone(), pager.clone());
        let memory = paged(folder.path());
        [
            tokio::spawn(async move { one.open_disk(&slow).await.is_ok() }),
            tokio::spawn(async move { two.serve("slow", &memory).await.is_ok() }),
        ]
    };
    for _ in 0..2 {
        next_order(&mut asked).await;
    }
    // Both slow requests are in flight, and others don't wait for them.
    let serving = pager.serve("quick", &paged(folder.path())).await.unwrap();
    pager.open_disk(&disk(2)).await.unwrap();
    pager.renew_origins(&disk(2)).await;
    pager.forget("quick", serving.ticket).await;
    pager.close_disks(|name| name != disk(2).name()).await;
    pager.complete("other").await.unwrap();
    assert!(pager.begin_trimming(|_| true).is_none(), "one is opened");
    let orders: HashSet<String> = std::iter::from_fn(|| asked.try_recv().ok())
        .map(|request| match request {
            PagerRequest::Serve { name, .. } => format!("serve {name}"),
            PagerRequest::OpenDisk(open) => format!("open {}", open.name),
            PagerRequest::Forget { name } => format!("forget {name}"),
            PagerRequest::Complete { name } => format!("complete {name}"),
            other => panic!("{other:?}"),
        })
        .collect();
    let of_disk = disk(2).name();
    let expected = [
        "serve quick".to_owned(),
        format!("open {of_disk}"),
        "forget quick".to_owned(),
        format!("forget {of_disk}"),
        "complete other".to_owned(),
    ];
    assert_eq!(orders, HashSet::from(expected));
    for task in waiting {
        assert!(!task.is_finished());
        task.abort();
    }
}

#[tokio::test]
async fn only_a_disk_whose_cache_was_removed_is_closed() {
    let folder = tempfile::tempdir().unwrap();
    let (pager, mut asked) = obeyed(folder.path()).await;
    for number in [1, 2] {
        let contents = disk(number).contents(&pager.paths);
        fs::create_dir_all(contents.parent().unwrap()).unwrap();
        fs::write(&contents, "").unwrap();
        pager.open_disk(&disk(number)).await.unwrap();
        next_order(&mut asked).await;
    }
    pager.close_removed_disks().await;
    assert!(asked.try_recv().is_err());
    fs::remove_file(disk(1).contents(&pager.paths)).unwrap();
    pager.close_removed_disks().await;
    let closed = next_order(&mut asked).await;
    assert!(matches!(closed, PagerRequest::Forget { name } if name == disk(1).name()));
    assert!(asked.try_recv().is_err());
}

#[tokio::test]
async fn a_disk_that_is_to_be_trimmed_is_opened_again_after_that() {
    let folder = tempfile::tempdir().unwrap();
    let (pager, mut asked) = obeyed(folder.path()).await;
    for number in [1, 2] {
        pager.open_disk(&disk(number)).await.unwrap();
        next_order(&mut asked).await;
    }
    let kept = disk(2).name();
    // Decided at once, before the pager is asked.
    let trimming = pager.begin_trimming(|name| name == kept).unwrap();
    let opening = {
        let pager = pager.clone();
        tokio::spawn(async move { pager.open_disk(&disk(1)).await.is_ok() })
    };
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(asked.try_recv().is_err(), "it is not opened yet");
    // Requests for other VMs don't wait.
    let memory = paged(folder.path());
    pager.serve("web", &memory).await.unwrap();
    assert!(matches!(
        next_order(&mut asked).await,
        PagerRequest::Serve { .. }
    ));
    assert_eq!(trimming.close_and_run(|| 7).await, Some(7));
    assert!(opening.await.unwrap());
    let [closed, opened] = [next_order(&mut asked).await, next_order(&mut asked).await];
    let name = disk(1).name();
    assert!(matches!(closed, PagerRequest::Forget { name: it } if it == name));
    assert!(matches!(opened, PagerRequest::OpenDisk(open) if open.name == name));
}
