//! Faults of one VM.

use super::support::*;
use jiffy_sys::memfd;
use jiffy_sys::userfaultfd::Arena;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;

#[test]
fn every_page_has_the_image_s_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), 8 * MIB, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let socket = pager.serve("vm", &image);
    assert_eq!(
        fs::metadata(&socket).unwrap().permissions().mode() & 0o777,
        0o600
    );
    let memory = Memory::new(8 * MIB);
    let connection = memory.connect(&socket);
    let threads: Vec<_> = (0..4).map(|seed| memory.check(seed)).collect();
    threads.into_iter().for_each(join);

    let stats = pager.stats_once("vm", |stats| {
        stats.faults >= 1024 && stats.bytes_filled >= 8 * MIB as u64
    });
    // Each chunk faults once, or a few more times when two threads race.
    assert!((1024..1024 * 4).contains(&stats.faults), "{stats:?}");
    assert_eq!(stats.bytes_filled, 8 * MIB as u64);
    assert!(stats.bytes_read > 0 && stats.fault_ns > 0 && stats.first_fault_ns > 0);
    assert_eq!(stats.failed, None);
    drop(connection);
    assert!(pager.terminate().success());
    assert!(!socket.exists());
}

#[test]
fn chunks_of_every_size_and_codec_are_served() {
    for (chunk, codec, around) in [
        (4 << 10, jiffy_store::Codec::None, "0"),
        (64 << 10, jiffy_store::Codec::Lz4, "256"),
        (2 << 20, jiffy_store::Codec::Lz4, "0"),
        (8 << 10, jiffy_store::Codec::Lz4, "32"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        // Not a whole number of the largest chunks.
        let bytes = 5 * MIB + 12 * PAGE;
        let image = image(folder.path(), bytes, |options| {
            options.chunk_size = chunk;
            options.codec = codec;
        });
        let pager = Pager::start(folder.path(), &["--fault-around", around]);
        let memory = Memory::new(bytes);
        let _connection = memory.connect(&pager.serve("vm", &image));
        let threads: Vec<_> = (0..3).map(|seed| memory.check(seed)).collect();
        threads.into_iter().for_each(join);
        let stats = pager.filled("vm", bytes);
        assert_eq!(stats.bytes_filled, bytes as u64, "{chunk}");
    }
}

#[test]
fn a_backing_file_is_served_after_all_files_are_unlinked() {
    let folder = tempfile::tempdir().unwrap();
    // All but the first MiB of the memory, at other offsets.
    let root = folder.path().join("root");
    let bytes = [&[7; 3 * PAGE], &contents(4 * MIB)[MIB..]].concat();
    fs::write(&root, bytes).unwrap();
    let image = image(folder.path(), 4 * MIB, |options| {
        options.backing = Some(jiffy_store::Backing::open(&root).unwrap());
    });
    let reader = jiffy_store::ImageReader::open(&image).unwrap();
    let there = (0..reader.chunks())
        .filter(|chunk| reader.kind(*chunk).unwrap() == jiffy_store::Kind::Backing)
        .count();
    // Chunks that begin with a page of zeros are not searched for.
    assert!((250..3 * MIB / 8192).contains(&there), "{there}");
    let pager = Pager::start(folder.path(), &[]);
    let memory = Memory::new(4 * MIB);
    let _connection = memory.connect(&pager.serve("vm", &image));
    fs::remove_file(&root).unwrap();
    fs::remove_file(&image).unwrap();
    memory.check(1).join().unwrap();
    let stats = pager.filled("vm", 4 * MIB);
    assert_eq!(stats.bytes_filled, 4 * MIB as u64, "{stats:?}");
    assert!(stats.bytes_read > (there * 8192) as u64, "{stats:?}");
    assert_eq!(stats.failed, None);
}

#[test]
fn shared_memory_is_served_as_private_memory_is() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), 2 * MIB, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let file = memfd::create("ram", 2 * MIB as u64, memfd::Pages::Small).unwrap();
    let memory = Memory::over(Arena::shared(&file, 2 * MIB).unwrap());
    let _connection = memory.connect(&pager.serve("vm", &image));
    let threads: Vec<_> = (0..2).map(|seed| memory.check(seed)).collect();
    threads.into_iter().for_each(join);
    memory.arena.discard(8 * PAGE, 2 * PAGE).unwrap();
    assert_page(memory.read_page(8).bytes(), [0; PAGE]);
    assert_page(memory.read_page(9).bytes(), [0; PAGE]);
    assert_page(memory.read_page(11).bytes(), page(11));
}

#[test]
fn ram_in_two_regions_is_served() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), 4 * MIB, |options| {
        options.chunk_size = 64 << 10
    });
    let pager = Pager::start(folder.path(), &[]);
    let memory = Memory::new(8 * MIB);
    let stream = UnixStream::connect(pager.serve("vm", &image)).unwrap();
    // The boundary is inside a chunk, and the upper part comes first.
    let low = MIB + 4 * PAGE;
    let high = 4 * MIB - low;
    let base = memory.arena.address() as usize;
    let region = |at: usize, size: usize, offset: usize| {
        format!(
            r#"{{"base_host_virt_addr":{},"size":{size},"offset":{offset},"page_size_kib":4096}}"#,
            base + at
        )
    };
    let text = format!("[{},{}]", region(0, high, low), region(5 * MIB, low, 0));
    greet(&stream, &text, &[memory.uffd()]);
    for number in 0..4 * MIB / PAGE {
        let at = number * PAGE;
        let place = if at < low { 5 * MIB + at } else { at - low };
        assert_page(memory.read_page(place / PAGE).bytes(), page(number));
    }
}

#[test]
fn pages_written_by_the_guest_are_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), MIB, |_| {});
    let pager = Pager::start(folder.path(), &["--fault-around", "64"]);
    let memory = Memory::new(MIB);
    let _connection = memory.connect(&pager.serve("vm", &image));
    let arena = memory.arena.clone();
    join(std::thread::spawn(move || {
        for number in 0..MIB / PAGE {
            arena.write(number * PAGE + 5, 0xee);
        }
    }));
    for number in 0..MIB / PAGE {
        let mut expected = page(number);
        expected[5] = 0xee;
        assert_page(memory.read_page(number).bytes(), expected);
    }
}

#[test]
fn a_handshake_may_come_in_pieces() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), MIB, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let memory = Memory::new(MIB);
    let stream = UnixStream::connect(pager.serve("vm", &image)).unwrap();
    let text = format!("[{}]", memory.mapping());
    let (first, rest) = text.split_at(20);
    greet(&stream, first, &[memory.uffd()]);
    std::thread::sleep(std::time::Duration::from_millis(50));
    greet(&stream, rest, &[]);
    assert_page(memory.read_page(3).bytes(), page(3));
}

#[test]
#[ignore = "needs huge pages: echo 8 >/proc/sys/vm/nr_hugepages"]
fn huge_pages_are_filled_whole() {
    const HUGE: usize = 2 * MIB;
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), 4 * HUGE, |_| {});
    let pager = Pager::start(folder.path(), &[]);
    let file = memfd::create("ram", 4 * HUGE as u64, memfd::Pages::Huge2M).unwrap();
    let memory = Memory::over(Arena::shared(&file, 4 * HUGE).unwrap());
    let stream = UnixStream::connect(pager.serve("vm", &image)).unwrap();
    let text = memory
        .mapping()
        .replace("\"page_size\":4096", &format!("\"page_size\":{HUGE}"));
    greet(&stream, &format!("[{text}]"), &[memory.uffd()]);
    let threads: Vec<_> = (0..2).map(|seed| memory.check(seed)).collect();
    threads.into_iter().for_each(join);
    let stats = pager.filled("vm", 4 * HUGE);
    assert_eq!(stats.bytes_filled, 4 * HUGE as u64);
    memory.arena.discard(HUGE, HUGE).unwrap();
    for number in HUGE / PAGE..2 * HUGE / PAGE {
        assert_page(memory.read_page(number).bytes(), [0; PAGE]);
    }
    assert_page(memory.read_page(1).bytes(), page(1));
}
