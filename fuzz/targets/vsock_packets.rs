//! A socket device whose guest sends any packets, and whose buffers may be
//! anything.

#![no_main]

use jiffy_devices::virtio::device::VirtioDevice;
use jiffy_devices::virtio::testing::{self, Buffer, DriverQueue, Running};
use jiffy_devices::virtio::vsock::{Vsock, VsockArgs};
use jiffy_fuzz::input::Input;
use jiffy_fuzz::seeds;
use libfuzzer_sys::fuzz_target;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

const MEMORY_BYTES: usize = 1 << 20;
const RX_BUFFERS: u64 = 0x40000;
const RX_BUFFER: u32 = 4096;
const RX_COUNT: u64 = 16;
const TX_BUFFERS: u64 = 0x80000;
const TX_BUFFER: u64 = 0x1000;

const GUEST_CID: u64 = 3;
const PORT: u32 = 1024;
const HEADER_BYTES: usize = 44;
const MOMENT: Duration = Duration::from_millis(2);

/// A header as the guest wants it, or with the fields filled in that make it
/// belong to a connection.
const RAW: u8 = 0x80;
/// The host connects to the guest first.
const KNOCK: u8 = 0x40;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let path = std::env::temp_dir().join(format!("jiffy-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&path).expect("a folder for sockets");
    path
});

/// A host program that listens where the guest may connect.
static SERVER: LazyLock<UnixListener> = LazyLock::new(|| {
    let path = FOLDER.join(format!("v_{PORT}"));
    let server = UnixListener::bind(path).expect("a socket");
    server.set_nonblocking(true).expect("non-blocking");
    server
});

fuzz_target!(
    init: seeds::write(all_seeds()),
    |data: &[u8]| play(data)
);

fn play(data: &[u8]) {
    let server = &*SERVER;
    let args = VsockArgs { cid: GUEST_CID, path: FOLDER.join("v") };
    let vsock = Vsock::new(args).expect("a device");
    let memory = testing::memory(MEMORY_BYTES);
    let mut base = 0x1000;
    let mut drivers = Vec::new();
    for size in vsock.queue_max_sizes() {
        drivers.push(DriverQueue::new(memory.clone(), base, *size));
        base = (base + DriverQueue::ring_bytes(*size)).next_multiple_of(0x1000);
    }
    let queues = drivers.iter().map(|driver| driver.device_queue(false)).collect();
    for slot in 0..RX_COUNT {
        let address = RX_BUFFERS + slot * u64::from(RX_BUFFER);
        drivers[0].add(&[Buffer::writable(address, RX_BUFFER)]);
    }
    let mut device = Running::start(vsock, &memory, queues, 0);

    let mut input = Input(data);
    let mut knocker = None;
    let mut sent = 0;
    while !input.is_empty() && sent < 64 {
        let switches = input.u8();
        if switches & KNOCK != 0 {
            knocker = UnixStream::connect(FOLDER.join("v")).ok();
            if let Some(knocker) = &mut knocker {
                let _ = knocker.write_all(input.bytes(usize::from(switches & 0x3f)));
            }
            continue;
        }
        let header = if switches & RAW != 0 {
            let mut header = [0; HEADER_BYTES];
            let bytes = input.bytes(HEADER_BYTES);
            header[..bytes.len()].copy_from_slice(bytes);
            header
        } else {
            let (op, length) = (input.u8(), input.u16());
            packet(input.u8(), op, u32::from(length), input.u8())
        };
        let payload = input.bytes(usize::from(input.0.first().copied().unwrap_or(0)));
        let address = TX_BUFFERS + sent * TX_BUFFER;
        drivers[1].store(address, &header);
        drivers[1].store(address + HEADER_BYTES as u64, payload);
        let whole = (HEADER_BYTES + payload.len()) as u32;
        let cut = u32::from(switches & 0x3f).min(whole);
        drivers[1].add(&[
            Buffer::readable(address, cut),
            Buffer::readable(address + u64::from(cut), whole - cut),
        ]);
        sent += 1;
    }
    device.ring(1);
    let start = Instant::now();
    while u64::from(drivers[1].used_index()) < sent
        && device.interrupt.counts().needs_reset == 0
        && start.elapsed() < MOMENT
    {
        std::thread::yield_now();
    }
    // A program that takes a little, says a little and goes.
    if let Ok((mut program, _)) = server.accept() {
        let _ = program.set_nonblocking(true);
        let _ = program.read(&mut [0; 100]);
        let _ = program.write(&[7; 100]);
    }
    while server.accept().is_ok() {}
    drop(knocker);
    device.stop();
}

/// A packet from the guest: port, operation, payload length, flags.
fn packet(port: u8, op: u8, length: u32, flags: u8) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&GUEST_CID.to_le_bytes());
    header[8..16].copy_from_slice(&2u64.to_le_bytes());
    header[16..20].copy_from_slice(&u32::from(port).to_le_bytes());
    header[20..24].copy_from_slice(&PORT.to_le_bytes());
    header[24..28].copy_from_slice(&length.to_le_bytes());
    header[28] = 1;
    header[30] = op;
    header[32] = flags;
    header[36..40].copy_from_slice(&0x10000u32.to_le_bytes());
    header
}

fn all_seeds() -> Vec<Vec<u8>> {
    // Switches, operation, length, port, flags, then the payload's length and
    // the payload.
    let send = |op: u8, length: u16, flags: u8, payload: &[u8]| {
        let mut bytes = vec![44 & 0x3f, op];
        bytes.extend(length.to_le_bytes());
        bytes.extend([9, flags]);
        bytes.extend(payload);
        bytes
    };
    let request = send(1, 0, 0, &[]);
    let mut payload = [b'x'; 32];
    payload[0] = 32;
    vec![
        request.clone(),
        [request.clone(), send(5, 32, 0, &payload)].concat(),
        [request.clone(), send(5, 32, 0, &payload), send(4, 0, 3, &[])].concat(),
        [request.clone(), send(6, 0, 0, &[]), send(7, 0, 0, &[]), send(3, 0, 0, &[])].concat(),
        [&[KNOCK | 13][..], b"CONNECT 1234\n", &request].concat(),
        [&[RAW][..], &packet(9, 1, 0, 0), &[0]].concat(),
    ]
}
