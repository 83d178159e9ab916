//! Checks the file systems that this crate creates with e2fsprogs.

use jiffy_ext4::layout::{LEAST_BYTES, Layout, MOST_BYTES};
use jiffy_ext4::{FormatError, Found, Options, format, inspect};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn options(bytes: u64) -> Options {
    Options {
        bytes,
        uuid: *b"\x12\x34jiffy-ext4-uui",
        hash_seed: [7; 16],
        label: "a-name-of-16-bytes-and-more".into(),
        created: 1_700_000_000,
        copies: true,
    }
}

fn make(folder: &TempDir, bytes: u64) -> PathBuf {
    make_with(folder, &options(bytes))
}

fn make_with(folder: &TempDir, options: &Options) -> PathBuf {
    let path = folder.path().join(format!("{}.img", options.bytes));
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    format(&file, options).unwrap();
    path
}

fn run(program: &str, arguments: &[&str], path: &Path) -> Output {
    let found = ["/usr/sbin", "/sbin", "/usr/bin"]
        .map(|folder| Path::new(folder).join(program))
        .into_iter()
        .find(|path| path.exists())
        .unwrap_or_else(|| panic!("{program} of e2fsprogs is missing: run `make setup`"));
    Command::new(found)
        .args(arguments)
        .arg(path)
        .output()
        .unwrap()
}

fn check(path: &Path) {
    let output = run("e2fsck", &["-f", "-n"], path);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}: {text}", path.display());
    assert!(!text.contains("Fix"), "{text}");
}

#[test]
fn e2fsck_finds_nothing_to_fix_at_any_size() {
    let folder = tempfile::tempdir().unwrap();
    let group = 128 * MIB;
    let sizes = [
        LEAST_BYTES,
        LEAST_BYTES + 4096,
        16 * MIB - 4096,
        16 * MIB,
        100 * MIB,
        group,
        // A last group that is left out, and one that is just large enough.
        group + MIB,
        group + 3 * MIB,
        2 * group,
        3 * group + 12345 * 4096,
        GIB,
        4 * GIB,
        // A second block of descriptors, and more copies.
        8 * GIB + group,
        100 * GIB,
    ];
    for bytes in sizes {
        for copies in [true, false] {
            let options = Options {
                copies,
                ..options(bytes)
            };
            let path = make_with(&folder, &options);
            check(&path);
            std::fs::remove_file(&path).unwrap();
        }
    }
}

#[test]
fn no_superblock_copies_are_written_without_the_option() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options {
        copies: false,
        ..options(4 * GIB)
    };
    let path = make_with(&folder, &options);
    let output = run("dumpe2fs", &[], &path);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("Primary superblock at 0"), "{text}");
    assert!(!text.contains("Backup superblock"), "{text}");
    let taken = std::fs::metadata(&path).unwrap().blocks() * 512;
    assert!(taken <= 64 << 10, "{taken} bytes are in use");
}

#[test]
fn dumpe2fs_shows_the_requested_parameters() {
    let folder = tempfile::tempdir().unwrap();
    let path = make(&folder, 4 * GIB);
    let output = run("dumpe2fs", &["-h"], &path);
    let text = String::from_utf8_lossy(&output.stdout);
    for line in [
        "Filesystem volume name:   a-name-of-16-byt",
        "Filesystem UUID:          12346a69-6666-792d-6578-74342d757569",
        "Filesystem state:         clean",
        "Block count:              1048576",
        "Reserved block count:     0",
        "Inode size:\t          256",
        "Total journal size:       64M",
        "Checksum type:            crc32c",
    ] {
        assert!(text.contains(line), "{line:?} is not in {text}");
    }
}

#[test]
fn a_new_file_system_is_a_sparse_file() {
    let folder = tempfile::tempdir().unwrap();
    for (bytes, most) in [(4 * GIB, 256 << 10), (100 * GIB, 3 << 20)] {
        let metadata = std::fs::metadata(make(&folder, bytes)).unwrap();
        assert_eq!(metadata.len(), bytes);
        let taken = metadata.blocks() * 512;
        assert!(taken <= most, "{bytes} bytes use {taken}");
    }
}

#[test]
fn resize2fs_grows_and_shrinks_the_file_system() {
    let folder = tempfile::tempdir().unwrap();
    let path = make(&folder, 300 * MIB);
    let file = File::options().read(true).write(true).open(&path).unwrap();
    for (bytes, size) in [(20 * GIB, "20G"), (200 * MIB, "200M")] {
        if bytes > file.metadata().unwrap().len() {
            file.set_len(bytes).unwrap();
        }
        let output = Command::new("/usr/sbin/resize2fs")
            .args(["-f"])
            .arg(&path)
            .arg(size)
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        check(&path);
        assert_eq!(inspect(&file).unwrap(), Some(Found { bytes }));
    }
}

#[test]
fn unusable_sizes_and_nonempty_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for bytes in [0, LEAST_BYTES - 1, MOST_BYTES + 1, u64::MAX] {
        assert_eq!(Layout::of(bytes, true), None);
        let file = File::create(folder.path().join("odd.img")).unwrap();
        let refused = format(&file, &options(bytes)).unwrap_err();
        assert!(matches!(refused, FormatError::Size(of) if of == bytes));
        assert_eq!(file.metadata().unwrap().len(), 0);
    }
    let path = folder.path().join("full.img");
    std::fs::write(&path, "data").unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    assert!(matches!(
        format(&file, &options(GIB)),
        Err(FormatError::NotEmpty)
    ));
    assert_eq!(std::fs::read(&path).unwrap(), b"data");
}

#[test]
fn inspect_recognizes_only_file_systems() {
    let folder = tempfile::tempdir().unwrap();
    let path = make(&folder, GIB + 12345 * 512);
    let file = File::open(&path).unwrap();
    let bytes = (GIB + 12345 * 512) / 4096 * 4096;
    assert_eq!(inspect(&file).unwrap(), Some(Found { bytes }));
    for contents in [vec![], vec![0; 4096], vec![0xff; 4096]] {
        let path = folder.path().join("other");
        std::fs::write(&path, contents).unwrap();
        assert_eq!(inspect(&File::open(&path).unwrap()).unwrap(), None);
    }
}
