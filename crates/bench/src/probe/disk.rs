//! Measures disk reads of a guest, and the creation of root disks.

use super::marks::Marks;
use super::{cpu_ns, kvm_counters, now_ns, since};
use crate::data::FOLDER;
use crate::disk::{BYTES, COLD_FILE, PIECE_SEQUENTIAL, WARM_FILE};
use crate::plan::Sample;
use anyhow::{Context, Result, bail};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Measures from the guest's first mark to its second.
///
/// # Errors
///
/// If the disk's file or the page cache can't be prepared, or the VMM ends before its second mark.
pub fn read(argv: &[String], warm: bool) -> Result<Sample> {
    prepare(warm)?;
    let (mut child, mut marks) = Marks::start(argv)?;
    let pid = child.0.id();
    marks.next(&mut child)?;
    let start = now_ns();
    let (exits, cpu) = (kvm_counters(pid), cpu_ns(pid)?);
    marks.next(&mut child)?;
    let end = now_ns();
    let mut counters = since(kvm_counters(pid), &exits);
    counters.insert("cpu_ns".into(), cpu_ns(pid)? - cpu);
    Ok(Sample {
        nanoseconds: end - start,
        counters,
        ..Sample::default()
    })
}

/// Creates a root disk's layer: an empty file system of `bytes` bytes in a new file.
///
/// # Errors
///
/// If the file can't be made or formatted.
pub fn create_root(bytes: u64) -> Result<Sample> {
    let path = Path::new(FOLDER).join("root.img");
    measure_creation(&path, |file| format(file, bytes))
}

/// Creates a root disk of `bytes` bytes by cloning an image that has some data in each block group.
///
/// # Errors
///
/// If a file can't be made, formatted or cloned.
pub fn clone_root(run: u32, bytes: u64) -> Result<Sample> {
    const GROUP: u64 = 128 << 20;
    let image = Path::new(FOLDER).join("root-image");
    if run == 0 {
        let file = new_file(&image)?;
        format(&file, bytes)?;
        let data = vec![b'J'; 2 << 20];
        for group in 0..bytes / GROUP {
            file.write_all_at(&data, group * GROUP + GROUP / 2)?;
        }
        file.sync_all()?;
    }
    measure_creation(&Path::new(FOLDER).join("root.img"), |file| {
        rustix::fs::ioctl_ficlone(file, File::open(&image)?)?;
        Ok(file.sync_all()?)
    })
}

/// Measures the creation of a file, which is then removed.
fn measure_creation(path: &Path, make: impl FnOnce(&File) -> Result<()>) -> Result<Sample> {
    let start = now_ns();
    let file = new_file(path)?;
    make(&file)?;
    drop(file);
    let end = now_ns();
    fs::remove_file(path)?;
    Ok(Sample {
        nanoseconds: end - start,
        ..Sample::default()
    })
}

fn new_file(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true);
    options
        .open(path)
        .with_context(|| path.display().to_string())
}

/// Writes an empty file system with random UUID and hash seed.
fn format(file: &File, bytes: u64) -> Result<()> {
    let mut options = jiffy_ext4::Options {
        bytes,
        label: "root".to_owned(),
        created: now_ns() as u32,
        copies: false,
        ..jiffy_ext4::Options::default()
    };
    for random in [&mut options.uuid, &mut options.hash_seed] {
        rustix::rand::getrandom(random, rustix::rand::GetRandomFlags::empty())?;
    }
    jiffy_ext4::format(file, &options)?;
    Ok(())
}

/// Prepares the file, in the page cache or not.
fn prepare(warm: bool) -> Result<()> {
    let path = Path::new(if warm { WARM_FILE } else { COLD_FILE });
    if !is_filled(path) {
        let mut file = OpenOptions::new()
            .write(true)
            .create(warm)
            .truncate(warm)
            .open(path)?;
        let piece: Vec<u8> = (0..PIECE_SEQUENTIAL)
            .map(|byte| (byte % 251) as u8 | 2)
            .collect();
        // One piece more than is measured, for the warm-up.
        for _ in 0..BYTES / PIECE_SEQUENTIAL as u64 + 1 {
            file.write_all(&piece)?;
        }
        file.sync_all()?;
    }
    if !warm {
        // Drops the page cache (Linux, Documentation/admin-guide/sysctl/vm.rst).
        rustix::fs::sync();
        fs::write("/proc/sys/vm/drop_caches", "1")?;
        let text = fs::read_to_string("/proc/meminfo")?;
        let buffers = text.lines().find_map(|line| line.strip_prefix("Buffers:"));
        let kib = buffers.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
        if kib.is_none_or(|kib| kib > 1024) {
            bail!("the page cache of {} could not be emptied", path.display());
        }
    }
    Ok(())
}

/// Whether the last piece has been written. Its bytes are never 0.
fn is_filled(path: &Path) -> bool {
    let mut byte = [0];
    let read = File::open(path).and_then(|file| file.read_exact_at(&mut byte, BYTES));
    read.is_ok() && byte != [0]
}
