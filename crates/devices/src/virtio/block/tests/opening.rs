use super::driver::*;
use crate::virtio::block::{Block, BlockError, ID_BYTES, SECTOR};
use std::fs::File;
use std::path::Path;

fn refused(path: &Path) -> BlockError {
    Block::open(&options(path)).unwrap_err()
}

#[test]
fn files_that_are_no_disks_are_refused_by_name() {
    let disk = Fixture::new(1);
    let folder = disk.folder.path();

    let missing = folder.join("missing.img");
    let error = refused(&missing);
    assert!(matches!(error, BlockError::Missing(_)));
    assert!(error.to_string().contains("missing.img"));

    assert!(matches!(refused(folder), BlockError::Kind(_)));
    assert!(matches!(
        refused(Path::new("/dev/null")),
        BlockError::Kind(_)
    ));
    let pipe = folder.join("pipe");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    assert!(
        matches!(refused(&pipe), BlockError::Kind(_)),
        "and does not wait"
    );
}

#[test]
fn empty_disks_and_broken_sectors_are_refused_with_a_hint() {
    let disk = Fixture::new(2);
    let file = File::options().write(true).open(&disk.path).unwrap();
    file.set_len(1000).unwrap();
    let error = refused(&disk.path);
    assert!(matches!(
        error,
        BlockError::Size {
            bytes: 1000,
            unit: 512,
            ..
        }
    ));
    assert!(error.hint().unwrap().contains("truncate -s %512"));
    file.set_len(0).unwrap();
    let error = refused(&disk.path);
    assert!(matches!(error, BlockError::Empty(_)));
    assert!(error.hint().is_some());
}

#[test]
fn serial_numbers_have_a_maximum_length() {
    let disk = Fixture::new(1);
    let mut options = disk.options();
    options.id = "x".repeat(ID_BYTES + 1);
    assert!(matches!(Block::open(&options), Err(BlockError::Id(_))));
    options.id.pop();
    assert!(Block::open(&options).is_ok());
}

#[test]
fn two_vms_cannot_write_one_disk() {
    let disk = Fixture::new(1);
    let mut reader = disk.options();
    reader.read_only = true;

    let writer = Block::open(&disk.options()).unwrap();
    assert!(matches!(refused(&disk.path), BlockError::InUse(_)));
    assert!(matches!(Block::open(&reader), Err(BlockError::InUse(_))));
    drop(writer);

    let first = Block::open(&reader).unwrap();
    let second = Block::open(&reader).unwrap();
    let error = refused(&disk.path);
    assert!(matches!(error, BlockError::InUse(_)));
    assert!(error.hint().is_some());
    drop((first, second));
    assert!(Block::open(&disk.options()).is_ok());
}

#[test]
fn a_sparse_disk_has_its_apparent_size() {
    let disk = Fixture::new(1);
    let file = File::options().write(true).open(&disk.path).unwrap();
    file.set_len(1 << 40).unwrap();
    let mut guest = Guest::start(&disk.options());
    assert_eq!(guest.config(0, 8), (1 << 40) / SECTOR);
    let last = (1 << 40) / SECTOR - 1;
    assert_eq!(guest.write(last, &[5; 512]), (OK, 1));
    assert_eq!(disk.bytes(last * SECTOR, 512), [5; 512]);
}
