//! The program itself, started as the daemon starts it, with sources that are good, hostile, or
//! withheld.

mod client;

use client::{Import, failed, made, tar_of};
use jiffy_wire::import::{Answer, FailureKind, Layer, Source};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::time::Duration;

const CONFIG: &[u8] = br#"{"architecture":"amd64","os":"linux","config":{"Cmd":["sh"],
    "Env":["A=1"],"ExposedPorts":{"80/tcp":{}},"Labels":{"a":"b"}}}"#;

fn layers(config: &[u8], layers: &[&[u8]]) -> Import {
    let described = layers.iter().map(|layer| Layer {
        name: "blob".into(),
        media_type: String::new(),
        size: layer.len() as u64,
    });
    let source = Source::Layers {
        config: config.to_vec(),
        layers: described.collect(),
    };
    Import::start(source, layers)
}

fn archive() -> Import {
    Import::start(
        Source::Archive {
            reference: None,
            format: None,
        },
        &[],
    )
}

fn sentence(answer: Answer) -> String {
    let failure = failed(answer);
    assert_eq!(failure.kind, FailureKind::Source);
    failure.sentence
}

#[test]
fn an_image_is_the_same_whatever_its_source_is() {
    let tar = tar_of(&[("bin/sh", &[7; 100_000]), ("etc/motd", b"hello")]);
    let packed = zstd::encode_all(&tar[..], 3).unwrap();
    let by_layers = layers(CONFIG, &[&packed]);
    let made_of_layers = made(by_layers.answer());
    assert_eq!(made_of_layers.config.cmd, ["sh"]);
    assert_eq!(made_of_layers.config.exposed_ports, ["80/tcp"]);
    assert_eq!(made_of_layers.config.labels, [("a".into(), "b".into())]);
    assert_eq!(made_of_layers.entries, 2);
    let (size, digest) = by_layers.image();

    for stream in [&tar, &packed] {
        let mut streamed = archive();
        streamed.stream().write_all(stream).unwrap();
        streamed.end_stream();
        assert_eq!(made(streamed.answer()).entries, 2);
        assert_eq!(streamed.image(), (size, digest));
    }
    // The library, without a process.
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("image");
    let whole = jiffy_rootfs::import_tar(&tar[..], &out, jiffy_rootfs::Limits::default()).unwrap();
    assert_eq!(
        (whole.size, whole.digest),
        (size, digest.to_hex().to_string())
    );
}

#[test]
fn a_child_image_is_that_of_the_library() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let limits = jiffy_rootfs::Limits::default();
    let base = tar_of(&[("one", &[1; 300_000]), ("two", &[2; 300_000])]);
    jiffy_rootfs::import_tar(&base[..], &path("parent"), limits).unwrap();
    let changes = tar_of(&[("two", &[3; 10])]);
    fs::write(path("changes"), &changes).unwrap();

    let parent = fs::read(path("parent")).unwrap();
    let source = Source::Changes {
        parent: "the parent".into(),
        changes: "the changes".into(),
    };
    let import = Import::start(source.clone(), &[&parent, &changes]);
    assert!(made(import.answer()).shares);
    let choice = jiffy_rootfs::Choice::new(folder.path());
    let layer = jiffy_rootfs::Source::open(&path("changes"), &choice).unwrap();
    let mut go_on = |_| std::ops::ControlFlow::Continue(());
    let child = jiffy_rootfs::child(&path("parent"), layer, &path("child"), &limits, &mut go_on);
    let child = child.unwrap().image;
    let (size, digest) = import.image();
    assert_eq!(
        (child.size, child.digest),
        (size, digest.to_hex().to_string())
    );

    let damaged = Import::start(source, &[&parent[..4096], &changes]);
    assert!(sentence(damaged.answer()).contains("the image the parent can't be used"));
}

#[test]
fn hostile_sources_are_refused_in_a_sentence() {
    let tar = tar_of(&[("file", &[5; 50_000])]);
    let packed = zstd::encode_all(&tar[..], 3).unwrap();
    let cut = layers(CONFIG, &[&packed[..packed.len() / 2]]);
    let refusal = sentence(cut.answer());
    assert!(refusal.contains("can't be unpacked"), "{refusal}");

    let bomb = zstd::encode_all(io::repeat(0).take_most((1 << 30) + (1 << 20)), 1).unwrap();
    let refusal = sentence(layers(CONFIG, &[&bomb]).answer());
    assert!(refusal.contains("times its size"), "{refusal}");

    for name in ["../../etc/passwd", "a/../../b"] {
        let climbing = tar_of(&[(name, b"x")]);
        let answer = layers(CONFIG, &[&climbing]).answer();
        assert!(sentence(answer).contains("is refused"), "{name}");
    }
    let refusal = sentence(layers(b"{\"config\":", &[&tar]).answer());
    assert!(refusal.contains("configuration is not valid"), "{refusal}");
    let other = br#"{"architecture":"s390x","os":"linux"}"#;
    let refusal = sentence(layers(other, &[&tar]).answer());
    assert!(refusal.contains("s390x"), "{refusal}");
    let refusal = sentence(layers(CONFIG, &[&[]]).answer());
    assert!(refusal.contains("truncated"), "{refusal}");

    // Bytes of every kind, in place of a tar and inside of one.
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for round in 0..40 {
        let mut bytes = [&tar, &packed][round % 2].clone();
        for _ in 0..20 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let at = (random >> 20) as usize % bytes.len().min(2048);
            bytes[at] = (random >> 56) as u8;
        }
        match layers(CONFIG, &[&bytes]).answer() {
            Answer::Made(_) => {}
            answer => assert!(!sentence(answer).is_empty()),
        }
    }
}

trait TakeMost: io::Read + Sized {
    fn take_most(self, bytes: u64) -> io::Take<Self> {
        self.take(bytes)
    }
}

impl<R: io::Read> TakeMost for R {}

#[test]
fn a_full_disk_is_a_kind_of_its_own() {
    let source = Source::Archive {
        reference: None,
        format: None,
    };
    let mut import = Import::start_with(source, &[], |files| {
        // Writing to it fails with ENOSPC.
        let open = || fs::File::options().write(true).open("/dev/full");
        files[1..]
            .iter_mut()
            .for_each(|file| *file = open().unwrap());
    });
    let _ = import.stream().write_all(&tar_of(&[("x", &[1; 9000])]));
    import.end_stream();
    assert_eq!(failed(import.answer()).kind, FailureKind::Full);
}

#[test]
fn it_is_confined_before_it_reads_anything() {
    let mut import = archive();
    // It reads, so it is confined: the first bytes were taken.
    import.stream().write_all(&[0; 4096]).unwrap();
    import.eventually("it is confined", |status| status.contains("Seccomp:\t2"));
    let status = import.status();
    for expected in [
        "NoNewPrivs:\t1",
        "CapPrm:\t0000000000000000",
        "CapEff:\t0000000000000000",
        "CapInh:\t0000000000000000",
    ] {
        assert!(status.contains(expected), "{expected}: {status}");
    }
    let limits = import.proc("limits");
    let limit = |name: &str| {
        let line = limits.lines().find(|line| line.starts_with(name));
        line.unwrap()[26..46].trim().to_owned()
    };
    assert_eq!(limit("Max open files"), "0");
    assert_eq!(limit("Max core file size"), "0");
    assert_eq!(limit("Max address space"), (4_u64 << 30).to_string());
    assert_eq!(limit("Max file size"), (128_u64 << 30).to_string());
    assert_eq!(limit("Max cpu time"), "14400");
    assert_eq!(import.proc("environ"), "");
}

#[test]
fn without_a_daemon_it_ends() {
    // The daemon closes its end before it sends a request, or while the process reads.
    for request in [false, true] {
        let mut import = match request {
            true => archive(),
            false => Import::without_a_request(),
        };
        import.close();
        import.ends_within(Duration::from_secs(60));
    }
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_jiffy-import"))
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("only jiffyd can start"));
}

#[test]
fn a_request_of_another_release_is_refused() {
    let mut import = Import::without_a_request();
    import.send(&[8, 0, 0, 0, 99, 0, 0, 0, 0, 0, 0, 0]);
    let failure = failed(import.answer());
    assert_eq!(failure.kind, FailureKind::Process);
    assert!(
        failure.sentence.contains("version 99"),
        "{}",
        failure.sentence
    );
    assert!(failure.sentence.contains("restart jiffyd"));
}

#[test]
fn a_killed_process_leaves_files_without_names_only() {
    let mut import = archive();
    import.stream().write_all(&[0; 100_000]).unwrap();
    import.kill();
    let names: Vec<_> = fs::read_dir(import.folder()).unwrap().collect();
    assert_eq!(names.len(), 1, "the image only: {names:?}");
    let mut byte = [0];
    assert_eq!(import.file().read_at(&mut byte, 0).unwrap(), 0);
}
