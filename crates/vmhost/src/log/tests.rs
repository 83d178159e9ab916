use super::*;
use proptest::prelude::*;

const OUT: Kind = Kind::Output(Stream::Stdout);

fn read_all(folder: &Path, from: u64) -> (Vec<u8>, u64) {
    let end = end_of(folder).unwrap();
    let mut reader = Reader::new(folder, from);
    let mut bytes = Vec::new();
    loop {
        let batch = reader.batch(end).unwrap();
        if batch.is_empty() {
            return (bytes, reader.take_dropped());
        }
        for record in batch {
            bytes.extend_from_slice(&record.data);
        }
    }
}

#[test]
fn offsets_restart_at_each_vm_start_and_survive_reopening() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = Writer::open(folder.path()).unwrap();
    log.begin().unwrap();
    log.append(OUT, b"first run").unwrap();
    let second = log.begin().unwrap();
    log.append(OUT, b"second").unwrap();
    log.append(Kind::Output(Stream::Stderr), b"err").unwrap();
    log.append(Kind::Note, b"a note").unwrap();
    let end = log.end();
    drop(log);
    let log = Writer::open(folder.path()).unwrap();
    assert_eq!(log.offset(Stream::Stdout), 6);
    assert_eq!(log.offset(Stream::Stderr), 3);
    assert_eq!(log.end(), end);
    assert_eq!(read_all(folder.path(), second).0, b"seconderra note");
}

#[test]
fn a_torn_record_is_truncated() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = Writer::create(folder.path()).unwrap();
    log.append(OUT, b"whole").unwrap();
    let end = log.end();
    log.append(OUT, b"torn").unwrap();
    let file = log.file.as_ref().unwrap();
    file.set_len(log.length - 2).unwrap();
    let mut log = Writer::open(folder.path()).unwrap();
    assert_eq!(log.end(), end);
    log.append(OUT, b" again").unwrap();
    assert_eq!(read_all(folder.path(), 0).0, b"whole again");
}

#[test]
fn a_damaged_record_is_an_error_and_never_data() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = Writer::create(folder.path()).unwrap();
    log.append(OUT, b"some bytes").unwrap();
    let file = log.file.as_ref().unwrap();
    file.write_all_at(b"X", log.length - 3).unwrap();
    let error = Reader::new(folder.path(), 0).batch(u64::MAX).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
}

#[test]
fn records_before_a_damaged_one_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = Writer::create(folder.path()).unwrap();
    log.append(OUT, b"whole").unwrap();
    let end = log.end();
    log.append(OUT, b"damaged").unwrap();
    let file = log.file.as_ref().unwrap();
    file.write_all_at(b"X", log.length - 3).unwrap();
    let mut reader = Reader::new(folder.path(), 0);
    assert_eq!(reader.batch(u64::MAX).unwrap()[0].data, b"whole");
    assert!(is_damage(&reader.batch(u64::MAX).unwrap_err()));
    let log = Writer::open(folder.path()).unwrap();
    assert_eq!((log.end(), log.offset(Stream::Stdout)), (end, 5));
}

#[test]
fn a_temporarily_unreadable_log_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    // A regular file whose first page can't be read (proc_pid_mem(5)).
    let log = current(folder.path());
    std::os::unix::fs::symlink("/proc/self/mem", &log).unwrap();
    let error = Writer::open(folder.path()).unwrap_err();
    assert_eq!(
        error.raw_os_error(),
        Some(rustix::io::Errno::IO.raw_os_error())
    );
    assert!(fs::symlink_metadata(&log).unwrap().is_symlink());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_segment_with_an_impossible_position_is_set_aside() {
    let folder = tempfile::tempdir().unwrap();
    for position in [u64::MAX - 5, 1 << 63] {
        let start = SegmentStart {
            position,
            ..SegmentStart::default()
        };
        let mut log = start.encode().to_vec();
        log.extend(2_u32.to_le_bytes());
        log.extend([Kind::Note.code(), 0, 0, 0]);
        let sum = record_checksum(&log[log.len() - 8..], b"on");
        log.extend(sum.to_le_bytes());
        log.extend(b"on");
        std::fs::write(current(folder.path()), log).unwrap();
        assert!(
            Reader::new(folder.path(), position)
                .batch(u64::MAX)
                .is_err()
        );
        assert_eq!(Writer::open(folder.path()).unwrap().end(), 0);
    }
}

#[test]
fn old_segments_are_deleted_and_late_readers_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = Writer::create(folder.path()).unwrap().with_segment(1000);
    let mut follower = Reader::new(folder.path(), 0);
    let mut followed = Vec::new();
    let mut wrote = Vec::new();
    for index in 0..100u8 {
        log.append(OUT, &[index; 50]).unwrap();
        wrote.extend_from_slice(&[index; 50]);
        for record in follower.batch(log.end()).unwrap() {
            followed.extend_from_slice(&record.data);
        }
    }
    assert_eq!(followed, wrote, "a reader that keeps up loses nothing");
    assert_eq!(follower.take_dropped(), 0);
    let (rest, dropped) = read_all(folder.path(), 0);
    assert!(dropped > 0 && wrote.ends_with(&rest) && !rest.is_empty());
    let kept: u64 = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().len())
        .sum();
    assert!(kept <= 2000);
}

proptest! {
    #[test]
    fn any_damage_is_detected_or_harmless(at in 0usize..400, with in any::<u8>()) {
        let folder = tempfile::tempdir().unwrap();
        let mut log = Writer::create(folder.path()).unwrap();
        for index in 0..10u8 {
            log.append(OUT, &[index; 20]).unwrap();
        }
        let mut bytes = fs::read(current(folder.path())).unwrap();
        let at = at.min(bytes.len() - 1);
        bytes[at] = with;
        fs::write(current(folder.path()), &bytes).unwrap();
        let mut reader = Reader::new(folder.path(), 0);
        while let Ok(batch) = reader.batch(u64::MAX) {
            if batch.is_empty() { break }
            for record in batch {
                prop_assert!(record.data.len() == 20 && record.data.iter().all(|b| *b == record.data[0]));
            }
        }
        Writer::open(folder.path()).unwrap();
    }
}

#[test]
fn a_rotation_that_was_cut_short_is_finished() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = Writer::create(folder.path()).unwrap();
    log.begin().unwrap();
    let end = log.append(Kind::Output(Stream::Stdout), b"before").unwrap();
    // As `rotate` does it, up to its second rename.
    let start = SegmentStart {
        position: end,
        stdout: log.stdout,
        stderr: log.stderr,
    };
    new_segment(&fresh(folder.path()), &start).unwrap();
    fs::rename(current(folder.path()), previous(folder.path())).unwrap();
    drop(log);
    let mut log = Writer::open(folder.path()).unwrap();
    assert_eq!((log.end(), log.offset(Stream::Stdout)), (end, 6));
    assert!(!fresh(folder.path()).exists());
    log.append(Kind::Output(Stream::Stdout), b"after").unwrap();
    assert_eq!(read_all(folder.path(), 0).0, b"beforeafter");
}
