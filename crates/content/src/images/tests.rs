use super::*;
use crate::model::vm::{Spec, VmRecord};
use jiffy_wire::api::VmState;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::mpsc::channel;
use std::task::Poll;

/// The images in this folder, one of them named `web`.
pub(super) fn images(folder: &Path) -> (Images, ImageRecord) {
    let [data, run] = ["data", "run"].map(|name| folder.join(name));
    let paths = Paths {
        socket: run.join("jiffyd.sock"),
        lib: folder.to_owned(),
        share: folder.to_owned(),
        peer: None,
        data,
        run,
    };
    paths.prepare().unwrap();
    let images = Images::new(
        &paths,
        None,
        Policy::default(),
        Arc::default(),
        Arc::default(),
    );
    let record = ImageRecord {
        digest: "0".repeat(64),
        size: 8192,
        ..ImageRecord::default()
    };
    let web = images.folder_of("web").unwrap();
    fs::create_dir(&web).unwrap();
    fs::write(web.join(ROOT), [7; 8192]).unwrap();
    record.save(&web).unwrap();
    (images, record)
}

/// Folders that are being removed.
fn going(folder: &Path) -> usize {
    let entries = fs::read_dir(folder).unwrap().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(".gone-")).count()
}

/// Polls once; true if the future is still pending.
async fn is_pending<F: Future>(mut what: Pin<&mut F>) -> bool {
    poll_fn(|context| Poll::Ready(what.as_mut().poll(context).is_pending())).await
}

/// The only blocking thread is busy, so anything that completes meanwhile ran on an async worker,
/// which must not be blocked.
#[test]
fn large_folders_are_removed_on_blocking_threads() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .max_blocking_threads(1)
        .build()
        .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (images, _) = images(folder.path());
    let images = Arc::new(images);
    let golden = images.folder.join("golden");
    fs::create_dir(&golden).unwrap();
    fs::write(golden.join("ram.raw"), [1; 8192]).unwrap();
    runtime.block_on(async {
        let (release, held) = channel::<()>();
        let busy = tokio::task::spawn_blocking(move || held.recv());
        let mut removing = pin!(images.remove("web", || async { Ok(()) }));
        assert!(is_pending(removing.as_mut()).await);
        assert!(!images.has("web"));
        assert_eq!(going(&images.folder), 1);
        crate::snapshots::remove_in_background(&golden).unwrap();
        assert!(!golden.exists());
        assert_eq!(going(&images.folder), 2);
        // Nor does a worker replace an image.
        let new = images.temporary().unwrap();
        let mut publishing = pin!(images.publish("new", new, || async { Ok(()) }));
        assert!(is_pending(publishing.as_mut()).await);
        release.send(()).unwrap();
        busy.await.unwrap().unwrap();
        removing.await.unwrap();
        publishing.await.unwrap();
        assert!(images.has("new"));
    });
    // The removals that were queued on the blocking thread are done.
    drop(runtime);
    assert_eq!(going(&images.folder), 0);
}

#[test]
fn a_sweep_keeps_the_chunks_that_running_vms_read() {
    let folder = tempfile::tempdir().unwrap();
    let (images, _) = images(folder.path());
    let root = folder.path().join("root");
    fs::write(&root, [7; 100_000]).unwrap();
    let (chunks, held) = images
        .chunks
        .make(&Room::default(), &root, None, None)
        .unwrap();
    drop(held);
    let vm = |state| {
        let mut record = VmRecord::new("0123456789ab".into(), "web".into(), Spec::default(), 3);
        record.state = state;
        record.root = Some(Root {
            path: root.clone(),
            digest: String::new(),
            lazy: Some(LazyDisk {
                chunks: chunks.clone(),
                ext4: false,
            }),
        });
        Ok(record)
    };
    let are_kept = |vms: &[std::result::Result<VmRecord, LoadError>]| {
        images.sweep(vms.iter().map(|vm| vm.as_ref()));
        images.chunks.has(&chunks[0])
    };
    assert!(are_kept(&[vm(VmState::Running)]));
    // It may run.
    assert!(are_kept(&[vm(VmState::Exited), Err(LoadError::Checksum)]));
    // It was never started.
    assert!(!are_kept(&[Err(LoadError::Empty), vm(VmState::Exited)]));
}
