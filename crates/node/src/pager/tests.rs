use super::*;
use tokio::net::UnixListener;

#[tokio::test]
async fn nobody_has_a_disk_alone_that_was_completed_for_somebody() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let paths = Paths {
        data: path.clone(),
        run: path.clone(),
        lib: path.clone(),
        share: path.clone(),
        socket: path.join("api"),
        peer: None,
    };
    let disk = LazyDisk {
        chunks: vec!["0123456789abcdef0123456789abcdef".to_owned()],
        ext4: false,
    };
    let contents = disk.contents(&paths);
    fs::create_dir_all(contents.parent().unwrap()).unwrap();
    fs::write(&contents, "").unwrap();
    let listener = UnixListener::bind(paths.pager_socket()).unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut ok = serde_json::to_vec(&PagerResponse::Ok).unwrap();
            ok.push(b'\n');
            stream.write_all(&ok).await.unwrap();
        }
    });
    let pager = Pager::new(paths);
    pager.state.lock().await.pid = Some(std::process::id());
    let alone = || Locked::alone(File::open(&contents).unwrap()).unwrap();
    let held = pager.complete_image(&disk).await.unwrap();
    assert!(alone().is_none());
    pager.close_disks(|_| false).await;
    assert!(alone().is_none(), "a VM has ended");
    drop(held);
    assert!(alone().is_some());
}
