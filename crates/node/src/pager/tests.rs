use super::*;
use jiffy_store::partial::map_path;
use tokio::net::UnixListener;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Asks somebody who does whatever it is told; and what that is.
async fn obeyed(folder: &Path) -> (Arc<Pager>, UnboundedReceiver<PagerRequest>) {
    answered(folder, PagerResponse::Ok).await
}

/// Asks somebody who always answers this; and what is asked.
async fn answered(
    folder: &Path,
    answer: PagerResponse,
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
        while let Ok((stream, _)) = listener.accept().await {
            let mut stream = BufReader::new(stream);
            let mut line = Vec::new();
            stream.read_until(b'\n', &mut line).await.unwrap();
            // A knock says nothing.
            if let Ok(request) = serde_json::from_slice(&line) {
                let _ = told.send(request);
            }
            let mut line = serde_json::to_vec(&answer).unwrap();
            line.push(b'\n');
            stream.write_all(&line).await.unwrap();
        }
    });
    let pager = Pager::new(paths);
    pager.state.lock().await.pid = Some(std::process::id());
    (pager, asked)
}

#[tokio::test]
async fn nobody_has_a_disk_alone_that_was_completed_for_somebody() {
    let folder = tempfile::tempdir().unwrap();
    let (pager, _asked) = obeyed(folder.path()).await;
    let disk = LazyDisk {
        chunks: vec!["0123456789abcdef0123456789abcdef".to_owned()],
        ext4: false,
    };
    let contents = disk.contents(&pager.paths);
    fs::create_dir_all(contents.parent().unwrap()).unwrap();
    fs::write(&contents, "").unwrap();
    let alone = || Locked::alone(File::open(&contents).unwrap()).unwrap();
    let held = pager.complete_image(&disk).await.unwrap();
    assert!(alone().is_none());
    pager.close_disks(|_| false).await;
    assert!(alone().is_none(), "a VM has ended");
    drop(held);
    assert!(alone().is_some());
}

#[tokio::test]
async fn a_disk_that_is_not_opened_in_time_is_let_go_of() {
    let folder = tempfile::tempdir().unwrap();
    let busy = PagerResponse::Error("it is busy".into());
    let (pager, mut asked) = answered(folder.path(), busy).await;
    let disk = LazyDisk {
        chunks: vec!["0123456789abcdef0123456789abcdef".to_owned()],
        ext4: false,
    };
    pager.open_disk(&disk).await.unwrap_err();
    assert!(matches!(
        asked.try_recv().unwrap(),
        PagerRequest::OpenDisk(_)
    ));
    let name = disk.name();
    assert_eq!(asked.try_recv().unwrap(), PagerRequest::Forget { name });
}

#[tokio::test]
async fn memory_that_is_here_in_parts_is_completed_from_where_it_is() {
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
    crate::snapshots::remote::add_origin(&memory, origin.clone()).unwrap();
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
async fn the_next_pager_hears_of_memory_before_disks() {
    let folder = tempfile::tempdir().unwrap();
    let (pager, mut asked) = obeyed(folder.path()).await;
    let mut state = State::default();
    for number in 0..3 {
        let served = Served {
            paged: Paged {
                image: folder.path().join("ram.image"),
                record: None,
                prefetch: false,
            },
            ticket: number,
        };
        state.served.insert(format!("vm{number}"), served);
        let disk = LazyDisk {
            chunks: vec![format!("{number:064x}")],
            ext4: false,
        };
        state.disks.insert(number.to_string(), disk);
    }
    pager.tell_all(&state).await;
    for (position, is_memory) in [true, true, true, false, false, false].iter().enumerate() {
        match asked.try_recv().unwrap() {
            PagerRequest::Serve { .. } => assert!(is_memory, "{position}"),
            PagerRequest::OpenDisk(_) => assert!(!is_memory, "{position}"),
            other => panic!("{other:?}"),
        }
    }
}
