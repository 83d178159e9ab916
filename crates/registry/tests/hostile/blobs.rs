//! Blobs from a registry that misbehaves.

use crate::server::{Reply, Request, Server};
use crate::{GivesUp, Waits, client, reference};
use jiffy_registry::artifact::{Artifact, Config, FileToPush, IMAGE_TYPE, RemoteArtifact};
use jiffy_registry::{
    BlobFolder, Client, Descriptor, Digest, Progress, Reference, RegistryError, media_type,
};
use std::fs;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

fn content() -> Vec<u8> {
    (0..300_000u32).map(|n| (n % 251) as u8).collect()
}

fn blob() -> Descriptor {
    Descriptor::of("", &content())
}

/// A correct answer.
fn answer(request: &Request) -> Reply {
    let content = content();
    match request.range() {
        Some(range) => Reply::part(&content, range),
        None => Reply::new(200, content),
    }
}

fn fetch(server: &Server) -> (Result<Vec<u8>, RegistryError>, Waits) {
    let (client, waits) = client();
    let mut bytes = Vec::new();
    let result = client.blob(&reference(server, "a:1"), &blob(), &mut bytes, &());
    assert!(bytes.len() <= content().len(), "never more than the size");
    (result.map(|()| bytes), waits)
}

#[test]
fn a_broken_transfer_resumes_where_it_stopped() {
    let cuts = Mutex::new(vec![200_000usize, 70_000, 0, 1, 5]);
    let server = Server::start(move |request| match cuts.lock().unwrap().pop() {
        Some(cut) => answer(request).cut(cut),
        None => answer(request),
    });
    let (bytes, waits) = fetch(&server);
    assert!(bytes.unwrap() == content());
    assert_eq!(waits.all().len(), 5);
    let starts: Vec<usize> = server
        .seen()
        .iter()
        .map(|request| request.range().map_or(0, |(first, _)| first))
        .collect();
    assert_eq!(starts, [0, 5, 6, 6, 70_006, 270_006]);
}

#[test]
fn one_connection_serves_many_reads() {
    let server = Server::start(answer);
    let (client, _) = client();
    let to = reference(&server, "a:1");
    for start in [0, 1_000, 299_999] {
        client
            .blob_range(&to, &blob(), start..start + 1, &())
            .unwrap();
        client
            .blob(&to, &blob(), &mut std::io::sink(), &())
            .unwrap();
        assert!(client.has_blob(&to, &blob(), &()).unwrap());
    }
    assert_eq!(server.seen().len(), 9);
    assert_eq!(server.connections(), 1);
}

#[test]
fn a_registry_without_ranges_is_read_from_the_start() {
    let count = AtomicUsize::new(0);
    let server = Server::start(move |_| match count.fetch_add(1, Ordering::SeqCst) {
        0 => Reply::new(200, content()).cut(100_000),
        1 => Reply::new(200, content()).of_unsaid_length().cut(120_000),
        _ => Reply::new(200, content()).of_unsaid_length(),
    });
    let (bytes, _) = fetch(&server);
    assert!(bytes.unwrap() == content());

    let (client, _) = client();
    let part = client
        .blob_range(&reference(&server, "a:1"), &blob(), 1_000..2_000, &())
        .unwrap();
    assert_eq!(part, content()[1_000..2_000]);
}

#[test]
fn a_large_blob_is_not_read_from_its_start_for_a_part() {
    let server = Server::start(|_| {
        Reply::new(200, vec![0; 1 << 16])
            .with("content-length", 1u64 << 40)
            .endless()
    });
    let (client, waits) = client();
    let mut large = blob();
    large.size = 1 << 40;
    for range in [1 << 30..(1 << 30) + 10, (1 << 40) - 10..1 << 40] {
        let error = client
            .blob_range(&reference(&server, "a:1"), &large, range, &())
            .unwrap_err();
        assert!(
            error
                .to_string()
                .contains("does not support range requests"),
            "{error}"
        );
    }
    assert!(waits.all().is_empty());
}

#[test]
fn wrong_lengths_and_digests_are_refused() {
    let mut wrong = content();
    wrong[299_999] ^= 1;
    let mut long = content();
    long.push(0);
    for (reply, said) in [
        (Reply::new(200, wrong), "its digest is"),
        (Reply::new(200, long.clone()), "has 300001 bytes"),
        (
            Reply::new(200, long).of_unsaid_length(),
            "more than its 300000 bytes",
        ),
        (
            Reply::new(200, content()).endless(),
            "more than its 300000 bytes",
        ),
        (Reply::new(200, "short"), "has 5 bytes"),
        (Reply::part(&content(), (0, 299_999)), "206"),
        (Reply::new(204, ""), "204"),
    ] {
        let server = Server::start(move |_| reply.clone());
        let (bytes, waits) = fetch(&server);
        let error = bytes.unwrap_err();
        assert!(error.to_string().contains(said), "{said}: {error}");
        assert!(waits.all().is_empty(), "{error}");
    }
}

#[test]
fn wrong_ranges_are_refused() {
    for (reply, said) in [
        (Reply::part(&content(), (1, 10)), "sent 1-10"),
        (Reply::part(&content(), (0, 8)), "sent 0-8"),
        (Reply::new(206, "0123456789"), "not a byte range"),
        (
            Reply::new(206, "x").with("content-range", "bytes 0-99999999999999999999/5"),
            "not a byte range",
        ),
        (
            Reply::new(206, "x").with("content-range", "bytes 0-18446744073709551615/*"),
            "1-9 were requested",
        ),
        (
            Reply::new(206, "x").with("content-range", "bytes 0-9/10"),
            "has 10 bytes",
        ),
        (Reply::new(416, ""), "416"),
        (Reply::new(404, ""), "not in the registry"),
    ] {
        let server = Server::start(move |_| reply.clone());
        let (client, _) = client();
        let error = client
            .blob_range(&reference(&server, "a:1"), &blob(), 0..10, &())
            .unwrap_err();
        let mut text = error.to_string();
        if let Some(source) = std::error::Error::source(&error) {
            text.push_str(&source.to_string());
        }
        assert!(text.contains(said), "{said}: {text}");
    }
}

#[test]
fn only_progress_resets_the_retry_limit() {
    // Each connection breaks after 66,000 bytes: more breaks than retries, but each makes progress.
    let server = Server::start(|request| answer(request).cut(66_000));
    let (bytes, waits) = fetch(&server);
    assert!(bytes.unwrap() == content());
    assert_eq!(waits.all().len(), 4);
    // One byte per connection is not counted as progress.
    let server = Server::start(|request| answer(request).cut(1));
    let (bytes, waits) = fetch(&server);
    assert!(matches!(bytes, Err(RegistryError::Unreachable { .. })));
    assert_eq!(waits.all().len(), 5);
}

#[test]
fn a_stalled_transfer_resumes_on_another_connection() {
    let count = AtomicUsize::new(0);
    let server = Server::start(move |request| match count.fetch_add(1, Ordering::SeqCst) {
        0 => Reply::new(200, &content()[..100_000])
            .with("content-length", 300_000)
            .then_stall(),
        _ => answer(request),
    });
    let mut options = Waits::default().options();
    options.stall_timeout = Duration::from_millis(200);
    // A busy host may stall the server for longer.
    options.retries.limit = 1_000;
    let client = Client::new(options).unwrap();
    let mut bytes = Vec::new();
    client
        .blob(&reference(&server, "a:1"), &blob(), &mut bytes, &())
        .unwrap();
    assert!(bytes == content());
    assert!(server.seen().len() >= 2);
}

#[test]
fn a_cancelled_fetch_ends_and_can_be_resumed() {
    let server = Server::start(answer);
    let (client, _) = client();
    let root = tempfile::tempdir().unwrap();
    let folder = BlobFolder::open(root.path()).unwrap();
    let to = reference(&server, "a:1");
    let error = folder
        .fetch(&client, &to, &blob(), &GivesUp(Mutex::new(3)))
        .unwrap_err();
    assert!(matches!(error, RegistryError::Cancelled { .. }), "{error}");
    let partial = root.path().join("partial").join(blob().digest.hex());
    let there = fs::metadata(&partial).unwrap().len();
    assert!((1..300_000).contains(&there), "{there}");
    let path = folder.fetch(&client, &to, &blob(), &()).unwrap();
    assert!(fs::read(path).unwrap() == content());
    let seen = server.seen();
    assert_eq!(seen[1].range().unwrap().0 as u64, there);
    assert!(!partial.exists());
}

#[test]
fn wrong_bytes_leave_nothing_behind() {
    let server = Server::start(|_| Reply::new(200, vec![0; 300_000]));
    let (client, _) = client();
    let root = tempfile::tempdir().unwrap();
    let folder = BlobFolder::open(root.path()).unwrap();
    let error = folder
        .fetch(&client, &reference(&server, "a:1"), &blob(), &())
        .unwrap_err();
    assert!(matches!(error, RegistryError::Damaged { .. }), "{error}");
    for inside in ["partial", "blobs/sha256"] {
        assert_eq!(fs::read_dir(root.path().join(inside)).unwrap().count(), 0);
    }
}

#[test]
fn a_sink_that_is_full_ends_the_transfer() {
    struct Full(usize);
    impl std::io::Write for Full {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let count = bytes.len().min(self.0);
            self.0 -= count;
            match count {
                0 => Err(std::io::ErrorKind::StorageFull.into()),
                count => Ok(count),
            }
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let server = Server::start(answer);
    let (client, waits) = client();
    let error = client
        .blob(&reference(&server, "a:1"), &blob(), &mut Full(100_000), &())
        .unwrap_err();
    assert!(matches!(error, RegistryError::Sink { .. }), "{error}");
    assert!(waits.all().is_empty());
}

/// Progress with this deadline.
struct Until(Instant);

impl Progress for Until {
    fn deadline(&self) -> Option<Instant> {
        Some(self.0)
    }
}

#[test]
fn a_slow_transfer_ends_at_its_deadline() {
    let whole = vec![7; 4 << 20];
    let blob = Descriptor::of("", &whole);
    // At one byte each 10 ms the blob takes eleven hours, but no read stalls.
    let server =
        Server::start(move |request| Reply::part(&whole, request.range().unwrap()).dripping());
    let (client, waits) = client();
    let soon = Until(Instant::now() + Duration::from_millis(500));
    let end = blob.size - 1;
    let read = client.blob_range(&reference(&server, "a:1"), &blob, 0..end, &soon);
    assert!(
        matches!(read, Err(RegistryError::Unreachable { .. })),
        "{read:?}"
    );
    assert!(waits.all().is_empty(), "there is no retry");
    assert!(Instant::now() >= soon.0);
    // After the deadline no request is sent. The server may see the first one only now.
    client
        .manifest(&reference(&server, "a:1"), &soon)
        .unwrap_err();
    let seen = server.seen();
    assert!(seen.iter().all(|request| request.range().is_some()));
}

#[test]
fn a_slow_error_body_is_not_awaited() {
    let server = Server::start(|_| Reply::new(418, vec![b' '; 60_000]).dripping());
    let (client, _) = client();
    let blob = Descriptor::of("", b"x");
    let error = client
        .small_blob(&reference(&server, "a:1"), &blob, 10, &())
        .unwrap_err();
    assert!(error.to_string().contains("418"), "{error}");
}

/// Serves an artifact of one file; `change` alters the bytes of each answer to a range.
fn artifact_server(
    content: &[u8],
    change: impl Fn(&mut Vec<u8>) + Send + Sync + 'static,
) -> (Server, Reference) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    fs::write(&path, content).unwrap();
    let file = FileToPush::local("disk", &path, "boot")
        .cut(100_000, "data")
        .read_in_parts();
    let config = Config {
        media_type: "c".into(),
        bytes: b"{}".to_vec(),
    };
    let plan = Artifact::plan(IMAGE_TYPE, config, Default::default(), &[file], &()).unwrap();
    let manifest = plan.manifest().to_vec();
    let hashes = content.chunks(64 << 10).flat_map(|block| {
        let hash = blake3::hash(block);
        hash.as_bytes()[..16].to_vec()
    });
    let mut blobs = vec![b"{}".to_vec(), hashes.collect()];
    blobs.extend([content[..100_000].to_vec(), content[100_000..].to_vec()]);
    let server = Server::start(move |request| {
        if request.path.contains("/manifests/") {
            let kind = media_type::OCI_MANIFEST;
            return Reply::new(200, manifest.clone()).with("content-type", kind);
        }
        let is_it = |blob: &&Vec<u8>| request.path.ends_with(&Digest::of(blob).to_string());
        let Some(blob) = blobs.iter().find(is_it) else {
            return Reply::new(404, "");
        };
        match request.range() {
            None => Reply::new(200, blob.clone()),
            Some(range) => {
                let mut blob = blob.clone();
                change(&mut blob);
                Reply::part(&blob, range)
            }
        }
    });
    let to = reference(&server, "a:1");
    (server, to)
}

#[test]
fn a_range_with_the_wrong_hash_is_not_returned() {
    let content = content();
    let (_server, to) = artifact_server(&content, |_| {});
    let (client, _) = client();
    let file = |to: &Reference| {
        let artifact = RemoteArtifact::open(&client, to, &()).unwrap();
        assert_eq!(artifact.files().len(), 1, "hashes are not listed as a file");
        artifact.file("disk").unwrap().clone()
    };
    let honest = file(&to);
    for range in [
        0..1,
        64..70_000,
        99_999..100_001,
        65_536..131_072,
        250_000..300_000,
    ] {
        assert_eq!(
            honest.bytes_to_read(&range) % (64 << 10),
            match range.end {
                300_000 => 300_000 % (64 << 10),
                _ => 0,
            }
        );
        let part = honest.read(range.clone(), &()).unwrap();
        assert!(part == content[range.start as usize..range.end as usize]);
    }
    // One wrong bit anywhere in the blocks that are read, also outside of the requested range.
    let (_server, to) = artifact_server(&content, |blob| blob[10] ^= 1);
    let lying = file(&to);
    for range in [50..60, 64_000..64_001] {
        let error = lying.read(range, &()).unwrap_err();
        assert!(matches!(error, RegistryError::Damaged { .. }), "{error}");
        assert!(
            error
                .to_string()
                .contains("block 0 does not match its hash")
        );
    }
    // Other blocks are intact.
    let part = lying.read(200_000..200_010, &()).unwrap();
    assert!(part == content[200_000..200_010]);
}
