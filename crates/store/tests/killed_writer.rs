//! Kills a writer process at many moments.
//!
//! This test has a binary of its own: between fork and exec, a child holds its parent's open files
//! and therefore the locks of any test that runs at the same time.

use jiffy_store::source::ChunkSource;
use jiffy_store::writer::write_image;
use jiffy_store::{ImageReader, WriteOptions};
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Bytes of a chunk.
const CHUNK: usize = 4096;

fn small() -> WriteOptions {
    WriteOptions {
        chunk_size: CHUNK as u32,
        ..WriteOptions::default()
    }
}

/// Chunks that compress, that do not, that are zero, and that occur twice.
fn contents() -> Vec<u8> {
    let mut noise = blake3::Hasher::new().finalize_xof();
    let mut bytes = Vec::new();
    for round in 0..40 {
        let mut chunk = [0; CHUNK];
        let text = |seed: u32| format!("{seed}: one line of many\n").into_bytes();
        bytes.extend(text(round).iter().cycle().take(CHUNK));
        noise.fill(&mut chunk);
        bytes.extend(chunk);
        bytes.extend([0; CHUNK]);
        bytes.extend(text(1_000_000).iter().cycle().take(CHUNK));
        bytes.extend(text(1_000 + round).iter().cycle().take(CHUNK));
    }
    bytes
}

/// The images in a folder; hidden files are not images.
fn images(folder: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(folder).unwrap();
    files
        .map(|file| file.unwrap().path())
        .filter(|path| !is_hidden(path))
        .collect()
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().unwrap().as_encoded_bytes()[0] == b'.'
}

/// Contents that report it and block forever when half of them was read.
struct Stalls(Vec<u8>);

impl ChunkSource for Stalls {
    fn size(&self) -> u64 {
        self.0.size()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        if offset >= self.size() / 2 {
            println!("stalled");
            loop {
                std::thread::park();
            }
        }
        self.0.read_at(offset, buffer)
    }
}

/// The writer of the test. Every third one stalls in the middle of an image; the others write
/// images until they are killed.
fn write_until_killed(folder: &Path, stalls: bool) -> ! {
    let bytes = contents();
    println!("begun");
    if stalls {
        let _ = write_image(&folder.join("image-0"), &Stalls(bytes.clone()), &small());
        panic!("an image was read whole from a source that stalls");
    }
    for number in 0.. {
        let path = folder.join(format!("image-{}", number % 3));
        write_image(&path, &bytes, &small()).unwrap();
    }
    unreachable!("numbers do not end");
}

#[test]
fn a_killed_writer_leaves_the_image_whole_or_as_it_was() {
    if let Some(path) = std::env::var_os("JIFFY_STORE_KILLED_WRITER") {
        let stalls = std::env::var_os("JIFFY_STORE_WRITER_STALLS").is_some();
        write_until_killed(Path::new(&path), stalls);
    }
    let folder = tempfile::tempdir().unwrap();
    for round in 0..18 {
        let stalls = round % 3 == 0;
        let mut child = Command::new(std::env::current_exe().unwrap());
        if stalls {
            child.env("JIFFY_STORE_WRITER_STALLS", "1");
        }
        let mut child = child
            .args(["--exact", "--nocapture"])
            .arg("a_killed_writer_leaves_the_image_whole_or_as_it_was")
            .env("JIFFY_STORE_KILLED_WRITER", folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains(if stalls { "stalled" } else { "begun" }) {
            line.clear();
            assert!(output.read_line(&mut line).unwrap() > 0);
        }
        if !stalls {
            std::thread::sleep(Duration::from_micros(5_000 + round * 7_300));
        }
        // On a slow host, no writer may have finished an image within these times.
        while round == 17 && images(folder.path()).is_empty() {
            assert_eq!(child.try_wait().unwrap(), None);
            std::thread::sleep(Duration::from_millis(1));
        }
        // Reads meanwhile.
        for path in images(folder.path()) {
            ImageReader::open(&path).unwrap().verify().unwrap();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        for path in images(folder.path()) {
            ImageReader::open(&path).unwrap().verify().unwrap();
        }
        let files = fs::read_dir(folder.path()).unwrap();
        let left: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
        let (hidden, _): (Vec<_>, Vec<_>) = left.iter().partition(|path| is_hidden(path));
        assert!(hidden.len() <= 1, "{hidden:?}");
        assert!(!stalls || hidden.len() == 1, "it was caught in the middle");
        for path in hidden {
            fs::remove_file(path).unwrap();
        }
    }
    assert!(!images(folder.path()).is_empty());
}
