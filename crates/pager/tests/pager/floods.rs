//! Slow registries and floods of clients and VMMs are bounded and delay no others.

use super::disks::{
    CHUNK, REGISTRY_TIME, SIZE, Vmm, check, open, peer, request, set_origins, without_chunks,
};
use super::support::*;
use jiffy_store::ImageReader;
use jiffy_wire::disk::ChunkAnswer;
use jiffy_wire::pager::{OpenDisk, Origin, PagerRequest, PagerResponse, RegistryOrigin};
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

/// A registry that sends so slowly that each answer would take hours, without a stall.
fn dripping() -> Origin {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let drip = |mut stream: TcpStream| {
        let _ = stream.read(&mut [0; 4096]);
        let head = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n";
        let mut alive = stream.write_all(head).is_ok();
        while alive {
            thread::sleep(Duration::from_millis(50));
            alive = stream.write_all(b" ").is_ok();
        }
    };
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || drip(stream));
        }
    });
    Origin::Registry(RegistryOrigin {
        reference: format!("{address}/a@sha256:{}", "0".repeat(64)),
        file: "image.jimg".into(),
        docker_config: None,
        plain_http: true,
        authorities: Vec::new(),
    })
}

#[test]
fn a_slow_registry_times_out_and_delays_no_other_vm() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), SIZE, |_| {});
    let partial = without_chunks(&image);
    let pager = Pager::start(folder.path(), &[]);
    let before = peer(folder.path(), "before", &image, |_| {});
    set_origins(&pager, &partial, vec![before]);
    let disk = request(folder.path(), &partial);
    let mut waiting = open(&pager, &disk);
    waiting.have(0, CHUNK);
    set_origins(&pager, &partial, vec![dripping()]);
    // As many requests as one VMM may have in flight, and as its lane has threads.
    let asked = 16;
    let whole = ImageReader::open(&image).unwrap();
    let place = |chunk: &u32| whole.stored_range(*chunk).unwrap();
    let far = |chunk: &u32| place(chunk).is_some_and(|place| place.start > 128 << 10);
    let far: Vec<u32> = (0..whole.chunks()).filter(far).take(asked).collect();
    assert_eq!(far.len(), asked);
    let begun = Instant::now();
    for chunk in &far {
        waiting.ask(u64::from(*chunk) * CHUNK, CHUNK);
    }
    let hang = |vmm: &Vmm| vmm.has_no_answer() || begun.elapsed() >= REGISTRY_TIME;
    // They delay no other request of the disk: local bytes are served at once, from the cache or
    // from the image's file.
    let mut second = Vmm::connect(&disk.socket);
    second.have(0, CHUNK);
    second.have(CHUNK, CHUNK);
    assert!(hang(&waiting), "they were waited for");
    // Other disks are filled, from local files and from a peer.
    let whole = OpenDisk {
        name: "whole".into(),
        socket: folder.path().join("whole.sock"),
        cache: folder.path().join("whole"),
        ..request(folder.path(), &image)
    };
    open(&pager, &whole).have(0, SIZE as u64);
    check(&whole.cache, 0, SIZE as u64);
    let near = folder.path().join("near");
    std::fs::create_dir(&near).unwrap();
    let copy = near.join("copy");
    std::fs::copy(&image, &copy).unwrap();
    let elsewhere = without_chunks(&copy);
    let honest = peer(folder.path(), "honest", &image, |_| {});
    set_origins(&pager, &elsewhere, vec![honest]);
    let other = OpenDisk {
        name: "other".into(),
        socket: folder.path().join("other.sock"),
        cache: folder.path().join("other"),
        ..request(folder.path(), &elsewhere)
    };
    open(&pager, &other).have(0, SIZE as u64);
    check(&other.cache, 0, SIZE as u64);
    assert!(hang(&waiting), "they were waited for");
    // All slow requests time out.
    for _ in 0..asked {
        match waiting.receive() {
            ChunkAnswer::Unavailable { .. } => {}
            answer => panic!("{answer:?}"),
        }
    }
    // The requests of a VMM end when it disconnects.
    waiting.ask(u64::from(far[0]) * CHUNK, CHUNK);
    drop(waiting);
    assert_eq!(pager.forget("root"), PagerResponse::Ok);
}

#[test]
fn silent_clients_are_dropped_for_new_ones() {
    let folder = tempfile::tempdir().unwrap();
    let pager = Pager::start(folder.path(), &[]);
    let mut silent: Vec<UnixStream> = (0..200)
        .map(|number| {
            let mut stream = UnixStream::connect(&pager.control).unwrap();
            if number % 2 == 0 {
                stream.write_all(b"{\"half").unwrap();
            }
            stream
        })
        .collect();
    assert_eq!(pager.ask(&PagerRequest::Ping), PagerResponse::Ok);
    // The oldest clients were disconnected.
    let first = &mut silent[0];
    first.set_read_timeout(Some(TIMEOUT)).unwrap();
    let read = first.read(&mut [0; 8]);
    assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
    assert!(pager.count("fd") < 200);
}

#[test]
fn connections_of_one_process_to_a_disk_are_limited() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), SIZE, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let disk = request(folder.path(), &image);
    let mut good = open(&pager, &disk);
    good.have(0, CHUNK);
    let before = pager.count("fd");
    let mut others: Vec<Vmm> = (0..100).map(|_| Vmm::connect(&disk.socket)).collect();
    let refused = others.pop().unwrap();
    assert!(refused.ends());
    assert!(pager.count("fd") <= before + 10);
    good.have(CHUNK, CHUNK);
}

#[test]
fn connections_that_the_node_makes_for_a_vmm_count_as_that_vmms() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), SIZE, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let disk = request(folder.path(), &image);
    let mut good = open(&pager, &disk);
    let connect_for = |pid: u32| {
        let mut vmm = Vmm::connect(&disk.socket);
        vmm.send_line(&format!("{{\"on_behalf_of\":{pid}}}\n"));
        vmm
    };
    let mut kept = Vec::new();
    for pid in [1, 2] {
        for _ in 0..8 {
            let mut vmm = connect_for(pid);
            vmm.have(0, CHUNK);
            kept.push(vmm);
        }
        assert!(connect_for(pid).ends());
    }
    good.have(CHUNK, CHUNK);
}

#[test]
fn a_vmm_that_is_refused_again_and_again_does_not_fill_the_log() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), SIZE, |_| {});
    let pager = Pager::start_with_log(folder.path());
    let log = || fs::read_to_string(folder.path().join("log")).unwrap();

    let disk = request(folder.path(), &image);
    let mut asking = open(&pager, &disk);
    for _ in 0..100 {
        asking.refused(SIZE as u64, CHUNK);
        let mut malformed = Vmm::connect(&disk.socket);
        malformed.send_line(&format!("{{\"{}\":1}}\n", "x".repeat(3000)));
        assert!(malformed.ends());
    }
    let about_disk = log().lines().filter(|line| line.contains("root")).count();
    assert!((5..20).contains(&about_disk), "{about_disk} lines");

    let socket = pager.serve("vm", &image);
    let text = format!("[\"{}\"]", "x".repeat(60_000));
    for _ in 0..100 {
        let stream = UnixStream::connect(&socket).unwrap();
        greet(&stream, &text, &[]);
        assert!(failure_message(&stream).len() < 2000);
    }
    let memory = Memory::new(SIZE);
    for _ in 0..20 {
        let _connection = memory.connect(&socket);
        pager.wait_for(&memory);
    }
    let log = log();
    let about_vm = log
        .lines()
        .filter(|line| line.contains("vm=\"vm\""))
        .count();
    assert!((5..20).contains(&about_vm), "{about_vm} lines");
    assert!(log.len() < 40_000, "{} bytes", log.len());
}
