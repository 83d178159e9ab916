//! A block driver for the tests.

use crate::GuestMemory;
use crate::virtio::block::{Block, BlockOptions, SECTOR};
use crate::virtio::queue::RateLimit;
use crate::virtio::testing::{Buffer, DriverQueue, Running, Used, memory};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;

pub const MEMORY_BYTES: u64 = 0x80000;
pub const RINGS: u64 = 0x1000;
pub const HEADER: u64 = 0x8000;
pub const STATUS: u64 = 0x9000;
pub const DATA: u64 = 0x10000;

pub const OK: u8 = 0;
pub const IO_ERROR: u8 = 1;
pub const UNSUPPORTED: u8 = 2;
/// The value of the status byte before the device writes it.
pub const UNTOUCHED: u8 = 0xee;

pub const IN: u32 = 0;
pub const OUT: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

pub const FLUSHES: u64 = 1 << VIRTIO_BLK_F_FLUSH;
pub const EVENT_IDX: u64 = 1 << 29;

/// A folder with a disk of `sectors` sectors, each filled with its number.
pub struct Fixture {
    pub folder: TempDir,
    pub path: PathBuf,
}

impl Fixture {
    pub fn new(sectors: u64) -> Fixture {
        Fixture::within(TempDir::new().unwrap(), sectors)
    }

    pub fn within(folder: TempDir, sectors: u64) -> Fixture {
        let path = folder.path().join("disk.img");
        let mut file = File::create(&path).unwrap();
        for sector in 0..sectors {
            file.write_all(&[sector as u8; SECTOR as usize]).unwrap();
        }
        Fixture { folder, path }
    }

    pub fn options(&self) -> BlockOptions {
        options(&self.path)
    }

    /// Bytes of the file.
    pub fn bytes(&self, offset: u64, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        let file = File::open(&self.path).unwrap();
        file.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }
}

pub fn options(path: &Path) -> BlockOptions {
    BlockOptions {
        path: path.to_owned(),
        read_only: false,
        direct: false,
        id: "disk-1".to_owned(),
        limit: RateLimit::default(),
    }
}

/// A guest with a disk.
pub struct Guest {
    pub device: Running<Block>,
    pub driver: DriverQueue,
    pub memory: Arc<GuestMemory>,
}

impl Guest {
    pub fn start(options: &BlockOptions) -> Guest {
        Guest::with_features(options, FLUSHES)
    }

    pub fn with_features(options: &BlockOptions, features: u64) -> Guest {
        let memory = memory(MEMORY_BYTES as usize);
        let driver = DriverQueue::new(memory.clone(), RINGS, 64);
        let queue = driver.device_queue(features & EVENT_IDX != 0);
        let block = Block::open(options).unwrap();
        Guest {
            device: Running::start(block, &memory, vec![queue], features),
            driver,
            memory,
        }
    }

    /// Writes a request's header and the status byte's old value.
    pub fn write_header(&mut self, kind: u32, sector: u64) {
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.driver.store(HEADER, &header);
        self.driver.store(STATUS, &[UNTOUCHED]);
    }

    pub fn status(&self) -> u8 {
        self.load(STATUS, 1)[0]
    }

    pub fn load(&self, address: u64, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.driver.load(address, &mut bytes);
        bytes
    }

    /// Sends a chain of any shape and waits for the answer.
    pub fn send(&mut self, buffers: &[Buffer]) -> Used {
        self.driver.add(buffers);
        self.device.ring(0);
        self.driver.wait_used()
    }

    /// Sends a request in the usual shape; returns its status and the used length.
    pub fn request(&mut self, kind: u32, sector: u64, data: &[Buffer]) -> (u8, u32) {
        self.write_header(kind, sector);
        let buffers = usual(data);
        let used = self.send(&buffers);
        (self.status(), used.length)
    }

    pub fn read(&mut self, sector: u64, bytes: u32) -> (u8, u32) {
        self.request(IN, sector, &[Buffer::writable(DATA, bytes)])
    }

    pub fn write(&mut self, sector: u64, data: &[u8]) -> (u8, u32) {
        self.driver.store(DATA, data);
        let buffer = Buffer::readable(DATA, data.len() as u32);
        self.request(OUT, sector, &[buffer])
    }

    /// Sends a discard or write-zeroes request of `(sector, count, flags)`.
    pub fn zero(&mut self, kind: u32, ranges: &[(u64, u32, u32)]) -> (u8, u32) {
        let mut data = Vec::new();
        for (sector, count, flags) in ranges {
            data.extend(sector.to_le_bytes());
            data.extend(count.to_le_bytes());
            data.extend(flags.to_le_bytes());
        }
        self.driver.store(DATA, &data);
        let buffer = Buffer::readable(DATA, data.len() as u32);
        self.request(kind, 0, &[buffer])
    }

    pub fn config(&self, offset: u64, count: usize) -> u64 {
        use crate::virtio::device::VirtioDevice;
        let mut bytes = [0; 8];
        self.device.device.read_config(offset, &mut bytes[..count]);
        u64::from_le_bytes(bytes)
    }
}

/// A chain of header, data and status.
pub fn usual(data: &[Buffer]) -> Vec<Buffer> {
    let mut buffers = vec![Buffer::readable(HEADER, 16)];
    buffers.extend_from_slice(data);
    buffers.push(Buffer::writable(STATUS, 1));
    buffers
}
