//! Works in a shared folder between two marks on COM1.

use crate::say;
use anyhow::{Context, Result, ensure};
use jiffy_bench::plan::MARKER;
use jiffy_bench::work::{DATA, FILES, MEASURED, PARAMETER, PIECE, Part, TAG, WARM_UP, Work};
use rustix::mount::{MountFlags, mount};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

const MOUNT_POINT: &str = "/shared";
/// Time after the first mark, in which the probe reads its counters.
const PAUSE: Duration = Duration::from_millis(200);

/// Does the work that the kernel parameter names.
pub fn measure(port: &File) -> Result<()> {
    let text = std::env::var(PARAMETER).context(PARAMETER)?;
    let work: Work = text.parse()?;
    fs::create_dir(MOUNT_POINT)?;
    mount(TAG, MOUNT_POINT, "virtiofs", MountFlags::empty(), c"").context("the folder")?;
    let mut piece = vec![1; PIECE];
    perform(work, WARM_UP, &mut piece)?;
    say(port, MARKER)?;
    std::thread::sleep(PAUSE);
    perform(work, MEASURED, &mut piece)?;
    say(port, MARKER)
}

fn perform(work: Work, part: Part, piece: &mut [u8]) -> Result<()> {
    let place = Path::new(MOUNT_POINT).join(part.name);
    let (data, folder) = (place.join(DATA), place.join(FILES));
    let mut files = (0..part.files).map(|number| folder.join(number.to_string()));
    match work {
        Work::Write => write(&data, part.bytes, piece),
        Work::Read => read(&data, part.bytes, piece),
        Work::Create => files.try_for_each(|file| Ok(File::create_new(&file).map(drop)?)),
        Work::Stat => files.try_for_each(|file| stat(&file)),
        Work::List => {
            let count = fs::read_dir(&folder)?.count();
            ensure!(count == part.files as usize, "{count} files in the folder");
            Ok(())
        }
        Work::Remove => files.try_for_each(|file| Ok(fs::remove_file(&file)?)),
    }
}

fn stat(file: &PathBuf) -> Result<()> {
    let found = fs::metadata(file)?;
    ensure!(found.is_file(), "{} is no file", file.display());
    Ok(())
}

fn write(path: &Path, bytes: u64, piece: &[u8]) -> Result<()> {
    let mut file = File::create_new(path)?;
    for _ in 0..bytes / piece.len() as u64 {
        file.write_all(piece)?;
    }
    Ok(())
}

fn read(path: &Path, bytes: u64, piece: &mut [u8]) -> Result<()> {
    let mut file = File::open(path)?;
    for _ in 0..bytes / piece.len() as u64 {
        file.read_exact(piece)?;
    }
    Ok(())
}
